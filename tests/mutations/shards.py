"""A ShardedOptimizer over NCCL: its calls, and parameters that are on their way."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

CALLS = "fastcomm/transports/nccl/calls.pyx"
BUCKET = "fastcomm/transports/nccl/bucket.pyx"
COMMUNICATOR = "fastcomm/transports/nccl/communicator.pyx"
SHARES = "fastcomm/reducer/features/shards.py"
SHARDED = "fastcomm/optim/sharded.py"
ARRIVALS = "fastcomm/reducer/features/arrivals.py"

FILE = "tests/transports/nccl/test_shards.py"
EQUAL = f"{FILE}::test_equal_shards_are_reduce_scattered_and_gathered"
WHOLE = f"{FILE}::test_whole_parameters_are_reduced_into_their_owner_and_sent_from_it"
PARAMETERS = f"{FILE}::test_shards_give_the_parameters_of_whole_buckets"
ORDERED = f"{FILE}::test_training_with_shards_is_ordered"
OVERLAPPED = f"{FILE}::test_overlapped_gathers_give_the_parameters_of_the_plain_optimizer"
MODULES = f"{FILE}::test_each_module_waits_for_its_own_parameters_alone"
USES = f"{FILE}::test_whatever_uses_a_parameter_waits_for_it"
UNSEEN = f"{FILE}::test_a_gradient_of_a_parameter_that_was_not_seen_in_use_is_refused"

MUTATIONS = (
    Mutation(
        name="shards: all whole parameters are reduced into rank 0, and sent from it",
        file=CALLS,
        within="_move",
        old="Call(each, shard, shard, numel, dtype, 0, r)",
        new="Call(each, shard, shard, numel, dtype, 0, 0)",
        tests=(WHOLE, PARAMETERS),
    ),
    Mutation(
        name="shards: every rank gathers the first shard",
        file=CALLS,
        within="_move",
        old="calls[0].source, calls[0].target = shard, whole",
        new="calls[0].source, calls[0].target = whole, whole",
        tests=(PARAMETERS,),
    ),
    Mutation(
        name="shards: every rank's shard is scattered to the beginning",
        file=CALLS,
        within="_move",
        old="Call(alike, whole, shard, numel, dtype, 0, 0)",
        new="Call(alike, whole, whole, numel, dtype, 0, 0)",
        tests=(PARAMETERS,),
    ),
    Mutation(
        name="shards: whole buckets are reduced",
        file=BUCKET,
        within="NcclBucket._fill_in_calls",
        old="if bounds is not None:",
        new="if False:",
        tests=(EQUAL, WHOLE),
    ),
    Mutation(
        name="shards: no rank hears which gradients the others have",
        file=BUCKET,
        within="NcclBucket._fill_in_calls",
        old="self.n_calls = n + 1",
        new="self.n_calls = n or 1",
        tests=(EQUAL, PARAMETERS),
    ),
    Mutation(
        name="shards: the first shard is cast back on every rank",
        file=BUCKET,
        within="NcclBucket._prepare_scattering",
        old="begin, end = bounds[self.link.rank], bounds[self.link.rank + 1]",
        new="begin, end = bounds[0], bounds[1]",
        tests=(PARAMETERS,),
    ),
    Mutation(
        name="shards: gathers begin with what the next forward uses last",
        file=SHARDED,
        within="ShardedOptimizer._spread",
        old="reversed(list(enumerate(self._buckets)))",
        new="list(enumerate(self._buckets))",
        tests=(WHOLE,),
    ),
    Mutation(
        name="shards: step() does not wait for the gathers",
        file=SHARDED,
        within="ShardedOptimizer._spread",
        old=("for work in under_way.values():\n    work.wait()"),
        new="",
        tests=(ORDERED,),
    ),
    Mutation(
        name="shards: a wait on another stream leaves that of the step without order",
        file=COMMUNICATOR,
        within="NcclWork.wait",
        old="self._order_launch()",
        new="pass",
        tests=(f"{FILE}::test_a_first_use_on_another_stream_orders_that_of_the_step",),
    ),
    Mutation(
        name="shards: a gather crosses the end of a capture",
        file=COMMUNICATOR,
        within="NcclCommunicator.all_gather_v",
        old="work.wait()  # in the capture",
        new="pass",
        tests=(f"{FILE}::test_a_step_can_be_captured",),
    ),
    Mutation(
        name="shards: a module does not wait for its parameters",
        file=ARRIVALS,
        within="Arrivals._before_forward",
        old="self._under_way[number].wait()",
        new="pass",
        tests=(OVERLAPPED,),
    ),
    Mutation(
        name="shards: a module waits for all parameters",
        file=ARRIVALS,
        within="Arrivals._before_forward",
        old="not torch.is_grad_enabled()",
        new="True",
        tests=(MODULES,),
    ),
    Mutation(
        name="shards: without grad a module waits for its own parameters alone",
        file=ARRIVALS,
        within="Arrivals._before_forward",
        old="not torch.is_grad_enabled()",
        new="False",
        tests=(MODULES,),
    ),
    Mutation(
        name="shards: zero_grad() waits for all parameters",
        file=ARRIVALS,
        within="Arriving.__torch_function__",
        old="func in _METADATA",
        new="False",
        tests=(MODULES,),
    ),
    Mutation(
        name="shards: what is done to a parameter outside modules does not wait",
        file=ARRIVALS,
        within="Arriving.__torch_function__",
        old="_wait_for(one)",
        new="one.__class__ = Parameter",
        tests=(USES,),
    ),
    Mutation(
        name="shards: a copy of a parameter is for ever on its way",
        file=ARRIVALS,
        within="Arriving.__deepcopy__",
        old=("_wait_for(self)\nreturn self.__deepcopy__(memo)"),
        new="return super().__deepcopy__(memo)",
        tests=(USES,),
    ),
    Mutation(
        name="shards: gradients of parameters that were not seen in use are reduced",
        file=SHARES,
        within="BucketShard.refuse_unseen",
        old="self._was_unseen and any(ready)",
        new="False",
        tests=(UNSEEN,),
    ),
    Mutation(
        name="shards: training goes on with parameters that did not arrive",
        file=ARRIVALS,
        within="Arrival.wait",
        old="optimizer.is_torn = True",
        new="pass",
        tests=(f"{FILE}::test_parameters_that_did_not_arrive_are_refused_until_refresh",),
    ),
)
