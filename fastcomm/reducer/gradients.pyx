# cython: language_level=3
"""Gradients: who owns the gradients of a bucket. The state of each decides whether a round takes
it, and whether an optimizer may step with it. Moves no data.

Accumulated and local gradients belong to this rank, and the next round takes both. A round owns
those that it reduces from their bucket's launch to the end of the backward: a write to one, or
another tensor in its place, is an error. It leaves all of them reduced, or none if it is dropped. A
reduced gradient belongs to all ranks: the user may change or replace it, until an optimizer steps
with it. Then it is spent, and may be used again only as the same tensor with the same version;
after a write, or with another tensor in its place, it is local. Zeros count as none.

Torch counts the writes to a tensor in its version; those past torch (`.data`, NumPy) go unseen.
Runs in every step, so it is compiled, and looks at gradients only where it must.
"""

from weakref import ref

import torch
from torch import strided
from torch.utils.weak import WeakIdKeyDictionary

from fastcomm.comm.flat_buffers import inside

from libc.stdint cimport uint32_t

from fastcomm.comm.gradient_slot cimport GradientSlot


cdef enum GradientState:
    NONE  # there is none, or nothing is known of it: then it is local
    ACCUMULATED  # a backward under no_sync() has made it, or added to it
    LOCAL  # the user's code has made it, or it is from before attach(): must not be used
    REDUCED  # by a round
    SPENT  # stepped, or left by a round


cdef Py_ssize_t MOST_COMPARED = 8  # parameters of a bucket in one checksum
cdef Py_ssize_t N_SAMPLED = 16  # elements of each gradient
cdef object NAN = float("nan")
# By parameter: state, gradient and version, from buckets that have gone. The next one that takes
# the parameter removes it.
cdef object left_behind = WeakIdKeyDictionary()


def no_tensor():
    """In place of a weak reference: to nothing that is there."""
    return None


cdef class Gradients:
    """What is known of the gradients of one bucket, by slot. The state noted there is that of one
    tensor, with the version that it had; see _state().

    references: weak ones to the parameters.
    views: of the flat buffer, or the sparse results of the last round; the bucket's own list, which
        may replace some.
    """

    cdef list references, views
    cdef list slots  # of the views, as they lay when they were made; None: of a sparse result
    cdef list states
    cdef list others  # weak references to tensors whose states these are; None: it is the view
    cdef list versions  # of those tensors, when they were spent
    cdef list has_stepped  # whether an optimizer has
    cdef list watched  # versions of the views, since watch(); or None
    # A few elements of each gradient in the flat buffer: where, and what the last round has left
    # there; and the versions of all gradients. None: nobody asks.
    cdef object sampled, sample
    cdef list counted_versions

    def __cinit__(self, list references, list views):
        n = len(views)
        self.references, self.views = references, views
        self.slots = [GradientSlot(view) if is_dense(view) else None for view in views]
        self.versions, self.has_stepped = [0] * n, [False] * n
        self.forget()
        for i in range(n):
            self._take_over(i)

    def parameters(self):
        """The parameters by slot. None stands for one that is gone, with its model."""
        return [reference() for reference in self.references]

    cdef object _gradient(self, Py_ssize_t i):
        parameter = self.references[i]()
        return None if parameter is None else parameter.grad

    # -- whose memory it is ------------------------------------------------------------------------

    cdef bint _is_view_in_slot(self, Py_ssize_t i) except -1:
        """Whether the view lies in its slot, and not where `.data =` or the like has put it."""
        cdef GradientSlot slot = self.slots[i]
        return slot is None or slot.still_holds(self.views[i])

    cdef bint _is_in_slot(self, Py_ssize_t i, gradient) except -1:
        """Whether it is the view, or another tensor on its memory, which shares its version. An
        empty one has no address.
        """
        if gradient is self.views[i]:
            return True
        cdef GradientSlot slot = self.slots[i]
        return slot is not None and slot.address != NULL and slot.holds(gradient)

    def rounds_write_to(self, Py_ssize_t i, gradient):
        """Whether they do to this gradient of slot i. An empty view has no address."""
        return gradient is self.views[i] or (gradient is not None and bool(inside([gradient])))

    def give_up_displaced(self):
        """Returns the slots whose views lie elsewhere by now, where there are to be others: these
        are tensors of the user's from here on.
        """
        cdef list found = []
        cdef Py_ssize_t i
        for i in range(len(self.views)):
            if self._is_view_in_slot(i):
                continue
            if self.others[i] is None:
                is_own = self.states[i] == ACCUMULATED
                self.others[i] = ref(self.views[i]) if is_own else no_tensor
            found.append(i)
        return found

    def note_view(self, Py_ssize_t i):
        """The view in this slot is another tensor now, which may be sparse."""
        view = self.views[i]
        self.slots[i] = GradientSlot(view) if is_dense(view) else None

    def elsewhere(self):
        """The slots whose gradient is missing, or is not the view, and the gradient."""
        return [
            (i, parameter.grad)
            for i, parameter in enumerate(self.parameters())
            if parameter is not None and parameter.grad is not self.views[i]
        ]

    # -- states ------------------------------------------------------------------------------------

    cdef GradientState _state(self, Py_ssize_t i, gradient) except *:
        """The state of the gradient that is there now."""
        cdef GradientState noted = self.states[i]
        if gradient is None:
            return NONE
        if noted == NONE or not self._is_noted(i, gradient):
            return LOCAL
        if noted == SPENT and self._version(i, gradient) != self.versions[i]:
            return LOCAL
        return noted

    cdef bint _is_noted(self, Py_ssize_t i, gradient) except -1:
        """Whether it is the tensor whose state was noted, whatever was written to it since."""
        other = self.others[i]
        return self._is_in_slot(i, gradient) if other is None else other() is gradient

    cdef object _version(self, Py_ssize_t i, gradient):
        """That of the noted tensor; NaN, which equals no other, of a view that lies elsewhere."""
        if self.others[i] is not None:
            return version_of(gradient)
        return self.views[i]._version if self._is_view_in_slot(i) else NAN

    cdef int _note(self, Py_ssize_t i, GradientState state, gradient) except -1:
        """The gradient, as it is now, is of this state."""
        self.states[i] = NONE if gradient is None else state
        is_elsewhere = gradient is not None and not self._is_in_slot(i, gradient)
        self.others[i] = ref(gradient) if is_elsewhere else None
        if state == SPENT and gradient is not None:
            self.versions[i] = self._version(i, gradient)
        return 0

    def forget(self):
        """There are no gradients, or they are the user's."""
        n = len(self.views)
        self.states, self.others, self.watched = [NONE] * n, [None] * n, None

    def note_unsynced(self, Py_ssize_t i, parameter):
        """A backward under no_sync() has made the gradient, or added to it."""
        gradient = parameter.grad
        self.states[i] = NONE if gradient is None else ACCUMULATED
        self.others[i] = (
            None if gradient is None or gradient is self.views[i] else ref(gradient)
        )

    def note_round(self, left):
        """A round has reduced all gradients but those in the slots `left`: these are as they were,
        or missing.
        """
        cdef Py_ssize_t i
        self.watched = None
        for i in range(len(self.views)):
            if not left or i not in left:
                self.states[i], self.others[i] = REDUCED, None
            elif self.states[i] != REDUCED or self._gradient(i) is None:
                self._note(i, SPENT, self._gradient(i))

    def note_kept(self, Py_ssize_t i):
        """A round has put its result into the tensor that was there."""
        self._note(i, REDUCED, self._gradient(i))

    def note_stepped(self, list slots):
        """An optimizer has stepped with the gradients in these slots."""
        cdef Py_ssize_t i
        for i in slots:
            self.has_stepped[i] = True
            if not self._is(i, ACCUMULATED):  # which the next round takes all the same
                self._note(i, SPENT, self._gradient(i))

    def note_scaled(self):
        """All gradients, which were usable, have been scaled alike on all ranks."""
        cdef Py_ssize_t i
        for i in range(len(self.views)):
            if self.states[i] == SPENT:
                self._note(i, SPENT, self._gradient(i))

    def taking_part(self, list parameters, list ready):
        """The parameters that take part in the round, None in place of the others. Takes part: a
        gradient that this backward has made, or that belongs to this rank.
        """
        cdef Py_ssize_t i
        taking_part = []
        for i, parameter in enumerate(parameters):
            is_taken = ready[i] or self._state(i, self._gradient(i)) in (ACCUMULATED, LOCAL)
            taking_part.append(parameter if is_taken else None)
        return taking_part

    def find_unreduced(self, slots):
        """The first of these slots, or of all if None, whose gradient is local, and may not be
        used; -1 if all may.
        """
        cdef Py_ssize_t i
        for i in range(len(self.views)) if slots is None else slots:
            if self.states[i] == REDUCED:  # the user may have replaced it
                continue
            gradient = self._gradient(i)
            # This waits for the device, but only where the gradients were written since a step.
            if self._state(i, gradient) == LOCAL and not is_zero(gradient):
                return i
        return -1

    def unsynced_slots(self):
        """The slots whose gradients backwards under no_sync() have made, or added to."""
        cdef Py_ssize_t i
        return [i for i in range(len(self.views)) if self._is(i, ACCUMULATED)]

    def first_earlier(self):
        """The first slot whose gradient an earlier round has reduced or left; -1 if there is none.
        """
        cdef Py_ssize_t i
        for i in range(len(self.views)):
            if self.is_earlier(i) and not is_zero(self._gradient(i)):
                return i
        return -1

    def is_earlier(self, Py_ssize_t i):
        """Whether an earlier round has reduced the gradient, or left it."""
        return self._is(i, REDUCED) or self._is(i, SPENT)

    def has_unstepped(self, bint counts_unclaimed):
        """Whether a gradient is here that a round has reduced and no optimizer has stepped.
        counts_unclaimed: also those of parameters that no optimizer has ever stepped.
        """
        cdef Py_ssize_t i
        for i in range(len(self.views)):
            if (counts_unclaimed or self.has_stepped[i]) and self._is(i, REDUCED):
                if not is_zero(self._gradient(i)):
                    return True
        return False

    cdef bint _is(self, Py_ssize_t i, GradientState state) except -1:
        return self.states[i] == state and self._state(i, self._gradient(i)) == state

    # -- while a bucket is under way ---------------------------------------------------------------

    def watch(self):
        """From here on first_changed() finds writes to the views."""
        self.watched = [view._version for view in self.views]

    def first_changed(self, exempt):
        """The first slot, but for those in `exempt`, whose view has been written to since watch(),
        or is not the gradient any more; -1 if there is none, or watch() was not called.
        """
        cdef Py_ssize_t i
        if self.watched is None:
            return -1
        for i in range(len(self.views)):
            parameter, view = self.references[i](), self.views[i]
            if parameter is None or (exempt and i in exempt):
                continue
            if parameter.grad is not view or view._version != self.watched[i]:
                return i
            if not self._is_view_in_slot(i):
                return i
        return -1

    # -- whether what a reduction has counted still holds ------------------------------------------

    def note_counted(self, flat):
        """Notes what a reduction, which counts, has left in the flat buffer. Does so once
        is_as_counted() was called.
        """
        if self.sampled is not None:
            self.sample, self.counted_versions = flat[self.sampled], self._all_versions(flat)

    def is_as_counted(self, flat, offsets):
        """Whether nobody has written to the gradients since note_counted(). Writes past torch are
        looked for in a few elements of each gradient, which any scaling changes unless they are all
        0: a gradient of few rows is never known to be unchanged. offsets: where gradients begin.
        """
        if self.sampled is None:
            steps = torch.arange(N_SAMPLED, dtype=torch.int64, device="cpu")
            # spread over one gradient; of a small one some repeat
            self.sampled = torch.cat([
                offset + (steps * max(view.numel() - 1, 0)) // (N_SAMPLED - 1)
                for offset, view in zip(offsets, self.views)
            ])
            return False
        if self.sample is None or self._all_versions(flat) != self.counted_versions:
            return False
        tells = bool(self.sample.view(-1, N_SAMPLED).any(dim=1).all())
        return tells and torch.equal(flat[self.sampled], self.sample)

    cdef list _all_versions(self, flat):
        return [flat._version] + [view._version for view in self.views]

    # -- from bucket to bucket ---------------------------------------------------------------------

    def hand_over(self, Py_ssize_t i, gradient):
        """Keeps what is known for the parameter's next bucket. gradient: what the parameter gets in
        place of its own, as the bucket's memory goes.
        """
        cdef GradientState state = self._state(i, self._gradient(i))
        if self.states[i] == REDUCED:  # the user may have replaced it
            state = REDUCED
        if state != LOCAL:
            left_behind[self.references[i]()] = state, ref(gradient), version_of(gradient)

    cdef int _take_over(self, Py_ssize_t i) except -1:
        """Takes over a gradient that exists at attach()."""
        parameter = self.references[i]()
        cdef GradientState state = state_left(parameter)
        left_behind.pop(parameter, None)
        if state != NONE:
            self._note(i, state, parameter.grad)
            self.has_stepped[i] = state == REDUCED
        return 0


cdef GradientState state_left(parameter) except *:
    """What its last bucket knew of the gradient that is there now; NONE if that knew nothing, or
    somebody has written to it since.
    """
    state, other, version = left_behind.get(parameter, (NONE, no_tensor, 0))
    gradient = parameter.grad
    if gradient is None or other() is not gradient:
        return NONE
    return state if state == ACCUMULATED or version == version_of(gradient) else NONE


def is_of_this_rank(parameter):
    """Whether the gradient of a parameter that is in no bucket may differ between ranks. Zeros do
    not, nor what a round had reduced while the parameter was in a bucket.
    """
    gradient = parameter.grad
    if gradient is None or state_left(parameter) in (REDUCED, SPENT):
        return False
    return not is_zero(gradient)


def checksum(list references, uint32_t turn):
    """Hashes four elements of up to 8 of these parameters, of those that lie in the CPU's memory.
    `turn` chooses which, so that a bucket of many parameters costs no more than one of few. Never
    returns 0.
    """
    cdef uint32_t value = 0x1C9DC5, spread = turn
    cdef Py_ssize_t numel, size, i, n = len(references), first = 0
    cdef const char *data
    if n > MOST_COMPARED:
        # of the hashed turn: turns that go up by a stride leave no parameter out
        first = (<uint32_t>(turn * <uint32_t>2654435761) >> 16) % n
    for i in range(min(n, MOST_COMPARED)):
        parameter = references[(first + i) % n]()
        if parameter is None or not parameter.is_cpu:
            continue
        numel = parameter.numel()
        data = <const char *><size_t>parameter.data_ptr()
        if not numel or data == NULL:  # its storage may have been freed
            continue
        size = parameter.element_size()
        value = _mixed(value, data, size)
        if not parameter.is_contiguous():
            strides = zip(parameter.shape, parameter.stride())
            last = sum([(n - 1) * stride for n, stride in strides])
            value = _mixed(value, data + <Py_ssize_t>last * size, size)
            continue
        value = _mixed(value, data + (numel - 1) * size, size)
        spread = spread * 1664525 + 1013904223
        value = _mixed(value, data + (spread % numel) * size, size)
        spread = spread * 1664525 + 1013904223
        value = _mixed(value, data + (spread % numel) * size, size)
    return value or 1


cdef uint32_t _mixed(uint32_t value, const char *element, Py_ssize_t size) noexcept:
    """FNV-1a, byte by byte."""
    cdef Py_ssize_t i
    for i in range(size):
        value = (value ^ <unsigned char>element[i]) * 16777619
    return value


cdef object version_of(gradient):
    """The tensor's version; -1 for inference tensors, whose writes torch does not count."""
    return -1 if gradient.is_inference() else gradient._version


cdef bint is_zero(gradient) except -1:
    """Waits for the device."""
    return not (gradient if is_dense(gradient) else gradient._values()).any()


cdef bint is_dense(gradient) except -1:
    """Whether it is not sparse, and so has an address."""
    return gradient.layout is strided
