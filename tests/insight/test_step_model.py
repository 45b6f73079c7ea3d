"""The model of a step: its limits, and what must never get cheaper. No ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.insight import machine as machines
from fastcomm.insight.advice import (
    DEFAULT_CAP_MB,
    choose_cap,
    distinct_caps,
    sync_every,
    wire_gain,
)
from fastcomm.insight.collectives import (
    ALGORITHMS,
    Cost,
    Link,
    MeasuredCosts,
)
from fastcomm.insight.machine import Machine
from fastcomm.insight.step_model import (
    Gradient,
    LocalStep,
    predict,
    predict_on,
    predict_sharded,
    seconds_every,
)

ROOT = Path(__file__).resolve().parent.parent.parent
NETWORK = Link(10e-6, 1e9, 10e9)
MEMORY = Link(1e-6, 10e9, core_share=1.0)
GPUS = Machine(Link(5e-6, 100e9), NETWORK, ranks_per_host=8)
CPUS = Machine(MEMORY, algorithm="direct", cores=2)

sizes = st.integers(1, 1 << 32)
ranks = st.integers(1, 1024)
algorithms = st.sampled_from(ALGORITHMS)


def step_of(*gradients: tuple[float, float], backward_s: float = 1.0) -> LocalStep:
    return LocalStep(tuple(Gradient(*g) for g in gradients), backward_s, 0.5, 0.25)


@st.composite
def steps(draw):
    ready = sorted(draw(st.lists(st.floats(0, 1), min_size=1, max_size=8)))
    return step_of(*((draw(st.floats(0, 1e9)), at) for at in ready))


def each_alone(step):
    return [[i] for i in range(len(step.gradients))]


# What a collective takes


def test_a_ring_moves_the_buffer_nearly_twice():
    p, nbytes, link = 4, 1e9, Link(1e-3, 1e9, 2e9)
    seconds = Machine(link, algorithm="ring").all_reduce(nbytes, p).seconds
    moved, added = 2 * (p - 1) / p * nbytes, (p - 1) / p * nbytes
    assert seconds == pytest.approx(2 * (p - 1) * 1e-3 + moved / 1e9 + added / 2e9)


def test_a_tree_takes_as_many_steps_as_it_is_deep():
    link = Link(1.0, math.inf)
    seconds = [Machine(link, algorithm="tree").all_reduce(1, p).seconds for p in (2, 8, 9, 1024)]
    assert seconds == [2, 6, 8, 20]


def test_shared_memory_takes_two_rounds_of_flags_whatever_the_ranks():
    link = Link(1.0, math.inf)
    seconds = [Machine(link, algorithm="direct").all_reduce(1, p).seconds for p in (2, 6)]
    assert seconds == [2, 2]


def test_between_hosts_a_byte_crosses_a_hosts_link_once_each_way():
    free = Link(0.0, math.inf)
    on = Machine(free, Link(0.0, 1.0), "hierarchical", ranks_per_host=4)
    assert on.all_reduce(100, 8).seconds == pytest.approx(2 * (1 / 2) * 100)


@given(algorithms, sizes)
def test_one_rank_does_not_communicate(algorithm, nbytes):
    network = None if algorithm == "direct" else NETWORK
    assert Machine(MEMORY, network, algorithm).all_reduce(nbytes, 1) == (0, 0)


@given(algorithms, sizes, sizes, ranks)
def test_more_bytes_never_cost_less(algorithm, one, other, n):
    network = None if algorithm == "direct" else NETWORK
    on = Machine(MEMORY, network, algorithm)
    less, more = sorted((one, other))
    assert on.all_reduce(less, n).seconds <= on.all_reduce(more, n).seconds


@given(st.lists(st.tuples(sizes, st.floats(0, 10)), min_size=2, max_size=6), sizes)
def test_measured_costs_are_met_and_nothing_costs_less_than_the_smallest(points, nbytes):
    by_size = {size: Cost(seconds, seconds / 2) for size, seconds in sorted(points)}
    if len(by_size) < 2:
        return
    costs = MeasuredCosts(list(by_size.items()))
    least = costs.points[0][1]
    assert costs(nbytes).seconds >= least.seconds
    for size, cost in by_size.items():
        assert costs(size).seconds == pytest.approx(max(cost.seconds, least.seconds))


# A step


@given(steps(), ranks, st.booleans())
def test_a_step_is_never_shorter_than_its_parts(step, n, is_crowded):
    on = CPUS if is_crowded else GPUS
    one = predict_on(on, n, step, each_alone(step))
    assert one.seconds >= one.local_s * (1 - 1e-12)
    total = sum(on.all_reduce(g.nbytes, n).seconds for g in step.gradients)
    assert one.seconds <= one.local_s + max(1, on.crowding(n)) * total + 1e-9


@given(steps())
def test_one_rank_makes_its_own_step(step):
    for one in (predict_on(GPUS, 1, step, each_alone(step)), predict_sharded(GPUS, 1, step, [])):
        assert one.seconds == pytest.approx(step.seconds)


def test_what_is_ready_early_is_hidden_behind_the_backward():
    step = step_of((1, 0.1), (1, 1.0))
    one = predict(step, [[0], [1]], lambda nbytes: Cost(0.3))
    assert one.exposed_s == pytest.approx(0.3) and one.communication_s == pytest.approx(0.3)
    assert one.buckets[0][1:] == pytest.approx((0.6, 0.6, 0.9))


def test_a_bucket_waits_for_the_one_before_it():
    step = step_of((1, 0.9), (1, 1.0))
    one = predict(step, [[0], [1]], lambda nbytes: Cost(0.3))
    assert one.buckets[1].start_s == pytest.approx(one.buckets[0].end_s)
    assert one.exposed_s == pytest.approx(0.5)


def test_what_takes_the_core_hides_nothing():
    step = step_of((1, 0.1), (1, 1.0))
    cost = Cost(0.3, 0.3)
    one = predict(step, [[0], [1]], lambda nbytes: cost, delays_compute=True)
    assert one.communication_s == pytest.approx(0.6)


def test_ranks_that_share_cores_take_turns():
    step = step_of((0, 1.0))
    assert predict_on(CPUS, 6, step, [[0]]).local_s == pytest.approx(3 * step.seconds)


def test_a_sharded_optimizer_makes_its_part_of_the_step():
    step = step_of((0, 1.0))
    free = Machine(Link(0.0, math.inf), algorithm="ring")
    assert predict_sharded(free, 4, step, [[0]]).seconds == pytest.approx(1.5 + 0.25 / 4)


# Advice


def test_a_small_gain_keeps_the_default():
    assert choose_cap({DEFAULT_CAP_MB: 1.0, 5.0: 0.985}).cap_mb == DEFAULT_CAP_MB
    assert choose_cap({DEFAULT_CAP_MB: 1.0, 5.0: 0.95, 1.0: 0.97}).cap_mb == 5.0


def test_sizes_that_make_the_same_buckets_are_one():
    assert distinct_caps(lambda cap: [[0], [1]] if cap < 5 else [[0, 1]]) == [1.0, DEFAULT_CAP_MB]


def test_rare_synchronisation_makes_communication_cheap():
    step = step_of((1, 1.0))
    dear = predict(step, [[0]], lambda nbytes: Cost(0.5))
    assert sync_every(predict(step, [[0]], lambda nbytes: Cost(0.01)), step) == 1
    assert sync_every(dear, step) == 8
    assert seconds_every(dear, step, 1) == dear.seconds


def test_a_short_wire_pays_where_bytes_are_what_takes_time():
    step = step_of((1e9, 1.0))
    assert wire_gain(GPUS, 16, step, [[0]]) > 0.2
    assert wire_gain(GPUS, 1, step, [[0]]) == 0
    assert wire_gain(CPUS, 2, step, [[0]]) == 0


# Machines


def test_the_machine_of_a_toml_file():
    on = machines.read(ROOT / "bench" / "machines" / "v100.toml")
    assert on.hosts(256) == 32 and on.step["backward"] == pytest.approx(0.064)


HOST = {"latency_us": 1, "gbytes_per_s": 10}


@pytest.mark.parametrize(
    "table, words",
    [
        ({}, "[host] is missing"),
        ({"host": {"latency_us": 1}}, "[host] lacks gbytes_per_s"),
        ({"host": HOST, "hosts": 3}, "hosts is unknown"),
        ({"host": HOST | {"speed": 1}}, "host.speed is unknown"),
        ({"host": HOST | {"latency_us": "1"}}, "host.latency_us must be a number"),
        ({"host": HOST | {"gbytes_per_s": 0}}, "host.gbytes_per_s must be more than 0"),
        ({"host": HOST, "algorithm": "star"}, "algorithm must be one of direct, ring"),
        ({"host": HOST, "cores": 0}, "cores must be a whole number"),
        ({"host": HOST, "links": True}, "links must be a whole number"),
        ({"host": HOST | {"gbytes_per_s": math.nan}}, "host.gbytes_per_s must be a number"),
        ({"host": HOST, "step": {"forward_ms": math.inf}}, "step.forward_ms must be a number"),
        ({"host": 3}, "host must be a table, [host]; got 3"),
        ({"host": HOST, "step": [1]}, "step must be a table, [step]; got [1]"),
        ({"host": HOST, "network": HOST, "algorithm": "direct"}, "leave the network out"),
    ],
)
def test_a_machine_that_makes_no_sense_is_refused(table, words):
    with pytest.raises(ValueError) as error:
        machines.of_table(table)
    assert words in str(error.value)


def test_a_machines_file_is_named_where_it_is_wrong(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("host = 3")
    with pytest.raises(ValueError, match=r"mine\.toml: "):
        machines.read(path)
