#include "numbers.h"

/* Digest, largest pattern and the copy of what is digested next, in one loop: the CPU waits for memory anyway. */
#if defined(__x86_64__)
#include "xxh3_x86.h"

#define AVX512BW __attribute__((target("avx512f,avx512bw")))
#define STRIPES (XXH3_BLOCK / XXH3_STRIPE)

#define DEFINE_AVX2(KIND, LANES, MAX, MASK)                                                                            \
    AVX2 static void KIND##_avx2(uint64_t acc[8], const uint8_t *input, size_t blocks, uint8_t seen[64],               \
                                 uint8_t *target, const uint8_t *source) {                                             \
        (void)target, (void)source;                                                                                    \
        __m256i low = _mm256_loadu_si256((__m256i *)acc), high = _mm256_loadu_si256((__m256i *)(acc + 4));             \
        __m256i top = _mm256_loadu_si256((__m256i *)seen), mask = _mm256_set1_##LANES(MASK);                           \
        for (size_t b = 0; b < blocks; b++) {                                                                          \
            for (int s = 0; s < STRIPES; s++, input += XXH3_STRIPE) {                                                  \
                low = half_avx2(low, input, xxh3_secret + 8 * s);                                                      \
                high = half_avx2(high, input + 32, xxh3_secret + 8 * s + 32);                                          \
                top = MAX(top, _mm256_and_si256(mask, _mm256_loadu_si256((const __m256i *)input)));                    \
                top = MAX(top, _mm256_and_si256(mask, _mm256_loadu_si256((const __m256i *)(input + 32))));             \
            }                                                                                                          \
            low = scramble_avx2(low, LAST_SECRET);                                                                     \
            high = scramble_avx2(high, LAST_SECRET + 32);                                                              \
        }                                                                                                              \
        _mm256_storeu_si256((__m256i *)acc, low);                                                                      \
        _mm256_storeu_si256((__m256i *)(acc + 4), high);                                                               \
        _mm256_storeu_si256((__m256i *)seen, top);                                                                     \
    }

DEFINE_AVX2(of32, epi32, _mm256_max_epi32, 0x7fffffff)
DEFINE_AVX2(of16, epi16, _mm256_max_epi16, 0x7fff)
DEFINE_AVX2(of8, epi8, _mm256_max_epu8, 0x7f)

const fused_loop fused_avx2[KINDS] = {[FLOAT32] = of32_avx2,  [FLOAT16] = of16_avx2, [BFLOAT16] = of16_avx2,
                                      [E5M2] = of8_avx2, [E4M3] = of8_avx2};

/* One line of four lanes is copied per stripe, four neighbouring ones of a lane in a row: see copy.c. */
#define DEFINE_LOOP(NAME, PULL, NOTE)                                                                                  \
    AVX512BW static void NAME(uint64_t acc[8], const uint8_t *input, size_t blocks, uint8_t seen[64],                  \
                              uint8_t *target, const uint8_t *source) {                                                \
        (void)target, (void)source;                                                                                    \
        __m512i sum = _mm512_loadu_si512(acc), top = _mm512_loadu_si512(seen);                                         \
        for (size_t b = 0; b < blocks; b++) {                                                                          \
            for (size_t s = 0; s < STRIPES; s++, input += XXH3_STRIPE) {                                               \
                PULL(s / 4 * blocks * (XXH3_BLOCK / 4) + b * (XXH3_BLOCK / 4) + s % 4 * XXH3_STRIPE);                  \
                sum = stripe_avx512(sum, input, xxh3_secret + 8 * s);                                                  \
                NOTE(_mm512_loadu_si512(input));                                                                       \
            }                                                                                                          \
            sum = scramble_avx512(sum);                                                                                \
        }                                                                                                              \
        _mm512_storeu_si512(acc, sum);                                                                                 \
        _mm512_storeu_si512(seen, top);                                                                                \
    }

#define STREAM(at) _mm512_stream_si512((void *)(target + (at)), _mm512_loadu_si512(source + (at)))
#define NO_STREAM(at) (void)0
#define DEFINE_AVX512(KIND, NOTE)                                                                                      \
    DEFINE_LOOP(KIND##_alone, NO_STREAM, NOTE)                                                                         \
    DEFINE_LOOP(KIND##_woven, STREAM, NOTE)                                                                            \
    static void KIND##_avx512(uint64_t acc[8], const uint8_t *input, size_t blocks, uint8_t seen[64], uint8_t *target, \
                              const uint8_t *source) {                                                                 \
        (target != NULL ? KIND##_woven : KIND##_alone)(acc, input, blocks, seen, target, source);                      \
    }

#define NOTE_64(data) top = _mm512_max_epi64(top, _mm512_and_si512(data, _mm512_set1_epi64(INT64_MAX)))
#define NOTE_32(data) top = _mm512_max_epi32(top, _mm512_and_si512(data, _mm512_set1_epi32(INT32_MAX)))
#define NOTE_16(data) top = _mm512_max_epi16(top, _mm512_and_si512(data, _mm512_set1_epi16(INT16_MAX)))
#define NOTE_8(data) top = _mm512_max_epu8(top, _mm512_and_si512(data, _mm512_set1_epi8(INT8_MAX)))
#define NOTE_NONE(data) (void)0

DEFINE_AVX512(none, NOTE_NONE)
DEFINE_AVX512(of64, NOTE_64)
DEFINE_AVX512(of32, NOTE_32)
DEFINE_AVX512(of16, NOTE_16)
DEFINE_AVX512(of8, NOTE_8)

const fused_loop fused_avx512[KINDS] = {[NO_NUMBERS] = none_avx512, [FLOAT64] = of64_avx512,
                                        [FLOAT32] = of32_avx512,    [FLOAT16] = of16_avx512,
                                        [BFLOAT16] = of16_avx512,   [E5M2] = of8_avx512,
                                        [E4M3] = of8_avx512};
#endif

const fused_loop fused_none[KINDS] = {NULL};
