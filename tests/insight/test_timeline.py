"""What a reducer's timeline records on real ranks: phases in their order, every kind of step, and
nothing where it is off.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
import weakref

import pytest
import torch

import fastcomm
from fastcomm import FastcommError
from tests.support.models import backward, mlp
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT

pytestmark = pytest.mark.usefixtures("transport")
SMALL_BUCKETS = {"bucket_cap_mb": 0.0002}
on_cpu = pytest.mark.transports("shm")


def _train(comm, steps=1):
    """A model, its reducer, optimizer and timeline, after so many steps."""
    model = mlp().to(comm.device)
    reducer = fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)
    timeline = reducer.timeline()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        _step(comm, model, optimizer, step)
    return model, reducer, optimizer, timeline


def _step(comm, model, optimizer, step=0):
    optimizer.zero_grad()
    backward(model, comm.rank, step)
    optimizer.step()


def _kinds(timeline):
    return [step.kind for step in timeline.steps()]


@pytest.mark.transports(*EVERY_TRANSPORT)
@on_ranks(2)
def test_a_steps_times_are_in_the_order_in_which_things_happen(comm):
    _, reducer, _, timeline = _train(comm, steps=3)
    steps = timeline.steps()
    assert [(step.kind, step.number) for step in steps] == [("reduced", n) for n in (1, 2, 3)]
    for step in steps:
        phases = (step.forward_begin, step.forward_end, step.backward_begin, step.backward_end)
        phases += (step.finished, step.optimizer_begin, step.optimizer_end)
        assert phases[0] > 0 and list(phases) == sorted(phases)
        assert step.forward_ns == step.forward_end - step.forward_begin
        assert all(step.backward_begin <= time <= step.backward_end for time in step.ready)
        assert len(step.buckets) == len(timeline.buckets) > 2
    names = [name for plan in timeline.buckets for name in plan.names]
    assert sorted(names) == sorted(name for name, _ in mlp().named_parameters())
    assert repr(timeline).startswith(
        f"<Timeline of reducer {reducer.core.number} over {comm.backend}"
    )


@pytest.mark.transports(*EVERY_TRANSPORT)
@on_ranks(2)
def test_every_buckets_reduction_begins_after_its_gradients_and_ends_before_the_round(comm):
    _, reducer, _, timeline = _train(comm, steps=3)
    if comm.has_streams:
        comm.cuda.synchronize()
    for step in timeline.steps():
        first = 0
        for plan, bucket in zip(timeline.buckets, step.buckets, strict=True):
            ready = step.ready[first : first + len(plan.names)]
            first += len(plan.names)
            assert max(ready) <= bucket.launch <= bucket.launched
            assert bucket.launch < bucket.start <= bucket.end
            assert comm.has_streams or bucket.end <= bucket.waited <= step.finished
            assert comm.has_streams == bool(bucket.gathered)
        assert 0 < step.communication_ns <= step.finished - step.backward_begin or comm.has_streams
        assert 0 <= step.overlap <= 1
        assert step.exposed_ns >= 0


@on_cpu
@on_ranks(2)
def test_only_the_newest_steps_are_kept(comm):
    model = mlp()
    reducer = fastcomm.Reducer(comm).attach(model)
    timeline = reducer.timeline(steps=2)
    for step in range(5):
        backward(model, comm.rank, step)
    assert [step.number for step in timeline.steps()] == [4, 5]
    assert repr(timeline).endswith(": on, 2 of the newest 2 steps, 1 bucket; 0.4 kB>")
    assert reducer.timeline() is reducer.timeline(steps=2) is timeline
    with pytest.raises(ValueError, match="keeps 2 steps, as was asked at first; got 50"):
        reducer.timeline(steps=50)


@on_cpu
@on_ranks(2)
def test_what_was_accumulated_is_a_step_of_its_own(comm):
    model, reducer, optimizer, timeline = _train(comm)
    optimizer.zero_grad()
    with reducer.no_sync():
        backward(model, comm.rank, 1)
        backward(model, comm.rank, 2)
    backward(model, comm.rank, 3)
    optimizer.step()
    assert _kinds(timeline) == ["reduced", "accumulated", "accumulated", "reduced"]
    accumulated, reduced = timeline.steps()[2:]
    assert accumulated.number == 0 and accumulated.exposed_ns == accumulated.optimizer_ns == 0
    assert accumulated.forward_ns > 0 and accumulated.backward_ns > 0
    assert reduced.number == 2 and reduced.optimizer_ns > 0


@on_cpu
@on_ranks(2)
def test_a_round_that_was_abandoned_is_said_to_be(comm):
    model, reducer, optimizer, timeline = _train(comm)

    def fail(_):
        raise ZeroDivisionError

    handle = model[0].weight.register_hook(fail) if comm.rank == 1 else contextlib.nullcontext()
    with handle, pytest.raises((ZeroDivisionError, FastcommError)):
        backward(model, comm.rank)
    _step(comm, model, optimizer)
    assert _kinds(timeline) == ["reduced", "abandoned", "reduced"]
    assert timeline.steps()[1].optimizer_ns == 0


@on_cpu
@on_ranks(2)
def test_gradients_made_by_hand_have_no_backward(comm):
    model, reducer, optimizer, timeline = _train(comm)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    reducer.reduce()
    optimizer.step()
    step = timeline.steps()[-1]
    assert (step.kind, step.backward_ns, set(step.ready)) == ("by hand", 0, {0})
    assert step.exposed_ns > 0 and step.optimizer_ns > 0


@on_cpu
@on_ranks(2)
def test_a_forward_of_an_evaluation_belongs_to_no_step(comm):
    model, reducer, optimizer, timeline = _train(comm)
    with torch.no_grad():
        model(torch.zeros(1, 8))
    reducer.reduce()
    assert timeline.steps()[-1].forward_ns == 0


@on_cpu
@on_ranks(2)
def test_a_forward_that_raises_belongs_to_no_step(comm):
    model, reducer, optimizer, timeline = _train(comm)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(1, 9))
    after = time.monotonic_ns()
    _step(comm, model, optimizer)
    assert timeline.steps()[-1].forward_begin > after
    model(torch.zeros(1, 8))  # a step's first forward is its begin, though another one raises
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(1, 9))
    before = time.monotonic_ns()
    _step(comm, model, optimizer)
    assert after < timeline.steps()[-1].forward_begin < before


@on_cpu
@on_ranks(2)
def test_a_timeline_that_is_off_records_nothing(comm):
    model, reducer, optimizer, timeline = _train(comm)
    timeline.stop()
    _step(comm, model, optimizer)
    assert reducer.core.recorder is None and not model._forward_hooks
    assert len(timeline.steps()) == 1
    with timeline:
        _step(comm, model, optimizer)
    _step(comm, model, optimizer)
    assert [step.number for step in timeline.steps()] == [1, 3]
    assert reducer.timeline() is timeline and not timeline.is_on


@on_cpu
@on_ranks(2)
def test_a_timeline_begun_inside_a_backward_records_from_the_next_round_on(comm):
    model = mlp()
    reducer = fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)
    model[2].weight.register_hook(lambda _: reducer.timeline() and None)
    backward(model, comm.rank)
    assert not reducer.timeline().steps()
    backward(model, comm.rank)
    assert _kinds(reducer.timeline()) == ["reduced"]


@on_cpu
@on_ranks(2)
def test_refresh_begins_a_timeline_anew(comm):
    model, reducer, optimizer, timeline = _train(comm)
    model[4].bias.requires_grad_(False)
    reducer.refresh()
    assert not timeline.steps() and timeline.is_on
    _step(comm, model, optimizer)
    assert len(timeline.steps()[0].ready) == 5


@on_cpu
@on_ranks(2)
def test_a_model_that_is_detached_has_no_hook_of_the_timeline(comm):
    model, reducer, _, timeline = _train(comm)
    reducer.detach()
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert "rounds 1 to 1" in timeline.summary()
    timeline.stop()
    timeline.start()
    assert not model._forward_hooks


@on_cpu
@on_ranks(2)
def test_where_rank_0_cannot_write_all_ranks_learn_of_it(comm):
    _, _, _, timeline = _train(comm)
    error = FileNotFoundError if comm.rank == 0 else FastcommError
    for write in (timeline.save_trace, timeline.plot):
        with pytest.raises(error, match="/nowhere/x.png") as raised:
            write("/nowhere/x.png")
        if comm.rank == 1:
            told = "rank 0 could not write /nowhere/x.png: FileNotFoundError: "
            assert str(raised.value).startswith(told)


@on_cpu
@on_ranks(2)
def test_a_timeline_keeps_no_model_alive(comm):
    model, reducer, optimizer, timeline = _train(comm)
    gone = weakref.ref(model)
    del model, reducer, optimizer
    gc.collect()
    assert gone() is None and len(timeline.steps()) == 1


@on_cpu
@on_ranks(2)
def test_a_profiler_sees_launches_and_waits_by_name(comm):
    model = mlp()
    reducer = fastcomm.Reducer(comm).attach(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        backward(model, comm.rank)
    names = {event.key for event in profile.key_averages() if event.key.startswith("fastcomm::")}
    which = f"bucket 0 of reducer {reducer.core.number}, mean"
    assert names == {f"fastcomm::all_reduce {which}", f"fastcomm::wait for {which}"}


@on_cpu
@on_ranks(2)
def test_scalars_of_the_newest_step_go_to_a_writer(comm):
    class Writer:
        def __init__(self):
            self.scalars = {}

        def add_scalar(self, tag, value, step):
            self.scalars[tag, step] = value

    _, _, _, timeline = _train(comm)
    writer = Writer()
    timeline.write_scalars(writer, 7)
    names = ("forward", "backward", "communication", "exposed", "optimizer", "overlap")
    assert set(writer.scalars) == {(f"fastcomm/{name}", 7) for name in names}
    assert all(value > 0 for (tag, _), value in writer.scalars.items() if "overlap" not in tag)


@pytest.mark.transports("shm", "hierarchical")
@on_ranks(2)
def test_all_ranks_get_one_table_and_rank_0_writes_one_trace_and_one_picture(comm, tmp_path):
    _, _, _, timeline = _train(comm, steps=3)
    table = timeline.summary()
    assert "rounds 1 to 3" in table and "Slowest: rank" in table
    assert table.splitlines()[2].split()[1:-1:2][:2] == ["rank", "forward"]
    timeline.save_trace(tmp_path / f"of rank {comm.rank}.json")
    timeline.plot(tmp_path / f"of rank {comm.rank}.png")
    comm.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of rank 0.json", "of rank 0.png"]
    events = json.loads((tmp_path / "of rank 0.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert min(event["ts"] for event in events if "ts" in event) == 0


@on_cpu
@on_ranks(2)
def test_a_timeline_without_a_round_says_so(comm):
    timeline = fastcomm.Reducer(comm).attach(mlp()).timeline()
    assert "no step yet" in timeline.summary()
    with pytest.raises(ValueError, match="nothing to plot"):
        timeline.plot("nowhere.png")
