"""The demo, a script of its own: `torchrun --nproc-per-node=2 examples/train_gpt.py`."""
