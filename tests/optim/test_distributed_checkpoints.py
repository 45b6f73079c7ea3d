"""ShardedOptimizer and torch.distributed.checkpoint: each rank writes its shards, and any number of
ranks read them.

Every rank trains on the same images, so that 1, 2 or 4 ranks make what one plain optimizer does, in
every bit: the mean over 3 would round.
"""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as recipes
from torch.distributed.checkpoint.api import CheckpointException

import fastcomm
from fastcomm import FastcommError
from tests.support.bodies import gloo
from tests.support.models import assert_same_parameters, convnet, image_backward
from tests.support.ranks import fresh_ranks, on_ranks
from tests.support.sharded_pairs import OPTIMIZERS, STEPS, Lion
from tests.support.transports import EVERY_TRANSPORT


class Counting(Lion):
    """Has a state that is no tensor."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state["n"] = state.get("n", 0) + 1


Make = Callable[[], nn.Module]
Kind = tuple[type[torch.optim.Optimizer], dict[str, Any]]
KINDS: dict[str, Kind] = {
    **{name: OPTIMIZERS[name] for name in ("AdamW", "Adam amsgrad", "Adafactor", "NAdam", "ASGD")},
    **{name: OPTIMIZERS[name] for name in ("SGD", "SGD momentum")},
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.1}),
    "Counting": (Counting, {}),
}
WHOLE = recipes.StateDictOptions(full_state_dict=True)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def net() -> nn.Module:
    """With a frozen parameter, and weights whose memory is not in the order of their indices."""
    model = convnet().to(memory_format=torch.channels_last)
    model[0].bias.requires_grad_(False)
    return model


def net_of_16_bits() -> nn.Module:
    return net().to(torch.bfloat16)


class Scaled(nn.Module):
    """Has a scalar, and parameters of no elements and of no use."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(5, 7))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.nothing.sum()


def odd_net() -> nn.Module:
    return nn.Sequential(*net(), Scaled())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": weights}, {"params": others, "lr": 0.003}]


class Plain:
    """A model and what a plain optimizer makes of it."""

    def __init__(self, kind: Kind, make: Make = net) -> None:
        self.model = make()
        self.optimizer = kind[0](groups(self.model), **kind[1])

    def train(self, first: int = 0, n: int = STEPS) -> None:
        for step in range(first, first + n):
            self.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype is not torch.float32):
                image_backward(self.model, 0, step)
            self.optimizer.step()

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def state(self) -> dict[str, Any]:
        """The optimizer's, whole."""
        return self.optimizer.state_dict()


class Sharded(Plain):
    """The same by a ShardedOptimizer."""

    def __init__(self, comm: Any, kind: Kind, make: Make = net, **reducing: Any) -> None:
        self.model = make()
        reducer = fastcomm.Reducer(comm, **reducing).attach(self.model)
        self.optimizer = fastcomm.ShardedOptimizer(reducer, kind[0], groups(self.model), **kind[1])

    def state(self) -> dict[str, Any]:
        return self.optimizer.full_state_dict()


def assert_same(mine: Plain, theirs: Plain) -> None:
    """The parameters, and the states of those that are not frozen, have the same bits."""
    assert_same_parameters(mine.model, theirs.model)
    ours, others = mine.state(), theirs.state()
    assert ours["param_groups"] == others["param_groups"]
    assert ours["state"].keys() == others["state"].keys()
    for i, state in others["state"].items():
        assert ours["state"][i].keys() == state.keys()
        for key, value in state.items():
            own = ours["state"][i][key]
            assert torch.equal(own, value) if torch.is_tensor(value) else own == value, (i, key)


def save(one: Plain, folder: Path, way: str) -> None:
    dcp.save(asked(one, way), checkpoint_id=folder)


def load(one: Plain, folder: Path, way: str, *, is_partial: bool = False) -> None:
    """Into a model and an optimizer that may have made no step. is_partial: the checkpoint may lack
    some of that.
    """
    state = asked(one, way)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=is_partial)
    dcp.load(state, checkpoint_id=folder, planner=planner)
    if way == "by number":
        one.model.load_state_dict(state["model"])
        one.optimizer.load_state_dict(state["optim"])


def asked(one: Plain, way: str) -> dict[str, Any]:
    if way == "as objects":
        return {"model": one.model, "optim": one.optimizer}
    return {"model": one.model.state_dict(), "optim": one.optimizer.state_dict()}


# -- other numbers of ranks ------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["by number", "as objects"])
def test_any_number_of_ranks_reads_what_another_has_written(ranks, tmp_path, way):
    for n_writers, n_readers in ((4, 2), (1, 4)):
        ranks(n_writers, _writes, KINDS["AdamW"], tmp_path / f"{n_writers}", way)
        ranks(n_readers, _reads, KINDS["AdamW"], tmp_path / f"{n_writers}", way)


@pytest.mark.parametrize("name", [name for name in KINDS if not name.startswith("AdamW")])
def test_of_every_class(ranks, tmp_path, name):
    ranks(4, _writes, KINDS[name], tmp_path, "by number")
    ranks(2, _reads, KINDS[name], tmp_path, "by number")


@pytest.mark.parametrize("make", [net_of_16_bits, odd_net])
def test_of_other_models(ranks, tmp_path, make):
    ranks(2, _writes, KINDS["AdamW"], tmp_path, "by number", make)
    ranks(4, _reads, KINDS["AdamW"], tmp_path, "by number", make)


def _writes(comm: Any, kind: Kind, folder: Path, way: str, make: Make = net) -> None:
    gloo()
    sharded = Sharded(comm, kind, make)
    sharded.train()
    save(sharded, folder, way)


def _reads(comm: Any, kind: Kind, folder: Path, way: str, make: Make = net) -> None:
    """Into other buckets, before the first step."""
    gloo()
    sharded, plain = Sharded(comm, kind, make, bucket_cap_mb=0.002), Plain(kind, make)
    plain.train()
    # what was never used has no state in the checkpoint, and one of no step here
    load(sharded, folder, way, is_partial=make is odd_net)
    assert_same(sharded, plain)
    for one in (sharded, plain):
        one.train(first=STEPS)
    assert_same(sharded, plain)


@pytest.mark.usefixtures("transport")
@pytest.mark.transports(*EVERY_TRANSPORT)
@on_ranks(2)
def test_over_every_transport(comm, tmp_path):
    _writes(comm, KINDS["AdamW"], tmp_path, "by number")
    _reads(comm, KINDS["AdamW"], tmp_path, "by number")


@on_ranks(2)
def test_each_rank_writes_its_shards_alone(comm, tmp_path):
    gloo()
    sharded = Sharded(comm, KINDS["AdamW"])
    sharded.train(n=1)
    save(sharded, tmp_path, "by number")
    written = dcp.FileSystemReader(tmp_path).read_metadata()
    n_elements = {0: 0, 1: 0}
    for index, place in written.storage_data.items():
        if index.fqn.endswith("exp_avg"):
            chunks = written.state_dict_metadata[index.fqn].chunks
            sizes = next(chunk.sizes for chunk in chunks if chunk.offsets == index.offset)
            n_elements[int(place.relative_path[2])] += sizes.numel()
    n = sum(p.numel() for p in sharded.model.parameters() if p.requires_grad)
    assert sum(n_elements.values()) == n
    assert max(n_elements.values()) < 0.6 * n


# -- before the first step -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["NAdam", "Adagrad", "SGD momentum"])
@on_ranks(2)
def test_what_was_saved_before_the_first_step_is_a_fresh_start(comm, name, tmp_path):
    gloo()
    writer, reader, plain = Sharded(comm, KINDS[name]), Sharded(comm, KINDS[name]), None
    save(writer, tmp_path, "by number")
    reader.train()
    load(reader, tmp_path, "by number")
    plain = Plain(KINDS[name])
    for one in (writer, reader, plain):  # asking for its state has changed no optimizer
        one.train()
    assert_same(writer, plain)
    assert_same(reader, plain)


@on_ranks(2)
def test_a_class_that_cannot_step_zeros_is_an_error_on_all(comm):
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            if comm.rank == 1:
                raise ZeroDivisionError("of its own")

    sharded = Sharded(comm, (Fails, {"lr": 0.1}))
    kind = ZeroDivisionError if comm.rank == 1 else FastcommError
    with pytest.raises(kind, match="of its own"):
        sharded.optimizer.state_dict()


# -- beside training -------------------------------------------------------------------------------


@pytest.mark.skipif(
    "async_stager" not in inspect.signature(dcp.async_save).parameters, reason="needs torch 2.9"
)
@on_ranks(2)
def test_what_is_saved_beside_training_is_of_one_step(comm, tmp_path):
    gloo()
    group = dist.new_group(backend="gloo")
    sharded, reader, plain = (
        Sharded(comm, KINDS["AdamW"]),
        Sharded(comm, KINDS["AdamW"]),
        Plain(KINDS["AdamW"]),
    )
    sharded.train()
    saving = dcp.async_save(
        asked(sharded, "by number"), checkpoint_id=tmp_path, process_group=group
    )
    sharded.train(first=STEPS)
    saving.result()
    load(reader, tmp_path, "by number")
    plain.train()
    assert_same(reader, plain)
    dist.destroy_process_group(group)


# -- without a group, and what is refused ----------------------------------------------------------


def test_without_a_process_group_nothing_is_saved_and_all_is_loaded(tmp_path):
    outcomes = fresh_ranks(2, _without_a_group, tmp_path, pass_comm=True)
    assert [outcome.kind for outcome in outcomes] == ["returned"] * 2, outcomes


def _without_a_group(comm: Any, folder: Path) -> None:
    kind = KINDS["AdamW"]
    sharded, reader, plain = Sharded(comm, kind), Sharded(comm, kind), Plain(kind)
    sharded.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(
            CheckpointException, match=r"no process group.*init_process_group\(\"gloo\"\)"
        ):
            save(sharded, folder / f"refused by {comm.rank}", "by number")
        whole = {"model": sharded.model.state_dict(), "optim": sharded.state()}
        if comm.rank == 0:
            dcp.save(whole, checkpoint_id=folder / "whole")
        comm.barrier()
        load(reader, folder / "whole", "by number")
    plain.train()
    assert_same(reader, plain)


@on_ranks(2)
def test_recipes_that_do_not_know_shards_are_refused(comm):
    gloo()
    sharded = Sharded(comm, KINDS["AdamW"])
    model, optimizer = sharded.model, sharded.optimizer
    for n_steps in range(2):
        saved = optimizer.state_dict()
        for call in (
            lambda: recipes.get_state_dict(model, optimizer),
            lambda: recipes.get_optimizer_state_dict(model, optimizer, options=WHOLE),
            lambda saved=saved: recipes.set_optimizer_state_dict(model, optimizer, saved),
        ):
            with pytest.raises(FastcommError, match=r"save and load its state_dict\(\)"):
                call()
        assert (len(optimizer.state) > 0) == (n_steps > 0)
        sharded.train(first=n_steps, n=1)
    plain = Plain(KINDS["AdamW"])
    plain.train(n=2)
    assert_same(sharded, plain)


@on_ranks(2)
def test_a_shard_can_be_copied_and_saved_and_nothing_else(comm):
    sharded = Sharded(comm, KINDS["AdamW"])
    sharded.train(n=1)
    saved = io.BytesIO()
    torch.save(sharded.optimizer.state_dict(), saved)
    saved.seek(0)
    for state in (torch.load(saved), copy.deepcopy(sharded.optimizer.state_dict())):
        sharded.train(first=1)
        sharded.optimizer.load_state_dict(state)
        assert sharded.state()["state"][0]["step"] == 1
    shard = state["state"][0]["exp_avg"]
    assert shard.shape == sharded.model[0].weight.shape and repr(shard).startswith("TensorShard(")
    for call in (lambda: shard + 1, lambda: torch.empty(shard.shape).copy_(shard)):
        with pytest.raises(FastcommError, match=r"some elements alone: use its to_local\(\)"):
            call()
