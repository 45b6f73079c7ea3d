"""Makes the figures of bench/paper.py take seconds. Whoever imports this before it runs one has it
so; the model is small_models.py's.
"""

from __future__ import annotations

from tests.support import small_models  # noqa: F401 (finds bench/)

from lib import paper_figures  # isort: skip

TOTAL = 60_000
paper_figures.TOTALS = {"shm": TOTAL, "network": TOTAL}
paper_figures.PARTS = (3, 1)
paper_figures.SETTINGS = (paper_figures.Setting(8, 0.02, 24),)
