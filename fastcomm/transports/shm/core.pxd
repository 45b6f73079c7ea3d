"""Declarations of the C core: kernels/shm/core.h says what they mean."""

from libc.stdint cimport uint32_t, uint64_t

from fastcomm.control.announcement cimport announcement
from fastcomm.control.collectives cimport shm_piece


cdef extern from "shm/core.h" nogil:
    enum:
        SHM_MAX_RANKS, SHM_RING
        SHM_OK, SHM_AGAIN, SHM_MISMATCH, SHM_PEER_LOST, SHM_ABANDONED
        SHM_ALIVE, SHM_CLOSED, SHM_ABORTED, SHM_DROPPED, SHM_ENDED, SHM_RAISED

    struct shm_counting:
        uint64_t numel
        bint adds_squares

    struct shm_statistics:
        uint64_t n_nonfinite
        double square_sum

    struct shm_outcome:
        bint has_no_data, is_skipped, is_counted
        shm_statistics statistics
        uint64_t began_ns, ended_ns

    struct shm_comm

    size_t shm_control_bytes()
    shm_comm *shm_open_comm(int rank, int world_size, char *const *segments,
                            const size_t *nbytes, const int *pidfds, int yield_early)
    void shm_free_comm(shm_comm *comm)
    int shm_post(shm_comm *comm, const announcement *wanted, const void *input, void *output,
                 const shm_piece *pieces, size_t n_pieces, const uint64_t *bounds,
                 shm_counting counting, uint32_t *seq)
    int shm_wait(shm_comm *comm, uint32_t seq, uint64_t slice_ns)
    int shm_make_room(shm_comm *comm, uint64_t slice_ns)
    uint64_t shm_progress(const shm_comm *comm)
    void shm_keep_times(shm_comm *comm, int change)
    shm_outcome shm_outcome_of(const shm_comm *comm, uint32_t seq)
    bint shm_is_possible(const shm_comm *comm, int rank, const announcement *d)
    int shm_stalled_on(const shm_comm *comm)
    uint32_t shm_posted(const shm_comm *comm, int rank)
    announcement shm_announcement_of(const shm_comm *comm, int rank, uint32_t seq)
    int shm_state_of(const shm_comm *comm, int rank)
    int shm_blamed_by(const shm_comm *comm, int rank)
    void shm_set_state(shm_comm *comm, int state, int blames)
