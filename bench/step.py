"""One training step without communication, with fastcomm, and with torch DDP (with and without
bucket views), in one run.

    python -m fastcomm bench step                 over shared memory and Gloo: four models, 2 ranks
    python -m fastcomm bench step --device cuda   over NCCL: three models, a rank for each GPU
    python -m fastcomm bench step --models mlp conv --rounds 30
    python -m fastcomm bench step --models gpt2 --optimizer adamw --ways local fastcomm sharded
    python -m fastcomm bench step --models mlp gpt2 --ways local fastcomm weighted
    python -m fastcomm bench step --models embedding embedding-dense --ways local fastcomm ddp
    python -m fastcomm bench step --models mlp gpt2 --ways local fastcomm joined
    python -m fastcomm bench step --models mlp gpt2 --ways local fastcomm skipping clipped
    python -m fastcomm bench step --models gpt2 --memory   what parameters and gradients take
    python -m fastcomm bench step --hook-cost   what the reducer costs per parameter
    python -m fastcomm bench step --from bench/results/step-2ranks.json --plot step.svg   only draws

Every way has a model and an optimizer (SGD) of its own, and the same batch. The ways take turns; in
every round each makes a few steps, all ranks at once, in an order that changes from round to round.
"local" is the step without any communication, with all ranks at work, so that it meets the same
contention for memory. A step's time is that of the slowest rank; the overhead is the median over
rounds of (way - local), so that what slows a whole round does not count.

On a GPU a time is what passes between two events around the steps of a turn, and both sides also
send bfloat16: fastcomm by wire_dtype, DDP by its hook bf16_compress_hook. On one card alone NCCL
moves nothing: the overhead is what the reducers do themselves.

Over NCCL "fastcomm_int8" sends 8 bits with a scale for every 256 elements. Expected, before the
first run: on one card, where it can only lose, its kernels move 23 bytes for each parameter, with
85% of the memory's bandwidth 0.8 ms for each 100 M parameters on an H100 and 0.6 ms on an H200; at
most INT8_MS. Between two GPUs that move 20 GB/s each over PCIe, a bucket of 25 MiB takes 1.3 ms in
float32, 0.7 ms in bfloat16, and 0.5 ms in int8, of which 0.15 ms are the kernels' (at 0.86 TB/s);
over NVLink, at 400 GB/s, 0.07, 0.03 and 0.06 ms, so that bfloat16 is the better wire there.

"weighted" is fastcomm with another weight on every rank (reducer.set_weight), and its step is set
beside fastcomm's without. "joined" is fastcomm inside reducer.join(), on the CPU, likewise.

"skipping" is fastcomm with skip_nonfinite=True, beside fastcomm without; "clipped" clips by
reducer.clip_grad_norm_, and "clipped_by_torch" by torch's clip_grad_norm_, to a norm that no
gradient here has: what is compared is the norm. "audited" is fastcomm with an audit in every step.

"sharded" is fastcomm.ShardedOptimizer: each rank steps its shard, and its step is set beside the
local one, which steps everything. Printed with it: the bytes of optimizer state of each rank. In
"shared" all ranks have one copy of the parameters (share_parameters=True).
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lib import cuda_clock, launch, machine, report, tables, turns
from lib.counters import Counters
from lib.models import CASES, CUDA_CASES, EMBEDDINGS, WARM_UP_STEPS, Case, TinyParameters
from lib.step_table import INT8_MS, SHARE_OF_DDP, steps_table
from lib.tables import Bar, Times
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import fastcomm

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
}
SHARDED_WAYS = ("sharded", "shared")
WAYS = ("local", "fastcomm", *WORDS, *SHARDED_WAYS, "ddp", "ddp_views")
NARROW_WAYS = ("fastcomm_bf16", "ddp_bf16", "fastcomm_int8")  # over NCCL
# What a way gives to its reducer, and to DDP.
REDUCED: dict[str, dict[str, Any]] = {
    "skipping": {"skip_nonfinite": True},
    "audited": {"audit": 1},
    "fastcomm_bf16": {"wire_dtype": torch.bfloat16},
    "fastcomm_int8": {"wire_dtype": torch.int8},
}
WRAPPED: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp_views": {"gradient_as_bucket_view": True},
    "ddp_bf16": {},
}
MAX_NORM = 1e9  # that no gradient here has: nothing is scaled
# Ways whose step is set beside another's, and the other.
BESIDE = {"sharded": "local", **dict.fromkeys(WORDS, "fastcomm")}
USUAL_WAYS = ("local", "fastcomm", "ddp", "ddp_views")


def main() -> int:
    options = parse_options()
    is_cuda = options.device == "cuda"
    reason = cuda_clock.why_not() if is_cuda else None
    if reason is not None:
        print(f"bench/step.py --device cuda needs a GPU, and {reason}", file=sys.stderr)
        return 2
    if "RANK" not in os.environ:
        launch.become_ranks(options.ranks or (cuda_clock.device_count() if is_cuda else 2))
    torch.set_num_threads(1)
    device = (
        cuda_clock.use_device(int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    )
    with fastcomm.init("nccl" if is_cuda else "shm", device=device) as comm:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if options.hook_cost:
            report_hook_cost(comm)
        elif options.memory:
            report_memory(comm, options)
        else:
            report_steps(comm, options)
        comm.barrier()
        dist.destroy_process_group()
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
    parser.add_argument(
        "--memory", action="store_true", help="measure the shared segments' memory, not steps"
    )
    options = report.parse(parser, rounds=16)
    known = (CUDA_CASES if options.device == "cuda" else CASES) | EMBEDDINGS
    unknown = set(options.models or ()) - set(known)
    if not {"local", "fastcomm"} <= set(options.ways):
        parser.error("--ways: the others are compared with local and fastcomm")
    if unknown:
        parser.error(f"--device {options.device} has no model {', '.join(sorted(unknown))}")
    return options


def report_steps(comm: Any, options: argparse.Namespace) -> None:
    is_cuda = options.device == "cuda"
    cases = CUDA_CASES if is_cuda else CASES
    results: dict[str, Any] = {}
    figures = {"device": options.device, "ranks": comm.world_size, "models": results}
    for name in options.models or cases:
        results[name] = measure(comm, (cases | EMBEDDINGS)[name], options)
        if comm.rank == 0:
            report.write_so_far("step", figures, options)
    if comm.rank == 0:
        print_machine(results, is_cuda)
        report.write_results("step", figures, options)
        if is_cuda:
            print_bars(results)


def measure(comm: Any, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Collective. Returns the result of one model; printed by rank 0."""
    steps, states = make_steps(comm, case, options)
    for step in steps.values():
        for _ in range(WARM_UP_STEPS):
            step()
    take_turn = turn_on_the_device if options.device == "cuda" else turn_on_the_host
    ways = tuple(steps)
    seconds = torch.zeros(options.rounds, len(ways), options.steps, dtype=torch.float64)
    rounds = range(options.rounds)
    for number in report.tracked(rounds, case.description, shown=comm.rank == 0):
        for way in turns.order_of(ways, number):
            comm.barrier()
            seconds[number, ways.index(way)] = torch.tensor(
                take_turn(steps[way], options.steps), dtype=torch.float64
            )
    seconds = seconds.to(comm.device)
    comm.all_reduce(seconds, "max")
    state_mb = {way: megabytes(optimizer) for way, optimizer in states.items()}
    states.clear()
    del step
    steps.clear()
    gc.collect()
    result = summarise(case, ways, seconds.cpu().median(dim=2).values)
    result |= {"optimizer": options.optimizer, "state_mb": state_mb}
    if comm.rank == 0:
        print_result(result)
    return result


def turn_on_the_host(step: Callable[[], None], n_steps: int) -> list[float]:
    """Seconds of each step."""
    return [nanoseconds / 1e9 for nanoseconds in turns.time_calls(step, n_steps)]


def turn_on_the_device(step: Callable[[], None], n_steps: int) -> list[float]:
    """As turn_on_the_host: all steps' mean for each."""
    return [cuda_clock.microseconds_of(step, n_steps) / 1e6] * n_steps


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
        if way in WRAPPED:
            model = wrapped(way, model)
        elif way != "local":
            reducer = fastcomm.Reducer(comm, **REDUCED.get(way, {})).attach(model)
        optimizers[way] = make_optimizer(way, model, reducer, options.optimizer)
        step = case.training_step(model, batch, optimizers[way])
        if way == "joined":
            reducer.join().__enter__()  # and never left
        steps[way] = weighted_step(reducer, step) if way == "weighted" else step
        steps[way].keep = reducer  # type: ignore[attr-defined]  # it lives as long as its step
    return steps, optimizers


def wrapped(way: str, model: torch.nn.Module) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, **WRAPPED[way])
    if way == "ddp_bf16":
        ddp.register_comm_hook(None, bf16_compress_hook)
    return ddp


def make_optimizer(
    way: str, model: torch.nn.Module, reducer: Any, name: str
) -> torch.optim.Optimizer:
    kind, defaults = OPTIMIZERS[name]
    if way in SHARDED_WAYS:
        is_shared = way == "shared"
        return fastcomm.ShardedOptimizer(reducer, kind, share_parameters=is_shared, **defaults)
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


def summarise(case: Case, ways: Sequence[str], rounds: torch.Tensor) -> dict[str, Any]:
    """rounds: seconds [round, way]."""
    model = case.make_model()
    numels = [p.numel() for p in model.parameters()]
    samples = dict(zip(ways, (1e3 * rounds).T.tolist(), strict=True))
    overhead = report.overheads(samples, "local")
    result = {
        "model": case.description,
        "parameters": sum(numels),
        "tensors": len(numels),
        "quartiles_ms": Times.of(samples).rounded(),
        "overhead_ms": report.rounded(overhead),
    }
    for peer in ("ddp", "ddp_views"):
        if peer in overhead:
            share = overhead["fastcomm"] / overhead[peer]
            result[f"fastcomm_share_of_{peer}_overhead"] = round(share, 3)
    for way, peer in BESIDE.items():
        if {way, peer} <= set(ways):
            ratios = [a / b for a, b in zip(samples[way], samples[peer], strict=True)]
            result[f"{way}_over_{peer}"] = round(statistics.median(ratios), 3)
    if "ddp_bf16" in overhead:
        result["fastcomm_bf16_share_of_ddp_bf16_overhead"] = round(
            overhead["fastcomm_bf16"] / overhead["ddp_bf16"], 3
        )
    if "fastcomm_int8" in overhead:
        added = overhead["fastcomm_int8"] - overhead["fastcomm"]
        result["int8_ms_per_100m"] = round(added / sum(numels) * 1e8, 2)
    return result


def print_result(result: dict[str, Any]) -> None:
    print()
    size = f"{result['parameters'] / 1e6:.1f} M parameters in {result['tensors']} tensors"
    steps_table(result, f"{result['model']}: {size}").print()
    for peer, words in (("ddp", "DDP's"), ("ddp_views", "DDP's with bucket views")):
        share = result.get(f"fastcomm_share_of_{peer}_overhead")
        if share is not None:
            print(f"  fastcomm's overhead is {share:.2f} of {words}", flush=True)
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


def report_memory(comm: Any, options: argparse.Namespace) -> None:
    """Proportional set size (PSS) of the segments in which parameters and gradients lie, all ranks
    together: a page that n ranks have mapped counts 1/n for each.
    """
    for name in options.models or CASES:
        for way in ("sharded", "shared"):
            before = segments_mb(comm)
            chosen = argparse.Namespace(optimizer=options.optimizer, ways=[way])
            steps, optimizers = make_steps(comm, CASES[name], chosen)
            for _ in range(2):
                steps[way]()
            taken = segments_mb(comm) - before
            steps.clear()
            optimizers.clear()
            gc.collect()
            comm.barrier()
            if comm.rank == 0:
                model = CASES[name].make_model()
                one = sum(p.numel() * p.itemsize for p in model.parameters()) / 1e6
                share = f"{taken / one:.2f} times a model's parameters"
                print(f"{name}, {way}: {taken:.0f} MB, {share}", flush=True)


def segments_mb(comm: Any) -> float:
    """Collective."""
    pss = torch.zeros(1, dtype=torch.float64)
    is_ours = False
    comm.barrier()
    with open("/proc/self/smaps") as maps:
        for line in maps:
            if "-" in line.split(" ", 1)[0]:
                is_ours = "memfd:fastcomm" in line
            elif is_ours and line.startswith("Pss:"):
                pss += float(line.split()[1]) * 1024 / 1e6
    comm.all_reduce(pss)
    return float(pss)


def report_hook_cost(comm: Any) -> None:
    """CPU time of zero_grad and backward with the reducer, less that without, per parameter, and
    their instructions in user mode, where perf counts them. Those of torch's hooks included.
    """
    plain, reduced = (TinyParameters(TINY_PARAMETERS).to(comm.device) for _ in range(2))
    reducer = fastcomm.Reducer(comm).attach(reduced)
    counters = Counters()
    # a collection now and then is the price of any Python object, and not the reducer's
    gc.disable()
    costs = []
    for _ in range(50):
        comm.barrier()
        without = cost_of_backward(plain, counters)
        comm.barrier()
        costs.append(cost_of_backward(reduced, counters) - without)
    gc.enable()
    counters.close()
    reducer.detach()
    if comm.rank == 0:
        seconds, instructions = (torch.stack(costs).median(dim=0).values / TINY_PARAMETERS).tolist()
        counted = f", {instructions:,.0f} instructions" if instructions else ""
        print(
            f"{1e6 * seconds:.2f} us per parameter and step{counted}; {TINY_PARAMETERS} "
            f"parameters, {comm.world_size} ranks"
        )


def cost_of_backward(model: torch.nn.Module, counters: Counters) -> torch.Tensor:
    """Seconds of the CPU, and instructions: 0 if they are not counted."""
    before, start = counters.read(), time.process_time()
    model.zero_grad()
    model().backward()
    seconds = time.process_time() - start
    after = counters.read()
    n = after.get("instructions", 0) - before.get("instructions", 0)
    return torch.tensor([seconds, n], dtype=torch.float64)


if __name__ == "__main__":
    sys.exit(main())
