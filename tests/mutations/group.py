"""fastcomm/group: the queue of works, how tensors are exchanged, and hosts."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

QUEUE = "fastcomm/transports/group/work_queue.py"
WORK = "fastcomm/transports/group/work.py"
HIERARCHICAL = "fastcomm/transports/group/hierarchical.py"
SHARDS = "fastcomm/transports/group/shards.pyx"
EXCHANGE = "fastcomm/transports/group/exchange.py"
CALL = "fastcomm/transports/group/call.py"
WIRE = "fastcomm/transports/group/wire.pyx"
BLOCKS = "kernels/wire/blocks.c"

ENDING_TESTS = "tests/transports/group/test_ending.py"
AHEAD_TESTS = "tests/transports/group/test_ahead.py"
FUSION_TESTS = "tests/transports/group/test_group.py"
WIRE_TESTS = "tests/transports/group/test_wires.py::test_"
BLOCK_TESTS = "tests/transports/group/test_blocks.py::test_"
KEPT = (
    "tests/contract/test_abandon.py::"
    "test_an_abandonment_does_not_keep_what_the_frames_held_that_asked_for_it"
)

MUTATIONS = (
    Mutation(
        name="group: autograd does not know what a collective writes to",
        file="fastcomm/transports/group/communicator.py",
        within="GroupCommunicator._begin",
        old="increment_version(written)",
        new="pass",
        tests=("tests/contract/test_autograd.py",),
    ),
    Mutation(
        name="group: the ranks do not compare the sizes of tensors that are reduced as one",
        file="fastcomm/transports/group/communicator.py",
        within="GroupCommunicator.all_reduce_coalesced",
        old="op, step=sizes(numels))",
        new="op)",
        tests=("tests/contract/test_mismatches.py",),
    ),
    Mutation(
        name="group: a forked child frees the group of its parent",
        file=EXCHANGE,
        within="",
        old="os.register_at_fork(after_in_child=_keep_groups)",
        new="",
        tests=(
            "tests/contract/test_forks.py::"
            "test_a_forked_child_may_drop_the_communicator_of_its_idle_parent[group-2]",
        ),
    ),
    Mutation(
        name="group: nobody looks at the connections while data is on its way",
        file=QUEUE,
        within="WorkQueue._look_at_connections",
        old="self._exchange.look_at_connections()",
        new="pass",
        tests=(
            "tests/transports/group/test_ending.py::"
            "test_a_rank_that_dies_while_its_data_is_on_its_way_is_missed_soon",
        ),
    ),
    Mutation(
        name="group: a rank's own part stays where it was",
        file=EXCHANGE,
        within="Exchange.swap_parts",
        old="received[self._rank].copy_(sent[self._rank])",
        new="",
        tests=("tests/contract/test_results.py",),
    ),
    Mutation(
        name="parts: what the root passes may be of any size",
        file="fastcomm/comm/parts.py",
        within="check_rooted",
        old="whole.numel() != numel",
        new="False",
        tests=(
            "tests/contract/test_arguments.py::"
            "test_what_only_one_rank_passes_is_refused_from_others_and_asked_of_it",
        ),
    ),
    Mutation(
        name="parts: however long, they move the deadline once",
        file=EXCHANGE,
        within="_chunks_of",
        old="as_bytes(row).split(CHUNK_NBYTES)",
        new="as_bytes(row).split(1 << 40)",
        tests=(
            "tests/transports/group/test_over_torch.py::"
            "test_what_is_large_may_take_longer_than_the_deadline[group-gather]",
        ),
    ),
    Mutation(
        name="parts: nobody compares what ranks send and expect",
        file="fastcomm/comm/parts.py",
        within="_agreed",
        old="sent_by[src, dst] != expected_by[dst, src]",
        new="False",
        tests=(
            "tests/contract/test_mismatches.py::"
            "test_parts_that_others_do_not_expect_are_named_on_every_rank",
        ),
    ),
    Mutation(
        name="group: abandon() posts another one though it joins the others",
        file=QUEUE,
        within="WorkQueue._post_abandonment",
        old=("if theirs is None:\n    self._append(own)"),
        new="self._append(own)",
        tests=(
            "tests/reducer/test_defects.py::"
            "test_a_rank_that_abandons_what_it_has_seen_abandoned_joins_the_others",
        ),
    ),
    Mutation(
        name="group: an unfinished work counts as finished at close()",
        file=QUEUE,
        within="WorkQueue._n_finished",
        old="bool(self._works) or self._is_meeting",
        new="self._is_meeting",
        tests=(ENDING_TESTS,),
    ),
    Mutation(
        name="group: after a broken connection a rank that answers is lost",
        file=QUEUE,
        within="WorkQueue._is_silent",
        old="is None",
        new="is not None",
        tests=(ENDING_TESTS,),
    ),
    Mutation(
        name="group: a thread stays in its host's shared memory after a failure",
        file=HIERARCHICAL,
        within="HierarchicalExchange.interrupt",
        old="self._shm.abort()",
        new="",
        tests=(ENDING_TESTS,),
    ),
    Mutation(
        name="group: what was called before abandon() is begun all the same",
        file=QUEUE,
        within="WorkQueue._next",
        old="not waiting[0].is_announced",
        new="False",
        tests=(
            "tests/transports/group/test_group.py::"
            "test_what_was_called_before_abandon_and_has_not_begun_is_not_begun",
        ),
    ),
    Mutation(
        name="group: what this rank has abandoned is abandoned once more",
        file=QUEUE,
        within="WorkQueue._resolve_before",
        old="AbandonedError(own_abandonment(self.rank))",
        new="FastcommError(own_abandonment(self.rank))",
        tests=("tests/contract/test_abandon.py",),
    ),
    Mutation(
        name="group: what was called before an abandonment is known joins the next round",
        file=QUEUE,
        within="WorkQueue.post",
        old="theirs is None",
        new="True",
        tests=("tests/transports/group/test_group.py",),
    ),
    Mutation(
        name="group: ranks that call different collectives go on",
        file=QUEUE,
        within="WorkQueue._wanted",
        old="call == wanted[0]",
        new="call.kind == wanted[0].kind",
        tests=(
            "tests/contract/test_mismatches.py::"
            "test_ranks_that_disagree_all_hear_of_it_and_of_both_sides[group-3-op]",
        ),
    ),
    Mutation(
        name="group: an abandonment ends when one rank has joined it",
        file=QUEUE,
        within="WorkQueue._meet_anew",
        old="all(call == ABANDON for call in gathered.calls)",
        new="any(call == ABANDON for call in gathered.calls)",
        equivalent="All ranks see the same calls, so they stop together, one exchange earlier.",
    ),
    Mutation(
        name="group: a shard is padded where it need not be, and not where it need",
        file=EXCHANGE,
        within="Exchange._all_reduce_chunk",
        old=("if padding:\n    flat.copy_(whole[: flat.numel()])"),
        new="",
        tests=("tests/transports/group/test_sizes.py",),
    ),
    Mutation(
        name="group: 16-bit floats are rounded at every rank",
        file=CALL,
        within="reduce_rows",
        old="rows[0].to(torch.float32 if dtype in HALVES else dtype, copy=True)",
        new="rows[0].clone()",
        tests=("tests/transports/group/test_over_torch.py::test_16_bit_floats_are_rounded_once",),
    ),
    Mutation(
        name="group: a mean is scaled in the wire's dtype",
        file=HIERARCHICAL,
        within="HierarchicalExchange._steps_of_chunk",
        old="part.to(sent_dtype)",
        new="(part * self._world_size).to(sent_dtype) / self._world_size",
        tests=("tests/reducer/test_wires.py",),
    ),
    Mutation(
        name="group: chunks do not move the deadline",
        file=EXCHANGE,
        within="Exchange._wait",
        old="self.moved_at = running_s()",
        new="",
        tests=(
            "tests/transports/group/test_over_torch.py::"
            "test_what_is_large_may_take_longer_than_the_deadline",
        ),
    ),
    Mutation(
        name="wire: what was dropped is not added to the next round",
        file=WIRE,
        within="Halves.encode",
        old=("residual.add_(values)\nhalves.copy_(residual)"),
        new=("halves.copy_(values)\nresidual.copy_(values)"),
        tests=(f"{WIRE_TESTS}fed_back_rounds_add_up_to_what_was_given_within_one_rounding",),
    ),
    Mutation(
        name="wire: a block leaves out what was dropped before",
        file=BLOCKS,
        within="",
        old="wide[i] = block[i] + dropped[i];",
        new="wide[i] = block[i] + 0 * dropped[i];",
        tests=(f"{BLOCK_TESTS}what_is_coded_decoded_and_kept_has_the_bits_of_torchs_operations",),
    ),
    Mutation(
        name="wire: one residual for all keys",
        file=WIRE,
        within="Wire.encode",
        old="self._residuals.get(key)",
        new="next(iter(self._residuals.values()), None)",
        tests=(f"{WIRE_TESTS}keys_have_residuals_of_their_own",),
    ),
    Mutation(
        name="wire: an infinity is fed back",
        file=WIRE,
        within="Halves.encode",
        old="residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)",
        new="",
        tests=(
            f"{WIRE_TESTS}what_is_not_finite_is_not_finite_on_the_other_side_and_is_not_fed_back",
        ),
    ),
    Mutation(
        name="wire: an infinity of a block is fed back",
        file=BLOCKS,
        within="",
        old="dropped[i] = without_nonfinite(wide[i] - rounded.value * scale);",
        new="dropped[i] = wide[i] - rounded.value * scale;",
        tests=(f"{BLOCK_TESTS}what_is_coded_decoded_and_kept_has_the_bits_of_torchs_operations",),
    ),
    Mutation(
        name="wire: an infinity leaves its block finite",
        file=BLOCKS,
        within="scale_of",
        old="return largest >= INFINITE ? float_of_bits(QUIET_NAN) :",
        new="return largest >= INFINITE ? 1 :",
        tests=(
            f"{WIRE_TESTS}what_is_not_finite_is_not_finite_on_the_other_side_and_is_not_fed_back",
        ),
    ),
    Mutation(
        name="wire: a block of NaNs has elements that the compiler chose",
        file=BLOCKS,
        within="",
        old="narrow[i] = rounded.element & is_number;",
        new="narrow[i] = rounded.element;",
        tests=(f"{BLOCK_TESTS}what_is_coded_decoded_and_kept_has_the_bits_of_torchs_operations",),
    ),
    Mutation(
        name="wire: int8 cuts off in place of rounding",
        file=BLOCKS,
        within="narrow_int8",
        old="const float sum = value + 0x1.8p23f;",
        new="const float sum = (float)(int)(value == value ? value : 0) + 0x1.8p23f;",
        tests=(f"{WIRE_TESTS}int8_is_off_by_half_a_step_of_its_block_at_most",),
    ),
    Mutation(
        name="wire: a scale has fewer bits than it needs",
        file=BLOCKS,
        within="scale_of",
        old="scale < FLT_MIN ? FLT_MIN : scale",
        new="scale",
        tests=(f"{WIRE_TESTS}the_smallest_numbers_become_zeros_and_not_others",),
    ),
    Mutation(
        name="wire: a block is multiplied by the reciprocal of its scale",
        file=BLOCKS,
        within="",
        old="NARROW(wide[i] / scale)",
        new="NARROW(wide[i] * (1 / scale))",
        tests=(
            f"{BLOCK_TESTS}every_number_and_what_is_next_to_the_middles_is_rounded_to_the_nearest",
        ),
    ),
    Mutation(
        name="wire: float8 has no subnormals",
        file=BLOCKS,
        within="narrow_float8",
        old="own > smallest ? own : smallest, addend",
        new="own > smallest ? own : smallest - (20u << 23), addend",
        tests=(
            f"{BLOCK_TESTS}every_number_and_what_is_next_to_the_middles_is_rounded_to_the_nearest",
        ),
    ),
    Mutation(
        name="wire: float8 rounds to 5 bits and cuts one off",
        file=BLOCKS,
        within="narrow_float8",
        old="addend = exponent + (20u << 23);",
        new="addend = exponent + (20u << 23) + 1;",
        tests=(
            f"{BLOCK_TESTS}every_number_and_what_is_next_to_the_middles_is_rounded_to_the_nearest",
        ),
    ),
    Mutation(
        name="wire: float8 subnormals widen to nothing",
        file=BLOCKS,
        within="widen_float8",
        old="(normal & ~is_subnormal) | (subnormal & is_subnormal) | sign",
        new="(normal & ~is_subnormal) | sign",
        tests=(
            f"{BLOCK_TESTS}every_number_and_what_is_next_to_the_middles_is_rounded_to_the_nearest",
        ),
    ),
    Mutation(
        name="wire: a sum writes over what was there",
        file=BLOCKS,
        within="",
        old="block[i] += WIDEN(narrow[i]) * scale;",
        new="block[i] = WIDEN(narrow[i]) * scale;",
        tests=(f"{BLOCK_TESTS}what_is_coded_decoded_and_kept_has_the_bits_of_torchs_operations",),
    ),
    Mutation(
        name="wire: rows after the own one are added before it",
        file=WIRE,
        within="Wire.reduce",
        old="range(len(rows)) if own > 1 else [own, *others]",
        new="[own, *others]",
        tests=(f"{BLOCK_TESTS}rows_are_reduced_in_their_order_wherever_the_own_one_stands",),
    ),
    Mutation(
        name="wire: the used mask is rounded beside the gradients",
        file=EXCHANGE,
        within="Exchange.coded_transfer_of",
        old="flat[numel:]",
        new="flat[numel:].clone()",
        tests=(f"{WIRE_TESTS}the_used_mask_is_exact_beside_great_gradients",),
    ),
    Mutation(
        name="hierarchical: a rank keeps a sum that it has rounded for the others",
        file=HIERARCHICAL,
        within="HierarchicalExchange._coded_steps_of_chunk",
        old=(
            "for host in range(self._n_hosts):  # this one's, too: all have what all can decode\n"
            "    wire.decode(coded[host], rows[host])"
        ),
        new=(
            "rows[self._host] = rows.sum(0)\n"
            "for host in others:  #: all have what all can decode\n"
            "    wire.decode(coded[host], rows[host])"
        ),
        tests=(f"{WIRE_TESTS}a_sum_is_rounded_once_before_and_once_after",),
    ),
    Mutation(
        name="group: a rank adds what others have sent to shards that are not its own",
        file=SHARDS,
        within="CodedTransfer._reduce_chunk",
        old="self._wire.reduce(coded, values, self._rank, op, factors)",
        new="reduce_rows(values, op, factors)",
        tests=(f"{WIRE_TESTS}a_sum_is_rounded_once_before_and_once_after",),
    ),
    Mutation(
        name="wire: what is fed back is encoded before the ranks have agreed on the round",
        file=SHARDS,
        within="CodedTransfer.__init__",
        old="begins_ahead and not wire.feeds_back",
        new="begins_ahead",
        tests=(f"{WIRE_TESTS}what_a_dropped_round_has_dropped_is_not_fed_back",),
    ),
    Mutation(
        name="wire: what a rank has sent in blocks is answered with what is none",
        file=EXCHANGE,
        within="_chunks_like",
        old="call.wire not in BLOCK_DTYPES",
        new="True",
        tests=(f"{AHEAD_TESTS}::test_a_mismatch_of_wires_leaves_nothing_in_flight",),
    ),
    Mutation(
        name="wire: a NaN stays in the gaps between gradients",
        file=SHARDS,
        within="CodedTransfer.steps",
        old="self._gradients.index_fill_(0, self._gaps, 0)",
        new="",
        tests=("tests/reducer/test_wires.py",),
    ),
    Mutation(
        name="group: what is fused goes on behind what the ranks do not share",
        file=SHARDS,
        within="_Announcement.wait",
        old="is_same.cumprod(0)",
        new="is_same",
        tests=(FUSION_TESTS,),
    ),
    Mutation(
        name="group: what is fused has the op of the first",
        file=WORK,
        within="GroupWork.fusable_behind",
        old="call == alike",
        new="call.dtype == alike.dtype",
        tests=(FUSION_TESTS,),
    ),
    Mutation(
        name="group: what is fused has one number",
        file=QUEUE,
        within="WorkQueue._begin",
        old="self.number += len(fused)",
        new="",
        tests=(FUSION_TESTS,),
    ),
    Mutation(
        name="group: buckets are fused whatever their ranks count",
        file="fastcomm/transports/group/communicator.py",
        within="GroupCommunicator.bind_bucket.work_of",
        old="is_fusable and op in OPS",
        new="is_fusable",
        tests=(FUSION_TESTS,),
    ),
    Mutation(
        name="group: buckets are fused whatever their wire",
        file="fastcomm/transports/group/communicator.py",
        within="GroupCommunicator.bind_bucket.work_of",
        old="is_fusable and op in OPS",
        new="op in OPS",
        tests=(FUSION_TESTS,),
    ),
    Mutation(
        name="group: buckets are fused whichever they are",
        file=SHARDS,
        within="Announcer.announce",
        old="one.label",
        new="0",
        tests=(FUSION_TESTS,),
    ),
    Mutation(
        name="group: buckets are fused after whatever steps",
        file=SHARDS,
        within="Announcer.announce",
        old="one.step",
        new="0",
        tests=(FUSION_TESTS,),
    ),
    Mutation(
        name="group: buckets of different checksums are reduced apart",
        file=WORK,
        within="GroupWork.fusable_behind",
        old="replace(other.call, numel=0, label=0, step=0)",
        new="replace(other.call, numel=0, label=0)",
        tests=(FUSION_TESTS,),
    ),
    Mutation(
        name="group: what is large is copied to be fused",
        file=WORK,
        within="GroupWork.__init__",
        old="is_small or call.nbytes > FUSABLE_NBYTES",
        new="is_small",
        tests=(FUSION_TESTS,),
    ),
    Mutation(
        name="group: any amount of data is fused",
        file=WORK,
        within="GroupWork.fusable_behind",
        old="not is_alike or nbytes > FUSED_NBYTES",
        new="not is_alike",
        tests=(FUSION_TESTS,),
    ),
    Mutation(
        name="group: what has interrupted a round is raised itself",
        file=QUEUE,
        within="WorkQueue.heard",
        old="told(self.communicator, error)",
        new="error",
        tests=(KEPT,),
    ),
    Mutation(
        name="group: what was sent for calls that do not go together stays in flight",
        file=EXCHANGE,
        within="Exchange.drain",
        old="unwanted.drain()",
        new="",
        tests=(AHEAD_TESTS,),
    ),
    Mutation(
        name="group: a rank forgets what it has sent for nothing",
        file=EXCHANGE,
        within="Exchange.drain",
        old="own.drain()",
        new="",
        tests=(AHEAD_TESTS,),
    ),
    Mutation(
        name="group: what runs is left when the ranks meet",
        file=QUEUE,
        within="WorkQueue._begin",
        old="while self._running:\n    self._take_step(self._running[0])",
        new="",
        tests=(AHEAD_TESTS,),
    ),
    Mutation(
        name="group: calls are announced while the ranks meet",
        file=QUEUE,
        within="WorkQueue._can_announce_ahead",
        old="one.call is not ABANDON",
        new="True",
        tests=(AHEAD_TESTS,),
    ),
    Mutation(
        name="group: calls that differ have one tag",
        file=SHARDS,
        within="tag_of",
        old="call.shard_key",
        new="call.label",
        tests=(AHEAD_TESTS,),
    ),
    Mutation(
        name="group: a group of the user's gets tags that MPI does not promise",
        file=EXCHANGE,
        within="Exchange.tag_of",
        old="tag_of(index, call) if self._owns_group else _IN_TURN",
        new="tag_of(index, call)",
        tests=(
            "tests/transports/group/test_group.py::"
            "test_tags_in_a_group_of_the_users_are_those_that_mpi_promises",
        ),
    ),
    Mutation(
        name="group: a bucket is encoded under the lock",
        file=QUEUE,
        within="WorkQueue.post",
        old="work.prepare()",
        new="with self._lock:\n    work.prepare()",
        tests=(AHEAD_TESTS,),
    ),
    Mutation(
        name="group: an abort waits for an announcement that goes on",
        file=EXCHANGE,
        within="Exchange.close",
        old="ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.announcer.group))",
        new="pass",
        tests=(ENDING_TESTS,),
    ),
    Mutation(
        name="group: who closes while the ranks meet counts as met",
        file=QUEUE,
        within="WorkQueue._n_finished",
        old="bool(self._works) or self._is_meeting",
        new="bool(self._works)",
        tests=(
            "tests/contract/test_abandon.py::"
            "test_who_closes_when_it_hears_of_an_abandonment_is_named",
        ),
    ),
)
