from libc.stdint cimport uint32_t

from fastcomm.postmortem.flight_recorder cimport Entry, FlightRecorder
from fastcomm.transports.shm.core cimport *


cdef shm_descriptor descriptor(int kind, int op) noexcept  # of no tensor yet
cdef int op_code(op) except -1
cdef int bucket_op_code(str op) except -1  # also of those with weights
cdef object called_by(shm_descriptor d)  # a words.Called, for messages
cdef Entry noted(FlightRecorder flight, const shm_descriptor *d, uint32_t seq)
