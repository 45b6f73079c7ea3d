/* See portable.c. */
#ifndef FASTCOMM_SHM_PORTABLE_H
#define FASTCOMM_SHM_PORTABLE_H

/* How many elements differ; none where this processor has portable kernels only. */
int compare_16bit_kernels(void);

#endif
