"""The demo, a script of its own: `torchrun --standalone --nproc-per-node=2 examples/train_gpt.py`."""
