"""Mutations: small defects that are put into the sources one at a time, to see whether the tests
notice. `make mutate` does it; the ordinary suite only checks that the list fits the sources.

One file for each area holds its list.
"""

from __future__ import annotations

import importlib
import pkgutil

_MODULES = [
    importlib.import_module(f"{__name__}.{one.name}")
    for one in pkgutil.iter_modules(__path__)
    if not one.name.startswith(("__", "test_"))
]
MUTATIONS = tuple(one for module in _MODULES for one in getattr(module, "MUTATIONS", ()))
