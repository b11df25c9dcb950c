/* Steps of XXH3 on x86-64, for the loops of xxh3.c and for those of fused.c, which look at numbers too. */
#ifndef FLASHCKPT_XXH3_X86_H
#define FLASHCKPT_XXH3_X86_H

#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f")))
#define AVX2 __attribute__((target("avx2")))

#include "xxh3.h"

AVX512 static inline __m512i stripe_avx512(__m512i acc, const uint8_t *input, const uint8_t *secret) {
    __m512i data = _mm512_loadu_si512(input), key = _mm512_xor_si512(data, _mm512_loadu_si512(secret));
    __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    __m512i swapped = _mm512_shuffle_epi32(data, (_MM_PERM_ENUM)0x4e); /* neighbouring lanes change places */
    return _mm512_add_epi64(acc, _mm512_add_epi64(product, swapped));
}

AVX512 static inline __m512i scramble_avx512(__m512i sum) {
    const __m512i prime = _mm512_set1_epi64(PRIME32_1);
    sum = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), _mm512_loadu_si512(LAST_SECRET));
    __m512i high = _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime), 32);
    return _mm512_add_epi64(_mm512_mul_epu32(sum, prime), high);
}

AVX2 static inline __m256i half_avx2(__m256i acc, const uint8_t *input, const uint8_t *secret) {
    __m256i data = _mm256_loadu_si256((const __m256i *)input);
    __m256i key = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)secret));
    __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    return _mm256_add_epi64(acc, _mm256_add_epi64(product, _mm256_shuffle_epi32(data, 0x4e)));
}

AVX2 static inline __m256i scramble_avx2(__m256i sum, const uint8_t *secret) {
    const __m256i prime = _mm256_set1_epi64x(PRIME32_1);
    sum = _mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47));
    sum = _mm256_xor_si256(sum, _mm256_loadu_si256((const __m256i *)secret));
    __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime), 32);
    return _mm256_add_epi64(_mm256_mul_epu32(sum, prime), high);
}

#endif
