"""The torch.distributed backend "fastcomm", and fastcomm as DDP's hook."""
