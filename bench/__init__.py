"""The benchmarks: scripts of their own, `python bench/allreduce.py`, `bench/step.py` and
`bench/flatten.py`.
"""
