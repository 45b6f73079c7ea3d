"""fastcomm makes each tensor on a device and in a dtype that it names: defaults are the user's, as
torch.set_default_device() and set_default_dtype() have them.
"""

from __future__ import annotations

import re
from pathlib import Path

import fastcomm

_MAKES = re.compile(
    r"\btorch\.(empty|zeros|ones|full|tensor|as_tensor|asarray|arange|range|linspace|logspace|eye"
    r"|rand|randn|randint|randperm|scalar_tensor|empty_strided|\w+_indices|sparse_\w+_tensor"
    r"|\w+_window)\((?!number\) makes)"  # a message
)


def _arguments(text: str, begin: int) -> str:
    """What stands in the brackets that open there."""
    depth = 0
    for end, character in enumerate(text[begin:], begin):
        depth += (character in "([{") - (character in ")]}")
        if not depth:
            return text[begin:end]
    raise ValueError("the brackets do not close")


def test_every_tensor_is_made_on_a_named_device_in_a_named_dtype() -> None:
    folder = Path(fastcomm.__file__).parent
    wrong = []
    for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.pyx"))):
        text = path.read_text()
        for call in _MAKES.finditer(text):
            arguments = _arguments(text, call.end() - 1)
            if "device=" not in arguments or "dtype=" not in arguments:
                line = text.count("\n", 0, call.start()) + 1
                wrong.append(f"{path.relative_to(folder)}:{line}")
    assert not wrong, f"give these device= and dtype=: {', '.join(wrong)}"
