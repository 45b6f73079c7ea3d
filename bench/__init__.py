"""The benchmarks, each a script of its own: allreduce.py, step.py, backend.py, hierarchical.py,
meetings.py, compiled.py, flatten.py and host_cost.py, with files of the same beginning that only
they use; all.py runs three of them in short.

All share report.py (options, JSON, progress), machine.py (what was measured on), turns.py and
cuda_clock.py (whose turn it is, and its time), launch.py (ranks) and models.py (what is trained).
Results are shown by tables.py (spreads and tables), chart.py (pictures) and page.py (HTML).
"""
