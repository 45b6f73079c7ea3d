"""The examples run as under torchrun and learn what they should."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from tests.support.forked_python import python, pythons
from tests.support.ranks import torchrun_env
from tests.support.scripts import printed_by

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).resolve().parent.parent.parent


def torchrun() -> tuple[str, ...]:
    """Without --standalone, whose meeting walks the stack of Python at every step: with thousands
    of modules that takes longer than some of these trainings. test_torchrun.py has it.
    """
    port = torchrun_env(2)[0]["MASTER_PORT"]
    return ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}")


def run(example: str, *arguments: str, **options: Any) -> str:
    return printed_by(ROOT / "examples" / example, *arguments, **options)


def numbers(pattern: str, printed: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, printed)]


def test_every_script_is_listed() -> None:
    listed = (ROOT / "docs/training_script.md").read_text()
    scripts = [
        script for script in (ROOT / "examples").glob("*.py") if "__main__" in script.read_text()
    ]
    missing = [script.name for script in scripts if f"../examples/{script.name}" not in listed]
    assert not missing and len(scripts) > 10, missing


def test_every_script_that_takes_any_device_moves_what_it_trains_there() -> None:
    """Most run on another device here (printed_by); those that a launcher starts do not."""
    texts = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    takes_any = re.compile(r'fastcomm\.init\((?!"shm"|group=)')
    found = [name for name, text in texts.items() if takes_any.search(text)]
    assert len(found) > 5
    assert [name for name in found if "comm.device)" not in texts[name]] == []


def test_the_gan_learns_the_circle() -> None:
    assert numbers(r"draws: ([\d.]+)", run("gan.py", "--steps", "300"))[0] == pytest.approx(1, 0.2)


def test_accumulation_with_clipping_learns() -> None:
    losses = numbers(r"loss ([\d.]+)", run("accumulation.py"))
    assert len(losses) == 4 and losses[-1] < losses[0] / 2


def test_reinforce_learns_though_ranks_play_different_numbers_of_episodes() -> None:
    assert numbers(r"reward ([\d.]+)", run("reinforce.py", "--steps", "200"))[-1] > 0.9


def test_a_reducer_and_ddp_converge_to_the_same_parameters() -> None:
    printed = run("converge.py", "--steps", "50", is_for_cpus=True)
    assert re.search(r"after 50 steps: 0$", printed, re.MULTILINE)


def test_uneven_data_is_trained_to_the_end_by_all() -> None:
    printed = re.findall(r"rank \d: \d of \d steps", run("uneven_data.py"))
    assert sorted(printed) == ["rank 0: 5 of 8 steps", "rank 1: 8 of 8 steps"]


def test_ranks_that_sync_seldom_learn() -> None:
    printed = run("diloco.py")
    losses = numbers(r"loss ([\d.]+)", printed)
    assert len(losses) == 4 and losses[-1] < losses[0] / 10
    assert printed.count("10 syncs") == 2


def test_tokens_are_averaged_over_ranks_whose_data_ends_and_has_nans() -> None:
    printed = run("uneven_tokens.py")
    losses = numbers(r"loss ([\d.]+)", printed)
    assert len(losses) == 3 and losses[-1] < losses[0] / 2
    # 37 batches close 10 steps, in each of three epochs
    assert re.findall(r"\d+ of \d+ steps dropped", printed) == ["1 of 30 steps dropped"] * 2


def test_hosts_sync_seldom_and_ranks_of_a_host_at_every_step() -> None:
    printed = run("hosts_sync_seldom.py", "--per-host", "2", "--steps", "16", ranks=4)
    # each rank has compared its optimizer with its host's; between hosts parameters alone agree
    totals = re.findall(r"parameters (-?[\d.]+)", printed)
    assert len(totals) == 4 and len(set(totals)) == 1


HSDP = pytest.param(
    "hsdp",
    marks=pytest.mark.skipif(
        "assert all_reduce_event is not None" in inspect.getsource(_fsdp_param_group),
        reason="torch 2.7's HSDP asserts an event of a GPU",
    ),
)


@pytest.mark.parametrize("way", ["tensor-parallel", "fsdp", HSDP])
def test_copies_in_parts_get_the_gradients_of_one_process(way: str) -> None:
    printed = run("device_mesh.py", way, ranks=4, is_for_cpus=True)
    differences = numbers(r"up to (\S+)", printed)
    assert len(differences) == 4 and max(differences) < 1e-6


def test_a_training_goes_on_without_a_lost_rank_and_takes_in_another() -> None:
    command = ("-m", "fastcomm", "run", "--replace", "1", "--ranks", "3")
    done = python(*command, ROOT / "examples" / "survive.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the same bits as one process") == 2
    assert len(re.findall(r"\[rank 1\] came at step \d+", done.stdout)) == 1


def test_any_number_of_ranks_prints_the_hashes_of_one_and_so_does_one_that_is_lost() -> None:
    command = ("-m", "fastcomm", "run", "--threads", "1", "--ranks")
    script = ROOT / "examples" / "any_number_of_ranks.py"
    through_a_loss = python(*command, "4", "--replace", "1", script)
    assert "rank 3 has come" in through_a_loss.stderr
    expected = re.findall(r"epoch .*", through_a_loss.stdout)
    assert len(expected) >= 5
    done = python(*command, "1", script, "--epochs", str(len(expected)))
    assert re.findall(r"epoch .*", done.stdout) == expected


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run of the training script, which stops and resumes."""
    path = tmp_path_factory.mktemp("training") / "run.pt"
    options = ("--checkpoint", str(path))
    parts = [run("training_script.py", "--epochs", n, *options) for n in ("2", "5")]
    losses = re.findall(r"epoch (\d): validation loss ([\d.]+)", "".join(parts))
    assert [epoch for epoch, _ in losses] == ["1", "2", "3", "4", "5"]
    return [float(loss) for _, loss in losses]


def test_the_training_script_learns_and_resumes(trained: list[float]) -> None:
    assert trained[-1] < 0.6 * trained[0]


def test_the_training_script_ends_where_it_would_without_a_break(trained: list[float]) -> None:
    assert numbers(r"loss ([\d.]+)", run("training_script.py", "--epochs", "5")) == trained


def test_the_training_script_ends_in_time() -> None:
    assert run("training_script.py", "--minutes", "0").count("epoch") == 1


def test_the_training_script_trains_a_compiled_model(trained: list[float]) -> None:
    # Inductor takes a minute of CPU time for this small model, and needs a compiler.
    done = python(
        *[*torchrun(), ROOT / "examples/training_script.py", "--epochs", "1"],
        *["--compile", "aot_eager"],
        imports=["torch._inductor.compile_fx"],  # which compiling imports
    )
    assert numbers(r"loss ([\d.]+)", done.stdout) == pytest.approx([trained[0]], rel=0.02)


# Frameworks. Their own DDP over torch's own Gloo gives the same figures; its processes sometimes
# abort at their end (torch's issue 190489).


def both_ways(
    example: str,
    pattern: str,
    *options: str,
    launchers: Sequence[Callable[[], Sequence[str]]] = (torchrun, torchrun),
) -> list[float]:
    """The losses that an example prints, alike over the backend and over the hook."""
    script = ROOT / "examples" / example
    commands = [
        [*launcher(), script, "--fastcomm", way, *options]
        for launcher, way in zip(launchers, ("backend", "hook"), strict=True)
    ]
    both = pythons(commands, env={"GLOO_SOCKET_IFNAME": "lo"}, imports=[script])
    assert all(done.returncode == 0 for done in both), "".join(done.stderr for done in both)
    over_the_backend, over_the_hook = (numbers(pattern, done.stdout) for done in both)
    assert over_the_backend == over_the_hook
    return over_the_hook


def test_accelerate_trains_alike_over_the_backend_and_the_hook() -> None:
    pytest.importorskip("accelerate")
    losses = both_ways("with_accelerate.py", r"step \d+: loss ([\d.]+)", "--steps", "30")
    assert len(losses) == 3 and losses[-1] < 0.8 * losses[0]


def test_fabric_trains_alike_over_the_backend_and_the_hook() -> None:
    pytest.importorskip("lightning_fabric")
    # Fabric starts ranks itself, if nobody has.
    pattern = r"step \d+: loss ([\d.]+)"
    losses = both_ways("with_fabric.py", pattern, "--steps", "30", launchers=(tuple, torchrun))
    assert len(losses) == 3 and losses[-1] < 0.8 * losses[0]


def test_the_trainer_trains_alike_over_the_backend_and_the_hook() -> None:
    pytest.importorskip("transformers")
    (loss,) = both_ways("with_trainer.py", r"mean loss ([\d.]+)", "--steps", "16")
    assert loss < 4.5


@pytest.mark.parametrize(("package", "by"), [("accelerate", torchrun), ("lightning_fabric", tuple)])
def test_the_scripts_for_frameworks_learn(package: str, by: Any, tmp_path: Path) -> None:
    pytest.importorskip(package)
    page = (ROOT / "docs/accelerate_and_lightning.md").read_text()
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if package in one]
    (tmp_path / "train.py").write_text(code)
    done = python(*by(), tmp_path / "train.py", env={"GLOO_SOCKET_IFNAME": "lo"})
    losses = numbers(r"loss ([\d.]+)", done.stdout)
    assert done.returncode == 0 and len(losses) == 5 and losses[-1] < losses[0] / 2, done.stderr
