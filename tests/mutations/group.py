"""fastcomm/group: the queue of works, how tensors are exchanged, and hosts."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

QUEUE = "fastcomm/group/work_queue.py"
WORK = "fastcomm/group/work.py"
HIERARCHICAL = "fastcomm/group/hierarchical.py"
EXCHANGE = "fastcomm/group/exchange.py"
CALL = "fastcomm/group/call.py"
WIRE = "fastcomm/group/wire.py"

ENDING_TESTS = "tests/group/test_ending.py"
WIRE_TESTS = "tests/group/test_wires.py::test_"

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
        old="        outgoing = part.to(wire)\n",
        new="        outgoing = (part * self._world_size).to(wire) / self._world_size\n",
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
    Mutation(
        name="wire: what was dropped is not added to the next round",
        file=WIRE,
        old="        values.add_(residual)\n",
        new="",
        tests=(f"{WIRE_TESTS}fed_back_rounds_add_up_to_what_was_given_within_one_rounding",),
    ),
    Mutation(
        name="wire: one residual for all places",
        file=WIRE,
        old="self._residuals.get(place)",
        new="next(iter(self._residuals.values()), None)",
        tests=(f"{WIRE_TESTS}places_have_residuals_of_their_own",),
    ),
    Mutation(
        name="wire: an infinity is fed back",
        file=WIRE,
        old="        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)\n",
        new="",
        tests=(
            f"{WIRE_TESTS}what_is_not_finite_is_not_finite_on_the_other_side_and_is_not_fed_back",
        ),
    ),
    Mutation(
        name="wire: an infinity leaves its block finite",
        file=WIRE,
        old='        scales.masked_fill_(~scales.isfinite(), float("nan"))\n',
        new="        scales.nan_to_num_()\n",
        tests=(
            f"{WIRE_TESTS}what_is_not_finite_is_not_finite_on_the_other_side_and_is_not_fed_back",
        ),
    ),
    Mutation(
        name="wire: int8 cuts off in place of rounding",
        file=WIRE,
        old="else scaled.round_())",
        new="else scaled)",
        tests=(f"{WIRE_TESTS}int8_is_off_by_half_a_step_of_its_block_at_most",),
    ),
    Mutation(
        name="wire: a scale has fewer bits than it needs",
        file=WIRE,
        old=".clamp_(min=_TINY)",
        new="",
        tests=(f"{WIRE_TESTS}the_smallest_numbers_become_zeros_and_not_others",),
    ),
    Mutation(
        name="wire: presence is rounded beside the gradients",
        file=EXCHANGE,
        old="gradients, presence = flat[:end], flat[end:]\n",
        new="gradients, presence = flat, flat[end:].clone()\n",
        tests=(f"{WIRE_TESTS}presence_is_exact_beside_great_gradients",),
    ),
    Mutation(
        name="hierarchical: a rank keeps a sum that it has rounded for the others",
        file=HIERARCHICAL,
        old="            for host in range(self._n_hosts):  # this one's, too",
        new="            rows[self._host] = rows.sum(0)\n            for host in others:  #",
        tests=(f"{WIRE_TESTS}a_sum_is_rounded_once_before_and_once_after",),
    ),
    Mutation(
        name="group: a rank adds what others have sent to shards that are not its own",
        file=EXCHANGE,
        old="            wire.decode(incoming[rank], rows[rank])\n        result",
        new="            pass\n        result",
        tests=(f"{WIRE_TESTS}a_sum_is_rounded_once_before_and_once_after",),
    ),
)
