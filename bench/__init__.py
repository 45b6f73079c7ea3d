"""The benchmarks: scripts of their own, `python bench/allreduce.py` and `python bench/step.py`."""
