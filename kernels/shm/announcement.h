/* What a rank says of the collective that it has come to, and what the ranks conclude from what all
 * of them have said: see "How ranks agree" in docs/design.md. The transport shm and those between
 * hosts share it. */
#ifndef FASTCOMM_SHM_ANNOUNCEMENT_H
#define FASTCOMM_SHM_ANNOUNCEMENT_H

#include "reduce.h"

enum call_kind {
    CALL_BARRIER = 1,
    CALL_ALL_REDUCE,
    CALL_BROADCAST,
    CALL_ALL_GATHER,
    CALL_REDUCE_SCATTER,
    /* Each rank's input is cut into a part for every rank, whose output is the parts it gets, by
     * the rank they come from. In GATHER only `root` has an output, in SCATTER only `root` has an
     * input, which is private. Parts of ALL_TO_ALL may be of any sizes: see shm_post. */
    CALL_GATHER,
    CALL_SCATTER,
    CALL_ALL_TO_ALL,
    /* Of a flat tensor that lies in the ranks' segments and is cut into one shard per rank, of any
     * sizes. REDUCE_SCATTER_V reduces every shard into its owner's tensor, and what lies behind the
     * last shard into all ranks' tensors. ALL_GATHER_V copies every owner's shard to the others. */
    CALL_REDUCE_SCATTER_V,
    CALL_ALL_GATHER_V,
    /* This rank cannot go on with the collectives under way. A rank that learns of it announces
     * CALL_ABANDON, too, again and again, until all have done so under one number. */
    CALL_ABANDON,
    CALL_KINDS
};

/* The dtypes in which data travels: those that are reduced, and two of 8 bits. */
enum { WIRE_DTYPES = SHM_DTYPES + 2 };

enum presence {
    HAS_DATA,
    /* If the others reduce a bucket, this rank moves data for them, and adds none of its own. Any
     * other collective of theirs is a mismatch. If all ranks say so, there is nothing to do. */
    HAS_NO_DATA,
    VOTES_TO_SKIP, /* whatever the others' op is, nothing is moved */
};

/* Where the input lies that the peers read. */
enum place {
    PRIVATE_MEMORY,
    IN_ARENA,       /* of this rank's segment */
    STAGED_IN_PART, /* private, and its first chunk was staged before the rank arrived */
};

/* What must agree: kind, op, dtype, wire, root, label, numel and fingerprint. With the flag
 * that announces it, it fills one cache line. */
struct announcement {
    uint8_t kind, op, dtype;
    uint8_t wire; /* the dtype in which it travels */
    uint16_t root;
    uint8_t presence, place;
    uint32_t label;       /* the caller's name for this collective (a bucket's number) */
    uint64_t numel;       /* of the input; of SCATTER, of the output */
    uint64_t fingerprint; /* see collective.fingerprint_of */
    uint64_t offset;      /* in the segment, where the place is IN_ARENA */
    /* A weighted op adds scale * tensor over the ranks, and divides by the sum of the ranks'
     * weights; where that is 0, so is the result. */
    double weight, scale;
};

enum outcome { ALL_AGREE, THEY_DIFFER, ONE_ABANDONS };

/* What all ranks conclude. */
struct verdict {
    enum outcome outcome;
    const struct announcement *wanted; /* by the first rank that has data; NULL if none has */
    bool lacks_data;                   /* a rank has none */
    bool is_skipped;                   /* a rank votes so */
    bool has_factors;                  /* the ranks' tensors do not count alike */
};

static inline bool is_weighted(const struct announcement *a) {
    return a->op == SHM_WEIGHTED_MEAN || a->op == SHM_WEIGHTED_SUM;
}

/* Only these are multiplied by factors, and counted. */
static inline bool is_float(int dtype) {
    return dtype == SHM_FLOAT32 || dtype == SHM_FLOAT64 || dtype == SHM_FLOAT16 ||
           dtype == SHM_BFLOAT16;
}

/* Whether a rank of `world_size` can have announced this: it can be named in words. */
static inline bool is_collective(const struct announcement *a, int world_size) {
    return a->kind >= CALL_BARRIER && a->kind < CALL_KINDS && a->op < SHM_OPS &&
           a->dtype < SHM_DTYPES && a->wire < WIRE_DTYPES && a->root < world_size &&
           a->presence <= VOTES_TO_SKIP && a->place <= STAGED_IN_PART &&
           (!is_weighted(a) || is_float(a->dtype)) && a->numel <= UINT64_MAX / 8;
}

static inline bool is_same_call(const struct announcement *a, const struct announcement *b,
                                bool compares_op) {
    return a->kind == b->kind && (!compares_op || a->op == b->op) && a->dtype == b->dtype &&
           a->wire == b->wire && a->root == b->root && a->numel == b->numel &&
           a->label == b->label && a->fingerprint == b->fingerprint;
}

/* Whether ranks without data can take part. */
static inline bool admits_absence(const struct announcement *a, bool is_skipped) {
    return a->kind == CALL_ALL_REDUCE && a->label != 0 && is_float(a->dtype) &&
           (is_skipped || is_weighted(a) || a->op == SHM_MEAN);
}

/* What the ranks' tensors are multiplied by before they are added. Ranks without data count
 * nothing; in a mean without weights the others count alike. */
static inline void weigh(const struct announcement *const *all, int world_size, double *factors) {
    double total = 0;
    for (int r = 0; r < world_size; r++) {
        bool has_data = all[r]->presence == HAS_DATA, has_weight = is_weighted(all[r]);
        factors[r] = !has_data ? 0 : has_weight ? all[r]->scale : 1;
        total += !has_data ? 0 : has_weight ? all[r]->weight : 1;
    }
    for (int r = 0; r < world_size; r++) {
        factors[r] = total > 0 ? factors[r] / total : 0;
    }
}

/* all: by rank, what it has announced. are_possible: of all of them, is_collective(). factors: room
 * for one of each rank; set where the verdict has some. */
static inline struct verdict decide(const struct announcement *const *all, int world_size,
                                    bool are_possible, double *factors) {
    struct verdict v = {.outcome = are_possible ? ALL_AGREE : THEY_DIFFER};
    bool is_abandoned = false;
    for (int r = 0; r < world_size; r++) {
        v.is_skipped = v.is_skipped || all[r]->presence == VOTES_TO_SKIP;
        v.lacks_data = v.lacks_data || all[r]->presence == HAS_NO_DATA;
        is_abandoned = is_abandoned || all[r]->kind == CALL_ABANDON;
        v.wanted = v.wanted != NULL || all[r]->presence == HAS_NO_DATA ? v.wanted : all[r];
    }
    for (int r = 0; r < world_size; r++) {
        bool is_alike =
            all[r]->presence == HAS_NO_DATA || is_same_call(all[r], v.wanted, !v.is_skipped);
        v.outcome = is_alike ? v.outcome : THEY_DIFFER;
    }
    if (v.lacks_data && v.wanted != NULL && !admits_absence(v.wanted, v.is_skipped)) {
        v.outcome = THEY_DIFFER;
    }
    if (v.outcome == THEY_DIFFER && is_abandoned) {
        v.outcome = ONE_ABANDONS;
    }
    v.has_factors = v.wanted != NULL && (v.lacks_data || is_weighted(v.wanted));
    if (v.has_factors) {
        weigh(all, world_size, factors);
    }
    return v;
}

#endif
