"""The entry point that `import torch` calls: what it costs, and what it must not break. That torch
finds it is tested with the installed wheel, in tests/test_package.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import torch
import torch.distributed as dist

import fastcomm_autoload
from fastcomm.torch_backend.process_group import ProcessGroup
from tests.support.outcomes import values_of
from tests.support.process_groups import start, world
from tests.support.ranks import fresh_ranks


def test_every_import_of_torch_pays_for_nothing_but_the_standard_library():
    code = "import sys, fastcomm_autoload; print({'torch', 'fastcomm', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def _begin_by_the_entry_point(place):
    fastcomm_autoload.register()  # after fastcomm has registered the backend, too
    start(place)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    known = dist.Backend.backend_list.count("fastcomm")
    return tensor.tolist(), known, type(world()) is ProcessGroup


def test_the_first_group_imports_what_makes_it():
    outcomes = fresh_ranks(2, _begin_by_the_entry_point)
    assert values_of(outcomes) == [([2.0, 2.0, 2.0], 1, True)] * 2


def test_an_error_does_not_reach_the_import_of_torch(monkeypatch):
    def fail(*args, **options):
        called.append(args[0])
        raise TypeError("another signature")

    called = []
    monkeypatch.setattr(dist.Backend, "register_backend", fail)
    fastcomm_autoload.register()
    assert called == ["fastcomm"]


def test_a_torch_without_distributed_is_left_alone(monkeypatch):
    monkeypatch.delattr(dist, "Backend")
    fastcomm_autoload.register()


ENTRY_POINT = "[torch.backends]\nfastcomm = fastcomm_autoload:register\n"


def test_torch_is_imported_as_usual_where_fastcomm_itself_is_broken(tmp_path):
    shutil.copy(fastcomm_autoload.__file__, tmp_path)
    (tmp_path / "fastcomm").mkdir()
    (tmp_path / "fastcomm" / "__init__.py").write_text("raise ImportError('not for this torch')")
    metadata = tmp_path / "fastcomm-0.0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fastcomm\nVersion: 0.0.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINT)
    code = "import torch.distributed as dist; print('FASTCOMM' in dist.Backend._plugins)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr
