"""Every wait, every recorded event and every record_stream of transports/nccl, transports/cuda and
reducer, left out one at a time: tests/transports/nccl/test_ordering.py and its kind must notice.
"""

from __future__ import annotations

from tests.mutations.mutation import Mutation

COMMUNICATOR = "fastcomm/transports/nccl/communicator.pyx"
BUCKET = "fastcomm/transports/nccl/bucket.pyx"
LAUNCHES = "fastcomm/transports/nccl/lane.pyx"
LINK = "fastcomm/transports/nccl/link.pyx"

ORDERING = "tests/transports/nccl/test_ordering.py"
TRAINING = f"{ORDERING}::test_training_is_ordered"
ON_ONE = f"{ORDERING}::test_a_collective_is_ordered_with_the_caller_s_stream"
FOR_NOTHING = (
    "tests/transports/nccl/test_works.py::"
    "test_tensors_nobody_waits_for_are_kept_until_the_collective_is_over"
)
KEPT = f"{ORDERING}::test_gradients_of_two_buckets_at_most_are_kept_until_they_have_been_flattened"
PRODUCERS = f"{ORDERING}::test_a_bucket_is_ordered_after_gradients_of_another_stream"
ROUNDS = f"{ORDERING}::test_a_bucket_is_ordered_after_its_last_round_on_whatever_streams"
LAUNCHES_TESTS = "tests/transports/nccl/test_launches.py"
WORKS_TESTS = "tests/transports/nccl/test_works.py"
OWN_LANE = f"{LAUNCHES_TESTS}::test_each_bucket_is_reduced_on_its_lane_s_stream_and_communicator"

MUTATIONS = (
    # -- a collective of a tensor --
    Mutation(
        name="order: the event after a collective is recorded on the caller's stream",
        file=COMMUNICATOR,
        within="_launch_on",
        old="driver.record_event(in_flight.done.handle, stream)",
        new="driver.record_event(in_flight.done.handle, current)",
        tests=(ON_ONE,),
    ),
    # -- a bucket --
    Mutation(
        name="order: gradients are flattened before they are ready",
        file=BUCKET,
        within="NcclBucket._launch_on",
        old="order_streams(reader, self.lane.ready.handle, current)",
        new="pass",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: a bucket is reduced before it is flattened",
        file=BUCKET,
        within="NcclBucket._launch_on",
        old="order_streams(stream, self.flattened.handle, reader)",
        new="pass",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: gradients are dropped before they have been flattened",
        file=BUCKET,
        within="NcclBucket._release",
        old="self.link.cuda.order_after(current, work.bucket.flattened)",
        new="pass",
        tests=(KEPT,),
    ),
    Mutation(
        name="order: gradients that another stream has awaited are dropped without a word",
        file=BUCKET,
        within="NcclBucketWork.drop_gradients",
        old="link.cuda.record_stream(gradient)",
        new="pass",
        tests=(KEPT,),
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
        within="NcclBucket._order_gathering",
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
        within="NcclBucket._order_gathering",
        old="if not is_known and not self.is_captured",
        new="if False and not is_known and not self.is_captured",
        tests=(ROUNDS,),
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
    # -- streams of gradients, by driver.pyx --
    # -- the reducer --
    # -- memory --
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
    # -- what the watchdog tells --
    Mutation(
        name="order: the watchdog lets go of tensors before their collective is over",
        file=LAUNCHES,
        within="Launches.ask_driver",
        old="if answers[i].code != CUDA_ERROR_NOT_READY:",
        new=("in_flight.tensors = None\nif answers[i].code != CUDA_ERROR_NOT_READY:"),
        tests=(FOR_NOTHING,),
    ),
)
