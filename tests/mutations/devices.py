"""Every place where transports/nccl and transports/cuda make the communicator's device the calling
thread's, and where they give the thread its own back, left out one at a time.
"""

from __future__ import annotations

from tests.mutations.mutation import Mutation

BUCKET = "fastcomm/transports/nccl/bucket.pyx"
COMMUNICATOR = "fastcomm/transports/nccl/communicator.pyx"
DRIVER = "fastcomm/transports/cuda/driver.pyx"
GRAPHS = "fastcomm/transports/cuda/driver.pyx"
MULTI_TENSOR = "fastcomm/transports/cuda/multi_tensor.pyx"

DEVICES = "tests/transports/nccl/test_devices.py"
EVERYWHERE = (
    f"{DEVICES}::"
    "test_every_call_works_on_the_communicator_s_device_and_leaves_the_caller_on_its_own"
)

# What is done there, the function, and how it names the device.
PLACES = (
    ("a bucket is launched", BUCKET, "NcclBucket._launch_on", "self.link.cuda"),
    ("a collective is launched", COMMUNICATOR, "_launch_on", "lane.device"),
    ("a capture is looked for", GRAPHS, "CapturedGraphs.note_capture", "self.device"),
    ("an event is made", DRIVER, "Event.__cinit__", "device"),
    ("an event is recorded", DRIVER, "Device.record", "self"),
    ("a stream is ordered", DRIVER, "Device.order_after", "self"),
    ("a device is selected", DRIVER, "Device.selected", "self"),
    ("a kernel is launched", MULTI_TENSOR, "MultiTensor._launch", "self.device"),
)


def _mutations_of(what: str, file: str, within: str, device: str) -> tuple[Mutation, ...]:
    return (
        Mutation(
            name=f"device: {what} on the caller's device",
            file=file,
            within=within,
            old=f"before = {device}.enter()",
            new=f"before = {device}.context",
            tests=(EVERYWHERE,),
        ),
        Mutation(
            name=f"device: where {what} the caller is kept",
            file=file,
            within=within,
            old=f"{device}.leave(before)",
            new="pass",
            tests=(EVERYWHERE,),
        ),
    )


MUTATIONS = (
    *(mutation for place in PLACES for mutation in _mutations_of(*place)),
    Mutation(
        name="device: a thread without a device keeps the communicator's",
        file=DRIVER,
        within="Device.leave",
        old="if before != self.context:",
        new="if before != self.context and before != NULL:",
        tests=(EVERYWHERE,),
    ),
)
