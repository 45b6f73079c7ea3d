"""fastcomm/group: the queue of works, how tensors are exchanged, and hosts."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

QUEUE = "fastcomm/group/work_queue.py"
WORK = "fastcomm/group/work.py"
HIERARCHICAL = "fastcomm/group/hierarchical.py"
EXCHANGE = "fastcomm/group/exchange.py"
CALL = "fastcomm/group/call.py"

ENDING_TESTS = "tests/group/test_ending.py"

MUTATIONS = (
    Mutation(
        name="group: abandon() posts another one though it joins the others",
        file=QUEUE,
        old="            if theirs is None:\n                self._append(own)\n",
        new="            self._append(own)\n",
        tests=(
            "tests/reducer/test_defects.py::"
            "test_a_rank_that_abandons_what_it_has_seen_abandoned_joins_the_others",
        ),
    ),
    Mutation(
        name="group: a work under way counts as carried out at close()",
        file=QUEUE,
        old="number = self.number - bool(self._works)",
        new="number = self.number",
        tests=(ENDING_TESTS,),
    ),
    Mutation(
        name="group: a thread stays in its host's shared memory after a failure",
        file=HIERARCHICAL,
        old="        self._shm.abort()\n        super().interrupt()\n",
        new="        super().interrupt()\n",
        tests=(ENDING_TESTS,),
    ),
    Mutation(
        name="group: what was called before abandon() is begun all the same",
        file=QUEUE,
        old="work = self._own_abandonment() or self._works[0]",
        new="work = self._works[0]",
        tests=(
            "tests/group/test_group.py::"
            "test_what_was_called_before_abandon_and_has_not_begun_is_not_begun",
        ),
    ),
    Mutation(
        name="group: what was called before an abandonment is known joins the next round",
        file=QUEUE,
        old="            if interruption is None:\n                self._append(work)",
        new="            if True:\n                self._append(work)",
        tests=("tests/group/test_group.py",),
    ),
    Mutation(
        name="group: ranks that call different collectives go on",
        file=QUEUE,
        old="elif any(call != calls[0] for call in calls):",
        new="elif any(call.kind != calls[0].kind for call in calls):",
        tests=(
            "tests/contract/test_mismatches.py::"
            "test_ranks_that_disagree_all_hear_of_it_and_of_both_sides[group-3-op]",
        ),
    ),
    Mutation(
        name="group: an abandonment ends when one rank has joined it",
        file=QUEUE,
        old="while any(call != ABANDON for call in calls):",
        new="while all(call != ABANDON for call in calls):",
        equivalent="All ranks see the same calls, so they stop together, one exchange earlier.",
    ),
    Mutation(
        name="group: a shard is padded where it need not be, and not where it need",
        file=EXCHANGE,
        old="        if padding:\n            flat.copy_(whole[: flat.numel()])\n",
        new="",
        tests=("tests/group/test_sizes.py",),
    ),
    Mutation(
        name="group: 16-bit floats are rounded at every rank",
        file=CALL,
        old="total = rows[0].to(torch.float32 if dtype in HALVES else dtype, copy=True)",
        new="total = rows[0].clone()",
        tests=("tests/group/test_over_torch.py::test_16_bit_floats_are_rounded_once",),
    ),
    Mutation(
        name="group: a mean is scaled in the wire's dtype",
        file=HIERARCHICAL,
        old="            part.mul_(1 / self._world_size)\n        outgoing = part.to(wire)\n",
        new="            pass\n        outgoing = part.to(wire) / self._world_size\n",
        tests=("tests/reducer/test_wires.py",),
    ),
    Mutation(
        name="group: chunks do not move the deadline",
        file=EXCHANGE,
        old="        work.wait()\n        self.moved_at = time.monotonic()\n",
        new="        work.wait()\n",
        tests=(
            "tests/group/test_over_torch.py::test_what_is_large_may_take_longer_than_the_deadline",
        ),
    ),
)
