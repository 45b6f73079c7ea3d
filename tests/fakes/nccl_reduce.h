/* The arithmetic of the stand-in for NCCL: dtypes and operations by NCCL's numbers. */
#ifndef FASTCOMM_STAND_IN_NCCL_REDUCE_H
#define FASTCOMM_STAND_IN_NCCL_REDUCE_H

#include <stddef.h>

enum { SUM, PROD, MAX, MIN, N_OPS /* the average, 4, is left out: fastcomm never asks for it */ };

/* 0 for a dtype that does not exist. */
size_t dtype_nbytes(int dtype);

/* Input after input, so that every rank that does it gets the same bits. 8- and 16-bit floats are
 * added as floats and rounded once. The output may be one of the inputs. */
void reduce(int dtype, int op, size_t numel, const void *const *inputs, int n_inputs, void *output);

#endif
