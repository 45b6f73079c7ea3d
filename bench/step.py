"""One training step without communication, with fastcomm, and with torch DDP (with and without
bucket views), in one run.

    python -m fastcomm bench step                 over shared memory and Gloo: four models, 2 ranks
    python -m fastcomm bench step --device cuda   over NCCL: three models, a rank for each GPU
    python -m fastcomm bench step --models mlp conv --rounds 30
    python -m fastcomm bench step --models gpt2 --optimizer adamw --ways local fastcomm sharded
    python -m fastcomm bench step --models mlp gpt2 --ways local fastcomm weighted
    python -m fastcomm bench step --models embedding embedding-dense --ways local fastcomm ddp
    python -m fastcomm bench step --models mlp gpt2 --ways local fastcomm skipping clipped
    python -m fastcomm bench step --models mlp --ways local hooks python wait fastcomm ddp
    python -m fastcomm bench step --ways local fastcomm unreduced backend ddp
    python -m fastcomm bench step --hook-cost   what the reducer costs per parameter
    python -m fastcomm bench step --from bench/results/step-2ranks.json --plot step.svg   only draws

Every way has a model and an optimizer (SGD) of its own, and the same batch. The ways take turns; in
every round each makes a few steps, all ranks at once. "local" is the step without any
communication, with all ranks at work, so that it meets the same contention for memory. A step's
time is that of the slowest rank; the overhead is the median over rounds of (way - local), so that
what slows a whole round does not count.

On a GPU a time is what passes between two events around the steps of a turn, and both sides also
send bfloat16: fastcomm by wire_dtype, DDP by its hook bf16_compress_hook. "fastcomm_int8" sends 8
bits with a scale for every 256 elements. On one card alone NCCL moves nothing: the overhead is what
the reducers do themselves.

These are set beside fastcomm's step: "weighted" has another weight on every rank
(reducer.set_weight), "joined" is inside reducer.join(), on the CPU, "skipping" has
skip_nonfinite=True, "clipped" clips by reducer.clip_grad_norm_, "clipped_by_torch" by torch's, to a
norm that no gradient here has, "audited" has an audit in every step, "recorded" a timeline.

"hooks", "python" and "wait" each do a little more than the one before, between "local" and
"fastcomm": hooks that do nothing, the reducer over a transport that moves nothing, and ranks that
meet at the end of backward. With them the overhead is taken apart.

"backend" is DDP over the torch.distributed backend "fastcomm", and "unreduced" DDP with a hook that
reduces nothing: what DDP itself takes, for its copies above all. "backend_views" and
"unreduced_views" are the same with bucket views.

"sharded" is fastcomm.ShardedOptimizer: each rank steps its shard, and its step is set beside the
local one, which steps everything. Printed with it: the bytes of optimizer state of each rank.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lib import cuda_clock, harness, launch, machine, report, tables
from lib.idle import IdleTransport
from lib.models import CASES, CUDA_CASES, EMBEDDINGS, WARM_UP_STEPS, Case, TinyParameters
from lib.tables import INT8_MS, SHARE_OF_DDP, Bar, Column, Spread, Table, Times, steps_table
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import fastcomm
from fastcomm.insight.recorder import BACKWARD, OPTIMIZER, OTHER, WAITING
from fastcomm.insight.stragglers import Stragglers

TINY_PARAMETERS = 2000
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 1e-4}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-4}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 1e-4, "foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 1e-4, "fused": True}),
}
# Ways whose step is printed beside fastcomm's, and how the line calls them.
WORDS = {
    "weighted": "with weights",
    "joined": "inside join()",
    "skipping": "with skip_nonfinite",
    "clipped": "with clipping",
    "clipped_by_torch": "with torch's clipping",
    "audited": "with an audit",
    "recorded": "with a timeline",
}
# Every part of the overhead, and the ways between which it lies.
PARTS = {
    "autograd calls the hooks": ("local", "hooks"),
    "the reducer's Python": ("hooks", "python"),
    "waiting for the slower rank": ("python", "wait"),
    "moving gradients": ("wait", "fastcomm"),
    "all of fastcomm": ("local", "fastcomm"),
    "all of DDP": ("local", "ddp"),
}
IN_PARTS = ("hooks", "python", "wait")
DDP_WAYS = ("unreduced", "backend", "ddp", "unreduced_views", "backend_views", "ddp_views")
WAYS = ("local", *IN_PARTS, "fastcomm", *WORDS, "sharded", *DDP_WAYS)
NARROW_WAYS = ("fastcomm_bf16", "ddp_bf16", "fastcomm_int8")  # over NCCL
# What a way gives to its reducer, and to DDP.
REDUCED: dict[str, dict[str, Any]] = {
    "skipping": {"skip_nonfinite": True},
    "audited": {"audit": 1},
    "fastcomm_bf16": {"wire_dtype": torch.bfloat16},
    "fastcomm_int8": {"wire_dtype": torch.int8},
}
# Whose overhead is told as a share of whose, and how the line calls them.
SHARES = {
    ("fastcomm", "ddp"): ("fastcomm's", "DDP's"),
    ("fastcomm", "ddp_views"): ("fastcomm's", "DDP's with bucket views"),
    ("backend", "ddp"): ("that of DDP over backend fastcomm", "DDP's"),
    ("unreduced", "ddp"): ("that of DDP alone", "DDP's"),
    ("backend_views", "ddp_views"): ("that of DDP over backend fastcomm, with views,", "DDP's"),
    ("unreduced_views", "ddp_views"): ("that of DDP alone, with views,", "DDP's"),
    ("fastcomm_bf16", "ddp_bf16"): ("fastcomm's in bfloat16", "DDP's"),
}
MAX_NORM = 1e9  # that no gradient here has: nothing is scaled
# Ways whose step is set beside another's, and the other.
BESIDE = {"sharded": "local", **dict.fromkeys(WORDS, "fastcomm")}
USUAL_WAYS = ("local", "fastcomm", "ddp", "ddp_views")


def main() -> int:
    options = parse_options()
    is_cuda = options.device == "cuda"
    if harness.is_rank():
        with harness.joined(options.device, group="gloo") as comm:
            launch.serve(comm.rank, Methods(comm, options))
        return 0
    reason = cuda_clock.why_not() if is_cuda else None
    if reason is not None:
        print(f"bench/step.py --device cuda needs a GPU, and {reason}", file=sys.stderr)
        return 2
    launch.exit_on_sigterm()
    n_ranks = options.ranks or (cuda_clock.device_count() if is_cuda else 2)
    with harness.started(__file__, n_ranks) as ranks:
        if options.hook_cost:
            report_hook_cost(ranks)
        else:
            report_steps(ranks, options)
    return 0


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where to train (cpu)"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=tuple(CASES | CUDA_CASES | EMBEDDINGS),
        metavar="MODEL",
        help=f"of {', '.join(CASES)}; on a GPU of {', '.join(CUDA_CASES)} (all); or of "
        f"{', '.join(EMBEDDINGS)}",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="number of ranks, on this machine (2; on GPUs as many as there are)",
    )
    parser.add_argument("--steps", type=int, default=3, help="steps of each turn (3)")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="sgd", help="(sgd)")
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=list(USUAL_WAYS),
        metavar="WAY",
        help=f"of {', '.join(WAYS)}; local and fastcomm among them ({' '.join(USUAL_WAYS)})",
    )
    parser.add_argument(
        "--hook-cost", action="store_true", help="measure the reducer's Python, not steps"
    )
    options = report.parse(parser, rounds=16)
    known = (CUDA_CASES if options.device == "cuda" else CASES) | EMBEDDINGS
    unknown = set(options.models or ()) - set(known)
    if not {"local", "fastcomm"} <= set(options.ways):
        parser.error("--ways: the others are compared with local and fastcomm")
    if unknown:
        parser.error(f"--device {options.device} has no model {', '.join(sorted(unknown))}")
    return options


def cases_of(options: argparse.Namespace) -> dict[str, Case]:
    return CUDA_CASES if options.device == "cuda" else CASES


def report_steps(ranks: launch.Ranks, options: argparse.Namespace) -> None:
    is_cuda = options.device == "cuda"
    results: dict[str, Any] = {}
    figures = {"device": options.device, "ranks": ranks.world_size, "models": results}
    for name in report.tracked(options.models or list(cases_of(options)), "models"):
        results[name] = measure(ranks, name, options)
        print_result(results[name])
        report.write_so_far("step", figures, options)
    print_machine(results, is_cuda)
    report.write_results("step", figures, options)
    if is_cuda:
        print_bars(results)


def measure(ranks: launch.Ranks, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The result of one model."""
    answers = ranks.call("measure", name=name)
    seconds = harness.slowest([answer["seconds"] for answer in answers])
    samples = {way: [1e3 * turn for turn in turns] for way, turns in seconds.items()}
    result = summarise((cases_of(options) | EMBEDDINGS)[name], samples)
    return result | {"optimizer": options.optimizer, "state_mb": answers[0]["state_mb"]}


# ---- the ranks -----------------------------------------------------------------------------------


class Methods:
    """What a rank does when the parent calls; all ranks are called together."""

    def __init__(self, comm: Any, options: argparse.Namespace) -> None:
        self.comm, self.options = comm, options

    def measure(self, name: str) -> dict[str, Any]:
        """By way: seconds of its steps by round, and megabytes of its optimizer's state."""
        case = (cases_of(self.options) | EMBEDDINGS)[name]
        steps, optimizers = make_steps(self.comm, case, self.options)
        for step in steps.values():
            for _ in range(WARM_UP_STEPS):
                step()
        take = turn_on_the_device if self.options.device == "cuda" else turn_on_the_host
        turns = {
            way: functools.partial(take, step, self.options.steps) for way, step in steps.items()
        }
        return {
            "seconds": harness.take_turns(turns, self.options.rounds, self.comm.barrier),
            "state_mb": {way: megabytes(optimizer) for way, optimizer in optimizers.items()},
        }

    def hook_cost(self) -> dict[str, float]:
        """Microseconds: of the reducer and of recording by parameter, of phases by step."""
        ways = {way: TinyParameters(TINY_PARAMETERS).to(self.comm.device) for way in COSTS}
        reducers = [fastcomm.Reducer(self.comm).attach(ways[way]) for way in COSTS[1:]]
        reducers[-1].timeline().start()
        turns = {way: functools.partial(cpu_time_of_backward, model) for way, model in ways.items()}
        samples = harness.take_turns(turns, 200, self.comm.barrier)
        for reducer in reducers:
            reducer.detach()
        costs = {
            "reducer": statistics.median(harness.differences(samples, "plain", "reduced")),
            "recording": statistics.median(harness.differences(samples, "reduced", "recorded")),
        }
        by_parameter = {what: 1e6 * cost / TINY_PARAMETERS for what, cost in costs.items()}
        return by_parameter | dict(zip(("noting", "telling"), phases_us(self.comm), strict=True))


COSTS = ("plain", "reduced", "recorded")


def turn_on_the_host(step: Callable[[], None], n_steps: int) -> float:
    """Seconds of a step."""
    return statistics.median(harness.time_calls(step, n_steps)) / 1e9


def turn_on_the_device(step: Callable[[], None], n_steps: int) -> float:
    return cuda_clock.microseconds_of(step, n_steps) / 1e6


def megabytes(optimizer: torch.optim.Optimizer) -> float:
    """Of this rank's optimizer state."""
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    nbytes = sum(t.numel() * t.itemsize for t in tensors if isinstance(t, torch.Tensor))
    return round(nbytes / 1e6, 1)


def make_steps(
    comm: Any, case: Case, options: argparse.Namespace
) -> tuple[dict[str, Callable[[], None]], dict[str, torch.optim.Optimizer]]:
    """For each way, a function that makes one training step, and its optimizer."""
    model, batch = case.make(comm.rank)
    original, batch = model.to(comm.device), batch.to(comm.device)
    ways = [way for way in WAYS if way in options.ways]
    ways += NARROW_WAYS if comm.backend == "nccl" else ()
    steps: dict[str, Callable[[], None]] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for way in ways:
        model = copy.deepcopy(original)
        reducer: Any = None
        if way in (*DDP_WAYS, "ddp_bf16"):
            model = wrapped(way, model)
        elif way == "hooks":
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda _: None)
        elif way != "local":
            over: Any = IdleTransport(comm, meets=way == "wait") if way in IN_PARTS else comm
            reducer = fastcomm.Reducer(over, **REDUCED.get(way, {})).attach(model)
        optimizers[way] = make_optimizer(way, model, reducer, options.optimizer)
        step = case.training_step(model, batch, optimizers[way])
        if way == "joined":
            reducer.join().__enter__()  # and never left
        if way == "recorded":
            reducer.timeline().start()
        steps[way] = weighted_step(reducer, step) if way == "weighted" else step
        steps[way].keep = reducer  # type: ignore[attr-defined]  # it lives as long as its step
    return steps, optimizers


def wrapped(way: str, model: torch.nn.Module) -> DistributedDataParallel:
    ddp = DistributedDataParallel(
        model,
        process_group=group_of_backend() if way.startswith("backend") else None,
        gradient_as_bucket_view=way.endswith("_views"),
    )
    if way == "ddp_bf16":
        ddp.register_comm_hook(None, bf16_compress_hook)
    if way.startswith("unreduced"):
        ddp.register_comm_hook(None, noop_hook)
    return ddp


@functools.cache
def group_of_backend() -> Any:
    """Collective, the first time."""
    return dist.new_group(backend="fastcomm")


def make_optimizer(
    way: str, model: torch.nn.Module, reducer: Any, name: str
) -> torch.optim.Optimizer:
    kind, defaults = OPTIMIZERS[name]
    if way == "sharded":
        return fastcomm.ShardedOptimizer(reducer, kind, **defaults)
    optimizer: torch.optim.Optimizer = kind(model.parameters(), **defaults)
    if way in ("clipped", "clipped_by_torch"):
        clip_before(optimizer, reducer if way == "clipped" else None)
    return optimizer


def weighted_step(reducer: Any, step: Callable[[], None]) -> Callable[[], None]:
    """The step with a weight that is another one on every rank."""

    def weigh_and_step() -> None:
        reducer.set_weight(5 - reducer.comm.rank % 5)
        step()

    return weigh_and_step


def clip_before(optimizer: torch.optim.Optimizer, reducer: Any) -> None:
    """Clips before every step: by the reducer, or by torch where that is None."""
    parameters = optimizer.param_groups[0]["params"]

    def clip(*_: object) -> None:
        if reducer is None:
            torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        else:
            reducer.clip_grad_norm_(MAX_NORM)

    optimizer.register_step_pre_hook(clip)


def cpu_time_of_backward(model: torch.nn.Module) -> float:
    """Seconds of zero_grad and backward; those of torch's hooks included."""
    start = time.process_time()
    model.zero_grad()
    model().backward()
    return time.process_time() - start


def phases_us(comm: Any) -> tuple[float, float]:
    """Collective. What reducer.stragglers() rests on, which is always on: medians of what a step's
    phases take to note, and to tell the other ranks, about every 2 s.
    """
    stragglers = Stragglers()
    stragglers.use(comm)
    stragglers.begin(0)
    of_a_step = (BACKWARD, WAITING, OTHER, WAITING, OPTIMIZER, OTHER)

    def note() -> None:
        for phase in of_a_step:
            stragglers.phases.enter(phase)

    noting = harness.time_calls(note, TINY_PARAMETERS)
    if comm.world_size == 1:  # which has nobody to tell
        return statistics.median(noting) / 1e3, 0.0
    telling = harness.time_calls(lambda: stragglers.tell(stragglers.due_at), TINY_PARAMETERS)
    return statistics.median(noting) / 1e3, statistics.median(telling) / 1e3


# ---- the report ----------------------------------------------------------------------------------


def summarise(case: Case, samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """samples: ms, by way and round."""
    numels = [p.numel() for p in case.make_model().parameters()]
    overhead = harness.overheads(samples, "local")
    result: dict[str, Any] = {
        "model": case.description,
        "parameters": sum(numels),
        "tensors": len(numels),
        "quartiles_ms": Times.of(samples).rounded(),
        "overhead_ms": harness.rounded(overhead),
    }
    for own, peer in SHARES:
        if {own, peer} <= set(overhead):
            share = overhead[own] / overhead[peer]
            result[f"{own}_share_of_{peer}_overhead"] = round(share, 3)
    for way, peer in BESIDE.items():
        if {way, peer} <= set(samples):
            ratios = harness.ratios(samples, peer, way)
            result[f"{way}_over_{peer}"] = round(statistics.median(ratios), 3)
    if "fastcomm_int8" in overhead:
        added = overhead["fastcomm_int8"] - overhead["fastcomm"]
        result["int8_ms_per_100m"] = round(added / sum(numels) * 1e8, 2)
    if {*IN_PARTS, "ddp"} <= set(samples):
        result["parts"] = {
            part: part_of(harness.differences(samples, *pair), overhead["ddp"])
            for part, pair in PARTS.items()
        }
    return result


def part_of(differences: Sequence[float], ddp_ms: float) -> dict[str, float]:
    low, middle, high = Spread.quartiles(differences).rounded()
    share = round(middle / ddp_ms, 3)
    return {"ms": middle, "quartile_1_ms": low, "quartile_3_ms": high, "share_of_ddp": share}


def print_result(result: dict[str, Any]) -> None:
    print()
    size = f"{result['parameters'] / 1e6:.1f} M parameters in {result['tensors']} tensors"
    steps_table(result, f"{result['model']}: {size}").print()
    for (own, peer), (words, its) in SHARES.items():
        share = result.get(f"{own}_share_of_{peer}_overhead")
        if share is not None:
            print(f"  of the overhead {words} is {share:.2f} of {its}", flush=True)
    if "int8_ms_per_100m" in result:
        added = result["int8_ms_per_100m"]
        print(
            f"  a wire of int8 adds {added:.2f} ms for each 100 M parameters (on one card expected "
            f"at most {INT8_MS})",
            flush=True,
        )
    for way, words in WORDS.items():
        if f"{way}_over_fastcomm" in result:
            share = result[f"{way}_over_fastcomm"]
            print(f"  the step {words} takes {share:.3f} of the one without", flush=True)
    if "sharded_over_local" in result:
        state = result["state_mb"]
        print(
            f"  the sharded step takes {result['sharded_over_local']:.3f} of the local step; its "
            f"optimizer's state on this rank {state['sharded']:.0f} MB of {state['local']:.0f} MB",
            flush=True,
        )
    if "parts" in result:
        print_parts(result["parts"])


def print_parts(parts: Mapping[str, Mapping[str, float]]) -> None:
    columns = [Column(30, ("part",), "<"), Column(9, ("ms",)), Column(17, ("quartiles",))]
    table = Table([*columns, Column(14, ("share of DDP",))])
    for part, figures in parts.items():
        quartiles = f"{figures['quartile_1_ms']:.2f} to {figures['quartile_3_ms']:.2f}"
        cells = [part, f"{figures['ms']:.2f}", quartiles, f"{figures['share_of_ddp']:.3f}"]
        table.rows.append(cells)
    table.print()


def print_bars(results: dict[str, dict[str, Any]]) -> None:
    """Whether fastcomm's overhead is at most half of DDP's; also where both send bfloat16."""
    bars = []
    for name, result in results.items():
        overhead = result["overhead_ms"]
        for own, peer in (("fastcomm", "ddp"), ("fastcomm_bf16", "ddp_bf16")):
            if not {own, peer} <= set(overhead):
                continue
            figure = f"{own} {overhead[own]:.2f} ms over local, {peer} {overhead[peer]:.2f} ms"
            bars.append(Bar(name, figure, overhead[own] <= SHARE_OF_DDP * overhead[peer]))
    tables.print_bars(bars)
    print(f"{tables.count_bars(bars)} (at most {SHARE_OF_DDP:.0%} of DDP's overhead)")


def print_machine(results: dict[str, Any], is_cuda: bool) -> None:
    print(f"\n{machine.summary()}")
    if any(
        spread.is_wide for result in results.values() for spread in result["quartiles_ms"].values()
    ):
        print(tables.WIDE_NOTE)
    if is_cuda:
        print(f"NCCL {machine.nccl_version()}")


def report_hook_cost(ranks: launch.Ranks) -> None:
    """The CPU's time of zero_grad and backward with the reducer, less that without."""
    costs = ranks.call("hook_cost")[0]
    print(
        f"{costs['reducer']:.2f} us per parameter and step, and {costs['recording']:.3f} while a "
        f"timeline records; {TINY_PARAMETERS} parameters, {ranks.world_size} ranks\n"
        f"{costs['noting']:.2f} us a step to note its phases, {costs['telling']:.0f} us to tell "
        "them, about every 2 s"
    )


if __name__ == "__main__":
    sys.exit(main())
