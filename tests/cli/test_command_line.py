"""`python -m fastcomm`, and the options that all benchmarks share: what they print, and what they
refuse before anything is measured.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fastcomm
import fastcomm.__main__ as command_line

ROOT = Path(__file__).resolve().parent.parent.parent
BENCH = ROOT / "bench"
BENCHMARKS = (
    *("all", "allreduce", "step", "network", "flatten", "paper"),
    *("compiled", "elastic", "parts"),
)
SCRIPTS = {name: f"{name}.py" for name in BENCHMARKS} | {"paper": "lab/paper.py"}


class Replaced(Exception):
    """The process has become another program: `command`, without the interpreter."""

    def __init__(self, command: list[str]) -> None:
        self.command = command


class Console:
    """Runs a main() with arguments, as from a shell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(
        self, *arguments: str, of: ModuleType = command_line, as_program: str = "program"
    ) -> tuple[int, str, str]:
        """Returns the exit status and what was printed, out and err."""
        self._monkeypatch.setattr(sys, "argv", [as_program, *arguments])
        try:
            status = of.main()
        except SystemExit as end:
            status = end.code or 0
        return int(status), *self._capsys.readouterr()

    def prints(
        self, *arguments: str, of: ModuleType = command_line, as_program: str = "program"
    ) -> str:
        status, out, err = self(*arguments, of=of, as_program=as_program)
        assert status == 0, err
        return out


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Console:
    def replace(program: str, command: list[str]) -> None:
        raise Replaced(command[1:])

    monkeypatch.setattr(os, "execv", replace)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # which --json - replaces
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # which become() sets
    return Console(monkeypatch, capsys)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Scripts of bench/, which find bench/lib by name, and libraries."""
    monkeypatch.syspath_prepend(str(BENCH))
    libraries = ("report", "tables", "chart")
    scripts = {
        name: importlib.import_module("lab.paper" if name == "paper" else name)
        for name in BENCHMARKS
    }
    return scripts | {name: importlib.import_module(f"lib.{name}") for name in libraries}


@pytest.mark.parametrize(
    "path, name",
    [("lib/fastcomm/__main__.py", "python -m fastcomm"), ("/usr/bin/fastcomm", "fastcomm")],
)
def test_the_help_names_the_command_it_was_called_by(
    console: Console, path: str, name: str
) -> None:
    assert console.prints("--help", as_program=path).startswith(f"usage: {name} [-h]")
    assert console.prints("info", "--help", as_program=path).startswith(f"usage: {name} info ")


def test_version_is_the_packages(console: Console) -> None:
    assert console.prints("--version") == f"fastcomm {fastcomm.__version__}\n"


def test_info_as_json_holds_what_info_prints(console: Console) -> None:
    facts = json.loads(console.prints("info", "--json"))
    assert facts.pop("version") == fastcomm.__version__
    assert facts["fastcomm"].startswith(fastcomm.__version__)
    lines = [f"{name:<10}{fact}" for name, fact in facts.items()]
    assert console.prints("info").splitlines() == lines


def test_info_says_that_the_cpu_needs_nothing_that_is_for_gpus(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> int:
        raise fastcomm.InitError("there is no CUDA driver")

    monkeypatch.setattr(command_line.cuda_driver, "load", load)
    facts = json.loads(console.prints("info", "--json"))
    assert facts["CUDA"] == "not needed on the CPU: there is no CUDA driver"
    for name in ("kernels", "NCCL"):
        assert facts[name].startswith("not needed on the CPU: ")
    assert not any("not available" in fact for fact in facts.values())


@pytest.mark.parametrize(("cuda", "package"), [("12.6", "cupy-cuda12x"), ("13.0", "cupy-cuda13x")])
def test_info_names_the_command_that_is_missing_on_a_gpu_without_nvcc(
    monkeypatch: pytest.MonkeyPatch, cuda: str, package: str
) -> None:
    monkeypatch.setattr(command_line.multi_tensor, "kernel_file", lambda name: None)
    monkeypatch.setattr(command_line.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(command_line.torch.version, "cuda", cuda)
    assert command_line.kernels_state().endswith(f"pip install {package}")


@pytest.mark.parametrize(
    "arguments, command",
    [
        *((("bench", name, "--json", "x"), (SCRIPTS[name], "--json", "x")) for name in BENCHMARKS),
        (("bench", "step", "--help"), ("step.py", "--help")),
        (("bench", "--report", "x.html"), ("all.py", "--report", "x.html")),
        (("tune", "--model", "mlp", "--help"), ("tune.py", "--model", "mlp", "--help")),
    ],
)
def test_a_command_becomes_its_script_with_what_follows(
    console: Console, arguments: tuple[str, ...], command: tuple[str, ...]
) -> None:
    with pytest.raises(Replaced) as replaced:
        console(*arguments)
    assert replaced.value.command == [str(BENCH / command[0]), *command[1:]]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "{run,info,demo,bench,tune,diagnose}"),
        (("bench",), "NAME"),
        (("bench", "everything"), "choose from"),
        (("info", "--yaml"), "--yaml"),
        (("run",), "required: script\n"),
        (("run", "--thread=2", "train.py"), "run does not take --thread=2"),
        (("demo", "--steps", "many"), "invalid int value: 'many'"),
        (("demo", "--width", "100"), "--width is a multiple of 64; got 100"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    console: Console, arguments: tuple[str, ...], words: str
) -> None:
    status, _, err = console(*arguments)
    assert status == 2 and words in err and err.count("error:") == 1


# The options of all benchmarks


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_a_help_and_can_draw(
    console: Console, bench: dict[str, ModuleType], name: str
) -> None:
    text = console.prints("--help", of=bench[name])
    assert "--plot" in text
    # As an installed fastcomm is called, which has no folder bench/ beside it.
    assert "usage: python -m fastcomm bench " in text and "python bench/" not in text


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--plot", "x.bmp"), ".png, .svg, .pdf"),
        (("--report", "x.pdf"), ".html"),
        (("--from", "x.json"), "--from is for --plot and --report"),
        (("--from", "missing.json", "--plot", "x.png"), "there is no such file"),
        (("--from", __file__, "--plot", "x.png"), "not JSON"),
        (("--from", __file__, __file__, "--plot", "x.png"), "of one file, and --from names 2"),
        (("--rounds", "1"), "--rounds: quartiles need at least 2; got 1"),
        (("--ranks", "0"), "--ranks is at least 1"),
        (("--steps", "-1"), "--steps is at least 1"),
    ],
)
def test_what_cannot_be_drawn_or_measured_is_refused(
    console: Console, bench: dict[str, ModuleType], arguments: tuple[str, ...], words: str
) -> None:
    status, _, err = console(*arguments, of=bench["step"])
    assert status == 2 and words in err


class Measured(ModuleType):
    """A benchmark that takes no time."""

    def __init__(self, report: ModuleType) -> None:
        super().__init__("measured")
        self.report = report

    def main(self) -> int:
        options = self.report.parse(argparse.ArgumentParser(), rounds=5)
        print("a table")
        self.report.write_results("step", {"models": {}}, options)
        return 0


def test_with_json_to_stdout_all_else_goes_to_stderr(
    console: Console, bench: dict[str, ModuleType]
) -> None:
    _, out, err = console("--rounds", "3", "--json", "-", of=Measured(bench["report"]))
    assert json.loads(out)["benchmark"] == "step" and "a table" in err


def test_results_tell_the_command_that_measures_them_again(
    console: Console, bench: dict[str, ModuleType]
) -> None:
    arguments = ("--json=-", "--rounds", "3")
    out = console.prints(*arguments, of=Measured(bench["report"]))
    assert json.loads(out)["command"] == "python -m fastcomm bench step --rounds 3"


# All in short


# What is printed
