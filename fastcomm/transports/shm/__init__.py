"""Ranks of one host over shared memory."""
