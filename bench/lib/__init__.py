"""What the benchmarks share, and what one of them keeps out of its script.

report.py has the options that all take, JSON and progress, tables.py spreads and tables, chart.py
pictures and page.py a page of them. machine.py says what was measured on, turns.py and
cuda_clock.py whose turn it is and what it takes; launch.py starts ranks, and models.py has what is
trained. Files that begin with a benchmark's name are that benchmark's.
"""
