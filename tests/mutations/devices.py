"""Every place where fastcomm/nccl and fastcomm/cuda make the communicator's device the calling
thread's, and where they give the thread its own back, left out one at a time.
"""

from __future__ import annotations

from tests.mutations.mutation import Mutation

BUCKET = "fastcomm/nccl/bucket.pyx"
COMMUNICATOR = "fastcomm/nccl/communicator.pyx"
LANE = "fastcomm/nccl/lane.pyx"
LAUNCHES = "fastcomm/nccl/launches.pyx"
LINK = "fastcomm/nccl/link.pyx"
MEMORY = "fastcomm/nccl/memory.pyx"
DRIVER = "fastcomm/cuda/driver.pyx"
MULTI_TENSOR = "fastcomm/cuda/multi_tensor.pyx"

DEVICES = "tests/nccl/test_devices.py"
EVERYWHERE = (
    f"{DEVICES}::"
    "test_every_call_works_on_the_communicator_s_device_and_leaves_the_caller_on_its_own"
)

MUTATIONS = (
    Mutation(
        name="device: a bucket is launched on the caller's device",
        file=BUCKET,
        old="before = link.cuda.enter()",
        new="before = link.cuda.context",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: a bucket's launch keeps the caller",
        file=BUCKET,
        old="            link.cuda.leave(before)\n        work.bucket",
        new="            pass\n        work.bucket",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: a bucket is gathered on the caller's device",
        file=BUCKET,
        old="check_usable()\n        before = self.link.cuda.enter()",
        new="check_usable()\n        before = self.link.cuda.context",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: a bucket's gathering keeps the caller",
        file=BUCKET,
        old="            self.link.cuda.leave(before)\n"
        "        return 0\n"
        "\n"
        "    cdef int _order_after_last",
        new="            pass\n        return 0\n\n    cdef int _order_after_last",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: a bucket is measured on the caller's device",
        file=BUCKET,
        old="cdef CUcontext before = self.link.cuda.enter()",
        new="cdef CUcontext before = self.link.cuda.context",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: a bucket's measuring keeps the caller",
        file=BUCKET,
        old="            self.link.cuda.leave(before)\n        return 0\n\n\ncdef class",
        new="            pass\n        return 0\n\n\ncdef class",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: a collective is launched on the caller's device",
        file=COMMUNICATOR,
        old="cdef CUcontext before = self.cuda.enter()",
        new="cdef CUcontext before = self.cuda.context",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: a collective keeps the caller",
        file=COMMUNICATOR,
        old="            self.cuda.leave(before)\n        return is_captured",
        new="            pass\n        return is_captured",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: a division is recorded on the caller's device",
        file=COMMUNICATOR,
        old="with cuda.selected():\n                self.divided",
        new="if True:\n                self.divided",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: a capture is looked for on the caller's device",
        file=COMMUNICATOR,
        old="with self.cuda.selected():  # a default",
        new="if True:  # a default",
        tests=("tests/nccl/test_launches.py",),
    ),
    Mutation(
        name="device: a bucket is made on the caller's device",
        file=COMMUNICATOR,
        old="with self.cuda.selected():\n            return NcclBucket",
        new="if True:\n            return NcclBucket",
        equivalent="whatever it is made of selects the device itself",
    ),
    Mutation(
        name="device: NCCL is called on no device",
        file=LANE,
        old="            self.device.enter()\n            self.make()",
        new="            self.make()",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: a ticket is made on the caller's device",
        file=LAUNCHES,
        old="cdef CUcontext before = self.cuda.enter()",
        new="cdef CUcontext before = self.cuda.context",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: a new ticket keeps the caller",
        file=LAUNCHES,
        old="            self.cuda.leave(before)\n        self.tickets",
        new="            pass\n        self.tickets",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: a lane is made on the caller's device",
        file=LINK,
        old="with self.cuda.selected():\n            lane",
        new="if True:\n            lane",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: the watchdog is on no device",
        file=LINK,
        old="        self.cuda.enter()\n",
        new="",
        equivalent="it only queries events, for which the driver wants no context",
    ),
    Mutation(
        name="device: memory is allocated on the caller's device",
        file=MEMORY,
        old="before = self.device.enter()\n"
        "        try:\n"
        "            with nogil:\n"
        "                check(nccl.mem_alloc",
        new="before = self.device.context\n"
        "        try:\n"
        "            with nogil:\n"
        "                check(nccl.mem_alloc",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: an allocation keeps the caller",
        file=MEMORY,
        old="            self.device.leave(before)\n        allocation.nbytes",
        new="            pass\n        allocation.nbytes",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: memory is freed on the caller's device",
        file=MEMORY,
        old="            before = self.device.enter()\n"
        "            try:\n"
        "                with nogil:  #",
        new="            before = self.device.context\n"
        "            try:\n"
        "                with nogil:  #",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: memory that is freed keeps the caller",
        file=MEMORY,
        old="                free(allocation)\n                self.device.leave(before)",
        new="                free(allocation)",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: wait() is for the caller's device",
        file=DRIVER,
        old="            before = self.enter()\n",
        new="            before = self.context\n",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: wait() keeps the caller",
        file=DRIVER,
        old="            self.leave(before)\n            check(code",
        new="            check(code",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: a thread without a device keeps the communicator's",
        file=DRIVER,
        old="        if before != self.context:\n            driver.set_context(before)",
        new="        if before != self.context and before != NULL:\n"
        "            driver.set_context(before)",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: a device is selected that is the caller's",
        file=DRIVER,
        old="cdef CUcontext before = self.enter()\n        try:\n            yield",
        new="cdef CUcontext before = self.context\n        try:\n            yield",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: a device stays selected",
        file=DRIVER,
        old="            yield\n        finally:\n            self.leave(before)",
        new="            yield\n        finally:\n            pass",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: the caller's device is synchronised",
        file=DRIVER,
        old="cdef CUcontext before = self.enter()\n        try:\n            with nogil",
        new="cdef CUcontext before = self.context\n        try:\n            with nogil",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: a device that is synchronised keeps the caller",
        file=DRIVER,
        old='                check(driver.synchronize(), b"cuCtxSynchronize")\n'
        "        finally:\n"
        "            self.leave(before)",
        new='                check(driver.synchronize(), b"cuCtxSynchronize")\n'
        "        finally:\n"
        "            pass",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: producers are on the caller's device",
        file=DRIVER,
        old="with device.selected():\n            self.side",
        new="if True:\n            self.side",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: producers are waited for on the caller's device",
        file=DRIVER,
        old="with self.device.selected():\n            self.order_before",
        new="if True:\n            self.order_before",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: garbage is not destroyed by a thread without a device",
        file=DRIVER,
        old="    if before == NULL:\n        driver.set_context(context)\n",
        new="",
        tests=(f"{DEVICES}::test_what_a_thread_without_a_context_collects_is_destroyed",),
    ),
    Mutation(
        name="device: whoever destroys garbage stays on its device",
        file=DRIVER,
        old="    destroy(handle)\n    if before == NULL:\n        driver.set_context(NULL)",
        new="    destroy(handle)",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: kernels are looked for on the caller's device",
        file=MULTI_TENSOR,
        old="with device.selected():\n            for i",
        new="if True:\n            for i",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: kernels are loaded on the caller's device",
        file=MULTI_TENSOR,
        old="cdef CUcontext before = device.enter()",
        new="cdef CUcontext before = device.context",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: kernels that are loaded keep the caller",
        file=MULTI_TENSOR,
        old="            device.leave(before)\n        if code",
        new="            pass\n        if code",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: flatten() runs on the caller's device",
        file=MULTI_TENSOR,
        old="before = self.device.enter()\n"
        "        try:\n"
        "            with nogil:\n"
        "                self.flatten_on",
        new="before = self.device.context\n"
        "        try:\n"
        "            with nogil:\n"
        "                self.flatten_on",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: flatten() keeps the caller",
        file=MULTI_TENSOR,
        old="                self.flatten_on(current, data, scale, by)\n"
        "        finally:\n"
        "            self.device.leave(before)",
        new="                self.flatten_on(current, data, scale, by)\n"
        "        finally:\n"
        "            pass",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: unflatten() runs on the caller's device",
        file=MULTI_TENSOR,
        old="before = self.device.enter()\n"
        "        try:\n"
        "            with nogil:\n"
        "                self.unflatten_on",
        new="before = self.device.context\n"
        "        try:\n"
        "            with nogil:\n"
        "                self.unflatten_on",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: unflatten() keeps the caller",
        file=MULTI_TENSOR,
        old="                self.unflatten_on(current, data, scale, with_stats)\n"
        "        finally:\n"
        "            self.device.leave(before)",
        new="                self.unflatten_on(current, data, scale, with_stats)\n"
        "        finally:\n"
        "            pass",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: norm() runs on the caller's device",
        file=MULTI_TENSOR,
        old="before = self.device.enter()\n"
        "        try:\n"
        "            with nogil:\n"
        "                self.norm_on",
        new="before = self.device.context\n"
        "        try:\n"
        "            with nogil:\n"
        "                self.norm_on",
        tests=(EVERYWHERE,),
    ),
    Mutation(
        name="device: norm() keeps the caller",
        file=MULTI_TENSOR,
        old="                self.norm_on(current)\n"
        "        finally:\n"
        "            self.device.leave(before)",
        new="                self.norm_on(current)\n        finally:\n            pass",
        tests=(EVERYWHERE,),
    ),
)
