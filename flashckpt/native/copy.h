/* Copy rows of memory and digest them on the way. No Python here. */
#ifndef FLASHCKPT_COPY_H
#define FLASHCKPT_COPY_H

#include <stddef.h>
#include <stdint.h>

#include "numbers.h"
#include "xxh3.h"

#define CHUNK_BYTES ((int64_t)1 << 20) /* bytes per digest, counted from the start of a row */

/* One row of the descriptors, as the caller's int64[n, 3] holds it. */
struct row {
    int64_t source; /* address */
    int64_t target; /* address; 0: nothing is copied */
    int64_t nbytes;
};

/* Where digests go. `digests` NULL: none are made. */
struct digest_output {
    uint64_t *digests;
    int64_t count;
    const int64_t *first; /* per row the index of its first digest, negative: none for this row; NULL: row after row */
    const uint8_t *kinds; /* per row an enum kind; NULL: no figures */
    struct figures *figures; /* of the same chunks as `digests` */
};

static inline int64_t chunk_count(int64_t nbytes) { return nbytes / CHUNK_BYTES + (nbytes % CHUNK_BYTES != 0); }

/* What one kind of CPU is best at. */
struct level {
    const char *name;
    const struct xxh3_level *hash;
    const struct numbers *numbers; /* [KINDS] */
    const fused_loop *fused; /* [KINDS] */
    /* Copy n bytes by stores that pass the cache; target aligned to 64, n a multiple of 64. NULL: there are none. */
    void (*stream)(uint8_t *target, const uint8_t *source, size_t n);
    int weaves;   /* fused loops copy the next piece while they digest one */
    size_t piece; /* bytes that are copied before they are digested, a multiple of a block */
};

#define MOST_LEVELS 5

/* The levels that this CPU has, the best one last; returns how many. */
size_t usable_levels(const struct level *found[MOST_LEVELS]);

/* Do what rows say. They must have been checked: see check.h. Everything is visible to other CPUs on return.
 *
 * `next` NULL: all of them. Else it is the number of the next row, which several threads with the same arguments take
 * from it, one by one, until none is left; `out->first` is needed then. Returns how many bytes this call copied. */
int64_t copy_rows(const struct level *level, const struct row *rows, size_t count, const struct digest_output *out,
                  int64_t *next);

#endif
