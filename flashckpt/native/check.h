/* What can be known of rows before a byte is touched. No Python here. */
#ifndef FLASHCKPT_CHECK_H
#define FLASHCKPT_CHECK_H

#include "copy.h"

/* The order is that of PROBLEMS in descriptors.py. */
enum problem {
    FINE,
    NEGATIVE_SIZE,
    BAD_ADDRESS,
    NOTHING_TO_DO,
    DIGEST_OUTSIDE,
    OVERLAP_SOURCE, /* a target lies over a source; `other` is the source's row */
    OVERLAP_TARGET, /* a target lies over another target */
    SOURCE_UNMAPPED,
    SOURCE_UNREADABLE,
    SOURCE_CUT_SHORT,
    TARGET_UNMAPPED,
    TARGET_READ_ONLY,
    TARGET_CUT_SHORT,
    NO_MEMORY, /* for the check itself */
};

struct finding {
    enum problem problem;
    size_t row, other;
};

/* Sizes, addresses, digest indexes and overlaps: arithmetic only. */
struct finding check_rows(const struct row *rows, size_t count, const struct digest_output *out);

/* Whether sources can be read and targets written, by this process's map of its memory. FINE where it has none (/proc). */
struct finding check_memory(const struct row *rows, size_t count);

#endif
