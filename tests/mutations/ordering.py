"""Every wait, every recorded event and every record_stream of transports/nccl, transports/cuda and
reducer, left out one at a time: tests/transports/nccl/test_ordering.py and its kind must notice.
"""

from __future__ import annotations

from tests.mutations.mutation import Mutation

COMMUNICATOR = "fastcomm/transports/nccl/communicator.pyx"
BUCKET = "fastcomm/transports/nccl/bucket.pyx"
LAUNCHES = "fastcomm/transports/nccl/launches.pyx"
LANE = "fastcomm/transports/nccl/lane.pyx"
LINK = "fastcomm/transports/nccl/link.pyx"
MEMORY = "fastcomm/transports/nccl/memory.pyx"
DRIVER = "fastcomm/transports/cuda/driver.pyx"
REDUCER_BUCKET = "fastcomm/reducer/bucket.py"
HOOK = "fastcomm/reducer/hooks.pyx"

ORDERING = "tests/transports/nccl/test_ordering.py"
TRAINING = f"{ORDERING}::test_training_is_ordered"
ON_ONE = f"{ORDERING}::test_a_collective_is_ordered_with_the_caller_s_stream"
ON_OTHERS = f"{ORDERING}::test_a_collective_is_ordered_with_all_streams_that_wait_for_it"
FOR_NOTHING = f"{ORDERING}::test_tensors_that_nobody_waits_for_live_until_they_are_reduced"
PRODUCERS = f"{ORDERING}::test_a_bucket_is_ordered_after_gradients_of_another_stream"
ROUNDS = f"{ORDERING}::test_a_bucket_is_ordered_after_its_last_round_on_whatever_streams"
TWO_STREAMS = f"{ORDERING}::test_training_on_two_streams_is_ordered"
FREED = f"{ORDERING}::test_memory_is_freed_when_the_device_is_done_with_it"
LAUNCHES_TESTS = "tests/transports/nccl/test_launches.py"
WORKS_TESTS = "tests/transports/nccl/test_works.py"
OWN_LANE = f"{LAUNCHES_TESTS}::test_each_bucket_is_reduced_on_its_lane_s_stream_and_communicator"

MUTATIONS = (
    # -- a collective of a tensor --
    Mutation(
        name="order: the event before a collective is not recorded",
        file=COMMUNICATOR,
        within="_launch_on",
        old="driver.record_event(lane.ready.handle, current)",
        new="0",
        tests=(ON_ONE,),
    ),
    Mutation(
        name="order: a collective's lane does not wait for the caller's stream",
        file=COMMUNICATOR,
        within="_launch_on",
        old="driver.wait_event(stream, lane.ready.handle, 0)",
        new="0",
        tests=(ON_ONE,),
    ),
    Mutation(
        name="order: the event after a collective is not recorded",
        file=COMMUNICATOR,
        within="_launch_on",
        old="driver.record_event(in_flight.done.handle, stream)",
        new="0",
        tests=(ON_ONE,),
    ),
    Mutation(
        name="order: the event after a collective is recorded on the caller's stream",
        file=COMMUNICATOR,
        within="_launch_on",
        old="driver.record_event(in_flight.done.handle, stream)",
        new="driver.record_event(in_flight.done.handle, current)",
        tests=(ON_ONE,),
    ),
    Mutation(
        name="order: broadcast_all() does not wait",
        file=COMMUNICATOR,
        within="NcclCommunicator.broadcast_all",
        old="self.cuda.order_current_after(in_flight.done)",
        new="",
        tests=(ON_ONE,),
    ),
    Mutation(
        name="order: wait() does not wait",
        file=COMMUNICATOR,
        within="NcclWork.wait",
        old="current = self.link.cuda.order_current_after(self.in_flight.done)",
        new="current = self.link.cuda.current_stream()",
        tests=(ON_ONE,),
    ),
    Mutation(
        name="order: a second wait() does not wait",
        file=COMMUNICATOR,
        within="NcclWork.wait",
        old=(
            "            self.link.cuda.order_current_after(self.in_flight.done)\n"
            "            if self.divided is not None:"
        ),
        new="if self.divided is not None:",
        tests=(ON_OTHERS,),
    ),
    Mutation(
        name="order: a second wait() does not wait for a division",
        file=COMMUNICATOR,
        within="NcclWork.wait",
        old="self.link.cuda.order_current_after(self.divided)",
        new="pass",
        tests=(ON_OTHERS,),
    ),
    Mutation(
        name="order: the event after a division is not recorded",
        file=COMMUNICATOR,
        within="NcclWork._divide",
        old="cuda.record(self.divided, current)",
        new="pass",
        tests=(ON_OTHERS,),
    ),
    Mutation(
        name="order: a sum is not recorded for the stream that divides it",
        file=COMMUNICATOR,
        within="NcclWork._divide",
        old="cuda.record_stream(total)",
        new="pass",
        tests=(ON_OTHERS,),
    ),
    Mutation(
        name="order: a work lets go of its tensors wherever it is waited for",
        file=COMMUNICATOR,
        within="NcclWork.wait",
        old="if current == self.launched_on:  # else",
        new="if True:  # else",
        tests=(ON_OTHERS,),
    ),
    Mutation(
        name="order: nothing keeps the tensors of a work that nobody waits for",
        file=COMMUNICATOR,
        within="NcclCommunicator._launched",
        old="work.in_flight.tensors = work.tensors  # kept also if nobody waits",
        new="pass",
        tests=(FOR_NOTHING,),
    ),
    Mutation(
        name="order: barrier() does not wait for its collective",
        file=COMMUNICATOR,
        within="NcclCommunicator.barrier",
        old="self.link.wait_for((<Lane>self.link.lanes[0]).in_flight)",
        new="",
        tests=(f"{ORDERING}::test_a_barrier_waits_for_the_device",),
    ),
    Mutation(
        name="order: the wait for a barrier does not block",
        file=COMMUNICATOR,
        within="NcclWork.wait",
        old="self.link.wait_for(self.in_flight)",
        new="pass",
        tests=(f"{ORDERING}::test_a_barrier_waits_for_the_device",),
    ),
    # -- a bucket --
    Mutation(
        name="order: the event before a bucket's reduction is not recorded",
        file=BUCKET,
        within="NcclBucket._launch_on",
        old="driver.record_event(self.lane.ready.handle, current)",
        new="0",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: a bucket's lane does not wait for the caller's stream",
        file=BUCKET,
        within="NcclBucket._launch_on",
        old="driver.wait_event(stream, self.lane.ready.handle, 0)",
        new="0",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: the event after a bucket's reduction is not recorded",
        file=BUCKET,
        within="NcclBucket._launch_on",
        old="driver.record_event(in_flight.done.handle, stream)",
        new="0",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: a bucket is done before it is cast back",
        file=BUCKET,
        within="NcclBucket._launch_on",
        old=(
            "if scatters:\n"
            "    self.scattering.unflatten_on(stream, wire, 1, True)\n"
            "_record(ended, stream)\n"
            'check(driver.record_event(in_flight.done.handle, stream), b"cuEventRecord")'
        ),
        new=(
            'check(driver.record_event(in_flight.done.handle, stream), b"cuEventRecord")\n'
            "if scatters:\n"
            "    self.scattering.unflatten_on(stream, wire, 1, True)"
        ),
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: a bucket is flattened on the lane",
        file=BUCKET,
        within="NcclBucket._launch_on",
        old="self.gathering.flatten_on(current, wire, scale, divisor)",
        new="self.gathering.flatten_on(stream, wire, scale, divisor)",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: gradients are flattened on the lane whose memory may go before",
        file=BUCKET,
        within="NcclBucket._launch_on",
        old="is_in_place = not self.kept",
        new="is_in_place = True",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: gradients in the flat buffer are flattened on the caller's stream",
        file=BUCKET,
        within="NcclBucket._launch_on",
        old="is_in_place = not self.kept",
        new="is_in_place = False",
        tests=(f"{LAUNCHES_TESTS}::test_gradients_in_the_flat_buffer_are_flattened_on_the_lane",),
    ),
    Mutation(
        name="order: a bucket is cast back on the caller's stream",
        file=BUCKET,
        within="NcclBucket._launch_on",
        old="self.scattering.unflatten_on(stream, wire, 1, True)",
        new="self.scattering.unflatten_on(current, wire, 1, True)",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: a bucket's wait() does not wait",
        file=BUCKET,
        within="NcclBucketWork.wait",
        old="self.bucket.link.cuda.order_current_after(self.in_flight.done)",
        new="self.bucket.link.cuda.current_stream()",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: a bucket of the second lane is reduced on the first one's stream",
        file=BUCKET,
        within="NcclBucket._launch_on",
        old="cdef CUstream stream = self.lane.stream.handle",
        new="cdef CUstream stream = (<Lane>self.link.lanes[0]).stream.handle",
        tests=(OWN_LANE,),
    ),
    Mutation(
        name="order: a bucket of the second lane is reduced by the first one's communicator",
        file=BUCKET,
        within="NcclBucket._launch_on",
        old="code = call_all(self.calls, self.n_calls, self.lane.comm, stream, failed)",
        new=(
            "with gil:\n"
            "    first = <Lane>self.link.lanes[0]\n"
            "code = call_all(self.calls, self.n_calls, first.comm, stream, failed)"
        ),
        tests=(OWN_LANE,),
    ),
    Mutation(
        name="order: a gather waits for an event that was captured",
        file=BUCKET,
        within="NcclBucket._order_after_last",
        old="self.in_flight.done",
        new="last.in_flight.done",
        tests=(
            f"{LAUNCHES_TESTS}::"
            "test_a_gather_after_a_capture_on_another_stream_waits_for_no_captured_event",
        ),
    ),
    Mutation(
        name="order: a bucket is gathered before its last round is over",
        file=BUCKET,
        within="NcclBucket._order_after_last",
        old="if not is_known and not self.is_captured",
        new="if False and not is_known and not self.is_captured",
        tests=(ROUNDS,),
    ),
    Mutation(
        name="order: whoever waited for the last round, all streams know of it",
        file=BUCKET,
        within="NcclBucket._order_after_last",
        old="is_known = last.is_awaited and current == last.awaited_on",
        new="is_known = last.is_awaited",
        tests=(ROUNDS,),
    ),
    Mutation(
        name="order: a bucket is not ordered after its gradients' streams",
        file=BUCKET,
        within="NcclBucket._order_gathering",
        old="self.producers.order_before(current)",
        new="",
        tests=(PRODUCERS,),
    ),
    Mutation(
        name="order: a bucket is ordered after its gradients' streams for the last one alone",
        file=BUCKET,
        within="NcclBucket.gather",
        old=(
            "self._order_gathering()\n"
            "self.kept = []\n"
            "# in their slots, as `measuring` knows them, but for what move() finds elsewhere\n"
            "memcpy(\n"
            "    self.gathering.addresses, self.measuring.addresses,"
            " len(self.views) * sizeof(void *)\n"
            ")\n"
            "return self.gather_gradients(parameters)"
        ),
        new=(
            "self.kept, n = [], len(parameters) - 1\n"
            "memcpy(\n"
            "    self.gathering.addresses, self.measuring.addresses,"
            " len(self.views) * sizeof(void *)\n"
            ")\n"
            "left = self.gather_gradients(parameters[:n])\n"
            "self._order_gathering()\n"
            "return left + self.gather_gradients([None] * n + parameters[n:])[n:]"
        ),
        tests=(PRODUCERS,),
    ),
    Mutation(
        name="order: a bucket does not note its gradients' streams",
        file=BUCKET,
        within="NcclBucket.note_stream",
        old="self.producers.note()",
        new="pass",
        tests=(PRODUCERS,),
    ),
    Mutation(
        name="order: a gradient that was copied is not kept",
        file=BUCKET,
        within="NcclBucket.note_copied",
        old="self.producers.keep(gradient)",
        new="",
        tests=(PRODUCERS,),
    ),
    Mutation(
        name="order: gradients that the launch reads are not kept",
        file=BUCKET,
        within="NcclBucket._release",
        old="self.producers.keep(gradient)",
        new="pass",
        tests=(PRODUCERS,),
    ),
    Mutation(
        name="order: gradients are dropped before the launch",
        file=BUCKET,
        within="NcclBucket.move",
        old="self.kept.append(gradient)",
        new="pass",
        tests=(PRODUCERS, TRAINING),
    ),
    # -- streams of gradients, by driver.pyx --
    Mutation(
        name="order: no event of another producer's stream is recorded",
        file=DRIVER,
        within="Producers.order_before",
        old="self.device.record(self.side, other)",
        new="pass",
        tests=(PRODUCERS,),
    ),
    Mutation(
        name="order: no event of another producer's stream is waited for",
        file=DRIVER,
        within="Producers.order_before",
        old="self.device.order_after(current, self.side)",
        new="pass",
        tests=(PRODUCERS,),
    ),
    Mutation(
        name="order: keep() records nothing",
        file=DRIVER,
        within="Producers.keep",
        old="self.device.record_stream(tensor)",
        new="pass",
        tests=(PRODUCERS,),
    ),
    Mutation(
        name="order: a wait for an event does nothing",
        file=DRIVER,
        within="Device.order_after",
        old="code = driver.wait_event(stream, event.handle, 0)",
        new="code = 0",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: synchronize() does not",
        file=DRIVER,
        within="Device.synchronize",
        old="driver.synchronize()",
        new="0",
        tests=(FREED,),
    ),
    # -- the reducer --
    Mutation(
        name="order: a backward ends without waiting for its buckets",
        file=REDUCER_BUCKET,
        within="Bucket.finish",
        old="work.wait()",
        new="pass",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: a gradient's hook does not note its stream",
        file=HOOK,
        within="GradientHook.__call__",
        old="self.note_stream()",
        new="pass",
        tests=(TWO_STREAMS,),
    ),
    # -- memory --
    Mutation(
        name="order: memory is freed while the device uses it",
        file=MEMORY,
        within="Pool.give_back",
        old="self.device.synchronize()",
        new="",
        tests=(FREED,),
    ),
    Mutation(
        name="order: memory that is dropped while the device comes to rest is freed, too",
        file=MEMORY,
        within="Pool.give_back",
        old="if address in freed:",
        new="if True:",
        tests=(
            "tests/transports/nccl/test_memory.py::"
            "test_memory_that_is_dropped_while_the_device_comes_to_rest_is_kept",
        ),
    ),
    Mutation(
        name="order: a busy communicator is split",
        file=LINK,
        within="Link.lane",
        old="self.wait_for((<Lane>self.lanes[0]).in_flight)",
        new="",
        tests=(f"{ORDERING}::test_a_lane_is_split_off_when_the_first_is_idle",),
    ),
    Mutation(
        name="order: close() does not wait for the device",
        file=LANE,
        within="_Finalize.make",
        old="driver.synchronize_stream(self.lane.stream.handle)",
        new="0",
        tests=("tests/transports/nccl/test_ending.py",),
    ),
    Mutation(
        name="order: close() lets go of tensors before it waits for the device",
        file=LINK,
        within="Link.close",
        old="errors, freeing = [], []",
        new="errors, freeing = [], []\nself.launches.forget_tensors()",
        tests=(
            f"{WORKS_TESTS}::"
            "test_a_close_keeps_tensors_nobody_waits_for_until_the_collective_is_over",
        ),
    ),
    # -- what is captured --
    Mutation(
        name="order: a captured collective takes the record of one that may be under way",
        file=COMMUNICATOR,
        within="NcclCommunicator._new_work",
        old="if work.is_captured:",
        new="if False:",
        tests=(f"{WORKS_TESTS}::test_a_capture_is_not_spoilt_by_a_watchdog_that_has_asked_before",),
    ),
    Mutation(
        name="order: a captured bucket records the event of the launch that is under way",
        file=BUCKET,
        within="NcclBucket._launch_on",
        old="driver.record_event(in_flight.done.handle, stream)",
        new="driver.record_event(self.in_flight.done.handle, stream)",
        tests=(
            f"{LAUNCHES_TESTS}::"
            "test_an_eager_launch_under_way_is_still_watched_when_its_bucket_is_captured",
        ),
    ),
    Mutation(
        name="order: a captured collective records the event that lanes wait for",
        file=COMMUNICATOR,
        within="NcclCommunicator._new_work",
        old="work.in_flight = launches.new_record()",
        new="work.in_flight = (<Lane>self.link.lanes[0]).in_flight",
        tests=(f"{LAUNCHES_TESTS}::test_a_lane_is_made_after_a_captured_collective",),
    ),
    Mutation(
        name="order: the look for an event spoils a capture on another thread",
        file=LAUNCHES,
        within="_query",
        old="cdef int mode = CU_STREAM_CAPTURE_MODE_RELAXED",
        new="cdef int mode = 0",
        tests=(f"{WORKS_TESTS}::test_a_capture_is_not_spoilt_by_the_look_for_an_event",),
    ),
    Mutation(
        name="order: the watchdog asks for what is captured",
        file=LAUNCHES,
        within="Launches.end",
        old="in_flight.is_pending = not is_captured",
        new="in_flight.is_pending = True",
        tests=(
            f"{LAUNCHES_TESTS}::"
            "test_a_step_can_be_captured_and_the_communicator_outlives_its_graphs",
        ),
    ),
    Mutation(
        name="order: a captured collective is asked whether it is over",
        file=COMMUNICATOR,
        within="NcclWork.is_completed",
        old="self.is_captured or ",
        new="",
        tests=(f"{WORKS_TESTS}::test_a_captured_work_counts_as_completed",),
    ),
    Mutation(
        name="order: a captured bucket is asked whether it is over",
        file=BUCKET,
        within="NcclBucketWork.is_completed",
        old="self.is_captured or ",
        new="",
        tests=(f"{WORKS_TESTS}::test_a_captured_work_counts_as_completed",),
    ),
    # -- what the watchdog tells --
    Mutation(
        name="order: the watchdog lets go of tensors before their collective is over",
        file=LAUNCHES,
        within="Launches.settle",
        old="if answers[i].code != CUDA_ERROR_NOT_READY:",
        new=("in_flight.tensors = None\nif answers[i].code != CUDA_ERROR_NOT_READY:"),
        tests=(FOR_NOTHING,),
    ),
)
