"""The CUDA driver, and the kernels that move many tensors in one launch."""
