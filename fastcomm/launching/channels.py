"""Channels: send() and recv(), by which one rank passes tensors to another while the others take no
part.

A channel is what one rank sends to one other. It is a communicator of these two alone, which they
make at its first message: the sender is rank 0 there, the receiver rank 1, and a message is a
broadcast. So a message waits for no collective and for no other channel, and what goes wrong with
it ends as it does in a collective.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fastcomm.comm.collective import check_root
from fastcomm.comm.communicator import Work
from fastcomm.comm.standing import Standing, again
from fastcomm.comm.transport import Transport
from fastcomm.comm.words import has_aborted, has_closed, has_ended
from fastcomm.errors import FastcommError, PeerLostError
from fastcomm.postmortem.flight_recorder import FlightRecorder
from fastcomm.postmortem.script_end import start_thread, tell_at_end


class Channels:
    """All channels of one rank of a communicator. They end with it."""

    def __init__(self, comm: Transport, connect: Callable[[int, int], Transport]) -> None:
        """connect: makes the communicator of a channel, and calls look() of this while it waits."""
        self._connect = connect
        self._rank, self._processes = comm.rank, comm.processes
        self._standing = Standing()
        self._channels: dict[tuple[int, int], _Channel] = {}
        weakref.finalize(comm, self.end, aborts=True).atexit = False
        tell_at_end(self)

    def move(
        self, comm: Transport, tensor: Tensor, src: int, dst: int, *, async_op: bool
    ) -> Work | None:
        """This rank's part in a message from rank `src` to rank `dst`. See Communicator.send."""
        if src == comm.rank:
            name, argument, peer = "send()", "dst", dst
        else:
            name, argument, peer = "recv()", "src", src
        check_root(argument, peer, comm.world_size)
        if src == dst:
            raise ValueError(f"rank {src} cannot send to itself")
        comm.check_tensor(tensor)
        comm.refuse_capture(name)
        if dst == comm.rank:
            increment_version(tensor)  # also where the thread comes to it later
        channel = self._channels.get((src, dst))
        if channel is None:
            channel = self._channels[src, dst] = _Channel(
                src, dst, peer, partial(self._meet, src, dst), self._standing
            )
        return channel.move(tensor, async_op)

    def _meet(self, src: int, dst: int, tensor: Tensor) -> Transport:
        """Makes the communicator of a channel. Until then a dump shows that its message waits."""
        ends = self._processes[src], self._processes[dst]
        flight = FlightRecorder("", int(self._rank == dst), ends)
        flight.channel = src, dst
        flight.note("broadcast", tensor.dtype, tensor.numel(), 1)
        comm = self._connect(src, dst)
        comm.flight.channel = src, dst
        return comm

    def look(self) -> None:
        """Raises what ends a meeting: the communicator has ended on this rank."""
        if self._standing.failure is not None:
            raise again(self._standing.failure)

    def tell_of_end(self, has_raised: bool) -> None:
        """Those that have met tell of it themselves; none begins to meet."""
        if not self._standing.is_forked():
            self._standing.end(FastcommError(has_ended(self._rank)))
            for channel in self._channels.values():
                channel.leave()

    def end(self, aborts: bool) -> None:
        why = has_aborted(self._rank) if aborts else has_closed(self._rank)
        self._standing.end(FastcommError(why))
        for channel in self._channels.values():
            channel.end(aborts)


class _Channel:
    """One end of a channel. Its thread moves the messages that this rank does not wait for at once,
    and those behind them: over shared memory nothing but a call moves one, and the two ranks may
    have yet to meet.
    """

    def __init__(
        self, src: int, dst: int, peer: int, meet: Callable[[Tensor], Transport], of_all: Standing
    ) -> None:
        """of_all: the standing of all channels."""
        self._name = f"a message from rank {src} (here rank 0) to rank {dst} (here rank 1)"
        self._peer = peer
        self._meet, self._of_all = meet, of_all
        self._standing = Standing()  # of the meeting: it tells who writes dumps of failures
        self._comm: Transport | None = None
        self._newest: _Message | None = None
        self._queue: SimpleQueue[_Message | None] | None = None

    def move(self, tensor: Tensor, async_op: bool) -> Work | None:
        if self._is_idle() and not async_op:
            comm = self._communicator(tensor)
            with self.naming_ranks():
                return comm.broadcast(tensor)
        message = self._newest = _Message(self, tensor)
        if self._queue is None:
            self._queue = SimpleQueue()
            start_thread("fastcomm-channel", _launch_all, self._queue)
        self._queue.put(message)
        if async_op:
            return message
        message.wait()
        return None

    def launch(self, tensor: Tensor) -> Work:
        """On the thread."""
        comm = self._communicator(tensor)
        with self.naming_ranks():
            work = comm.broadcast(tensor, async_op=True)
            assert work is not None  # for the type checker
            if not comm.has_streams:
                work.wait()
        return work

    def _is_idle(self) -> bool:
        """Whether the thread has nothing left to do: it takes one message after the other."""
        return self._newest is None or self._newest.is_launched

    def _communicator(self, first: Tensor) -> Transport:
        """first: what the first message passes on."""
        if self._standing.failure is not None:
            raise again(self._standing.failure)
        if self._comm is None:
            try:
                self._comm = self._meet(first)
            except FastcommError as error:
                self._standing.end(error)
                raise
            except BaseException as error:  # of a signal handler, say
                why = f"{error!r} has interrupted the first message"
                self._standing.end(FastcommError(why))
                raise
            if self._of_all.failure is not None:  # while the ranks met
                self._comm.abort()
        return self._comm

    @contextlib.contextmanager
    def naming_ranks(self) -> Iterator[None]:
        """An error of the channel's communicator says which ranks it numbers 0 and 1."""
        try:
            yield
        except PeerLostError as error:
            ranks = [self._peer] if error.ranks else []
            raise PeerLostError(f"{self._name}: {error}", ranks) from error
        except FastcommError as error:
            raise type(error)(f"{self._name}: {error}") from error

    def leave(self) -> None:
        """Lets the thread end behind its messages."""
        if self._queue is not None:
            self._queue.put(None)

    def end(self, aborts: bool) -> None:
        self.leave()
        if self._comm is None:
            return
        if aborts or not self._is_idle():  # close() would wait for the thread's message
            self._comm.abort()
        else:
            self._comm.close()


class _Message(Work):
    """A message that its rank does not wait for at once."""

    def __init__(self, channel: _Channel, tensor: Tensor) -> None:
        self._channel, self._tensor = channel, tensor
        self._work: Future[Work] = Future()
        is_on_stream = tensor.device.type == "cuda"
        self._stream = torch.cuda.current_stream(tensor.device) if is_on_stream else None

    def launch(self) -> None:
        """On the channel's thread."""
        try:
            with torch.cuda.stream(self._stream):
                self._work.set_result(self._channel.launch(self._tensor))
        except BaseException as error:
            self._work.set_exception(error)

    @property
    def is_launched(self) -> bool:
        """Or has failed. Without streams it is in place then."""
        return self._work.done()

    def wait(self) -> None:
        work = self._work.result()
        with self._channel.naming_ranks():
            work.wait()

    def is_completed(self) -> bool:
        if not self.is_launched:
            return False
        return self._work.exception() is not None or self._work.result().is_completed()


def _launch_all(queue: SimpleQueue[_Message | None]) -> None:
    """What a channel's thread does until the channel ends. In between it holds no message."""
    while (message := queue.get()) is not None:
        message.launch()
        del message
