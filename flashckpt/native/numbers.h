/* What the numbers in a block of memory are: a look at bytes that are in the cache for their digest. No Python here. */
#ifndef FLASHCKPT_NUMBERS_H
#define FLASHCKPT_NUMBERS_H

#include <stddef.h>
#include <stdint.h>

/* How the bytes of a row are read; NO_NUMBERS: not at all. KINDS in descriptors.py has the same order. */
enum kind { NO_NUMBERS, FLOAT64, FLOAT32, FLOAT16, BFLOAT16, E5M2, E4M3, E5M2_FNUZ, E4M3_FNUZ, KINDS };

/* Of one chunk. `top`: the largest bit pattern without the sign, which orders magnitudes, with infinity and NaN behind
 * all numbers. `squares`: the sum of squares, of a long chunk that of some numbers, in proportion. */
struct figures {
    uint64_t top;
    double squares;
};

/* The largest pattern, and the sum of squares, of nbytes: a multiple of an element. */
struct numbers {
    size_t width; /* bytes of an element */
    uint64_t (*top)(const uint8_t *input, size_t nbytes);
    double (*squares)(const uint8_t *input, size_t nbytes);
};

/* Does what `blocks` of an xxh3_level does, and notes the largest patterns, lane by lane. Where the level weaves it also
 * copies as many bytes past the cache: `target`, aligned to 64; NULL: none. NULL: there is no such loop for this kind. */
typedef void (*fused_loop)(uint64_t acc[8], const uint8_t *input, size_t blocks, uint8_t seen[64], uint8_t *target,
                           const uint8_t *source);

extern const fused_loop fused_none[KINDS];
extern const struct numbers numbers_plain[KINDS];
#if defined(__x86_64__)
extern const struct numbers numbers_avx2[KINDS], numbers_avx512[KINDS];
extern const fused_loop fused_avx2[KINDS], fused_avx512[KINDS];
#endif

#endif
