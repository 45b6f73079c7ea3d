"""GPUs over NCCL, driven directly."""
