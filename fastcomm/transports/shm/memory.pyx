# cython: language_level=3
"""Segment, Segments and Block: memory files that all ranks of a host have mapped, and the
tensors allocated in them.

A memory file has no name: nothing appears in /dev/shm, nothing is left after any exit. It is
sparse: it costs only what is allocated in it. Also tells malloc what to do with freed gradients.
"""

import os
import weakref

from fastcomm.comm import forms
from fastcomm.comm.who import processes_of
from fastcomm.errors import InitError

from posix.fcntl cimport F_DUPFD_CLOEXEC, fcntl
from posix.mman cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_PRIVATE, MAP_SHARED, PROT_NONE, PROT_READ, PROT_WRITE,
    madvise, mmap, munmap,
)
from posix.unistd cimport close as close_fd

from fastcomm.comm.standing cimport forks
from fastcomm.transports.shm.core cimport SHM_MAX_RANKS


cdef extern from "sys/mman.h" nogil:
    int MADV_REMOVE, MADV_DONTDUMP, MADV_DONTFORK, MAP_NORESERVE


cdef extern from "Python.h":
    int PyBuffer_FillInfo(
        Py_buffer *view, object exporter, void *buf, Py_ssize_t nbytes, int readonly, int flags
    ) except -1


cdef size_t PAGE = 4096
cdef size_t HUGE_PAGE = 2 << 20
cdef int MADV_COLLAPSE = 25  # Linux 6.1; not in older headers

cdef str NAME = "fastcomm"  # of memory files
# What the ranks tell each other.
cdef dict FORM = {
    "pid": forms.PID, "fd": forms.NUMBER, "nbytes": forms.NUMBER,
    "cores": [forms.NUMBER],
}
cdef object own_segments = weakref.WeakSet()


def _after_fork_in_child():
    """A forked child gets other memory: what it writes to a gradient must not reach its
    parent, or the peers.
    """
    for segment in list(own_segments):
        (<Segment>segment).make_private()
    own_segments.clear()  # now they are ordinary memory for further forks


os.register_at_fork(after_in_child=_after_fork_in_child)


cdef class Segment:
    """One rank's memory file, mapped. Its owner allocates tensors behind the first `n_reserved`
    bytes.

    A forked child does not see the segments of other ranks. Of its parent's own it has a
    copy-on-write copy.
    """

    def __cinit__(self, int fd, size_t nbytes, size_t n_reserved, bint is_own):
        self.fd, self.generation = -1, forks()
        # Huge pages must be aligned in memory as in the file: reserve more, and map at an aligned
        # address.
        cdef void *reserved = mmap(NULL, nbytes + HUGE_PAGE, PROT_NONE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        cdef void *base = MAP_FAILED
        cdef size_t slack
        if reserved != MAP_FAILED:
            slack = (HUGE_PAGE - <size_t>reserved % HUGE_PAGE) % HUGE_PAGE
            base = mmap(<char *>reserved + slack, nbytes, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0)
            munmap(reserved, slack)
            munmap(<char *>reserved + slack + nbytes, HUGE_PAGE - slack)
        if base == MAP_FAILED:
            raise InitError(f"cannot map {nbytes >> 30} GiB of address space for a shared "
                            "segment; is `ulimit -v` set?")
        self.base = <char *>base
        self.nbytes = nbytes
        madvise(base, nbytes, MADV_DONTDUMP)  # a core dump need not hold the whole arena
        n_reserved = (n_reserved + PAGE - 1) // PAGE * PAGE
        self.holes = [(n_reserved, nbytes - n_reserved)]
        if is_own:
            self.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0)  # for a forked child to map again
            if self.fd < 0:
                raise OSError("no file descriptor left for a shared segment; see `ulimit -n`")
            own_segments.add(self)
        else:
            madvise(base, nbytes, MADV_DONTFORK)

    def __dealloc__(self):
        if self.fd >= 0:
            close_fd(self.fd)
        # A forked child never had its peers' segments: something else may be mapped there by now.
        if self.base != NULL and (self.fd >= 0 or self.generation == forks()):
            munmap(self.base, self.nbytes)

    cdef int make_private(self) except -1:
        """In a forked child: the same contents, but what is written stays here."""
        cdef int flags = MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED
        if mmap(self.base, self.nbytes, PROT_READ | PROT_WRITE, flags, self.fd, 0) == MAP_FAILED:
            raise MemoryError("a forked child cannot have the parent's shared memory to itself")
        return 0

    cdef size_t allocate(self, size_t nbytes, size_t alignment) except 0:
        """First fit. Returns the offset of `nbytes` in the segment, a multiple of `alignment`."""
        holes = self.holes
        for i, (begin, size) in enumerate(holes):
            offset = (begin + alignment - 1) // alignment * alignment
            if offset + nbytes <= begin + size:
                rest = [(begin, offset - begin), (offset + nbytes, begin + size - offset - nbytes)]
                fewer = [*holes[:i], *(hole for hole in rest if hole[1]), *holes[i + 1:]]
                # our lists made Python collect garbage, and a collected tensor has released its
                # memory
                if self.holes is not holes:
                    return self.allocate(nbytes, alignment)
                self.holes = fewer
                if alignment == HUGE_PAGE:
                    _ask_for_huge_pages(self.base + <size_t>offset, nbytes)
                return offset
        raise MemoryError(f"no {nbytes} contiguous bytes left in the shared arena of "
                          f"{self.nbytes} bytes")

    cdef void release(self, size_t offset, size_t nbytes):
        """Gives the memory back to the system and merges the hole with its neighbours."""
        madvise(self.base + offset, nbytes, MADV_REMOVE)
        while True:
            holes = self.holes
            merged = []
            for begin, size in sorted([*holes, (offset, nbytes)]):
                if merged and merged[-1][0] + merged[-1][1] == begin:
                    merged[-1] = (merged[-1][0], merged[-1][1] + size)
                else:
                    merged.append((begin, size))
            if self.holes is holes:  # else as in allocate
                break
        self.holes = merged


cdef void _ask_for_huge_pages(char *memory, size_t nbytes) noexcept:
    """Huge pages cause fewer page faults, and make reductions of large tensors up to a third
    faster. If the kernel refuses, small pages do.
    """
    cdef size_t offset = 0
    with nogil:  # zeroes the memory, which takes a while
        while offset + HUGE_PAGE <= nbytes:  # the rest keeps small pages
            memory[offset] = 0  # the kernel collapses only what has a page
            offset += HUGE_PAGE
        madvise(memory, offset, MADV_COLLAPSE)


def _new_file(int rank, size_t nbytes):
    """A descriptor of memory that other processes can map. Raises InitError."""
    fd = -1
    try:
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return fd
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise InitError(
            f"rank {rank} cannot make a file of {nbytes} bytes in memory, which takes up only what "
            f"is used of it: {error}; see `ulimit -f` and `ulimit -n`, or take backend='group'"
        ) from error


cdef class Segments:
    """The segments of all ranks of a host, mapped here, and the pidfds by which this rank notices
    that another has ended.

    Collective: every rank makes a memory file, opens its peers', and closes the descriptors once
    all ranks have mapped everything. n_reserved: bytes at the beginning of each segment that are
    not for tensors. Raises InitError.
    """

    def __cinit__(self, int rank, int world_size, object bootstrap, size_t n_reserved):
        self.world_size, self.n_reserved, self.segments = world_size, n_reserved, []
        for r in range(SHM_MAX_RANKS):
            self.pidfds[r] = -1
        self.n_pidfds = SHM_MAX_RANKS
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        # Sparse: costs only what is touched, and address space, of which a process has 128 TiB.
        # The n-th communicator takes 1/n of what the first does, so that there may be some 1,700.
        share = (1 << 44) // (world_size * (1 + len(own_segments)))
        nbytes = min(memory, share) // PAGE * PAGE
        fd = _new_file(rank, nbytes)
        try:
            cores = sorted(os.sched_getaffinity(0))
            mine = {"pid": os.getpid(), "fd": fd, "nbytes": nbytes, "cores": cores}
            ranks = bootstrap.exchange(mine, FORM)
            self.processes = processes_of(theirs["pid"] for theirs in ranks)
            try:
                for r, theirs in enumerate(ranks):
                    self._map_memory(r, theirs, r == rank)
            except (OSError, InitError) as error:
                raise InitError(
                    f"rank {rank} cannot reach the memory of its peers: {error}; ranks that share "
                    "memory need one pid namespace and one user: leave FASTCOMM_HOST_ID to "
                    "fastcomm, or give each container another one"
                ) from error
            bootstrap.exchange("mapped", str)
        finally:
            os.close(fd)
        self.is_crowded = world_size > len(set().union(*(theirs["cores"] for theirs in ranks)))

    def _map_memory(self, rank, theirs, is_own):
        path = f"/proc/{theirs['pid']}/fd/{theirs['fd']}"
        if not os.readlink(path).startswith(f"/memfd:{NAME} "):
            raise InitError(f"{path} of rank {rank} is no memory of fastcomm's")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # What lies behind the end of the file cannot be read without a signal.
            if not self.n_reserved < theirs["nbytes"] <= os.fstat(fd).st_size:
                raise InitError(f"the memory of rank {rank} has no {theirs['nbytes']} bytes")
            segment = Segment(fd, theirs["nbytes"], self.n_reserved, is_own)
        finally:
            os.close(fd)
        self.segments.append(segment)
        self.bases[rank], self.nbytes[rank] = (<Segment>segment).base, theirs["nbytes"]
        if not is_own:
            self.pidfds[rank] = os.pidfd_open(theirs["pid"])

    def __dealloc__(self):
        for r in range(self.n_pidfds):
            if self.pidfds[r] >= 0:
                close_fd(self.pidfds[r])

    cdef Segment of(self, int rank):
        return self.segments[rank]


cdef class Block:
    """Memory of one tensor. The tensor holds it through the buffer protocol; it goes back to the
    segment with the last reference.
    """

    def __cinit__(self, Segment segment, size_t nbytes):
        cdef size_t alignment = HUGE_PAGE if nbytes >= HUGE_PAGE else PAGE
        self.nbytes = (nbytes + PAGE - 1) // PAGE * PAGE
        self.offset = segment.allocate(self.nbytes, alignment)
        self.segment = segment
        self.generation = forks()

    def __dealloc__(self):
        # A forked child shares the pages with its parent and must not release them.
        if self.segment is not None and self.generation == forks():
            self.segment.release(self.offset, self.nbytes)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        cdef void *base = self.segment.base + self.offset
        PyBuffer_FillInfo(buffer, self, base, <Py_ssize_t>self.nbytes, 0, flags)


cdef extern from *:
    """
    #include <limits.h>
    #include <malloc.h>
    static void raise_thresholds(void) {
    #ifdef __GLIBC__
        if (!mallopt(M_MMAP_THRESHOLD, 1 << 30)) {  /* older versions take no more than this */
            mallopt(M_MMAP_THRESHOLD, 32 << 20);
        }
        mallopt(M_TRIM_THRESHOLD, INT_MAX);
    #endif
    }
    """
    void raise_thresholds() nogil


def keep_freed_memory():
    """Tells glibc's malloc to keep what is freed, up to 2 GiB, for the next allocation.

    Gradients that are moved into a bucket are freed in the middle of backward. glibc would return
    their memory to the kernel and fault it in again at the next step, which costs more than the
    whole reduction. Does nothing if the user has tuned malloc by environment variables.
    """
    tunables = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}
    if not tunables & os.environ.keys():
        raise_thresholds()
