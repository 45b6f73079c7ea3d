/* See portable.c. */
#ifndef FASTCOMM_SHM_PORTABLE_H
#define FASTCOMM_SHM_PORTABLE_H

/* How many elements differ, and how often a kernel is wrong about whether its result is finite. */
int compare_16bit_kernels(void);

#endif
