# cython: language_level=3
"""The callbacks that autograd calls: when a gradient is ready, when a backward has ended, when a
parameter that nobody reduces gets a gradient.

The hook on each parameter runs in every backward, so it only counts; the work is done once per
bucket. torch.compile traces the Python frames it meets during a backward. It meets none here,
because this module is compiled; what is called from here runs untraced.
"""

from torch._C import _len_torch_dispatch_stack
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.utils._python_dispatch import _disable_current_modes

from fastcomm.insight.recorder cimport Recorder


cdef object _untraced(function):
    """Calls the function so that torch.compile does not trace it, and out of sight of modes, as of
    a FakeTensorMode, which would make tensors without memory of ours.
    """
    before = set_eval_frame(None)
    try:
        if not _len_torch_dispatch_stack():
            return function()
        with _disable_current_modes():
            return function()
    finally:
        set_eval_frame(before)


cdef class RoundFlags:
    """The part of a round that the hooks read; base class of Round."""

    cdef public bint has_callback  # the running backward will call the reducer at its end


cdef class CoreFlags:
    """The part of a reducer that the hooks read; base class of Core."""

    cdef public bint reduces_backwards  # False inside no_sync
    cdef public bint steps_alone  # each rank steps with its own gradients
    cdef public bint overlap
    cdef public RoundFlags round  # the open round, or None
    # gradients that backwards inside no_sync have made since the last round
    cdef public Py_ssize_t n_unsynced
    cdef public Recorder recorder  # of what happens when; or None


cdef class Counter:
    """The part of a bucket in which the hooks count; base class of Bucket. ready: by slot, whether
    this backward has produced the gradient.
    """

    cdef readonly list ready
    cdef public Py_ssize_t first  # which of the reducer's gradients that of slot 0 is
    cdef public Py_ssize_t n_pending
    cdef public object gradients  # has the method note_unsynced

    def expect_gradients(self, Py_ssize_t n):
        """Starts again with n gradients, none of them ready."""
        self.ready, self.n_pending = [False] * n, n


cdef class GradientHook:
    """The hook on the parameter of slot `i` of a bucket. Counts its gradient, and tells the round
    when the bucket is full.

    core: has the methods begin_backward and refuse_abandoned_backward; its rounds have
        advance.
    bucket: has is_launched, and the method refuse_second_gradient, called once it is launched.
    note_stream: called first, for transports with streams; or None.
    """

    cdef CoreFlags core
    cdef Counter bucket
    cdef object note_stream
    cdef Py_ssize_t i

    def __cinit__(
        self, CoreFlags core not None, Counter bucket not None, Py_ssize_t i, note_stream
    ):
        self.core, self.bucket, self.i, self.note_stream = core, bucket, i, note_stream

    def __call__(self, parameter):
        if self.note_stream is not None:
            self.note_stream()
        if self.core.steps_alone or not self.core.reduces_backwards:
            if self.core.n_unsynced == 0:
                _untraced(self.core.refuse_abandoned_backward)
            if self.core.recorder is not None:
                self.core.recorder.note_unsynced(self.bucket.first + self.i)
            self.bucket.gradients.note_unsynced(self.i, parameter)
            self.core.n_unsynced += 1
            return
        if self.core.round is None or not self.core.round.has_callback:
            _untraced(self.core.begin_backward)
        if self.core.recorder is not None:
            self.core.recorder.note_ready(self.bucket.first + self.i)
        if self.bucket.ready[self.i]:
            if self.bucket.is_launched:
                self.bucket.refuse_second_gradient(self.i)
            return
        self.bucket.ready[self.i] = True
        self.bucket.n_pending -= 1
        if self.bucket.n_pending == 0 and self.core.overlap and self._runs_last(parameter):
            _untraced(self.core.round.advance)

    cdef bint _runs_last(self, parameter) except -1:
        """Whether no other hook runs behind this one, which may change the gradient. Else the
        bucket is launched with the next one, or at the end of backward.
        """
        hooks = parameter._post_accumulate_grad_hooks
        return not hooks or next(reversed(hooks.values())) is self


cdef class EndOfBackward:
    """The callback for the end of a backward. Autograd drops it uncalled if the backward ends with
    an exception.

    when_through: called when the backward is through.
    when_dropped: called if the callback is dropped uncalled, or after when_through has raised; does
        nothing when no round is open.
    """

    cdef object when_through, when_dropped, __weakref__

    def __cinit__(self, when_through, when_dropped):
        self.when_through, self.when_dropped = when_through, when_dropped

    def __call__(self):
        when_dropped, self.when_dropped = self.when_dropped, None
        try:
            _untraced(self.when_through)
        except BaseException:
            # A signal handler may have raised before anything was done: the round would stay open.
            _untraced(when_dropped)
            raise

    def __del__(self):
        if self.when_dropped is not None:
            _untraced(self.when_dropped)


cdef class Untraced:
    """A function that torch.compile leaves alone, for hooks that do more than count."""

    cdef object function

    def __cinit__(self, function):
        self.function = function

    def __call__(self, *arguments):
        return _untraced(lambda: self.function(*arguments))
