"""Makes the backend "fastcomm" known to torch.distributed where nobody has imported fastcomm.
`import torch` calls register(), through the entry point that pyproject.toml has in the group
torch.backends; from 2.15 on init_process_group does, too, through the one in
torch.distributed.backends. fastcomm itself is imported when the first group is made. A module
beside the package, because every `import torch` pays for what it imports.
"""

from __future__ import annotations

import contextlib
from typing import Any


def register() -> None:
    """Does nothing where torch has no distributed. Never raises: `import torch` would fail. What
    fails here fails again in `import fastcomm`, which then registers the backend and says why it
    cannot.
    """
    with contextlib.suppress(Exception):
        from torch.distributed import Backend

        Backend.register_backend("fastcomm", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    from fastcomm.torch_backend.process_group import ProcessGroup  # registers it anew, for good

    return ProcessGroup(options)
