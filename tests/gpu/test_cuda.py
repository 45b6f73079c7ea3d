"""What only a GPU can show: the kernels on the device, whole steps in CUDA graphs, no
synchronisation behind the user's back, AMP, compiled and checkpointed models, streams. One rank,
whose reduced gradients must be the plain model's; and two and four ranks on one card, against a
single process in float64 on the CPU.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fastcomm
from fastcomm.cuda.multi_tensor import WIRE_DTYPES, MultiTensor
from tests.support.models import batch
from tests.support.process_groups import world
from tests.support.ranks import Ranks, on_ranks

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: run ci/gpu.sh where there is one"
)

DEVICE = torch.device("cuda", 0)
PAIRS = [(grad, wire) for grad, wires in WIRE_DTYPES.items() for wire in wires]
# Tiles hold 2048 elements, 16-byte accesses up to 8.
NUMELS = [1, 7, 8, 31, 2047, 2048, 2049, 100_003]
STEPS = 5


@pytest.fixture(scope="module")
def comm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = new_communicator(tmp_path_factory.mktemp("store"))
    yield made
    assert eventually(lambda: closes(made))


def new_communicator(folder: Any) -> Any:
    return fastcomm.init(
        "nccl", init_method=f"file://{folder}/store", rank=0, world_size=1, device=DEVICE
    )


def closes(comm: Any) -> bool:
    """Whether no graph is in the way any more."""
    gc.collect()
    try:
        comm.close()
    except fastcomm.FastcommError:
        return False
    return True


def mlp() -> nn.Sequential:
    """Wider than models.mlp, so that several buckets and tiles are at work."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)
    ).to(DEVICE)


def inputs() -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


MANY_BUCKETS = {"bucket_cap_mb": 0.1, "first_bucket_cap_mb": 0.01}


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad,
            other.grad,
            rtol=1e-5,
            atol=1e-7,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_same_parameters(model: nn.Module, plain: nn.Module) -> None:
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            parameter, other, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def eventually(is_so: Callable[[], bool], seconds: float = 5.0) -> bool:
    """The driver destroys graphs on a thread of its own."""
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_so()


# Kernels


def unaligned(
    numels: list[int], dtype: torch.dtype, fill: Callable[..., Tensor] = torch.randn
) -> list[Tensor]:
    """Tensors every other one of which begins where it is not 16-byte aligned."""
    torch.manual_seed(0)
    return [fill(numel + i % 2, device=DEVICE).to(dtype)[i % 2 :] for i, numel in enumerate(numels)]


def offsets_of(numels: list[int]) -> list[int]:
    """Places in a flat buffer, as a layout pads them: multiples of 64."""
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += -(-numel // 64) * 64
    return offsets


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def ids(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize("grad, wire", PAIRS, ids=ids)
def test_kernels_cast_as_torch_does_on_the_device(comm, grad, wire):
    tensors, offsets = unaligned(NUMELS, grad), offsets_of(NUMELS)
    multi_tensor = MultiTensor(NUMELS, offsets, grad, wire, comm.cuda)
    flat = torch.zeros(offsets[-1] + NUMELS[-1], dtype=torch.float32, device=DEVICE).to(wire)
    multi_tensor.flatten(tensors, flat)
    places = [flat[offset : offset + numel] for offset, numel in zip(offsets, NUMELS, strict=True)]
    for tensor, place in zip(tensors, places, strict=True):
        assert same_bits(place, tensor.to(wire))
    back = unaligned(NUMELS, grad, torch.zeros)
    multi_tensor.unflatten(flat, back, with_stats=True)
    for tensor, place in zip(back, places, strict=True):
        assert same_bits(tensor, place.to(grad))
    exact = sum(tensor.double().square().sum() for tensor in back)
    torch.testing.assert_close(multi_tensor.square_sum, exact, rtol=1e-5, atol=0)
    assert multi_tensor.n_nonfinite == 0


@pytest.mark.parametrize("n_tensors", [448, 449, 4001])
def test_any_number_of_tensors_is_flattened(comm, n_tensors):
    numels = [1 + i % 97 for i in range(n_tensors)]
    tensors, offsets = unaligned(numels, torch.float32), offsets_of(numels)
    flat = torch.zeros(offsets[-1] + numels[-1], device=DEVICE)
    MultiTensor(numels, offsets, torch.float32, torch.float32, comm.cuda).flatten(
        tensors, flat, 0.5
    )
    expected = torch.zeros_like(flat)
    for tensor, offset in zip(tensors, offsets, strict=True):
        expected[offset : offset + tensor.numel()] = 0.5 * tensor
    assert torch.equal(flat, expected)


@pytest.mark.parametrize("grad", list(WIRE_DTYPES), ids=ids)
def test_norm_counts_what_is_not_finite(comm, grad):
    tensors = unaligned(NUMELS, grad)
    tensors[4][5], tensors[7][99_999] = float("inf"), float("nan")
    multi_tensor = MultiTensor(NUMELS, offsets_of(NUMELS), grad, grad, comm.cuda)
    multi_tensor.norm(tensors)
    assert multi_tensor.n_nonfinite == 2


def test_statistics_are_the_same_to_the_bit_every_time(comm):
    tensors = unaligned(NUMELS, torch.float32)
    multi_tensor = MultiTensor(NUMELS, offsets_of(NUMELS), torch.float32, torch.float32, comm.cuda)
    found = set()
    for _ in range(20):
        multi_tensor.norm(tensors)
        found.add(multi_tensor.square_sum.item())
    assert len(found) == 1


# Training steps


def train(model: nn.Module, steps: int, *, in_step: Callable[[], object] = lambda: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, inputs()).backward()
        in_step()
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [{}, MANY_BUCKETS, {**MANY_BUCKETS, "streams": 2}],
    ids=["one bucket", "many buckets", "two streams"],
)
def test_a_reducer_of_one_rank_changes_nothing(comm, options):
    model, plain = mlp(), mlp()
    fastcomm.Reducer(comm, **options).attach(model)
    train(model, STEPS)
    train(plain, STEPS)
    assert_same_parameters(model, plain)


@pytest.mark.parametrize(
    "wire", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=ids
)
def test_a_wire_dtype_of_one_rank_is_one_cast_there_and_back(comm, wire):
    model, plain = mlp(), mlp()
    fastcomm.Reducer(comm, wire_dtype=wire, **MANY_BUCKETS).attach(model)
    for one in (model, plain):
        loss_of(one, inputs()).backward()
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad.to(wire).float())


def capture_step(model: nn.Module, x: Tensor) -> torch.cuda.CUDAGraph:
    """A whole step, after the warm-up every capture asks for. The model has made STEPS steps
    then.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@pytest.mark.parametrize(
    "options", [{}, {**MANY_BUCKETS, "wire_dtype": torch.bfloat16}], ids=["views", "bfloat16 wire"]
)
def test_a_captured_training_step_gives_the_parameters_of_eager_ones(comm, options):
    captured, eager = mlp(), mlp()
    fastcomm.Reducer(comm, **options).attach(captured)
    fastcomm.Reducer(comm, **options).attach(eager)
    graph = capture_step(captured, inputs())
    for _ in range(STEPS):
        graph.replay()
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for _ in range(2 * STEPS):
        optimizer.zero_grad()
        loss_of(eager, inputs()).backward()
        optimizer.step()
    assert_same_parameters(captured, eager)


def test_a_captured_step_reduces_what_the_replay_has_computed(comm):
    x = inputs()
    model = mlp()
    fastcomm.Reducer(comm).attach(model)
    graph = capture_step(model, x)
    plain = copy.deepcopy(model)
    x.copy_(torch.randn_like(x))
    graph.replay()
    plain.zero_grad()
    loss_of(plain, x).backward()
    assert_same_gradients(model, plain)


def test_close_refuses_while_a_graph_lives_and_works_after(tmp_path):
    comm = new_communicator(tmp_path)
    model = mlp()
    fastcomm.Reducer(comm).attach(model)
    graph = capture_step(model, inputs())
    graph.replay()
    with pytest.raises(fastcomm.FastcommError, match="graph"):
        comm.close()
    torch.cuda.synchronize()
    del graph
    assert eventually(lambda: closes(comm))
    with pytest.raises(fastcomm.FastcommError, match="closed"):
        comm.all_reduce(torch.ones(1, device=DEVICE))


@pytest.fixture
def no_synchronisation() -> Iterator[Callable[[], None]]:
    """Called, it makes every synchronisation of torch's with the device an error until the test
    ends.
    """
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "options",
    [{}, {**MANY_BUCKETS, "wire_dtype": torch.float16}],
    ids=["one bucket", "many buckets"],
)
def test_a_step_does_not_synchronise(comm, no_synchronisation, options):
    model, x = mlp(), inputs()
    fastcomm.Reducer(comm, **options).attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, x).backward()
    no_synchronisation()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "options", [{}, {"wire_dtype": torch.bfloat16}], ids=["a pass of its own", "on the way"]
)
def test_norm_and_clipping_are_torchs_without_synchronising(comm, no_synchronisation, options):
    model, x = mlp(), inputs()
    reducer = fastcomm.Reducer(comm, **MANY_BUCKETS, **options).attach(model)
    loss_of(model, x).backward()
    plain = copy.deepcopy(model)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        other.grad = parameter.grad.clone()
    no_synchronisation()
    norm = reducer.grad_norm()
    clipped = reducer.clip_grad_norm_(1e-3)
    torch.cuda.set_sync_debug_mode("default")
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(clipped, expected, rtol=1e-5, atol=0)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-9)


# Mixed precision


def amp_train(model: nn.Module, *, poison_step: int | None = None) -> list[float]:
    """Returns the scales. In the poisoned step one input is infinite."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    scales = []
    for step in range(STEPS):
        x = inputs()
        if step == poison_step:
            x[0, 0] = float("inf")
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(model, x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("poison_step", [None, 2], ids=["finite", "one step overflows"])
def test_grad_scaler_works_as_without_a_reducer(comm, poison_step):
    model, plain = mlp(), mlp()
    fastcomm.Reducer(comm, **MANY_BUCKETS).attach(model)
    assert amp_train(model, poison_step=poison_step) == amp_train(plain, poison_step=poison_step)
    assert_same_parameters(model, plain)


def test_nonfinite_gradients_are_counted_on_the_device(comm):
    model, x = mlp(), inputs()
    reducer = fastcomm.Reducer(comm, wire_dtype=torch.bfloat16).attach(model)
    loss_of(model, x).backward()
    assert reducer.nonfinite_count() == 0
    x[0, 0] = float("inf")
    model.zero_grad()
    loss_of(model, x).backward()
    assert (
        reducer.nonfinite_count()
        == sum(int((~p.grad.isfinite()).sum()) for p in model.parameters())
        > 0
    )


# Models of other kinds


def test_a_compiled_model_is_reduced(comm):
    model, plain = mlp(), mlp()
    compiled = torch.compile(model)
    fastcomm.Reducer(comm, **MANY_BUCKETS).attach(compiled)
    train(compiled, 2)
    train(plain, 2)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        # Fused kernels round otherwise.
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-5)


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Sequential, use_reentrant: bool) -> None:
        super().__init__()
        self.body = body
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_checkpointed_model_is_reduced(comm, use_reentrant):
    model, plain = Checkpointed(mlp(), use_reentrant), mlp()
    fastcomm.Reducer(comm, **MANY_BUCKETS).attach(model)
    for _ in range(2):
        for one in (model, plain):
            one.zero_grad()
            loss_of(
                one, inputs().requires_grad_()
            ).backward()  # reentrant checkpoints want an input with a gradient
        assert_same_gradients(model, plain)


class TwoStreams(nn.Module):
    """Two branches, the second on a stream of its own, where its backward runs as well."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = mlp(), mlp()
        self.side = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            second = self.two(x)
        first = self.one(x)
        torch.cuda.current_stream().wait_stream(self.side)
        second.record_stream(torch.cuda.current_stream())
        return first + second


@pytest.mark.parametrize("options", [{}, MANY_BUCKETS], ids=["one bucket", "many buckets"])
def test_gradients_produced_on_a_side_stream_are_reduced(comm, options):
    model, plain = TwoStreams(), TwoStreams()
    fastcomm.Reducer(comm, **options).attach(model)
    for _ in range(STEPS):
        for one in (model, plain):
            one.zero_grad()
            loss_of(one, inputs()).backward()
        assert_same_gradients(model, plain)


def test_gradients_of_a_backward_on_a_side_stream_are_reduced(comm):
    model, plain, side = mlp(), mlp(), torch.cuda.Stream()
    fastcomm.Reducer(comm, **MANY_BUCKETS).attach(model)
    for _ in range(STEPS):
        plain.zero_grad()
        loss_of(plain, inputs()).backward()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model.zero_grad()
            loss_of(model, inputs()).backward()
        torch.cuda.current_stream().wait_stream(side)
        assert_same_gradients(model, plain)


# Several ranks on one card


@pytest.fixture
def over_nccl(ranks: Ranks) -> Iterator[None]:
    ranks.transport = "nccl"
    yield
    ranks.transport = "shm"


def small() -> nn.Sequential:
    """On the CPU and in float64, the same on every rank."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def oracle(world_size: int, steps: int) -> nn.Module:
    """Trained in one process on the batches of all ranks together."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        with torch.device("cpu"):
            losses = [
                F.mse_loss(model(x.double()), y.double())
                for x, y in (batch(rank, step) for rank in range(world_size))
            ]
        (sum(losses) / world_size).backward()
        optimizer.step()
    return model


def train_on_ranks(comm: Any, steps: int, **options: Any) -> nn.Module:
    model = small().float().to(comm.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fastcomm.Reducer(comm, bucket_cap_mb=0.0005, first_bucket_cap_mb=0.0001, **options).attach(
        model
    )
    for step in range(steps):
        with torch.device("cpu"):
            x, y = batch(comm.rank, step)
        optimizer.zero_grad()
        F.mse_loss(model(x.to(comm.device)), y.to(comm.device)).backward()
        optimizer.step()
    return model.cpu().double()


# A parameter's relative and absolute error after STEPS steps: a few roundings of what travels.
TOLERANCES = {
    None: (1e-5, 1e-6),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (2e-3, 2e-3),
    torch.float8_e5m2: (0.2, 0.2),
}


@pytest.mark.usefixtures("over_nccl")
@pytest.mark.parametrize("wire", TOLERANCES, ids=ids)
@on_ranks(2, 4)
def test_ranks_that_share_a_card_train_as_one_process_does(comm, wire):
    model = train_on_ranks(comm, STEPS, wire_dtype=wire)
    rtol, atol = TOLERANCES[wire]
    for parameter, exact in zip(
        model.parameters(), oracle(comm.world_size, STEPS).parameters(), strict=True
    ):
        torch.testing.assert_close(parameter, exact, rtol=rtol, atol=atol)


@pytest.mark.usefixtures("over_nccl")
@on_ranks(2)
def test_two_streams_of_two_ranks_that_share_a_card_do_not_block_each_other(comm):
    model = train_on_ranks(comm, STEPS, streams=2)
    for parameter, exact in zip(
        model.parameters(), oracle(comm.world_size, STEPS).parameters(), strict=True
    ):
        torch.testing.assert_close(parameter, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("over_nccl")
@on_ranks(2)
def test_synchronised_batch_norm_over_the_backend_sees_the_whole_batch(comm):
    world()
    with torch.device("cpu"):
        whole = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    whole = whole.to(comm.device)
    alone = nn.BatchNorm1d(4).to(comm.device)
    shared = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    mine = slice(8 * comm.rank, 8 * comm.rank + 8)
    torch.testing.assert_close(shared(whole[mine]), alone(whole)[mine])
    torch.testing.assert_close(shared.running_var, alone.running_var)
