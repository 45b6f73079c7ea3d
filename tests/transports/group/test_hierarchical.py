"""backend="hierarchical" on hosts that are network namespaces: results, what crosses a link, and
what the others hear when a host goes. What a reducer needs of it is in tests/reducer.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import fastcomm
from fastcomm import FastcommError, PeerLostError, TimeoutError
from fastcomm.transports.group.layout import Layout
from fastcomm.transports.group.shards import AHEAD, CHUNK_NBYTES
from tests.support.bodies import gloo, my_place
from tests.support.collective_checks import with_ops_in_turn
from tests.support.namespaces import INTERFACE, Hosts, enter, why_not
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks
from tests.support.reference import DTYPES, assert_rounded, shards_of

LAYOUTS = {"2+2": [2, 2], "1+1": [1, 1], "2+1+3": [2, 1, 3]}
# Of float32: nothing, a few elements for each shard, one chunk, more chunks than are ever under
# way.
SIZES = (0, 37, 5000)
LARGE = (2 * AHEAD + 2) * CHUNK_NBYTES // 4 + 5
PORT = 29500  # in namespaces of our own every port is free


@pytest.fixture(scope="module")
def may_make_hosts() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(params=LAYOUTS)
def hosts(request: pytest.FixtureRequest, may_make_hosts: None) -> Iterator[Hosts]:
    with Hosts(LAYOUTS[request.param]) as hosts:
        yield hosts


@pytest.fixture
def two_hosts(may_make_hosts: None) -> Iterator[Hosts]:
    with Hosts([2, 2]) as hosts:
        yield hosts


def outcomes_on(hosts, body, *args, **options):
    """How `body(comm, *args)` ended, by rank, on ranks that fastcomm.init(**options) has brought
    together.
    """
    namespaces = [hosts.namespace(host) for host in hosts.host_of]
    environments = [hosts.environment(rank) for rank in range(hosts.world_size)]
    return fresh_ranks(
        hosts.world_size,
        _run_on_its_host,
        namespaces,
        hosts.address(0),
        options,
        body,
        args,
        env=environments,
    )


def run_on(hosts, body, *args, **options):
    return values_of(outcomes_on(hosts, body, *args, **options))


def _run_on_its_host(place, namespaces, address, options, body, args):
    enter(namespaces[place.rank])
    options = {
        "init_method": f"tcp://{address}:{PORT}",
        "rank": place.rank,
        "world_size": place.world_size,
    } | options
    with fastcomm.init(**options) as comm:
        value = body(comm, *args)
        comm.barrier()
        return value


# Who owns what

ALL_LAYOUTS = [[1], [4], [1, 1], [2, 2], [3, 1], [2, 3], [2, 1, 3], [4, 6], [1, 2, 3, 5], [8] * 4]


def _hosts_of(layout):
    ranks = iter(range(sum(layout)))
    return [[next(ranks) for _ in range(n)] for n in layout]


@pytest.mark.parametrize("layout", ALL_LAYOUTS, ids=str)
def test_every_unit_has_one_owner_on_each_host_and_all_owners_agree(layout):
    owners = {}  # by unit, as each of them says
    for rank in range(sum(layout)):
        mine = Layout(_hosts_of(layout), rank)
        n = mine.n_units // len(mine.neighbours)
        first = mine.neighbours.index(rank) * n
        for i, units in enumerate(mine.cut(torch.arange(first, first + n))):
            others = [(host, owner) for segment, host, owner in mine.peers if segment == i]
            for unit in units.tolist():
                owners.setdefault(unit, []).append(sorted([*others, (mine.place, rank)]))
    assert sorted(owners) == list(range(mine.n_units))
    for said in owners.values():
        assert [host for host, _ in said[0]] == list(range(len(layout)))
        assert said == [said[0]] * len(layout)


# Results


def _describe(comm):
    return comm.backend, comm.local_rank


def test_init_chooses_it_where_ranks_have_several_hosts(two_hosts):
    assert run_on(two_hosts, _describe) == [("hierarchical", 0), ("hierarchical", 1)] * 2


def _init_from_a_group(place, backend):
    with fastcomm.init(backend, group=gloo()) as comm:
        _check_sum(comm)
        return comm.backend


@pytest.mark.parametrize("backend", ["auto", "hierarchical"])
def test_ranks_of_several_hosts_may_meet_in_a_group(backend):
    outcomes = fresh_ranks(3, _init_from_a_group, backend, transport="hierarchical")
    assert [outcome.value for outcome in outcomes] == ["hierarchical"] * 3, "\n".join(
        map(str, outcomes)
    )


def _check_every_size(comm):
    """And every operation; contract/test_results.py has all of them with every dtype. Returns the
    bits of the results.
    """
    results = []
    for i, dtype in enumerate(DTYPES):
        for numel, op in with_ops_in_turn(*SIZES, *([LARGE] if i == 0 else []), first=i):
            shards = shards_of(dtype, comm.world_size, numel, seed=numel)
            tensor = comm.empty(numel, dtype=dtype).copy_(shards[comm.rank])
            comm.all_reduce(tensor, op)
            assert_rounded(tensor, shards, op, roundings=4)
            results.append(zlib.crc32(tensor.view(torch.uint8).numpy()))
    return results


def test_results_are_right_in_every_layout_and_have_the_same_bits_on_all_ranks(hosts):
    first, *others = run_on(hosts, _check_every_size)
    assert all(other == first for other in others)


def _bytes_sent(comm, wire_dtype, numel):
    flat = comm.empty(numel, dtype=torch.float32).fill_(1)
    bucket = comm.bind_bucket(flat, [flat[:1]], [0], wire_dtype=wire_dtype, label=1)
    comm.barrier()
    before = _transmitted()
    bucket.launch("sum", []).wait()
    comm.barrier()
    return _transmitted() - before


def _transmitted():
    """By this rank's host. From /proc: /sys shows the interfaces of the namespace it was mounted
    in.
    """
    line = next(
        line
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines()
        if line.strip().startswith(f"{INTERFACE}:")
    )
    return int(line.partition(":")[2].split()[8])


@pytest.mark.parametrize("wire_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_host_sends_every_element_once(two_hosts, wire_dtype):
    numel = 4 * 2**20
    for sent in run_on(two_hosts, _bytes_sent, wire_dtype, numel):
        assert 1 <= sent / (numel * wire_dtype.itemsize) < 1.1


def _launch_while_the_others_are_late(comm):
    flat = comm.empty(3_000_000, dtype=torch.float32).fill_(1)
    bucket = comm.bind_bucket(flat, [flat[:1]], [0], wire_dtype=None, label=1)
    launched = [
        Path(my_place().directory, f"launched by {rank}") for rank in range(comm.world_size)
    ]
    if comm.rank == 3:
        while not all(path.exists() for path in launched[:3]):
            time.sleep(0.01)
    work = bucket.launch("sum", [])
    other = comm.empty(1000, dtype=torch.float32)  # memory is to be had meanwhile
    launched[comm.rank].touch()
    work.wait()
    assert other.numel() == 1000 and (flat[:-1] == 4).all()


def test_a_launch_does_not_wait_for_anybody(two_hosts):
    run_on(two_hosts, _launch_while_the_others_are_late)


# When it goes wrong


def _check_sum(comm):
    tensor = torch.ones(10_000)
    comm.all_reduce(tensor)
    assert (tensor == comm.world_size).all()


def _lose_a_peer(comm):
    """The last rank dies in the midst of a collective."""
    large = comm.empty(8_000_000, dtype=torch.float32).zero_()
    comm.barrier()
    if comm.rank == comm.world_size - 1:
        for _ in range(2):
            comm.all_reduce(large, async_op=True)
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    before = time.monotonic()
    try:
        while True:
            comm.all_reduce(large)
    except PeerLostError as error:
        raise PeerLostError(f"{error} after {time.monotonic() - before:.1f} s") from error


def test_a_rank_that_is_killed_in_a_collective_is_named_on_every_host_within_seconds(two_hosts):
    *others, last = outcomes_on(two_hosts, _lose_a_peer)
    assert last.exitcode == -signal.SIGKILL
    for outcome in others:
        assert outcome.is_a(PeerLostError), str(outcome)
        assert re.search(rf"rank {last.rank} \(pid \d+\) died", outcome.failure.message), (
            outcome.failure.message
        )
        assert float(outcome.failure.message.split()[-2]) < 6


def _lose_the_network(comm, directory):
    """Until somebody outside has cut a host off."""
    _check_sum(comm)
    Path(directory, f"ready-{comm.rank}").touch()
    while not Path(directory, "cut").exists():
        time.sleep(0.01)
    before = time.monotonic()
    try:
        comm.all_reduce(torch.ones(10_000_000))
    except FastcommError as error:
        raise type(error)(f"{error} after {time.monotonic() - before:.1f} s") from error


def test_ranks_whose_hosts_cannot_reach_each_other_all_time_out(two_hosts, tmp_path):
    def cut_off_when_all_are_ready():
        while len(list(tmp_path.glob("ready-*"))) < two_hosts.world_size:
            time.sleep(0.01)
        two_hosts.cut(1)
        (tmp_path / "cut").touch()

    threading.Thread(target=cut_off_when_all_are_ready, daemon=True).start()
    for outcome in outcomes_on(
        two_hosts, _lose_the_network, str(tmp_path), timeout=timedelta(seconds=2)
    ):
        assert outcome.is_a((TimeoutError, PeerLostError)), str(outcome)
        assert float(outcome.failure.message.split()[-2]) < 15
