"""The benchmarks, each a script of its own: allreduce.py, step.py, backend.py, hierarchical.py,
flatten.py and host_cost.py, with files of the same beginning that only they use.

All share report.py (figures, tables, bars, JSON), machine.py (what was measured on), turns.py and
cuda_clock.py (whose turn it is, and its time), launch.py (ranks) and models.py (what is trained).
"""
