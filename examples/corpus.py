"""Real text that is on every machine that can run the examples: Python's own source code."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def standard_library() -> Tensor:
    """The bytes of Python's own modules, one after the other in alphabetical order, indented by
    tabs.
    """
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    source = b"\n".join(module.read_bytes() for module in modules)
    # As spaces, a fifth of all bytes would be indents, from which a short training learns little
    # else.
    return torch.frombuffer(bytearray(source.replace(b"    ", b"\t")), dtype=torch.uint8)


def rows(length: int, n: int) -> Tensor:
    """The first `n` times `length` bytes of the text, [n, length], for what wants a data set and
    makes batches by itself.
    """
    text = standard_library()
    if len(text) < n * length:
        raise ValueError(
            f"{n} rows of {length} bytes, but the text has only {len(text)}: fewer steps would do"
        )
    return text[: n * length].view(n, length).long()
