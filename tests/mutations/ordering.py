"""Every wait, every recorded event and every record_stream of fastcomm/nccl, fastcomm/cuda and
fastcomm/reducer, left out one at a time: tests/nccl/test_ordering.py and its kind must notice.
"""

from __future__ import annotations

from tests.mutations.mutation import Mutation

COMMUNICATOR = "fastcomm/nccl/communicator.pyx"
BUCKET = "fastcomm/nccl/bucket.pyx"
LAUNCHES = "fastcomm/nccl/launches.pyx"
LANE = "fastcomm/nccl/lane.pyx"
LINK = "fastcomm/nccl/link.pyx"
MEMORY = "fastcomm/nccl/memory.pyx"
DRIVER = "fastcomm/cuda/driver.pyx"
HOOKED_BUCKET = "fastcomm/reducer/hooked_bucket.py"
REDUCER_BUCKET = "fastcomm/reducer/bucket.py"
HOOK = "fastcomm/reducer/gradient_hook.pyx"

ORDERING = "tests/nccl/test_ordering.py"
TRAINING = f"{ORDERING}::test_training_is_ordered"
ON_ONE = f"{ORDERING}::test_a_collective_is_ordered_with_the_caller_s_stream"
ON_OTHERS = f"{ORDERING}::test_a_collective_is_ordered_with_all_streams_that_wait_for_it"
FOR_NOTHING = f"{ORDERING}::test_tensors_that_nobody_waits_for_live_until_they_are_reduced"
PRODUCERS = f"{ORDERING}::test_a_bucket_is_ordered_after_gradients_of_another_stream"
ROUNDS = f"{ORDERING}::test_a_bucket_is_ordered_after_its_last_round_on_whatever_streams"
TWO_STREAMS = f"{ORDERING}::test_training_on_two_streams_is_ordered"
FREED = f"{ORDERING}::test_memory_is_freed_when_the_device_is_done_with_it"

MUTATIONS = (
    # -- a collective of a tensor --
    Mutation(
        name="order: the event before a collective is not recorded",
        file=COMMUNICATOR,
        old="driver.record_event(lane.ready.handle, current)",
        new="0",
        tests=(ON_ONE,),
    ),
    Mutation(
        name="order: a collective's lane does not wait for the caller's stream",
        file=COMMUNICATOR,
        old="driver.wait_event(stream, lane.ready.handle, 0)",
        new="0",
        tests=(ON_ONE,),
    ),
    Mutation(
        name="order: the event after a collective is not recorded",
        file=COMMUNICATOR,
        old="driver.record_event(ticket.done.handle, stream)",
        new="0",
        tests=(ON_ONE,),
    ),
    Mutation(
        name="order: the event after a collective is recorded on the caller's stream",
        file=COMMUNICATOR,
        old="driver.record_event(ticket.done.handle, stream)",
        new="driver.record_event(ticket.done.handle, current)",
        tests=(ON_ONE,),
    ),
    Mutation(
        name="order: broadcast_all() does not wait",
        file=COMMUNICATOR,
        old="        self.cuda.order_current_after(ticket.done)\n\n    def all_gather_single",
        new="\n    def all_gather_single",
        tests=(ON_ONE,),
    ),
    Mutation(
        name="order: wait() does not wait",
        file=COMMUNICATOR,
        old="        current = self.link.cuda.order_current_after(self.ticket.done)\n",
        new="        current = self.link.cuda.current_stream()\n",
        tests=(ON_ONE,),
    ),
    Mutation(
        name="order: a second wait() does not wait",
        file=COMMUNICATOR,
        old="            self.link.cuda.order_current_after(self.ticket.done)\n            if",
        new="            if",
        tests=(ON_OTHERS,),
    ),
    Mutation(
        name="order: a second wait() does not wait for a division",
        file=COMMUNICATOR,
        old="                self.link.cuda.order_current_after(self.divided)\n",
        new="                pass\n",
        tests=(ON_OTHERS,),
    ),
    Mutation(
        name="order: the event after a division is not recorded",
        file=COMMUNICATOR,
        old="driver.record_event(self.divided.handle, current)",
        new="0",
        tests=(ON_OTHERS,),
    ),
    Mutation(
        name="order: a sum is not recorded for the stream that divides it",
        file=COMMUNICATOR,
        old="                cuda.record_stream(total)\n",
        new="                pass\n",
        tests=(ON_OTHERS,),
    ),
    Mutation(
        name="order: a work lets go of its tensors wherever it is waited for",
        file=COMMUNICATOR,
        old="        if current == self.launched_on:  # else",
        new="        if True:  # else",
        tests=(ON_OTHERS,),
    ),
    Mutation(
        name="order: nothing keeps the tensors of a work that nobody waits for",
        file=COMMUNICATOR,
        old="            ticket.tensors = work.tensors  # kept also if nobody waits\n",
        new="            pass\n",
        tests=(FOR_NOTHING,),
    ),
    Mutation(
        name="order: barrier() does not wait for its collective",
        file=COMMUNICATOR,
        old="        self.link.wait_for((<Lane>self.link.lanes[0]).ticket)\n",
        new="",
        tests=(f"{ORDERING}::test_a_barrier_waits_for_the_device",),
    ),
    Mutation(
        name="order: the wait for a barrier does not block",
        file=COMMUNICATOR,
        old="            self.link.wait_for(self.ticket)\n",
        new="            pass\n",
        tests=(f"{ORDERING}::test_a_barrier_waits_for_the_device",),
    ),
    # -- a bucket --
    Mutation(
        name="order: the event before a bucket's reduction is not recorded",
        file=BUCKET,
        old="driver.record_event(self.lane.ready.handle, current)",
        new="0",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: a bucket's lane does not wait for the caller's stream",
        file=BUCKET,
        old="driver.wait_event(stream, self.lane.ready.handle, 0)",
        new="0",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: the event after a bucket's reduction is not recorded",
        file=BUCKET,
        old="driver.record_event(self.ticket.done.handle, stream)",
        new="0",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: a bucket is done before it is cast back",
        file=BUCKET,
        old="""\
            if scatters:
                self.scattering.unflatten_on(stream, wire, 1, True)
            _record(ended, stream)
            check(driver.record_event(self.ticket.done.handle, stream), b"cuEventRecord")
""",
        new="""\
            check(driver.record_event(self.ticket.done.handle, stream), b"cuEventRecord")
            if scatters:
                self.scattering.unflatten_on(stream, wire, 1, True)
""",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: a bucket is flattened on the lane",
        file=BUCKET,
        old="self.gathering.flatten_on(current, wire, scale, divisor)",
        new="self.gathering.flatten_on(stream, wire, scale, divisor)",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: a bucket is cast back on the caller's stream",
        file=BUCKET,
        old="self.scattering.unflatten_on(stream, wire, 1, True)",
        new="self.scattering.unflatten_on(current, wire, 1, True)",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: a bucket's wait() does not wait",
        file=BUCKET,
        old="        self.awaited_on = self.bucket.link.cuda.order_current_after("
        "self.bucket.ticket.done)\n",
        new="        self.awaited_on = self.bucket.link.cuda.current_stream()\n",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: a bucket is gathered before its last round is over",
        file=BUCKET,
        old="        if not is_known and not self.is_captured",
        new="        if False and not is_known and not self.is_captured",
        tests=(ROUNDS,),
    ),
    Mutation(
        name="order: whoever waited for the last round, all streams know of it",
        file=BUCKET,
        old="is_known = last.is_awaited and current == last.awaited_on",
        new="is_known = last.is_awaited",
        tests=(ROUNDS,),
    ),
    Mutation(
        name="order: a bucket is not ordered after its gradients' streams",
        file=BUCKET,
        old="            self.producers.order_before(current)\n",
        new="",
        tests=(PRODUCERS,),
    ),
    Mutation(
        name="order: a bucket does not note its gradients' streams",
        file=BUCKET,
        old="        self.producers.note()\n",
        new="        pass\n",
        tests=(PRODUCERS,),
    ),
    Mutation(
        name="order: a gradient that was copied is not kept",
        file=BUCKET,
        old="            self.producers.keep(gradient)\n        elif",
        new="        elif",
        tests=(PRODUCERS,),
    ),
    Mutation(
        name="order: gradients that the launch reads are not kept",
        file=BUCKET,
        old="                self.producers.keep(gradient)\n        self.kept",
        new="                pass\n        self.kept",
        tests=(PRODUCERS,),
    ),
    Mutation(
        name="order: gradients are dropped before the launch",
        file=BUCKET,
        old="            self.kept.append(gradient)\n",
        new="            pass\n",
        tests=(PRODUCERS, TRAINING),
    ),
    # -- streams of gradients, by driver.pyx --
    Mutation(
        name="order: no event of another producer's stream is recorded",
        file=DRIVER,
        old="driver.record_event(self.side.handle, other)",
        new="0",
        tests=(PRODUCERS,),
    ),
    Mutation(
        name="order: no event of another producer's stream is waited for",
        file=DRIVER,
        old="driver.wait_event(current, self.side.handle, 0)",
        new="0",
        tests=(PRODUCERS,),
    ),
    Mutation(
        name="order: keep() records nothing",
        file=DRIVER,
        old="                self.device.record_stream(tensor)\n",
        new="                pass\n",
        tests=(PRODUCERS,),
    ),
    Mutation(
        name="order: a wait for an event does nothing",
        file=DRIVER,
        old="            code = driver.wait_event(current, event.handle, 0)\n",
        new="            code = 0\n",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: synchronize() does not",
        file=DRIVER,
        old="driver.synchronize()",
        new="0",
        tests=(FREED,),
    ),
    # -- the reducer --
    Mutation(
        name="order: a backward ends without waiting for its buckets",
        file=REDUCER_BUCKET,
        old="            work.wait()\n",
        new="            pass\n",
        tests=(TRAINING,),
    ),
    Mutation(
        name="order: a hooked bucket is not ordered after its gradients' streams",
        file=HOOKED_BUCKET,
        old="        self._producers.order_before_current()\n",
        new="",
        tests=(TWO_STREAMS,),
    ),
    Mutation(
        name="order: a hooked bucket does not note its gradients' streams",
        file=HOOKED_BUCKET,
        old="            self._producers.note()\n",
        new="            pass\n",
        tests=(TWO_STREAMS,),
    ),
    Mutation(
        name="order: a hooked bucket does not keep its gradients",
        file=HOOKED_BUCKET,
        old="                self._producers.keep(gradient)\n",
        new="                pass\n",
        tests=(TWO_STREAMS,),
    ),
    Mutation(
        name="order: a hooked bucket does not wait for its presence",
        file=HOOKED_BUCKET,
        old="        self._known.wait()\n",
        new="",
        tests=(TWO_STREAMS,),
    ),
    Mutation(
        name="order: a bucket's hook is not waited for",
        file=HOOKED_BUCKET,
        old="    value = future.wait()\n",
        new="    value = future._tensor  # as the test's hook has it\n",
        tests=(TWO_STREAMS,),
    ),
    Mutation(
        name="order: a gradient's hook does not note its stream",
        file=HOOK,
        old="            self.note_stream()\n",
        new="            pass\n",
        tests=(TWO_STREAMS,),
    ),
    # -- memory --
    Mutation(
        name="order: memory is freed while the device uses it",
        file=MEMORY,
        old="            self.device.synchronize()\n",
        new="",
        tests=(FREED,),
    ),
    Mutation(
        name="order: a busy communicator is split",
        file=LINK,
        old="            self.wait_for((<Lane>self.lanes[0]).ticket)\n            with",
        new="            with",
        tests=(f"{ORDERING}::test_a_lane_is_split_off_when_the_first_is_idle",),
    ),
    Mutation(
        name="order: close() does not wait for the device",
        file=LANE,
        old="driver.synchronize_stream(self.lane.stream.handle)",
        new="0",
        tests=("tests/nccl/test_ending.py",),
    ),
    # -- what the watchdog tells --
    Mutation(
        name="order: the watchdog lets go of tensors before their collective is over",
        file=LAUNCHES,
        old="                if looks[i].code != CUDA_ERROR_NOT_READY:\n",
        new="                ticket.tensors = None\n"
        "                if looks[i].code != CUDA_ERROR_NOT_READY:\n",
        tests=(FOR_NOTHING,),
    ),
)
