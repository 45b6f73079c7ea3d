"""The benchmarks, each a script: `python -m fastcomm bench NAME`, or `python bench/NAME.py`.

What the ranks of NAME run is in NAME_rank.py, and all else in lib/.
"""
