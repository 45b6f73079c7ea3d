"""One bucket: a flat buffer, the gradients that are views of it, how many of them are ready, its
launch and its completion.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from fastcomm.comm.collective import as_pairs
from fastcomm.comm.flat_buffers import inside
from fastcomm.comm.transport import BoundBucket, BucketWork, Part, Transport
from fastcomm.comm.words import OTHERS_GRADIENT, advice_on_bucket
from fastcomm.errors import FastcommError, MismatchError, add_to_first_line
from fastcomm.reducer.autograd import is_hooked_behind
from fastcomm.reducer.gradients import Gradients, checksum
from fastcomm.reducer.hooks import Counter, GradientHook
from fastcomm.reducer.layout import BucketLayout, strides_of, view_of
from fastcomm.reducer.validation import grad_dtype, misfit_in_slot

if TYPE_CHECKING:
    from fastcomm.reducer.features.shards import BucketShard

# Gets the names of parameters, and their gradients.
Inspection = Callable[[Sequence[str], Sequence[Tensor]], None]


class Bucket(Counter):
    """Gradients that are reduced together. Between two rounds a gradient is a view of `flat`, a
    tensor of the user's own, or missing.
    """

    step_checksum = 0  # of what the last step has made of the parameters; 0: none is compared
    note_stream: Callable[[], None] | None  # a gradient was produced on the current stream
    waits_in_launch = False  # for the other ranks, so that it is launched at the end of backward

    def __init__(
        self,
        comm: Transport,
        layout: BucketLayout,
        named: Sequence[tuple[str, Parameter]],
        bind: Callable[..., BoundBucket],
        *,
        numel: int,
        is_copied: bool,
    ) -> None:
        """named: the parameters, among which the layout has chosen. bind: makes what reduces the
        flat buffer, of that, the gradients in it, and their offsets. numel: of the flat buffer,
        without what is behind the gradients. is_copied: a copy travels, in another dtype.
        """
        own = [named[slot.index] for slot in layout.slots]
        self.dtype = layout.dtype  # of the flat buffer, in which complex gradients lie as pairs
        self.numel = numel  # of the flat buffer, as far as it holds gradients
        whole = numel + len(own)  # behind the gradients: their used mask
        if is_copied:
            self.flat = torch.zeros(whole, dtype=self.dtype, device=comm.device)
        else:
            self.flat = comm.empty(whole, dtype=self.dtype).zero_()
        offsets = [slot.offset for slot in layout.slots]
        self.geometries = [
            (offset, p.size(), strides_of(p)) for offset, (_, p) in zip(offsets, own, strict=True)
        ]
        self._dtypes = [grad_dtype(p) for _, p in own]
        self.indices = [slot.index for slot in layout.slots]
        self._hold(own, [self._view(i) for i in range(len(own))], comm)
        self._bound = bind(self.flat, self.views, offsets)
        self.note_stream = self._bound.note_stream if comm.has_streams else None

    def _hold(
        self, named: Sequence[tuple[str, Parameter]], views: list[Tensor], comm: Transport
    ) -> None:
        """Take note of the parameters, and of where their gradients will lie."""
        # The hooks on the parameters keep the reducer and its buckets alive. Python could not
        # collect a cycle through them.
        self._references = [weakref.ref(parameter) for _, parameter in named]
        self.names = [name for name, _ in named]
        self.views = views
        self.gradients = Gradients(self._references, views)
        self.shard: BucketShard | None = None  # of a model that a ShardedOptimizer steps
        self._has_streams = comm.has_streams
        self._is_gathered = False  # in this round
        # Gradients of parameters that got none in this backward, kept in case no other rank has got
        # one either.
        self._untouched: dict[int, Tensor | None] = {}
        # gradients that can themselves be differentiated, and stay in .grad: settle() puts the
        # values there
        self._staying: dict[int, Tensor] = {}
        self.expect_gradients(len(named))

    def _view(self, i: int) -> Tensor:
        return view_of(self.flat, *self.geometries[i], self._dtypes[i])

    @property
    def parameters(self) -> list[Parameter | None]:
        """The parameters by slot. None stands for one that is gone, with its model."""
        return self.gradients.parameters()

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """The names and parameters of those that are not gone."""
        pairs = zip(self.names, self.parameters, strict=True)
        return [(name, parameter) for name, parameter in pairs if parameter is not None]

    def start_counting(self) -> None:
        """Let the reduction count, where it can, for n_nonfinite_in_result()."""
        self._bound.count_results(False)

    def note_step(self, n_rounds: int) -> None:
        """Notes a few elements of the parameters just stepped, which the next launch compares.
        n_rounds: how many have ended, which chooses the elements.
        """
        self.step_checksum = checksum(self._references, n_rounds)

    @property
    def is_launched(self) -> bool:
        """Whether it is posted in this round: from then on the other ranks count on this one."""
        return self._is_gathered and self._bound.posted is not None

    def count_all(self) -> None:
        """Every gradient there is takes part in the next launch."""
        self.n_pending = 0

    def launch(
        self,
        op: str,
        fingerprint: int,
        part: Part,
        *,
        keeps_graph: bool,
        inspect: Inspection | None,
    ) -> None:
        """Moves the gradients into the flat buffer, of which they are views from here on, and
        starts its reduction. fingerprint, part: see BoundBucket.launch. inspect: is shown the
        gradients that take part, before they are reduced.
        """
        self._remake_views()
        taking_part = self._taking_part(part, keeps_graph)
        if keeps_graph:
            self._set_graphs_aside(taking_part)
        own = _gradients_of(taking_part) if inspect is not None else []
        missing = self._gather(taking_part)
        self._is_gathered = True
        if inspect is not None:
            inspect([self.names[i] for i, _ in own], [gradient for _, gradient in own])
        for i in missing:
            if self.ready[i] and part.weight:
                self._refuse_dropped_in_hook(i)
            self._fill_missing(i)
        increment_version(self.views)  # a graph may have saved one that an earlier round has left
        try:
            self._bound.launch(op, missing, fingerprint, part)
        except MismatchError as error:  # the others have posted something else already
            raise self._explained(error) from error.__cause__

    def _remake_views(self) -> None:
        """After parameter.grad.data = ... some views lie on the user's memory. To be called before
        a gradient is compared with its view: a gradient that is the view is then in its slot.
        """
        for i in self.gradients.give_up_displaced():
            self.views[i] = self._view(i)

    def launch_vote(self, op: str, fingerprint: int, part: Part) -> None:
        """Takes part without any gradient, as all ranks will drop this round."""
        missing = self._bound.gather([None] * len(self.views))
        self._is_gathered = True
        self._bound.launch(op, missing, fingerprint, part)

    def _taking_part(self, part: Part, keeps_graph: bool) -> list[Parameter | None]:
        """The parameters whose gradients take part, None in place of the others."""
        if not part.weight:
            return self._leave_out(keeps_graph)
        if not self.n_pending:
            return self.parameters
        return self.gradients.taking_part(self.parameters, self.ready)

    def _leave_out(self, keeps_graph: bool) -> list[Parameter | None]:
        """Drops the gradients that this rank has made without data. Zeros that an earlier round has
        left stay, since other ranks have them, too.
        """
        for i, parameter in enumerate(self.parameters):
            if parameter is None or parameter.grad is None:
                continue
            if keeps_graph:
                raise FastcommError(
                    f"the gradient of parameter {self.names[i]} is to be differentiated "
                    "(create_graph=True), and this rank has weight 0: use a weight above 0"
                )
            if not self.gradients.is_earlier(i):
                parameter.grad = None
        return [None] * len(self.views)

    def _set_graphs_aside(self, parameters: list[Parameter | None]) -> None:
        """For backward(create_graph=True). Reduces tensors without a graph, in place of the
        gradients with one; settle() copies the values back into those.
        """
        if self._is_sharded:
            raise FastcommError(
                "backward(create_graph=True) leaves gradients in .grad, which a ShardedOptimizer "
                "takes: make it with keep_gradients=True"
            )
        for i, parameter in enumerate(parameters):
            if (
                parameter is not None
                and parameter.grad is not None
                and parameter.grad.requires_grad
            ):
                self._staying[i] = parameter.grad
                parameter.grad = parameter.grad.detach()

    def _gather(self, taking_part: list[Parameter | None]) -> list[int]:
        """Raises FastcommError naming the parameter whose gradient does not fit its slot."""
        try:
            return self._bound.gather(taking_part)
        except RuntimeError as error:
            i: int = getattr(error, "slot", -1)
            parameter = None if i < 0 else self._references[i]()
            if parameter is None or parameter.grad is None:
                raise
            trouble = misfit_in_slot(parameter, parameter.grad, self.views[i])
            raise FastcommError(
                f"the gradient of parameter {self.names[i]} {trouble or error}"
            ) from error

    def _fill_missing(self, i: int) -> None:
        """A parameter without a new gradient takes part with the one it has, or with zeros."""
        parameter = self._references[i]()
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            self._untouched[i] = None
            as_pairs(self.views[i]).fill_(-0.0)  # added, it changes no number, not even a -0.0
        else:
            is_flat = self.gradients.rounds_write_to(i, gradient)
            self._untouched[i] = gradient.clone() if is_flat else gradient
            if gradient is not self.views[i]:
                self._copy_in(i, gradient)

    def _copy_in(self, i: int, gradient: Tensor) -> None:
        """Copies a gradient that lies elsewhere to slot i. Raises FastcommError, naming the
        parameter, if it does not fit, or lies in another slot, of any bucket, whose rounds change
        it.
        """
        parameter, view = self._references[i](), self.views[i]
        assert parameter is not None  # for the type checker
        trouble = misfit_in_slot(parameter, gradient, view)
        is_in_slot = trouble is None and gradient.data_ptr() == view.data_ptr()
        if trouble is None and not is_in_slot and inside([gradient]):
            trouble = OTHERS_GRADIENT
        if trouble is not None:
            raise FastcommError(f"the gradient of parameter {self.names[i]} {trouble}")
        view.copy_(gradient.clone() if is_in_slot else gradient)

    def gather_elsewhere(self) -> None:
        """Copies the gradients that lie elsewhere into the flat buffer. Raises as _copy_in()."""
        for i, gradient in self._elsewhere():
            if gradient is not None:
                self._copy_in(i, gradient)

    def refuse_second_gradient(self, i: int) -> None:
        """With reentrant checkpointing a shared parameter gets several gradients in one backward.
        That is fine until its bucket has been launched.
        """
        raise FastcommError(
            f"parameter {self.names[i]} got another gradient in this backward after its bucket "
            "was launched (shared parameters "
            "under reentrant checkpointing do this): use checkpoint(..., use_reentrant=False) or "
            "Reducer(overlap=False)"
        )

    def watch_gradients(self) -> None:
        """The bucket is under way while backward goes on: from here on nobody may write to it."""
        self.gradients.watch()

    def refuse_changed_gradients(self) -> None:
        """Called at the end of backward, when the bucket is under way. Raises FastcommError if a
        hook has written to a gradient since watch_gradients(), or replaced it: what the ranks have
        of it depends on which was faster.
        """
        i = self.gradients.first_changed(self._untouched)
        if i >= 0:
            raise FastcommError(
                f"the gradient of parameter {self.names[i]} was changed by a hook while it was "
                "reduced: change gradients after backward(), or in a hook of the parameter itself "
                "(register_hook, register_post_accumulate_grad_hook), or use "
                "Reducer(overlap=False)"
            )

    def _refuse_dropped_in_hook(self, i: int) -> None:
        """The gradient is not the one autograd has made. That is fine if autograd has made none, or
        if a hook that runs before the reducer's has dropped it.
        """
        parameter = self._references[i]()
        if parameter is not None and is_hooked_behind(parameter, GradientHook):
            raise FastcommError(
                f"the gradient of parameter {self.names[i]} was dropped in a hook before it was "
                "reduced: use gradients, and drop them, after backward()"
            )

    def finish(self) -> BucketWork:
        """Waits for the reduction, and returns it. Raises FastcommError, naming the parameters."""
        work = self._bound.posted
        if work is None or not self._is_gathered:
            raise RuntimeError("finish() before launch()")
        try:
            work.wait()
        except FastcommError as error:
            raise self._explained(error) from error.__cause__
        self.gradients.note_counted(self.flat)
        return work

    def is_skipped(self) -> bool:
        """After finish(): whether some rank votes to drop the round."""
        return self._bound.posted is not None and self._bound.posted.is_skipped()

    def n_nonfinite_in_result(self) -> Tensor | None:
        """After finish(): how many elements of the result are infinite or NaN, on all ranks, as an
        int64 scalar. None if the transport has not counted.
        """
        is_partial = self._is_sharded and self._has_streams
        return None if is_partial else self._bound.n_nonfinite()

    def reduced_part(self) -> Tensor:
        """The result of the last round, as far as this rank needs it: all, or its shard."""
        if self.shard is not None and self._is_sharded:
            return self.shard.part_of(self.flat)
        return self.flat[: self.numel]

    @property
    def _is_sharded(self) -> bool:
        """Whether each rank has its shard of the result only."""
        return self.shard is not None and not self.shard.keeps_gradients

    def _explained(self, error: FastcommError) -> FastcommError:
        """The error that has ended the reduction, with the parameters it is about."""
        advice = advice_on_bucket(error.differs) if isinstance(error, MismatchError) else ""
        held = f"; the bucket holds the gradients of {self.names[0]} ... {self.names[-1]}{advice}"
        explained = type(error)(add_to_first_line(str(error), held))
        explained.__dict__.update(error.__dict__)
        return explained

    def settle(self) -> None:
        """Brings every gradient to where it belongs. A second call gives the same result."""
        work = self._bound.posted
        left = self._settle_missing(work) if work is not None and self._untouched else []
        self.gradients.note_round(left)
        for i, gradient in self._staying.items():
            parameter = self._references[i]()
            if parameter is not None and i not in left:
                # not seen by autograd: the graph is that of this rank's gradient
                gradient.data.copy_(self.views[i])
                parameter.grad = gradient
                self.gradients.note_kept(i)

    def _settle_missing(self, work: BucketWork) -> list[int]:
        """Gives the parameters that had no gradient here the mean if some rank had one, and what
        they had before if none had. Returns the slots of the latter.
        """
        is_present = work.present()
        left = []
        for i, before in self._untouched.items():
            parameter = self._references[i]()
            if parameter is None:
                continue
            if is_present[i]:
                parameter.grad = self.views[i]
                continue
            if before is not None and self.gradients.rounds_write_to(i, parameter.grad):
                self.views[i].copy_(before)
            left.append(i)
        return left

    def refuse_unreduced(self, slots: list[int] | None) -> None:
        """Raises FastcommError naming the parameter of a local gradient in slots (None: all)."""
        i = self.gradients.find_unreduced(slots)
        if i >= 0:
            raise FastcommError(
                f"the gradient of parameter {self.names[i]} was made without a backward() that "
                "reduces it (by hand, before attach(), by torch.func, or in a graph that "
                "torch.compile has traced through backward): call reducer.reduce() on every rank "
                "first"
            )

    def has_unstepped(self, counts_unclaimed: bool) -> bool:
        """Whether it has reduced gradients that no optimizer has stepped, or dropped.
        counts_unclaimed: also of parameters that no optimizer has ever stepped.
        """
        is_pending = self.shard is not None and self.shard.is_pending
        return is_pending or self.gradients.has_unstepped(counts_unclaimed)

    def square_sum(self) -> Tensor | None:
        """The sum of squares of all gradients, as a float64 scalar on the device, without a launch
        for each. None if the transport does not count, or a gradient is not in the flat buffer.
        """
        return self._counted(self._bound.square_sum)

    def n_nonfinite_now(self) -> Tensor | None:
        """Counts infinite or NaN elements, as an int64 scalar. None as above."""
        return self._counted(self._bound.n_nonfinite)

    def _counted(self, count: Callable[[], Tensor | None]) -> Tensor | None:
        """What `count` finds, if it holds for all gradients. Norms have the same bits on all ranks
        only if every rank takes them in one way. So on a device, gradients that lie elsewhere are
        copied to the flat buffer.
        """
        # On every rank, whatever this one has found: the next round is then counted on all.
        if not self._has_streams and not self._bound.count_results(True):
            return None
        outside = self._elsewhere()
        if any(self._is_misfit(i, gradient) for i, gradient in outside):
            return None
        if self._has_streams:
            return self._count_with(outside, count)
        # Not where one is missing: another rank may have zeros there, of which its sample tells
        # nothing.
        is_in_flat = all(
            gradient is not None and torch.equal(gradient, self.views[i]) for i, gradient in outside
        )
        # in any case: the first call begins to sample
        is_unchanged = self.gradients.is_as_counted(self.flat, [one[0] for one in self.geometries])
        return count() if is_in_flat and is_unchanged else None

    def _is_misfit(self, i: int, gradient: Tensor | None) -> bool:
        return gradient is not None and (
            gradient.is_sparse or gradient.dtype != self.views[i].dtype
        )

    def _count_with(
        self, outside: list[tuple[int, Tensor | None]], count: Callable[[], Tensor | None]
    ) -> Tensor | None:
        """Counts while the flat buffer holds what lies elsewhere. What it had comes back: the user
        may have a name for it.
        """
        places = [self.views[i].data for i, _ in outside]
        before = [place.clone() for place in places]
        for place, (_, gradient) in zip(places, outside, strict=True):
            if gradient is None:
                place.zero_()
            else:
                place.copy_(gradient)
        found = count()
        for place, values in zip(places, before, strict=True):
            place.copy_(values)
        return found

    def _elsewhere(self) -> list[tuple[int, Tensor | None]]:
        """The slots whose gradient is another tensor than the view, or missing. A view that the
        user has moved out of the flat buffer is another tensor.
        """
        self._remake_views()
        return self.gradients.elsewhere()

    def scale_(self, factor: Tensor) -> None:
        """Multiplies all gradients by a scalar on the device. What lies in the flat buffer but is
        no gradient any more stays as it is: the user may have a name for it.
        """
        outside = self._elsewhere()
        places = [self.views[i].data for i, _ in outside]
        before = [place.clone() for place in places]
        # A number without a dimension would be multiplied in the scalar's dtype, not in its own.
        elsewhere = [
            torch.atleast_1d(g.detach())
            for _, g in outside
            if g is not None and not g._is_zerotensor()
        ]
        products = [gradient * factor for gradient in elsewhere]  # now: they may share its memory
        self.flat[: -len(self.views)].mul_(factor)
        for place, values in zip(places, before, strict=True):
            place.copy_(values)
        for gradient, product in zip(elsewhere, products, strict=True):
            gradient.copy_(product)

    def reset(self) -> None:
        """Makes the bucket ready for the next backward."""
        self._is_gathered = False
        self._untouched.clear()
        self._staying.clear()
        self.expect_gradients(len(self.views))

    def drop_gradients(self) -> None:
        """Leaves the parameters without gradients."""
        self.gradients.forget()
        for parameter in self.parameters:
            if parameter is not None:
                parameter.grad = None

    def vacate(self) -> None:
        """Leaves no gradient in the views, so that they can hold something else."""
        for _, parameter in self.named_parameters():
            if parameter.grad is not None and inside([parameter.grad]):
                parameter.grad = parameter.grad.clone()
        self._remake_views()

    def take_views(self) -> None:
        """Makes the views the gradients: what they hold is reduced next."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter is not None:
                parameter.grad = view

    def release(self) -> None:
        """Gives the parameters gradients of their own, so that the flat buffer can go."""
        for i, parameter in enumerate(self.parameters):
            if parameter is not None and parameter.grad is not None:
                is_graph = parameter.grad.requires_grad
                own = parameter.grad if is_graph else parameter.grad.clone()
                self.gradients.hand_over(i, own)
                parameter.grad = own
        if self.shard is not None:
            self.shard.release(self.parameters)


def _gradients_of(parameters: Sequence[Parameter | None]) -> list[tuple[int, Tensor]]:
    """The gradients by slot, without those that are missing."""
    grads = [None if parameter is None else parameter.grad for parameter in parameters]
    return [(i, gradient) for i, gradient in enumerate(grads) if gradient is not None]
