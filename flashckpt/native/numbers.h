/* What the numbers in a block of memory are: a look at bytes that are in the cache for their digest. No Python here. */
#ifndef FLASHCKPT_NUMBERS_H
#define FLASHCKPT_NUMBERS_H

#include <stddef.h>
#include <stdint.h>

/* How the bytes of a row are read; NO_NUMBERS: not at all. KINDS in numbers.py has the same order. */
enum kind { NO_NUMBERS, FLOAT64, FLOAT32, FLOAT16, BFLOAT16, E5M2, E4M3, E5M2_FNUZ, E4M3_FNUZ, KINDS };

/* Of one chunk. `top`: the largest bit pattern without the sign, which orders magnitudes, with infinity and NaN behind
 * all numbers. `squares`: the sum of squares of those numbers that it was taken of, in proportion to the whole chunk. */
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

extern const struct numbers numbers_plain[KINDS];
#if defined(__x86_64__)
extern const struct numbers numbers_avx2[KINDS], numbers_avx512[KINDS];
#endif

#endif
