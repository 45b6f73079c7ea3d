"""Complex parameters: their gradients are reduced as pairs of real numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastcomm
from tests.support.bodies import gloo
from tests.support.models import attached, replica_of, seed
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT

pytestmark = [
    pytest.mark.usefixtures("transport"),
    pytest.mark.transports(*EVERY_TRANSPORT),
    pytest.mark.pairwise,
]


class Spectral(nn.Module):
    """Filters of frequencies, beside real weights: large and small, without dimensions, with other
    strides, and one that only even ranks use.
    """

    def __init__(self) -> None:
        super().__init__()
        seed(0)
        self.mix = nn.Linear(8, 8)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(5, 601, dtype=torch.complex64))
        self.skew = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64).t())
        self.phase = nn.Parameter(torch.tensor(0.5 + 0.5j))
        self.precise = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.sometimes = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.never = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, rank, step=0):
        return self.loss(rank, step)

    def loss(self, rank, step=0):
        generator = torch.Generator("cpu").manual_seed(10 * step + rank)
        x = torch.randn(4, 8, generator=generator, device="cpu").to(self.mix.weight.device)
        spectrum = torch.fft.rfft(self.mix(x)) * self.filter * self.phase
        features = spectrum @ self.skew * self.precise.conj()
        if rank % 2 == 0:
            features = features * self.sometimes
        return features.abs().square().mean() + (spectrum @ self.wide).abs().square().mean()


def alone(rank, step=0, model=None):
    """The gradients of one rank."""
    replica = replica_of(Spectral() if model is None else model)
    replica.loss(rank, step).backward()
    return dict(replica.named_parameters())


def expected(ranks, weights):
    """The weighted sum of the ranks' gradients."""
    sums = {}
    for rank, weight in zip(ranks, weights, strict=True):
        for name, p in alone(rank).items():
            if p.grad is not None:
                sums[name] = sums.get(name, 0) + p.grad * weight
    return sums


def assert_gradients(model, wanted, rtol=1e-5, atol=1e-6):
    for name, p in model.named_parameters():
        assert (p.grad is None) == (name not in wanted), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, wanted[name], rtol=rtol, atol=atol)


@pytest.mark.parametrize("op", ["mean", "sum"])
@on_ranks(2, 3)
def test_gradients_are_those_of_one_process(comm, op, buckets):
    model, n = Spectral(), comm.world_size
    reducer = fastcomm.Reducer(comm, op=op, **buckets).attach(model)
    wanted = expected(range(n), [1 / n if op == "mean" else 1] * n)
    before = None
    for set_to_none in (True, True, False):
        model.zero_grad(set_to_none)
        model.loss(comm.rank).backward()
        assert_gradients(model, wanted)
        assert before is None or model.wide.grad.data_ptr() == before
        before = model.wide.grad.data_ptr()
    reducer.detach()
    assert_gradients(model, wanted)


@on_ranks(2)
def test_narrow_wires_carry_both_parts(comm):
    rounding = {torch.bfloat16: 2**-7, torch.float16: 2**-9}
    if torch.int8 in comm.wire_dtypes:
        rounding[torch.int8] = 2**-5  # of the largest in a block
    wanted = expected(range(2), [0.5, 0.5])
    for wire_dtype, error in rounding.items():
        model = Spectral()
        reducer = fastcomm.Reducer(comm, wire_dtype=wire_dtype).attach(model)
        model.loss(comm.rank).backward()
        atol = error * max(g.abs().max().item() for g in wanted.values())
        assert_gradients(model, wanted, rtol=error, atol=atol)
        reducer.detach()


@on_ranks(2)
def test_weights_clipping_and_counts_are_torchs(comm):
    model, reducer, _ = attached(comm, Spectral())
    counts = [(2, 1), (0, 5)][comm.rank]
    reducer.set_weight(counts[0])
    with reducer.no_sync():
        model.loss(comm.rank).backward()
    reducer.set_weight(counts[1])
    model.loss(comm.rank + 2).backward()
    wanted = expected([0, 2, 3], [2 / 8, 1 / 8, 5 / 8])
    assert_gradients(model, wanted)
    norm = torch.nn.utils.get_total_norm(list(wanted.values()))
    torch.testing.assert_close(reducer.grad_norm(), norm, check_dtype=False)
    reducer.clip_grad_norm_(norm.item() / 4)
    assert_gradients(model, {name: gradient / 4 for name, gradient in wanted.items()})
    assert reducer.nonfinite_count() == 0
    model.filter.grad[2] = complex(float("inf"), float("nan"))
    model.filter.grad[3] = complex(0, float("nan"))
    if comm.backend in (
        "group",
        "hierarchical",
    ):  # as the reduction has left them, where it has counted
        assert reducer.nonfinite_count() == 3


@on_ranks(2)
def test_nonfinite_parts_that_come_from_a_round_are_counted(comm):
    z = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    reducer = fastcomm.Reducer(comm).attach([("z", z)])
    z.grad = torch.zeros(4, dtype=torch.complex64)
    if comm.rank == 1:
        z.grad[1] = complex(1, float("inf"))
        z.grad[2] = complex(float("nan"), float("nan"))
    reducer.reduce()
    assert reducer.nonfinite_count() == 3


@on_ranks(2)
def test_conjugated_and_transposed_gradients_are_resolved(comm):
    z = nn.Parameter(torch.ones(50, 60, dtype=torch.complex64))
    reducer = fastcomm.Reducer(comm).attach([("z", z)])
    own = torch.arange(3000).view(60, 50) * (1 + 2j) * (comm.rank + 1)
    for _ in range(2):
        z.grad = own.t()
        assert not z.grad.is_conj()
        reducer.reduce()
        assert torch.equal(z.grad, torch.arange(3000).view(60, 50).t() * (1.5 + 3j))
        z.grad = own.view(50, 60).conj()
        assert z.grad.is_conj()
        reducer.reduce()
        assert torch.equal(z.grad, torch.arange(3000).view(50, 60) * (1.5 - 3j))
        z.grad = z.grad.conj()  # on the flat buffer's own memory
        reducer.reduce()
        assert torch.equal(z.grad, torch.arange(3000).view(50, 60) * (1.5 + 3j))


@on_ranks(2)
def test_models_are_copied_compared_and_refreshed(comm):
    model = Spectral()
    with torch.no_grad():
        for p in model.parameters():
            p += comm.rank * 1j if p.is_complex() else comm.rank
    reducer = fastcomm.Reducer(comm).attach(model)
    assert torch.equal(model.phase, Spectral().phase)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.loss(comm.rank).backward()
    optimizer.step()
    reducer.check_in_sync(optimizer)
    reducer.refresh()
    model.loss(comm.rank).backward()
    optimizer.step()
    with torch.no_grad():
        model.filter[1] += comm.rank * 1j
    with pytest.raises(fastcomm.MismatchError, match="parameter filter is not the same"):
        reducer.check_in_sync()


@pytest.mark.skipif(torch.__version__ < "2.11", reason="DDP of torch 2.7 takes no complex numbers")
@pytest.mark.transports("shm")
@on_ranks(2)
def test_ddps_hook_sees_pairs(comm):
    model = Spectral()
    ddp = DistributedDataParallel(model, process_group=gloo(), find_unused_parameters=True)
    state = fastcomm.HookState(comm, wire_dtype=torch.bfloat16)
    ddp.register_comm_hook(state, fastcomm.all_reduce_hook)
    ddp(comm.rank).backward()
    wanted = expected(range(2), [0.5, 0.5])
    atol = 2**-7 * max(g.abs().max().item() for g in wanted.values())
    assert_gradients(model, wanted, rtol=2**-7, atol=atol)


@on_ranks(2)
def test_what_complex_numbers_do_not_have_is_refused_by_name(comm):
    words = "op max of the gradient of parameter filter is not possible: complex numbers"
    with pytest.raises(ValueError, match=words):
        fastcomm.Reducer(comm, op="max").attach(Spectral())
    model, reducer, _ = attached(comm, Spectral())
    with pytest.raises(ValueError, match=r"filter is torch.complex64: ShardedOptimizer steps real"):
        fastcomm.ShardedOptimizer(reducer, torch.optim.AdamW)
    half = nn.Parameter(torch.ones(2, dtype=torch.complex32))
    with pytest.raises(ValueError, match=r"tiny is torch.complex32; only gradients of"):
        fastcomm.Reducer(comm).attach([("tiny", half)])
