#include "numbers.h"

/* Digest and figures in one loop: the numbers are in registers for the digest, which waits for memory anyway. */
#if defined(__x86_64__)
#include "xxh3_x86.h"

#define NOTING __attribute__((target("avx2,fma,f16c")))
#define STRIPES (XXH3_BLOCK / XXH3_STRIPE)

/* -- what is noted of one vector: the largest pattern without sign in `top`, squares in two sums. Squares are single
 * numbers, added up in double ones after each block: see `is_exact` in copy.c for those too large or small for that. */

#define SQUARE(sum, value) sum = _mm256_fmadd_ps(value, value, sum)

NOTING static inline void float32_avx2(__m256i data, __m256i *top, __m256 *sum, __m256 *sum2) {
    (void)sum2;
    __m256i size = _mm256_and_si256(data, _mm256_set1_epi32(0x7fffffff));
    __m256 value = _mm256_castsi256_ps(size);
    *top = _mm256_max_epi32(*top, size);
    SQUARE(*sum, value);
}

/* Two numbers in 32 bits, each of which is a float32 once the other is cut away. */
NOTING static inline void brain16_avx2(__m256i data, __m256i *top, __m256 *sum, __m256 *sum2) {
    __m256 value = _mm256_castsi256_ps(_mm256_and_si256(data, _mm256_set1_epi32((int)0xffff0000)));
    __m256 value2 = _mm256_castsi256_ps(_mm256_slli_epi32(data, 16));
    *top = _mm256_max_epi16(*top, _mm256_and_si256(data, _mm256_set1_epi16(0x7fff)));
    SQUARE(*sum, value);
    SQUARE(*sum2, value2);
}

NOTING static inline void half16_avx2(__m256i data, __m256i *top, __m256 *sum, __m256 *sum2) {
    __m256 value = _mm256_cvtph_ps(_mm256_castsi256_si128(data));
    __m256 value2 = _mm256_cvtph_ps(_mm256_extracti128_si256(data, 1));
    *top = _mm256_max_epi16(*top, _mm256_and_si256(data, _mm256_set1_epi16(0x7fff)));
    SQUARE(*sum, value);
    SQUARE(*sum2, value2);
}

NOTING static inline __m256d widened_avx2(__m256d sum, __m256 added) {
    sum = _mm256_add_pd(sum, _mm256_cvtps_pd(_mm256_castps256_ps128(added)));
    return _mm256_add_pd(sum, _mm256_cvtps_pd(_mm256_extractf128_ps(added, 1)));
}

#define DEFINE_AVX2(KIND)                                                                                              \
    NOTING static void fused_##KIND##_avx2(uint64_t acc[8], const uint8_t *input, size_t blocks,                       \
                                           struct seen *seen) {                                                        \
        __m256i low = _mm256_loadu_si256((__m256i *)acc), high = _mm256_loadu_si256((__m256i *)(acc + 4));             \
        __m256i top = _mm256_loadu_si256((__m256i *)seen->top);                                                        \
        __m256d squares = _mm256_loadu_pd(seen->squares);                                                              \
        for (size_t b = 0; b < blocks; b++) {                                                                          \
            __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};     \
            for (int s = 0; s < STRIPES; s++, input += XXH3_STRIPE) {                                                  \
                low = half_avx2(low, input, xxh3_secret + 8 * s);                                                      \
                high = half_avx2(high, input + 32, xxh3_secret + 8 * s + 32);                                          \
                KIND##_avx2(_mm256_loadu_si256((const __m256i *)input), &top, &sums[0], &sums[1]);                     \
                KIND##_avx2(_mm256_loadu_si256((const __m256i *)(input + 32)), &top, &sums[2], &sums[3]);              \
            }                                                                                                          \
            low = scramble_avx2(low, LAST_SECRET);                                                                     \
            high = scramble_avx2(high, LAST_SECRET + 32);                                                              \
            __m256 both = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3]));             \
            squares = widened_avx2(squares, both);                                                                     \
        }                                                                                                              \
        _mm256_storeu_si256((__m256i *)acc, low);                                                                      \
        _mm256_storeu_si256((__m256i *)(acc + 4), high);                                                               \
        _mm256_storeu_si256((__m256i *)seen->top, top);                                                                \
        _mm256_storeu_pd(seen->squares, squares);                                                                      \
    }

DEFINE_AVX2(float32)
DEFINE_AVX2(brain16)
DEFINE_AVX2(half16)

const fused_loop fused_avx2[KINDS] = {
    [FLOAT32] = fused_float32_avx2, [FLOAT16] = fused_half16_avx2, [BFLOAT16] = fused_brain16_avx2};

/* -- the same in vectors of twice the size, by instructions of AVX-512 F alone ------------------------------------ */

#define SQUARE512(sum, value) sum = _mm512_fmadd_ps(value, value, sum)

AVX512 static inline void float32_avx512(__m512i data, __m512i *top, __m512 *sum, __m512 *sum2) {
    (void)sum2;
    __m512i size = _mm512_and_si512(data, _mm512_set1_epi32(0x7fffffff));
    __m512 value = _mm512_castsi512_ps(size);
    *top = _mm512_max_epi32(*top, size);
    SQUARE512(*sum, value);
}

AVX512 static inline void split_avx512(__m512i data, __m512i *top, __m512i *upper, __m512i *lower) {
    const __m512i mask = _mm512_set1_epi32(0x7fff0000);
    *upper = _mm512_and_si512(data, mask), *lower = _mm512_and_si512(_mm512_slli_epi32(data, 16), mask);
    *top = _mm512_max_epi32(*top, _mm512_max_epi32(*upper, *lower));
}

AVX512 static inline void brain16_avx512(__m512i data, __m512i *top, __m512 *sum, __m512 *sum2) {
    __m512i upper, lower;
    split_avx512(data, top, &upper, &lower);
    __m512 value = _mm512_castsi512_ps(upper), value2 = _mm512_castsi512_ps(lower);
    SQUARE512(*sum, value);
    SQUARE512(*sum2, value2);
}

AVX512 static inline void half16_avx512(__m512i data, __m512i *top, __m512 *sum, __m512 *sum2) {
    __m512i upper, lower;
    split_avx512(data, top, &upper, &lower);
    __m512 value = _mm512_cvtph_ps(_mm512_castsi512_si256(data));
    __m512 value2 = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(data, 1));
    SQUARE512(*sum, value);
    SQUARE512(*sum2, value2);
}

AVX512 static inline __m512d widened_avx512(__m512d sum, __m512 added) {
    __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(added), 1));
    sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_castps512_ps256(added)));
    return _mm512_add_pd(sum, _mm512_cvtps_pd(upper));
}

#define DEFINE_AVX512(KIND)                                                                                            \
    AVX512 static void fused_##KIND##_avx512(uint64_t acc[8], const uint8_t *input, size_t blocks,                     \
                                             struct seen *seen) {                                                      \
        __m512i sum = _mm512_loadu_si512(acc), top = _mm512_loadu_si512(seen->top);                                    \
        __m512d squares = _mm512_loadu_pd(seen->squares);                                                              \
        for (size_t b = 0; b < blocks; b++) {                                                                          \
            __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};                                               \
            for (int s = 0; s < STRIPES; s++, input += XXH3_STRIPE) {                                                  \
                sum = stripe_avx512(sum, input, xxh3_secret + 8 * s);                                                  \
                KIND##_avx512(_mm512_loadu_si512(input), &top, &sums[0], &sums[1]);                                    \
            }                                                                                                          \
            sum = scramble_avx512(sum);                                                                                \
            squares = widened_avx512(squares, _mm512_add_ps(sums[0], sums[1]));                                        \
        }                                                                                                              \
        _mm512_storeu_si512(acc, sum);                                                                                 \
        _mm512_storeu_si512(seen->top, top);                                                                           \
        _mm512_storeu_pd(seen->squares, squares);                                                                      \
    }

DEFINE_AVX512(float32)
DEFINE_AVX512(brain16)
DEFINE_AVX512(half16)

const fused_loop fused_avx512[KINDS] = {
    [FLOAT32] = fused_float32_avx512, [FLOAT16] = fused_half16_avx512, [BFLOAT16] = fused_brain16_avx512};

/* Subnormal numbers, and squares that are some, take an Intel CPU a hundred times as long: they count as 0 meanwhile. */
unsigned flush_subnormal(void) {
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040);
    return mode;
}

void set_float_mode(unsigned mode) { _mm_setcsr(mode); }

#else
unsigned flush_subnormal(void) { return 0; }
void set_float_mode(unsigned mode) { (void)mode; }
#endif

const fused_loop fused_none[KINDS] = {NULL};
