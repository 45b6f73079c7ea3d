"""SparseBucket: all gradients of a model that are sparse (of nn.Embedding(sparse=True)). Every rank
gets the rows of all ranks, and adds them.

No flat buffer holds these gradients, and the number of rows differs by rank and step. So the ranks
first make each other an Offer: what they bring. The host waits for the offers, which is why the
bucket is launched at the end of backward. They tell all ranks alike which gradients come out.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fastcomm.comm import words
from fastcomm.comm.collective import HALVES
from fastcomm.comm.communicator import Work
from fastcomm.comm.objects import gather_numbers
from fastcomm.comm.transport import BucketWork, Part, Transport
from fastcomm.control.announcement import Call, Verdict, conclude
from fastcomm.errors import FastcommError, MismatchError
from fastcomm.reducer.bucket import Bucket, Inspection
from fastcomm.reducer.layout import values_of
from fastcomm.reducer.validation import grad_dtype, misfit
from fastcomm.transports.cuda.driver import Producers

_ALIGNMENT = 64  # bytes, of what each rank sends
_INDEX_NBYTES = 8


class Offer(NamedTuple):
    """What one rank brings.

    call: with op, fingerprint, weight and vote; its numel means nothing.
    n_rows: by slot, how many rows its gradient has; 0 where there is none.
    is_present: by slot, whether a gradient is of this round, and not only left from an earlier one.
    """

    call: Call
    n_rows: list[int]
    is_present: list[int]

    def numbers(self) -> list[int]:
        """Returns the offer as it travels; of() is the way back."""
        return [*array("q", self.call.packed()), *self.n_rows, *self.is_present]

    @staticmethod
    def of(numbers: Sequence[int], likes: Sequence[Tensor]) -> Offer:
        """The offer of these numbers. Raises ValueError if they are of none for gradients like
        these.
        """
        middle = len(numbers) - len(likes)
        begin = middle - len(likes)  # the call comes first
        call = Call.of(array("q", numbers[:begin]).tobytes(), 1)
        n_rows, is_present = list(numbers[begin:middle]), list(numbers[middle:])
        if not all(0 <= some <= len(like) for some, like in zip(n_rows, likes, strict=True)):
            raise ValueError(f"{numbers} is no offer of gradients")
        return Offer(call, n_rows, is_present)


class SparseBucket(Bucket):
    """All sparse gradients of a reducer. Between two rounds a gradient is one of `views`, the
    results of the last round, a tensor of the user's own, or missing. Values travel in their own
    dtype, or one that holds all of theirs, whatever the reducer's wire_dtype is.
    """

    waits_in_launch = True

    def __init__(self, label: int, named: Sequence[tuple[str, Parameter]], comm: Transport) -> None:
        own = [parameter for _, parameter in named]
        self._label, self._comm = label, comm
        self.indices = list(range(len(own)))
        self._likes = [torch.empty_like(p, dtype=grad_dtype(p), device="meta") for p in own]
        dtypes = [like.dtype for like in self._likes]
        self._wire_dtype = functools.reduce(torch.promote_types, dtypes)
        self.dtype = torch.promote_types(self._wire_dtype, torch.float32)
        # how long messages are is not known
        self.flat = torch.empty(0, dtype=self.dtype, device=comm.device)
        self._hold(named, [self.flat.new_empty(1) for _ in own], comm)
        self._producers = Producers(comm.cuda) if comm.has_streams else None
        self.note_stream = None if self._producers is None else self._producers.note
        # of messages, kept from round to round
        self._memory = torch.empty(0, dtype=torch.uint8, device=comm.device)
        self.reset()

    def reset(self) -> None:
        self._work: _SparseWork | None = None
        self._results: list[Tensor | None] | None = None
        super().reset()

    @property
    def is_launched(self) -> bool:
        return self._work is not None

    # -- a round -----------------------------------------------------------------------------------

    def launch(
        self,
        op: str,
        fingerprint: int,
        part: Part,
        *,
        keeps_graph: bool,
        inspect: Inspection | None,
    ) -> None:
        """Waits for what the other ranks bring, and sends this rank's rows."""
        self._refuse_capture()
        if self._producers is not None:
            self._producers.order_before_current()
        gradients = self._brought(part, keeps_graph)
        if inspect is not None:
            self._show(gradients, inspect)
        rows = [None if gradient is None else rows_of(gradient) for gradient in gradients]
        own = Offer(
            Call("all_reduce", op=op, fingerprint=fingerprint, part=part),
            [0 if one is None else len(one.indices) for one in rows],
            [i not in self._untouched for i in range(len(gradients))],
        )
        self._take_part(own, rows)
        if self._producers is not None:
            for gradient in gradients:
                if gradient is not None:
                    self._producers.keep(gradient)
            self._producers.clear()

    def _show(self, gradients: Sequence[Tensor | None], inspect: Inspection) -> None:
        """Those that a backward has made in this round, and that have rows."""
        names, values = [], []
        for i, gradient in enumerate(gradients):
            if gradient is not None and i not in self._untouched and values_of(gradient).numel():
                names.append(self.names[i])
                values.append(values_of(gradient))
        inspect(names, values)

    def launch_vote(self, op: str, fingerprint: int, part: Part) -> None:
        """The offer carries the vote, over every transport."""
        n = len(self.names)
        vote = Call("all_reduce", op=op, fingerprint=fingerprint, part=part)
        own = Offer(vote, [0] * n, [False] * n)
        self._take_part(own, [None] * n)

    def _take_part(self, own: Offer, rows: Sequence[Rows | None]) -> None:
        try:
            work = _SparseWork(*self._exchange(own))
            self._send(work, rows)
            self._is_gathered, self._work = True, work
        except FastcommError as error:
            raise self._explained(error) from error.__cause__

    def _refuse_capture(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise FastcommError(
                f"the gradient of parameter {self.names[0]} is sparse, and how many rows it has is "
                "waited for, which cannot be captured in a CUDA graph: use sparse=False"
            )

    def _brought(self, part: Part, keeps_graph: bool) -> list[Tensor | None]:
        """The gradients that this rank brings, by slot, and among them those that no backward has
        touched: as in a bucket of dense ones, the mean of what all ranks have stays what it is.
        """
        taking_part = self._taking_part(part, keeps_graph)
        gradients: list[Tensor | None] = []
        for i, parameter in enumerate(self.parameters):
            gradient = None if parameter is None else parameter.grad
            if taking_part[i] is None or gradient is None:
                if self.ready[i] and part.weight:
                    self._refuse_dropped_in_hook(i)
                self._untouched[i] = gradient
            if parameter is not None and gradient is not None:
                self._refuse_misfit(i, parameter, gradient)
            gradients.append(gradient)
        return gradients

    def _refuse_misfit(self, i: int, parameter: Parameter, gradient: Tensor) -> None:
        like = self._likes[i]
        trouble = misfit(parameter, gradient, like, self._comm.device)
        if trouble is None and gradient.requires_grad:
            trouble = "is to be differentiated (create_graph=True): use sparse=False"
        if trouble is None and not gradient.is_sparse:
            trouble = "is dense, and was to be sparse, which tied weights are not: use sparse=False"
        if trouble is None and gradient.sparse_dim() != 1:
            trouble = f"has {gradient.sparse_dim()} sparse dimensions: it must be one of rows"
        if trouble is not None:
            raise FastcommError(f"the gradient of parameter {self.names[i]} {trouble}")

    def _exchange(self, own: Offer) -> tuple[list[Offer], Verdict]:
        """Every rank's offer, and what all conclude. Raises MismatchError, on every rank, if their
        ops or steps differ.
        """
        table = gather_numbers(self._comm, own.numbers())
        offers = []
        for rank, row in enumerate(table):
            try:
                offers.append(Offer.of(row, self._likes))
            except ValueError as error:
                raise FastcommError(f"rank {rank} has sent what cannot be: {error}") from error
        verdict = conclude([offer.call for offer in offers])
        if not verdict.is_agreed:
            calls = [
                words.Called("", one.call.op, label=1, fingerprint=one.call.fingerprint)
                for one in offers
            ]
            what = words.in_words(dict(enumerate(calls)))
            mismatch = MismatchError(f"the ranks reduce sparse gradients differently: {what}")
            mismatch.differs = words.difference(calls)
            raise mismatch
        return offers, verdict

    def _send(self, work: _SparseWork, rows: Sequence[Rows | None]) -> None:
        """Sends this rank's rows to all others."""
        widths = {  # by slot, of a row of the result
            i: like.shape[1:].numel() for i, like in enumerate(self._likes) if work.present()[i]
        }
        sizes = [[(one.n_rows[i], width) for i, width in widths.items()] for one in work.offers]
        bounds = [0]
        for own in sizes:
            n_lines = math.ceil(nbytes_of(own, self._wire_dtype) / _ALIGNMENT)
            bounds.append(bounds[-1] + n_lines * _ALIGNMENT)
        message = self._message(bounds[-1])
        for begin, own in zip(bounds, sizes, strict=False):
            places = rows_in(message[begin:], own, self._wire_dtype)
            work.rows.append(dict(zip(widths, places, strict=True)))
        for i, place in work.rows[self._comm.rank].items():
            mine = rows[i]
            if mine is not None:
                place.indices.copy_(mine.indices)
                place.values.copy_(mine.values)
        if bounds[-1]:
            work.sending = self._comm.all_gather_v(message, tuple(bounds), label=self._label)

    def _message(self, nbytes: int) -> Tensor:
        """Memory for the message of all ranks, with room for some more rows later."""
        if self._memory.numel() < nbytes:
            self._memory = self._memory[:0].clone()  # so that old and new do not exist together
            self._memory = self._comm.empty(nbytes + nbytes // 4, dtype=torch.uint8)
        return self._memory[:nbytes]

    def finish(self) -> BucketWork:
        """Waits for the others' rows, and adds them."""
        if self._work is None:
            raise RuntimeError("finish() before launch()")
        try:
            self._work.wait()
        except FastcommError as error:
            raise self._explained(error) from error.__cause__
        if self._results is None:
            self._results = [self._result(self._work, i) for i in range(len(self.names))]
            if self._producers is not None:  # the next round writes where this stream reads
                self._producers.note()
        return self._work

    def _result(self, work: _SparseWork, i: int) -> Tensor | None:
        if not work.present()[i]:
            return None
        call, factors = work.offers[0].call, work.verdict.factors
        divisor = self._comm.world_size if call.op == "mean" else 1
        rows = added([own[i] for own in work.rows], factors, divisor)
        return sparse_of(rows, self._likes[i])

    def settle(self) -> None:
        left = []
        for i, result in enumerate(self._results or ()):
            parameter = self._references[i]()
            if result is None:
                left.append(i)
            elif parameter is not None:
                parameter.grad = self.views[i] = result
                self.gradients.note_view(i)
        self.gradients.note_round(left)

    # -- after it ----------------------------------------------------------------------------------

    def is_skipped(self) -> bool:
        return self._work is not None and self._work.is_skipped()

    def n_nonfinite_in_result(self) -> Tensor:
        total = torch.zeros((), dtype=torch.int64, device=self._comm.device)
        for result in self._results or ():
            if result is not None:
                total += (~values_of(result).isfinite()).sum()
        return total

    def square_sum(self) -> Tensor:
        return self._measured(lambda values: values.double().square().sum(), torch.float64)

    def n_nonfinite_now(self) -> Tensor:
        return self._measured(lambda values: (~values.isfinite()).sum(), torch.int64)

    def _measured(self, measure: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        """The sum of what `measure` says of each gradient's values."""
        total = torch.zeros((), dtype=dtype, device=self._comm.device)
        for parameter in self.parameters:
            if parameter is not None and parameter.grad is not None:
                total += measure(values_of(parameter.grad))
        return total

    def scale_(self, factor: Tensor) -> None:
        for parameter in self.parameters:
            if parameter is not None and parameter.grad is not None:
                grad = parameter.grad
                (grad._values() if grad.is_sparse else grad).mul_(factor)


class _SparseWork(BucketWork):
    """One reduction of a SparseBucket.

    rows: by rank, and then by slot, what it sends.
    """

    def __init__(self, offers: list[Offer], verdict: Verdict) -> None:
        self.offers, self.verdict = offers, verdict
        slots = zip(*(offer.is_present for offer in offers), strict=True)
        self._present = [any(ranks) and not verdict.is_skipped for ranks in slots]
        self.rows: list[dict[int, Rows]] = []
        self.sending: Work | None = None

    def is_skipped(self) -> bool:
        return self.verdict.is_skipped

    def wait(self) -> None:
        if self.sending is not None:
            self.sending.wait()

    def is_completed(self) -> bool:
        return self.sending is None or self.sending.is_completed()

    def present(self) -> list[bool]:
        return self._present


# ---- rows ---------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The rows of one gradient. indices: ascending, each once, int64 of shape (n,). values: of
    shape (n, numbers in a row).
    """

    indices: Tensor
    values: Tensor


def rows_of(gradient: Tensor) -> Rows:
    """Reads a sparse tensor. Entries of the same row are added."""
    gradient = gradient.detach().coalesce()
    values = gradient.values()
    return Rows(gradient.indices()[0], values.reshape(len(values), values.shape[1:].numel()))


def sparse_of(rows: Rows, like: Tensor) -> Tensor:
    """The coalesced sparse tensor of these rows, of like's shape and dtype."""
    return torch.sparse_coo_tensor(
        rows.indices[None],
        rows.values.reshape(len(rows.indices), *like.shape[1:]),
        like.shape,
        dtype=like.dtype,
        device=rows.values.device,
        is_coalesced=True,
        check_invariants=False,
    )


def nbytes_of(sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> int:
    """How long a rank's message is. sizes: of each gradient, how many rows, and how many numbers
    in a row. dtype: on the wire.
    """
    return sum(n * (_INDEX_NBYTES + width * dtype.itemsize) for n, width in sizes)


def rows_in(message: Tensor, sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[Rows]:
    """The rows of each gradient, on the memory of a message: all indices, and then all values."""
    middle = sum(n for n, _ in sizes) * _INDEX_NBYTES
    indices = message[:middle].view(torch.int64).split([n for n, _ in sizes])
    values = message[middle : nbytes_of(sizes, dtype)].view(dtype)
    parts = values.split([n * width for n, width in sizes])
    rows = zip(indices, parts, sizes, strict=True)
    return [Rows(index, part.view(size)) for index, part, size in rows]


def added(parts: Sequence[Rows], factors: Sequence[float] | None, divisor: int) -> Rows:
    """The sum of all ranks' rows, in float32 if they are 16-bit floats. Each row is added in the
    order of the ranks, so that it has the same bits everywhere.

    parts, factors: by rank. divisor: of the sum.
    """
    indices, places = torch.unique(torch.cat([part.indices for part in parts]), return_inverse=True)
    like = parts[0].values
    wide = torch.float32 if like.dtype in HALVES else like.dtype
    total = torch.zeros(len(indices), like.shape[1], dtype=wide, device=like.device)
    begin = 0
    for i, part in enumerate(parts):
        end = begin + len(part.indices)
        factor = 1 if factors is None else factors[i]
        # no row comes twice from one rank, so threads of a device do not race for it
        total.index_add_(0, places[begin:end], part.values.to(wide), alpha=factor)
        begin = end
    return Rows(indices, total if divisor == 1 else total.div_(divisor))
