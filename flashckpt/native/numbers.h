/* What the numbers in a block of memory are: a look at bytes that are in the cache for their digest. No Python here. */
#ifndef FLASHCKPT_NUMBERS_H
#define FLASHCKPT_NUMBERS_H

#include <stddef.h>
#include <stdint.h>

/* How the bytes of a row are read; NO_NUMBERS: not at all. KINDS in numbers.py has the same order. */
enum kind { NO_NUMBERS, FLOAT64, FLOAT32, FLOAT16, BFLOAT16, E5M2, E4M3, E5M2_FNUZ, E4M3_FNUZ, KINDS };

/* Of one chunk. `top`: the largest bit pattern without the sign, which orders magnitudes, with infinity and NaN behind
 * all numbers. `squares`: the sum of squares; at levels without a fused loop that of some numbers, in proportion. */
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

/* What a fused loop has seen of a chunk so far, lane by lane; `top` as the kind's numbers. */
struct seen {
    uint64_t top[8];
    double squares[8];
};

/* Does what `blocks` of an xxh3_level does, and looks at the same numbers. NULL: there is none for this kind. */
typedef void (*fused_loop)(uint64_t acc[8], const uint8_t *input, size_t blocks, struct seen *seen);

/* Around fused loops: returns the mode to set behind them. */
unsigned flush_subnormal(void);
void set_float_mode(unsigned mode);

extern const fused_loop fused_none[KINDS];
extern const struct numbers numbers_plain[KINDS];
#if defined(__x86_64__)
extern const struct numbers numbers_avx2[KINDS], numbers_avx512[KINDS];
extern const fused_loop fused_avx2[KINDS], fused_avx512[KINDS];
#endif

#endif
