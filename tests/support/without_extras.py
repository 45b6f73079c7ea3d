"""Importing this takes away what only the extras of pyproject.toml install, for this process and
those that it forks.
"""

import sys

sys.modules.update(dict.fromkeys(("matplotlib", "mpi4py", "rich", "tqdm")))  # type: ignore[arg-type]
