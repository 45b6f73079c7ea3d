"""A transport that moves nothing, for what the rest of a step takes: bench/step.py's ways "python"
and "wait".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastcomm.comm.transport import BoundBucket, BucketWork, Transport


class IdleWork(BucketWork):
    """Of a bucket that is not reduced. wait: for the other ranks, or for nobody."""

    def __init__(self, n: int, wait: Callable[[], object]) -> None:
        self._n, self._wait = n, wait

    def wait(self) -> None:
        self._wait()

    def is_completed(self) -> bool:
        return True

    def present(self) -> list[bool]:
        return [True] * self._n


class IdleBucket(BoundBucket):
    """Takes the gradients as the shared-memory bucket does, and leaves those of some size where
    they lie: it never launches.
    """

    def __init__(self, bucket: BoundBucket, n: int, wait: Callable[[], object]) -> None:
        self._bucket, self._n, self._wait = bucket, n, wait
        self._posted: BucketWork | None = None

    @property
    def posted(self) -> BucketWork | None:
        return self._posted

    def gather(self, parameters: list[Any]) -> list[int]:
        self._posted = None
        return self._bucket.gather(parameters)

    def launch(self, op: str, missing: list[int], *rest: Any, **named: Any) -> BucketWork:
        self._posted = IdleWork(self._n, self._wait)
        return self._posted


class IdleTransport:
    """The communicator, but for the reduction of buckets. meets: whether the ranks wait for each
    other at the end of backward, where the reducer waits for the last bucket.
    """

    def __init__(self, comm: Any, meets: bool) -> None:
        self._comm, self._meets = comm, meets
        self._labels: list[int] = []
        self.left_in_backward = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def bind_bucket(self, flat: Any, views: list[Any], *args: Any, **named: Any) -> BoundBucket:
        label = named["label"]
        self._labels.append(label)

        def wait() -> None:
            if self._meets and label == self._labels[-1]:
                self._comm.barrier()

        bucket = self._comm.bind_bucket(flat, views, *args, **named)
        return IdleBucket(bucket, len(views), wait)


Transport.register(IdleTransport)
