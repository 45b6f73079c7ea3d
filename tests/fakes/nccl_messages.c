/* The sends and receives of the stand-in for NCCL: what one rank posts at a time, all of which
 * progress together. Those between two ranks match in the order in which they were posted. None is
 * over before its match has come and all has been copied. A receive whose match has another count
 * or dtype takes nothing, so that both ranks wait until somebody aborts. */
#include <string.h>

#include "nccl_calls.h"
#include "nccl_reduce.h"

static size_t nbytes_of(const struct message *m) {
    return m->count * dtype_nbytes(m->dtype);
}

static size_t next_part(const struct message *m) {
    const size_t left = nbytes_of(m) - m->done;
    return left < MAIL_BYTES ? left : MAIL_BYTES;
}

/* Puts the next part into the mailbox, or sees that the last one was taken. A message of no bytes
 * has one part, too. */
static bool put_part(struct message *m, struct mailbox *box) {
    if (box->is_full) {
        return false;
    }
    if (m->has_begun && m->done == nbytes_of(m)) {
        m->is_over = true;
        return true;
    }
    const size_t n = next_part(m);
    box->count = m->count;
    box->dtype = m->dtype;
    if (n > 0) {
        memcpy(box->part, m->buffer + m->done, n);
    }
    m->done += n;
    m->has_begun = true;
    box->is_full = true;
    return true;
}

/* Takes a part out of the mailbox, unless it is of another message than is expected. */
static bool take_part(struct message *m, struct mailbox *box) {
    if (!box->is_full || box->count != m->count || box->dtype != m->dtype) {
        return false;
    }
    const size_t n = next_part(m);
    if (n > 0) {
        memcpy(m->buffer + m->done, box->part, n);
    }
    m->done += n;
    m->is_over = m->done == nbytes_of(m);
    box->is_full = false;
    return true;
}

static struct mailbox *mailbox_of(ncclComm_t comm, const struct message *m) {
    return m->is_send ? world_mailbox(comm->world, comm->rank, m->peer)
                      : world_mailbox(comm->world, m->peer, comm->rank);
}

/* Looks at the first message that is not over to, and from, each rank. Returns whether any has
 * progressed; counts those that are over. */
static bool progress(ncclComm_t comm, struct message *messages, size_t n, size_t *n_over) {
    bool has_progressed = false, is_later[2][MAX_RANKS] = {{false}};
    for (size_t i = 0; i < n; i++) {
        struct message *m = &messages[i];
        bool *is_behind = &is_later[m->is_send][m->peer];
        if (m->is_over || *is_behind) {
            continue;
        }
        struct mailbox *box = mailbox_of(comm, m);
        has_progressed = (m->is_send ? put_part(m, box) : take_part(m, box)) || has_progressed;
        *n_over += m->is_over;
        *is_behind = !m->is_over;
    }
    return has_progressed;
}

bool move_messages(ncclComm_t comm, struct message *messages, size_t n) {
    size_t n_over = 0;
    int n_looks = 0;
    while (n_over < n && !world_is_abandoned(comm->world)) {
        const uint32_t knocks = world_knocks(comm->world);
        if (progress(comm, messages, n, &n_over)) {
            world_knock(comm->world);
            n_looks = 0;
        } else {
            world_rest(comm->world, n_looks++, knocks);
        }
    }
    return !world_is_abandoned(comm->world);
}

/* ---- what is refused ---- */

/* From `i` on, the next one between this rank and itself in one direction; `n` if there is none. */
static size_t next_to_self(const struct message *messages, size_t n, size_t i, int rank,
                           bool is_send) {
    while (i < n && (messages[i].peer != rank || messages[i].is_send != is_send)) {
        i++;
    }
    return i;
}

static bool matches_itself(const struct message *messages, size_t n, int rank) {
    size_t s = next_to_self(messages, n, 0, rank, true);
    size_t r = next_to_self(messages, n, 0, rank, false);
    while (s < n && r < n && messages[s].count == messages[r].count &&
           messages[s].dtype == messages[r].dtype) {
        s = next_to_self(messages, n, s + 1, rank, true);
        r = next_to_self(messages, n, r + 1, rank, false);
    }
    return s == n && r == n;
}

static bool overlap(const struct message *a, const struct message *b) {
    return a->count > 0 && b->count > 0 && a->buffer < b->buffer + nbytes_of(b) &&
           b->buffer < a->buffer + nbytes_of(a);
}

static bool is_copy_in_place(const struct message *a, const struct message *b, int rank) {
    return a->peer == rank && b->peer == rank && a->is_send != b->is_send &&
           a->buffer == b->buffer && nbytes_of(a) == nbytes_of(b);
}

static bool writes_over_another(const struct message *messages, size_t n, int rank) {
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < i; j++) {
            const struct message *a = &messages[i], *b = &messages[j];
            const bool is_written = !a->is_send || !b->is_send;
            if (is_written && overlap(a, b) && !is_copy_in_place(a, b, rank)) {
                return true;
            }
        }
    }
    return false;
}

const char *wrong_with_messages(const struct message *messages, size_t n, int rank) {
    if (!matches_itself(messages, n, rank)) {
        return "a send to itself and a receive from itself do not match in the group";
    }
    if (writes_over_another(messages, n, rank)) {
        return "a receive writes where another message of the group reads or writes";
    }
    return NULL;
}
