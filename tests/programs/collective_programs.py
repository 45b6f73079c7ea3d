"""Runs a CollectiveProgram on one rank of several, and compares every result, and what lies around
it in memory, with tests/support/reference.py."""

from __future__ import annotations

import functools
import os
import time
import zlib
from typing import Any

import torch
from torch import Tensor

from fastcomm import FastcommError, MismatchError
from tests.programs.data import Call, CollectiveProgram, Leave, Rebuild, Round
from tests.programs.members import Members, members_of
from tests.support.bodies import finish_together
from tests.support.reference import HALVES, reduced

DONE_WITHIN_S = 20.0
GUARD = 77
# The numbers repeat, after a prime: nobody is off by so much.
PERIOD, POOL_NUMEL = 65521, 1_500_000
_EPSILON = {
    torch.float64: 1e-15,
    torch.float32: 4e-7,
    torch.float16: 2**-10,
    torch.bfloat16: 2**-7,
}
_OTHER_DTYPE = {
    torch.float64: torch.int64,
    torch.int64: torch.float64,
    torch.float32: torch.int32,
    torch.int32: torch.float32,
    torch.float16: torch.bfloat16,
    torch.bfloat16: torch.float16,
}


def run_collective_program(comm: Any, program: CollectiveProgram) -> list[dict[str, int] | None]:
    """Returns, by round, check sums of what must be equal on all ranks; None once this rank has
    left."""
    with members_of(comm, program.rounds) as members:
        return _run_rounds(members, program)


def _run_rounds(members: Members, program: CollectiveProgram) -> list[dict[str, int] | None]:
    sums: list[dict[str, int] | None] = []
    for number, one in enumerate(program.rounds):
        if isinstance(one, Leave):
            members.part()
        if one == Leave(members.comm.rank):
            return sums + [None] * (len(program.rounds) + 1 - len(sums))
        try:
            if isinstance(one, Rebuild):
                members.rebuild()
            elif isinstance(one, Leave):
                members.rebuild_without_one(members.comm.barrier)
            sums.append(_Round(members.comm, one, number).run() if isinstance(one, Round) else {})
        except Exception as error:
            raise AssertionError(f"round {number}: {error}") from error
    comm = members.comm
    # Every rank hears of every event, at its next collective at the latest.
    tensor = torch.full((5,), float(comm.rank), dtype=torch.float64)
    comm.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(comm.world_size))] * 5, f"out of step at the end: {tensor}"
    sums.append({"n_abandoned": comm.n_abandoned})
    return sums


class _Left(Exception):
    """This rank has abandoned the round, or heard that another one has."""


class _Round:
    def __init__(self, comm: Any, one: Round, number: int) -> None:
        self.comm, self.round, self.number = comm, one, number
        self.is_exact = comm.backend in ("shm", "group")
        self.under_way: list[tuple[int, _Posted]] = []  # with the index when it is waited for
        self.sums: dict[str, int] = {}

    def run(self) -> dict[str, int]:
        n = len(self.round.calls)
        if self.round.is_abandoned:
            finish_together(self.comm)
        try:
            for index, call in enumerate(self.round.calls):
                self._leave_if_due(index)
                self._perform(index, _Posted(self.comm, call, 100 * self.number + index))
                self._wait_for_those_due(index)
            self._leave_if_due(n)
            self._wait_for_those_due(n + max(max(call.delay) for call in self.round.calls))
            self._may_hear(self.comm.barrier)
        except _Left:
            self._wait_in_vain()
        else:
            assert not self.round.is_abandoned, "this rank has not heard of an abandoned round"
        return {} if self.round.is_abandoned else self.sums

    def _leave_if_due(self, index: int) -> None:
        if self.round.leaves[self.comm.rank] == index:
            self.comm.abandon()
            raise _Left

    def _perform(self, index: int, posted: _Posted) -> None:
        call, rank = posted.call, self.comm.rank
        if call.delay[rank]:
            posted.work = self._may_hear(functools.partial(posted.start, async_op=True))
            self.under_way.append((index + call.delay[rank], posted))
            self._poll(posted)
        elif call.odd >= 0:
            _assert_mismatch(functools.partial(posted.start, async_op=False))
        else:
            self._may_hear(functools.partial(posted.start, async_op=False))
            self._check(posted)

    def _may_hear(self, function: Any) -> Any:
        try:
            return function()
        except FastcommError as error:
            if not self.round.is_abandoned or "abandoned" not in str(error):
                raise
            raise _Left from error

    def _wait_for_those_due(self, index: int) -> None:
        due = sorted((entry for entry in self.under_way if entry[0] <= index), key=lambda e: e[0])
        for entry in due:
            posted = entry[1]
            self._poll(posted)
            if posted.call.odd >= 0:
                _assert_mismatch(posted.work.wait)
            else:
                self._may_hear(posted.work.wait)
                self._check(posted)
            self.under_way.remove(entry)

    def _poll(self, posted: _Posted) -> None:
        """Neither raises nor uses up an error: the next wait, check or call does."""
        how = posted.call.poll[self.comm.rank]
        if how == "check":
            self._may_hear(self.comm.check)
        elif how:
            is_done = posted.work.is_completed()
            deadline = time.monotonic() + DONE_WITHIN_S
            while how == "until done" and not is_done:
                assert time.monotonic() < deadline, f"{posted.call} never completed"
                os.sched_yield()
                is_done = posted.work.is_completed()
            # Over NCCL it is in place for the stream alone, and may have to be divided yet.
            is_in_place = is_done and posted.call.odd < 0 and self.comm.backend != "nccl"
            if is_in_place and not self.round.is_abandoned:
                posted.check(self.is_exact)

    def _check(self, posted: _Posted) -> None:
        # Over NCCL, a work's wait returns before it is known whether the round was abandoned.
        if not (self.round.is_abandoned and self.comm.backend == "nccl"):
            posted.check(self.is_exact)
            self.sums |= posted.check_sum()

    def _wait_in_vain(self) -> None:
        """Works of an abandoned round end with an error, or, if they were done before, well."""
        for _, posted in self.under_way:
            try:
                posted.work.wait()
            except FastcommError as error:
                assert "abandoned" in str(error), str(error)
            else:
                self._check(posted)


_CUT = ("reduce_scatter_single", "scatter", "all_to_all_single")  # inputs, into parts


def _assert_mismatch(function: Any) -> None:
    try:
        function()
    except MismatchError:
        return
    raise AssertionError("ranks that call different collectives have not heard of it")


class _Posted:
    """A call, its tensors, and what they should become."""

    def __init__(self, comm: Any, call: Call, seed: int) -> None:
        self.comm, self.call, self.seed = comm, call, seed
        self.dtype = getattr(torch, call.dtype)
        self.work: Any = None
        n = comm.world_size
        self.shards = [
            _values(self.dtype, rank, self.seed, self._input_numel(), call.op) for rank in range(n)
        ]
        self._guarded: list[tuple[Tensor, int]] = []  # memory, and where a tensor begins in it
        self.out = self.inp = self._placed(self.shards[comm.rank])
        if call.kind == "all_gather_single":
            self.out = self._placed(torch.zeros(n * call.numel, dtype=self.dtype))
            if call.memory[comm.rank] == "inside":
                self.inp = self.out[comm.rank * call.numel : (comm.rank + 1) * call.numel]
                self.inp.copy_(self.shards[comm.rank])
        elif call.kind in ("reduce_scatter_single", "scatter"):
            self.out = self._placed(torch.zeros(call.numel, dtype=self.dtype))
        elif call.kind == "all_to_all_single" or (call.kind == "gather" and self._is_root()):
            self.out = self._placed(torch.zeros(n * call.numel, dtype=self.dtype))

    def _input_numel(self) -> int:
        return (self.comm.world_size if self.call.kind in _CUT else 1) * self.call.numel

    def _is_root(self) -> bool:
        return self.comm.rank == self.call.src % self.comm.world_size

    def _placed(self, values: Tensor) -> Tensor:
        """A copy between two guards."""
        where = self.call.memory[self.comm.rank]
        lead = 1 if where.endswith("odd") else 64 // self.dtype.itemsize
        numel = lead + values.numel() + 1
        empty = self.comm.empty if where.startswith("shared") else torch.empty
        base = empty(numel, dtype=self.dtype)
        base[:lead] = base[-1] = GUARD
        self._guarded.append((base, lead))
        return base[lead:-1].copy_(values)

    def start(self, async_op: bool) -> Any:
        call, comm = self.call, self.comm
        kind, op, src, inp, out = call.kind, call.op, call.src, self.inp, self.out
        if call.odd == comm.rank:  # what nobody else calls
            n, parts, how = call.numel, comm.world_size, call.how_odd
            if how == "op" and kind in ("all_reduce", "reduce_scatter_single"):
                op = "max" if op != "max" else "min"
            elif how == "src" and kind == "broadcast":
                src += 1
            elif how == "dtype" and self.dtype in _OTHER_DTYPE and kind != "barrier":
                inp, out = inp.view(_OTHER_DTYPE[self.dtype]), out.view(_OTHER_DTYPE[self.dtype])
            elif how == "numel" and n > 0:
                is_joined = kind in ("all_gather_single", "gather", "all_to_all_single")
                inp = inp[: (n - 1) * (parts if kind in _CUT else 1)]
                out = out[: (n - 1) * (parts if is_joined else 1)]
            else:
                kind = "barrier" if kind != "barrier" else "broadcast"
        if kind == "all_reduce":
            return comm.all_reduce(inp, op, async_op=async_op)
        if kind == "broadcast":
            return comm.broadcast(inp, src % comm.world_size, async_op=async_op)
        if kind == "all_gather_single":
            return comm.all_gather_single(out, inp, async_op=async_op)
        if kind == "reduce_scatter_single":
            return comm.reduce_scatter_single(out, inp, op, async_op=async_op)
        root = src % comm.world_size
        if kind == "gather":
            return comm.gather(out if self._is_root() else None, inp, root, async_op=async_op)
        if kind == "scatter":
            return comm.scatter(out, inp if self._is_root() else None, root, async_op=async_op)
        if kind == "all_to_all_single":
            return comm.all_to_all_single(out, inp, async_op=async_op)
        return comm.barrier(async_op=async_op)

    def expected(self) -> Tensor:
        call, rank = self.call, self.comm.rank
        if call.kind == "all_reduce":
            return reduced(self.shards, call.op)
        if call.kind == "broadcast":
            return self.shards[call.src % self.comm.world_size]
        if call.kind == "all_gather_single":
            return torch.cat(self.shards)
        if call.kind == "reduce_scatter_single":
            part = slice(rank * call.numel, (rank + 1) * call.numel)
            return reduced([shard[part] for shard in self.shards], call.op)
        if call.kind == "gather" and self._is_root():
            return torch.cat(self.shards)
        if call.kind in ("scatter", "all_to_all_single"):
            part = slice(rank * call.numel, (rank + 1) * call.numel)
            parts = [shard[part] for shard in self.shards]
            is_scatter = call.kind == "scatter"
            return parts[call.src % self.comm.world_size] if is_scatter else torch.cat(parts)
        return self.shards[rank]

    def check(self, is_exact: bool) -> None:
        expected = self.expected().to(self.out.device)
        out = self.out
        if not torch.equal(out, expected):
            is_sum = self.call.kind in ("all_reduce", "reduce_scatter_single")
            tolerance = 0.0
            if is_sum and not is_exact and self.dtype.is_floating_point:
                tolerance = (self.comm.world_size + 1) * _EPSILON[self.dtype]
                # A half's product may fall below its normal numbers on the way.
                tolerance *= self._magnitude() + (1.0 if self.dtype in HALVES else 0.0)
            difference = (out.double() - expected.double()).abs()
            assert difference.max().item() <= tolerance, (
                f"{self.call}: element {int(difference.argmax())} of {len(out)} is off by "
                f"{difference.max().item():.3g}: {out[difference.argmax()].item()}, expected "
                f"{expected[difference.argmax()].item()}; {int((difference > 0).sum())} differ"
            )
        if self.inp is not self.out and self.call.memory[self.comm.rank] != "inside":
            shard = self.shards[self.comm.rank].to(self.inp.device)
            assert torch.equal(self.inp, shard), f"{self.call}: the input has changed"
        for base, lead in self._guarded:
            guards = {*base[:lead].tolist(), base[-1].item()}
            assert guards == {GUARD}, f"{self.call}: wrote outside the tensor: {guards}"

    def _magnitude(self) -> float:
        """Of what goes into the result."""
        op = "max" if self.call.op == "min" else self.call.op
        values = reduced([shard.double().abs() for shard in self.shards], op)
        return values.max().item() if values.numel() else 0.0

    def check_sum(self) -> dict[str, int]:
        if self.call.kind not in ("all_reduce", "broadcast", "all_gather_single"):
            return {}  # each rank has something else
        return {f"call {self.seed}": zlib.crc32(self.out.cpu().view(torch.uint8).numpy())}


@functools.cache
def _pool(dtype: torch.dtype, rank: int) -> Tensor:
    """Moderate floats, so that products stay finite; integers of all sizes."""
    generator = torch.Generator("cpu").manual_seed(rank)
    if dtype.is_floating_point:
        values = torch.randn(PERIOD, generator=generator, dtype=torch.float64, device="cpu")
        values = values.to(dtype)
    else:
        limits = torch.iinfo(dtype)
        shape = (PERIOD,)
        values = torch.randint(
            limits.min, limits.max, shape, generator=generator, dtype=dtype, device="cpu"
        )
    return values.repeat(POOL_NUMEL // PERIOD + 1)


def _values(dtype: torch.dtype, rank: int, seed: int, numel: int, op: str) -> Tensor:
    values = _pool(dtype, rank)[1009 * seed % 4096 :][:numel]
    # The sum behind a mean of int64 must not wrap around.
    return values // 8 if dtype == torch.int64 and op == "mean" else values
