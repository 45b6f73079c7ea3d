# cython: language_level=3
"""GradientState: where the gradients of a bucket come from. Has a round reduced them, has an
optimizer stepped with them, were they made under no_sync(), or by the user? Decides which gradients
take part in a round that did not make them, and which may be stepped. Moves no data.

The user may change a gradient that a round has reduced, until an optimizer steps with it. From then
on, a step without a new round must find the gradient as the last step found it. The tensor's
version tells, which torch increments with every write; writes past torch (`.data`, NumPy) go
unseen.

Runs in every step, so it is compiled, and looks at gradients only where it must.
"""

from itertools import count

from torch import strided

from libc.stdint cimport uint32_t

from fastcomm.comm.gradient_slot cimport GradientSlot

# An attribute of gradients that are not views of a flat buffer: one of the states below, and a
# number. What is known of views is kept by slot.
cdef str MARK = "_known_to_fastcomm"
cdef enum:
    REDUCED = 1  # and not stepped since; the number is the version. Good until attach() reads it.
    ACCEPTED = 2  # stepped, or left by a round; the number is the version
    UNSYNCED = 3  # made under no_sync(); the number is the period's
cdef Py_ssize_t MOST_COMPARED = 8  # parameters of a bucket in one checksum
cdef object NEVER = -1
cdef object NO_VERSION = -2  # of no tensor
cdef object numbers = count(1)  # of the periods of all buckets; 0 stands for one that was detached


cdef class GradientState:
    """The state of the gradients of one bucket, by slot.

    references: weak ones to the parameters.
    views: of the flat buffer, or the sparse results of the last round; the bucket's own list, which
        may replace some.
    n_rounds: how many rounds of the reducer have ended so far.
    """

    cdef list references, views
    cdef list slots  # of the views, as they lay when they were made; None: of a sparse result
    cdef list reduced_by  # the number of the last round that has reduced the gradient
    cdef list stepped_at  # how many rounds had ended at the last step with it, by any optimizer
    cdef list versions  # of the views, when they were stepped or left
    cdef list unsynced  # of the views: made under no_sync() in this period
    cdef object period  # from one round to the next
    cdef list watched  # versions of the views, since watch(); or None

    def __cinit__(self, list references, list views, Py_ssize_t n_rounds):
        n = len(views)
        self.references, self.views = references, views
        self.slots = [GradientSlot(view) if is_dense(view) else None for view in views]
        self.reduced_by, self.stepped_at = [NEVER] * n, [NEVER] * n
        self.versions = [view._version for view in views]
        self.begin_period()
        for i in range(n):
            self._take_over(i, n_rounds)

    def parameters(self):
        """The parameters by slot. None stands for one that is gone, with its model."""
        return [reference() for reference in self.references]

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
            if not self._is_in_place(i):
                return i
        return -1

    cdef bint _is_in_place(self, Py_ssize_t i) except -1:
        """Whether the view lies in its slot, and not where `.data =` or the like has put it."""
        cdef GradientSlot slot = self.slots[i]
        return slot is None or slot.still_holds(self.views[i])

    def give_up_displaced(self):
        """Returns the slots whose views lie elsewhere by now, where there are to be others: these
        are tensors of the user's from here on.
        """
        cdef list found = []
        cdef Py_ssize_t i
        for i in range(len(self.views)):
            if self._is_in_place(i):
                continue
            if self.unsynced[i]:
                setattr(self.views[i], MARK, (UNSYNCED, self.period))
            self.unsynced[i], self.versions[i] = False, NO_VERSION
            found.append(i)
        return found

    def note_view(self, Py_ssize_t i):
        """The view in this slot is another tensor now, which may be sparse."""
        view = self.views[i]
        self.slots[i] = GradientSlot(view) if is_dense(view) else None

    cdef object _gradient(self, Py_ssize_t i):
        parameter = self.references[i]()
        return None if parameter is None else parameter.grad

    cdef _take_over(self, Py_ssize_t i, n_rounds):
        """Takes over a gradient that exists at attach(), with the mark that release() may have left
        on it.
        """
        gradient = self._gradient(i)
        mark = getattr(gradient, MARK, None)
        if mark == (UNSYNCED, 0):
            setattr(gradient, MARK, (UNSYNCED, self.period))
        elif mark is not None and mark == (REDUCED, version_of(gradient)):
            self.reduced_by[i], self.stepped_at[i] = n_rounds, n_rounds - 1
            setattr(gradient, MARK, (ACCEPTED, mark[1]))

    def begin_period(self):
        """Begins a period: all gradients made under no_sync() so far are in a round, or gone. Ends
        what watch() began.
        """
        self.watched = None
        self.unsynced = [False] * len(self.views)
        self.period = next(numbers)

    def note_unsynced(self, Py_ssize_t i, parameter):
        """A backward under no_sync() has added to the gradient: from here on it is local."""
        gradient = parameter.grad
        self.reduced_by[i] = NEVER
        if gradient is self.views[i]:
            self.unsynced[i] = True
        elif gradient is not None:
            setattr(gradient, MARK, (UNSYNCED, self.period))

    def unsynced_slots(self):
        """The slots whose gradients backwards under no_sync() have made, or added to."""
        cdef Py_ssize_t i
        found = []
        for i in range(len(self.views)):
            gradient = self._gradient(i)
            if gradient is not None and self._is_unsynced(i, gradient):
                found.append(i)
        return found

    def first_earlier(self):
        """The first slot whose gradient an earlier round has reduced or left; -1 if there is none.
        """
        cdef Py_ssize_t i
        for i in range(len(self.views)):
            gradient = self._gradient(i)
            if gradient is None or self._is_unsynced(i, gradient):
                continue
            if self._is_known(i, gradient):
                if self._is_fresh(i, None) or self._is_accepted(i, gradient):
                    # not what zero_grad(set_to_none=False) leaves
                    if stored_values(gradient).any():
                        return i
        return -1

    def note_round(self, number, left):
        """The round of this number has reduced all gradients but those in the slots `left`."""
        cdef Py_ssize_t i
        for i in range(len(self.views)):
            if not left or i not in left:
                self.reduced_by[i] = number

    def note_kept(self, Py_ssize_t i):
        """A round has put its result into the tensor that was there."""
        self._accept(i, self._gradient(i))

    def note_left(self, Py_ssize_t i):
        """A round has left the gradient as it was, or the parameter without one."""
        gradient = self._gradient(i)
        if gradient is None:
            self.reduced_by[i] = NEVER
        elif not self._is_fresh(i, None):
            self._accept(i, gradient)

    def note_stepped(self, list slots, n_rounds):
        """An optimizer has stepped with the gradients in these slots."""
        cdef Py_ssize_t i
        for i in slots:
            self.stepped_at[i] = n_rounds
            gradient = self._gradient(i)
            if gradient is self.views[i]:
                self.versions[i] = gradient._version
            elif gradient is not None:
                self._accept(i, gradient)

    def note_scaled(self):
        """All gradients, which were usable, have been scaled alike on all ranks."""
        cdef Py_ssize_t i
        for i in range(len(self.views)):
            gradient = self._gradient(i)
            if gradient is not None and not self._is_fresh(i, None):
                self._accept(i, gradient)

    def forget_rounds(self):
        """A round was dropped, and all gradients with it."""
        self.reduced_by = [NEVER] * len(self.views)

    cdef bint _is_fresh(self, Py_ssize_t i, since):
        """Whether a round after number `since` has reduced it (None: a round after the last step).
        The user may then change or replace it.
        """
        return self.reduced_by[i] > (self.stepped_at[i] if since is None else since)

    cdef _accept(self, Py_ssize_t i, gradient):
        """Accepts the gradient as it is now: a later write to it ends that."""
        if self._is_at_home(i, gradient):
            self.versions[i] = self.views[i]._version
        elif not self._is_unsynced(i, gradient):
            setattr(gradient, MARK, (ACCEPTED, version_of(gradient)))

    cdef bint _is_at_home(self, Py_ssize_t i, gradient):
        """Whether it is the view, or another tensor on its memory, which shares its version."""
        if gradient is self.views[i]:
            return True
        cdef GradientSlot slot = self.slots[i]
        return slot is not None and slot.holds(gradient)

    cdef bint _is_unsynced(self, Py_ssize_t i, gradient):
        if gradient is self.views[i]:
            return self.unsynced[i]
        return getattr(gradient, MARK, None) == (UNSYNCED, self.period)

    cdef bint _is_accepted(self, Py_ssize_t i, gradient):
        """Whether nobody has written to it since it was stepped or left."""
        if self._is_at_home(i, gradient):
            return self._is_in_place(i) and self.views[i]._version == self.versions[i]
        return getattr(gradient, MARK, None) == (ACCEPTED, version_of(gradient))

    def taking_part(self, list parameters, list ready):
        """The parameters that take part in the round, None in place of the others. Takes part: a
        gradient that this backward has made, or that no round has seen.
        """
        return [
            parameter if ready[i] or self._is_local(i) else None
            for i, parameter in enumerate(parameters)
        ]

    cdef bint _is_local(self, Py_ssize_t i):
        gradient = self._gradient(i)
        if gradient is None:
            return False
        if self._is_unsynced(i, gradient):
            return True
        # A new tensor in place of a reduced one may be made from the reduced one, or from nothing
        # that any rank has seen. The mean is right in both cases.
        is_fresh = self._is_fresh(i, None) and self._is_known(i, gradient)
        return not is_fresh and not self._is_accepted(i, gradient)

    def find_unreduced(self, slots, since):
        """The first of these slots, or of all if None, whose gradient may not be used; -1 if all
        may. since: how many rounds had ended at this optimizer's last step, if it has made one.
        """
        cdef Py_ssize_t i
        for i in range(len(self.views)) if slots is None else slots:
            if not self._is_fresh(i, since) and not self._is_usable(i):
                return i
        return -1

    def has_unstepped(self, bint counts_unclaimed):
        """Whether a gradient is here that a round has reduced and no optimizer has stepped.
        counts_unclaimed: also those of parameters that no optimizer has ever stepped.
        """
        cdef Py_ssize_t i
        for i in range(len(self.views)):
            if self.stepped_at[i] == NEVER and not counts_unclaimed:
                continue
            gradient = self._gradient(i)
            if gradient is not None and self._is_fresh(i, None) and self._is_known(i, gradient):
                if stored_values(gradient).any():  # not what zero_grad(set_to_none=False) leaves
                    return True
        return False

    cdef bint _is_usable(self, Py_ssize_t i):
        gradient = self._gradient(i)
        if gradient is None or self._is_unsynced(i, gradient) or self._is_accepted(i, gradient):
            return True
        # Zeros left by zero_grad(set_to_none=False) do no harm. This waits for the device, but only
        # in a step without a round whose gradients were written since the last step.
        return self._is_known(i, gradient) and not stored_values(gradient).any()

    cdef bint _is_known(self, Py_ssize_t i, gradient):
        """Whether a round or a step has seen this tensor, whatever was written to it since."""
        return self._is_at_home(i, gradient) or hasattr(gradient, MARK)

    def hand_over(self, Py_ssize_t i, gradient):
        """Marks `gradient`, which the parameter gets in place of its own when the bucket's memory
        goes.
        """
        before = self._gradient(i)
        if self._is_unsynced(i, before):
            setattr(gradient, MARK, (UNSYNCED, 0))
        elif self._is_fresh(i, None):
            setattr(gradient, MARK, (REDUCED, version_of(gradient)))
        elif self._is_accepted(i, before):
            setattr(gradient, MARK, (ACCEPTED, version_of(gradient)))
        elif self._is_known(i, before):  # and written to since, as by zero_grad(set_to_none=False)
            setattr(gradient, MARK, (ACCEPTED, NO_VERSION))


def is_of_this_rank(gradient):
    """Whether a gradient that is in no bucket may differ between ranks. Zeros do not, nor what a
    round had reduced while the parameter was in a bucket.
    """
    if gradient is None:
        return False
    mark = getattr(gradient, MARK, None)
    if mark is not None and mark[0] != UNSYNCED and mark[1] == version_of(gradient):
        return False
    return bool(stored_values(gradient).any())


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


cpdef version_of(gradient):
    """The tensor's version; -1 for inference tensors, whose writes torch does not count."""
    return -1 if gradient.is_inference() else gradient._version


cdef stored_values(gradient):
    """What is not zero in it is in here."""
    return gradient if is_dense(gradient) else gradient._values()


cdef bint is_dense(gradient):
    """Whether it is not sparse, and so has an address."""
    return gradient.layout is strided
