/* Runs the C part without Python, for machines that this one only emulates: see tests/integration/native/native_arm.py.
 *
 * Reads lines "NBYTES SOURCE_ALIGNMENT TARGET_ALIGNMENT" and prints, per level and line, "LEVEL DIGEST DIGEST ...". Ends
 * with 1 where a copy is not the source or a byte beside it was written. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../flashckpt/native/check.h"

#define BESIDE 256

static uint8_t *aligned_part(uint8_t *memory, size_t alignment) {
    return memory + (-(uintptr_t)memory & 63) + 64 + alignment;
}

static int run(const struct level *level, size_t nbytes, size_t source_alignment, size_t target_alignment) {
    uint8_t *memory = malloc(nbytes + BESIDE), *other = malloc(nbytes + BESIDE), *expected = malloc(nbytes + BESIDE);
    uint8_t *source = aligned_part(memory, source_alignment), *target = aligned_part(other, target_alignment);
    for (size_t k = 0; k < nbytes; k++) source[k] = (uint8_t)((uint32_t)k * 2654435761U >> 24);
    memset(other, 0xAA, nbytes + BESIDE);
    memset(expected, 0xAA, nbytes + BESIDE);
    memcpy(expected + (target - other), source, nbytes);
    uint64_t digests[16];
    struct row row = {(int64_t)(uintptr_t)source, (int64_t)(uintptr_t)target, (int64_t)nbytes};
    struct digest_output out = {digests, 16, NULL};
    if (check_rows(&row, 1, &out).problem != FINE) return 1;
    copy_rows(level, &row, 1, &out, NULL);
    printf("%s", level->name);
    for (int64_t k = 0; k < chunk_count((int64_t)nbytes); k++) printf(" %" PRIu64, digests[k]);
    printf("\n");
    int differs = memcmp(other, expected, nbytes + BESIDE) != 0;
    free(memory), free(other), free(expected);
    return differs;
}

int main(void) {
    const struct level *levels[MOST_LEVELS];
    size_t count = usable_levels(levels), nbytes, source_alignment, target_alignment;
    while (scanf("%zu %zu %zu", &nbytes, &source_alignment, &target_alignment) == 3)
        for (size_t k = 0; k < count; k++)
            if (run(levels[k], nbytes, source_alignment, target_alignment)) return 1;
    return 0;
}
