"""The transports, side by side: shared memory, NCCL on CUDA, and torch groups."""
