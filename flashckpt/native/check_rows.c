#include <stdlib.h>

#include "check.h"

struct range {
    int64_t start, stop;
    size_t row;
};

static struct finding found(enum problem problem, size_t row, size_t other) {
    return (struct finding){problem, row, other};
}

static enum problem check_row(const struct row *row, int64_t first, const struct digest_output *out) {
    if (row->nbytes < 0) return NEGATIVE_SIZE;
    if (row->source < 0 || row->target < 0) return BAD_ADDRESS;
    if (row->nbytes == 0) return FINE;
    if (row->source == 0) return BAD_ADDRESS;
    if (row->nbytes > INT64_MAX - row->source || row->nbytes > INT64_MAX - row->target) return BAD_ADDRESS;
    if (out->digests == NULL || first < 0) return row->target == 0 ? NOTHING_TO_DO : FINE;
    int64_t chunks = chunk_count(row->nbytes);
    return chunks > out->count || first > out->count - chunks ? DIGEST_OUTSIDE : FINE;
}

static int by_start(const void *a, const void *b) {
    int64_t left = ((const struct range *)a)->start, right = ((const struct range *)b)->start;
    return (left > right) - (left < right);
}

static int is_copied(const struct row *row) { return row->nbytes > 0 && row->target != 0; }

/* The first range that ends behind `at`; ranges are sorted and apart. */
static size_t first_behind(const struct range *ranges, size_t count, int64_t at) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (ranges[middle].stop <= at) low = middle + 1;
        else high = middle;
    }
    return low;
}

static struct finding compare_all(const struct row *rows, size_t count, struct range *targets) {
    size_t n = 0;
    for (size_t k = 0; k < count; k++)
        if (is_copied(&rows[k])) targets[n++] = (struct range){rows[k].target, rows[k].target + rows[k].nbytes, k};
    qsort(targets, n, sizeof *targets, by_start);
    for (size_t k = 1; k < n; k++)
        if (targets[k].start < targets[k - 1].stop) return found(OVERLAP_TARGET, targets[k].row, targets[k - 1].row);
    for (size_t k = 0; k < count; k++) {
        if (rows[k].nbytes == 0) continue;
        size_t hit = first_behind(targets, n, rows[k].source);
        if (hit < n && targets[hit].start < rows[k].source + rows[k].nbytes)
            return found(OVERLAP_SOURCE, targets[hit].row, k);
    }
    return found(FINE, 0, 0);
}

/* Nearly always the targets ascend, and no source lies between the first and the last: two passes, no sorting. */
static struct finding check_overlaps(const struct row *rows, size_t count) {
    int64_t low = INT64_MAX, high = 0;
    int ascending = 1, between = 0;
    for (size_t k = 0; k < count; k++) {
        if (!is_copied(&rows[k])) continue;
        ascending &= rows[k].target >= high;
        if (rows[k].target < low) low = rows[k].target;
        if (rows[k].target + rows[k].nbytes > high) high = rows[k].target + rows[k].nbytes;
    }
    for (size_t k = 0; k < count; k++)
        between |= rows[k].nbytes > 0 && rows[k].source < high && rows[k].source + rows[k].nbytes > low;
    if (ascending && !between) return found(FINE, 0, 0);
    struct range *targets = malloc(count * sizeof *targets);
    if (targets == NULL) return found(NO_MEMORY, 0, 0);
    struct finding result = compare_all(rows, count, targets);
    free(targets);
    return result;
}

struct finding check_rows(const struct row *rows, size_t count, const struct digest_output *out) {
    int64_t next = 0;
    for (size_t k = 0; k < count; k++) {
        enum problem problem = check_row(&rows[k], out->first != NULL ? out->first[k] : next, out);
        if (problem != FINE) return found(problem, k, k);
        next += chunk_count(rows[k].nbytes);
    }
    return check_overlaps(rows, count);
}
