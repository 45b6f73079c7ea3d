"""Makes the figures of bench/lab/paper.py take seconds. Whoever imports this before it runs one has
it so; the model is small_models.py's.
"""

from __future__ import annotations

from tests.support import small_models  # noqa: F401 (finds bench/)

from lab import figures  # isort: skip

TOTAL = 60_000
figures.TOTALS = {"shm": TOTAL, "network": TOTAL}
figures.PARTS = (3, 1)
