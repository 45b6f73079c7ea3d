"""Writes docs/api.md from the docstrings of fastcomm's public names:

    python ci/api.py > docs/api.md

Reads sources only, so it needs neither torch nor a build. Members whose docstring begins with one
of INTERNAL are for other modules of fastcomm, and left out. Arguments stand in docstrings as
paragraphs of lines `name: text`; here they become lists.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INTERNAL = ("For reducers", "See ")
WIDTH = 100
ITEM = re.compile(r"^([a-z_]+(?:, [a-z_]+)*): ")

INTRO = """\
# API

Every public name of fastcomm: what it takes, returns and raises. [README.md](../README.md) shows a
loop, [training_script.md](training_script.md) a whole script, [backend.md](backend.md) the
torch.distributed backend. Made from the docstrings by `python ci/api.py > docs/api.md`.

- [Starting](#starting): `fastcomm.init`
- [Training](#training): `fastcomm.Reducer`
- [Collectives](#collectives): `fastcomm.Communicator`, `fastcomm.Work`, ops and dtypes, order and
  threads, sub-groups
- [Under DDP](#under-ddp): `fastcomm.HookState`, `fastcomm.all_reduce_hook`
- [Errors](#errors)
"""

NOTES = """\
### Ops and dtypes

| op | also | of integers |
|---|---|---|
| `"sum"` | `ReduceOp.SUM` | |
| `"mean"` | `"avg"`, `ReduceOp.AVG` | rounded towards zero |
| `"min"`, `"max"` | `ReduceOp.MIN`, `ReduceOp.MAX` | |
| `"prod"` | `"product"`, `ReduceOp.PRODUCT` | |

float32, float64, float16, bfloat16, int32, int64 and uint8, also for what is only copied. bool is
not among them: send `flag.to(torch.uint8)` and reduce by `"max"` (any) or `"min"` (all). Autograd
sees nothing of a collective.

There is no `all_to_all`, `send`, `recv`, `scatter`, `gather` or collective of Python objects here:
the [backend](backend.md) has them.

### Order and threads

- All ranks call the same collectives of a communicator in the same order. Where they do not, all
  of them get `MismatchError`; over NCCL once one of them waits for ever.
- One thread at a time uses a communicator; give each thread its own. (`"group"` and
  `"hierarchical"` take calls from any number of threads, if only their order is the same on all
  ranks.)
- With `async_op=True` a collective returns a `Work`. Up to 16 may be under way over shared memory;
  the next one waits for the oldest. On one host a collective moves forward in `wait()` and inside
  later calls, over NCCL and across hosts by itself.
- After `fork` the child cannot use the communicator, and says so.

### Sub-groups

A communicator has the ranks that met in `init()`. For a part of them, give it a group:

```python
dist.init_process_group("gloo")
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]  # on every rank
comm = fastcomm.init(group=halves[dist.get_rank() // 2])  # of 2 ranks, numbered from 0
```

There is no other way to make one of a part of the ranks.

### After an error

| error | the communicator |
|---|---|
| `ValueError`, `TypeError` | as before: no peer has heard of it |
| `AbandonedError` | as before: skip the step, and go on |
| `MismatchError` | as before; over NCCL it has ended |
| `PeerLostError`, `TimeoutError` | has ended: start again, as [launching.md](launching.md) says |

`comm.failure` is None as long as it can be used.
"""

# By heading: what stands under it.
SECTIONS = {
    "Starting": [("rendezvous", "init"), ("runner", "launch")],
    "Training": [("reducer/reducer", "Reducer")],
    "Collectives": [("communicator", "Communicator"), ("communicator", "Work")],
    "Under DDP": [
        ("torch_backend/ddp_hook", "HookState"),
        ("torch_backend/ddp_hook", "all_reduce_hook"),
    ],
    "Errors": [
        ("errors", f"{kind}Error")
        for kind in ("Fastcomm", "Init", "Mismatch", "Abandoned", "PeerLost", "Timeout", "Nccl")
    ],
}
# What an instance is called in a signature.
INSTANCES = {"Reducer": "reducer", "Communicator": "comm", "Work": "work"}

Function = ast.FunctionDef
Definition = ast.FunctionDef | ast.ClassDef


def page() -> str:
    """The text of docs/api.md."""
    lines = [INTRO]
    for heading, names in SECTIONS.items():
        lines.append(f"## {heading}\n")
        for module, name in names:
            lines += of_definition(find(module, name))
        if heading == "Collectives":
            lines.append(NOTES)
    return "\n".join(lines)


def find(module: str, name: str) -> Definition:
    tree = ast.parse((ROOT / "fastcomm" / f"{module}.py").read_text())
    return next(node for node in tree.body if isinstance(node, Definition) and node.name == name)


def of_definition(node: Definition) -> Iterator[str]:
    yield f"### `fastcomm.{node.name}`\n"
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        if node.name.endswith("Error"):
            yield f"A `{bases.replace(', ', '` and a `')}`.\n"
        init = next((member for member in functions(node) if member.name == "__init__"), None)
        if init is not None and not node.name.endswith("Error"):
            yield from signature(f"fastcomm.{node.name}", init)
        yield from prose(node)
        for member in functions(node):
            if is_public(member):
                yield from of_member(INSTANCES[node.name], member)
    else:
        yield from signature(f"fastcomm.{node.name}", node)
        yield from prose(node)


def functions(node: ast.ClassDef) -> list[Function]:
    return [member for member in node.body if isinstance(member, Function)]


def is_public(member: Function) -> bool:
    documentation = ast.get_docstring(member) or ""
    return not member.name.startswith("_") and not documentation.startswith(INTERNAL)


def of_member(owner: str, member: Function) -> Iterator[str]:
    decorators = [ast.unparse(decorator) for decorator in member.decorator_list]
    if "property" in decorators:
        assert member.returns is not None
        yield f"```python\n{owner}.{member.name}: {ast.unparse(member.returns)}\n```\n"
    else:
        yield from signature(f"{owner}.{member.name}", member)
    yield from prose(member)


def signature(name: str, function: Function) -> Iterator[str]:
    parameters = list(parameters_of(function.args))
    returns = "" if function.returns is None else f" -> {text_of(function.returns)}"
    if function.name == "__init__":
        returns = ""
    line = f"{name}({', '.join(parameters)}){returns}"
    if len(line) > WIDTH:
        line = "\n".join([f"{name}(", *(f"    {parameter}," for parameter in parameters)])
        line += f"\n){returns}"
    yield f"```python\n{line}\n```\n"


def parameters_of(arguments: ast.arguments) -> Iterator[str]:
    """In words; without self."""
    positional = arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    for argument, default in zip(positional, defaults, strict=True):
        if argument.arg != "self":
            yield parameter(argument, default)
    if arguments.vararg is not None:
        yield f"*{parameter(arguments.vararg, None)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield parameter(argument, default)


def parameter(argument: ast.arg, default: ast.expr | None) -> str:
    kind = "" if argument.annotation is None else f": {text_of(argument.annotation)}"
    return f"{argument.arg}{kind}" + ("" if default is None else f" = {text_of(default)}")


def text_of(expression: ast.expr) -> str:
    return ast.unparse(expression).replace("'", '"')


def prose(node: Definition) -> Iterator[str]:
    """The docstring as Markdown."""
    documentation = ast.get_docstring(node)
    assert documentation, f"{node.name} is public and has no docstring"
    for paragraph in documentation.split("\n\n"):
        if ITEM.match(paragraph):
            yield from items(paragraph)
        elif paragraph.startswith("    "):
            yield f"```python\n{textwrap.dedent(paragraph)}\n```\n"
        else:
            yield wrap(paragraph) + "\n"


def items(paragraph: str) -> Iterator[str]:
    found: list[str] = []
    for line in paragraph.splitlines():
        if ITEM.match(line):
            names = re.sub(r"(\w+)", r"`\1`", ITEM.match(line)[1])
            found.append(f"{names}: {line[ITEM.match(line).end() :]}")
        else:
            found[-1] += f" {line.strip()}"
    yield "\n".join(wrap(item, "- ") for item in found) + "\n"


def wrap(text: str, bullet: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()),
        WIDTH,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_on_hyphens=False,
        break_long_words=False,
    )


if __name__ == "__main__":
    print(page(), end="")
