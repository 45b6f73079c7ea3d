"""How many cores count, on machines that are made up."""

from __future__ import annotations

import pytest

from fastcomm.launching.cores import count


class Machine:
    def __init__(self, root):
        self.sys, self.cgroup = root / "sys", root / "cgroup"

    def put(self, path, text):
        file = self.sys / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def put_cores(self, *siblings):
        for of_one in siblings:
            for cpu in of_one:
                path = f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
                self.put(path, ",".join(map(str, of_one)))

    def count(self, *usable):
        return count(usable, self.sys, self.cgroup)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_the_threads_of_a_core_count_once(machine):
    machine.put_cores((0, 4), (1, 5), (2, 6), (3, 7))
    assert machine.count(*range(8)) == 4
    assert machine.count(0, 4) == 1
    assert machine.count(0, 1, 5, 7) == 3


def test_each_cpu_is_a_core_where_the_kernel_does_not_say(machine):
    assert machine.count(0, 1, 2) == 3


@pytest.mark.parametrize(
    "limit, expected",
    [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("800000 100000", 4)],
)
def test_a_quota_of_cpu_time_counts(machine, limit, expected):
    machine.cgroup.write_text("0::/slice/job\n")
    machine.put("fs/cgroup/slice/job/cpu.max", limit)
    assert machine.count(*range(4)) == expected


@pytest.mark.parametrize("group", ["", "slice/", "slice/job/"])
def test_the_quota_of_any_group_above_counts(machine, group):
    machine.cgroup.write_text("0::/slice/job\n")
    machine.put("fs/cgroup/slice/job/cpu.max", "max 100000")
    machine.put(f"fs/cgroup/{group}cpu.max", "200000 100000")
    assert machine.count(*range(4)) == 2
