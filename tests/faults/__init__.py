"""Brute force: ranks that are killed, stopped, or fail at random points of a training.

faults.py draws a fault and judges how the ranks have ended; `python -m tests.faults` runs as many
as it is told to, test_faults.py a few.
"""
