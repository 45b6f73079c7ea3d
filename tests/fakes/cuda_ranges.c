/* Who has touched which bytes of device memory: a table of ranges in the order of their addresses,
 * each with its last write and the reads since. See cuda_order.h. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_order.h"

enum { MAX_READS = 4, MAX_NAMES = 1024, FIRST_RANGES = 256 };

struct access {
    uint32_t stream, time; /* time 0: none */
    uint32_t name;
};

struct touched {
    uintptr_t start, end;
    struct access write;
    struct access reads[MAX_READS]; /* by different streams */
    int n_reads;
};

static struct touched *table;
static size_t n_touched, room;
static char *names[MAX_NAMES]; /* they are few: of kernels, collectives, torch's operations */
static uint32_t n_names;

static uint32_t number_of_name(const char *name) {
    for (uint32_t i = 0; i < n_names; i++) {
        if (strcmp(names[i], name) == 0) {
            return i;
        }
    }
    if (n_names == MAX_NAMES) {
        return MAX_NAMES - 1;
    }
    names[n_names] = strdup(name);
    return n_names++;
}

/* ---- the table ---- */

/* Puts `n_new` ranges, yet to be filled in, in the place of `n_old`. */
static void replace(size_t at, size_t n_old, size_t n_new) {
    if (n_touched + n_new > room) {
        room = room > 0 ? 2 * (room + n_new) : FIRST_RANGES;
        table = realloc(table, room * sizeof *table);
        if (table == NULL) {
            abort();
        }
    }
    memmove(table + at + n_new, table + at + n_old, (n_touched - at - n_old) * sizeof *table);
    n_touched += n_new - n_old;
}

/* The number of the first range at or behind the address. No range reaches across it any more. */
static size_t split_at(uintptr_t address) {
    size_t low = 0, high = n_touched;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table[middle].start < address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (low > 0 && table[low - 1].end > address) {
        replace(low, 0, 1);
        table[low] = table[low - 1];
        table[low - 1].end = table[low].start = address;
    }
    return low;
}

static bool is_over(const struct access *access, const struct clock *known) {
    return access->time <= known->times[access->stream % CLOCKS];
}

/* ---- races ---- */

static void check(const struct touched *touched, const struct access *before, const char *did,
                  const struct clock *known, const char *does) {
    if (before->time > 0 && !is_over(before, known)) {
        note_race("%zu bytes at %#zx: %s, and nothing orders it after %s on stream 0x%x, which %s "
                  "them",
                  (size_t)(touched->end - touched->start), (size_t)touched->start, does,
                  names[before->name], before->stream, did);
    }
}

static void check_write(const struct touched *touched, const struct clock *known,
                        const char *does) {
    check(touched, &touched->write, "writes", known, does);
    for (int i = 0; i < touched->n_reads; i++) {
        check(touched, &touched->reads[i], "reads", known, does);
    }
}

/* ---- reads, writes, and ends ---- */

/* A stream's later read comes after its earlier one. Where there are too many streams, the oldest
 * read is forgotten. */
static void add_read(struct touched *touched, const struct access *read) {
    int i = 0;
    while (i < touched->n_reads && touched->reads[i].stream != read->stream) {
        i++;
    }
    if (i == MAX_READS) {
        memmove(touched->reads, touched->reads + 1, (MAX_READS - 1) * sizeof *touched->reads);
        i = MAX_READS - 1;
    }
    touched->reads[i] = *read;
    touched->n_reads = i < touched->n_reads ? touched->n_reads : i + 1;
}

static void read_range(uintptr_t start, uintptr_t end, const struct access *access,
                       const struct clock *known, const char *does) {
    split_at(end);
    for (size_t i = split_at(start); start < end; i++) {
        uintptr_t next = i < n_touched && table[i].start < end ? table[i].start : end;
        if (start < next) { /* nobody has touched these */
            replace(i, 0, 1);
            table[i] = (struct touched){.start = start, .end = next};
        }
        check(&table[i], &table[i].write, "writes", known, does);
        add_read(&table[i], access);
        start = table[i].end;
    }
}

static void write_range(uintptr_t start, uintptr_t end, const struct access *access,
                        const struct clock *known, const char *does) {
    size_t first = split_at(start), last = split_at(end);
    for (size_t i = first; i < last; i++) {
        check_write(&table[i], known, does);
    }
    replace(first, last - first, 1);
    table[first] = (struct touched){.start = start, .end = end, .write = *access};
}

void ranges_touch(size_t stream, uint32_t time, const struct clock *known, const char *name,
                  const struct range *range) {
    if (range->nbytes == 0) {
        return;
    }
    const uintptr_t start = (uintptr_t)range->address;
    const struct access access = {(uint32_t)stream, time, number_of_name(name)};
    char does[128];
    snprintf(does, sizeof does, "%s on stream 0x%zx %s them", name, stream,
             range->is_write ? "writes" : "reads");
    (range->is_write ? write_range : read_range)(start, start + range->nbytes, &access, known,
                                                 does);
}

void ranges_free(const struct clock *known, const char *who, const void *address, size_t nbytes) {
    const uintptr_t start = (uintptr_t)address;
    size_t first = split_at(start), last = split_at(start + nbytes);
    for (size_t i = first; i < last; i++) {
        check_write(&table[i], known, who);
    }
    replace(first, last - first, 0);
}

void ranges_forget(const void *address, size_t nbytes) {
    const uintptr_t start = (uintptr_t)address;
    size_t first = split_at(start), last = split_at(start + nbytes);
    replace(first, last - first, 0);
}

void ranges_forget_all(void) {
    n_touched = 0;
}
