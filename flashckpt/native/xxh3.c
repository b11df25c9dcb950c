#include "xxh3.h"

#include <string.h>

#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL
#define PRIME_MX1 0x165667919E3779F9ULL
#define PRIME_MX2 0x9FB21C651E98DF25ULL

const uint8_t xxh3_secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint32_t load32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline uint64_t load64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline uint64_t rotate(uint64_t value, int bits) { return (value << bits) | (value >> (64 - bits)); }

/* The upper half of the 128-bit product, exclusive-or the lower one. */
static inline uint64_t fold(uint64_t a, uint64_t b) {
    __extension__ typedef unsigned __int128 uint128;
    uint128 product = (uint128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t avalanche(uint64_t hash) {
    hash ^= hash >> 37;
    hash *= PRIME_MX1;
    return hash ^ (hash >> 32);
}

static inline uint64_t avalanche_small(uint64_t hash) {
    hash ^= hash >> 33;
    hash *= PRIME64_2;
    hash ^= hash >> 29;
    hash *= PRIME64_3;
    return hash ^ (hash >> 32);
}

static inline uint64_t mix16(const uint8_t *input, const uint8_t *secret) {
    return fold(load64(input) ^ load64(secret), load64(input + 8) ^ load64(secret + 8));
}

static uint64_t up_to_16(const uint8_t *input, size_t nbytes) {
    const uint8_t *secret = xxh3_secret;
    if (nbytes > 8) {
        uint64_t low = load64(input) ^ load64(secret + 24) ^ load64(secret + 32);
        uint64_t high = load64(input + nbytes - 8) ^ load64(secret + 40) ^ load64(secret + 48);
        return avalanche(nbytes + __builtin_bswap64(low) + high + fold(low, high));
    }
    if (nbytes >= 4) {
        uint64_t both = load32(input + nbytes - 4) + ((uint64_t)load32(input) << 32);
        uint64_t hash = both ^ load64(secret + 8) ^ load64(secret + 16);
        hash ^= rotate(hash, 49) ^ rotate(hash, 24);
        hash *= PRIME_MX2;
        hash ^= (hash >> 35) + nbytes;
        hash *= PRIME_MX2;
        return hash ^ (hash >> 28);
    }
    if (nbytes) {
        uint32_t first = input[0], middle = input[nbytes >> 1], last = input[nbytes - 1];
        uint32_t packed = (first << 16) | (middle << 24) | last | ((uint32_t)nbytes << 8);
        return avalanche_small(packed ^ (uint64_t)(load32(secret) ^ load32(secret + 4)));
    }
    return avalanche_small(load64(secret + 56) ^ load64(secret + 64));
}

static uint64_t up_to_128(const uint8_t *input, size_t nbytes) {
    uint64_t hash = nbytes * PRIME64_1;
    for (size_t pair = (nbytes - 1) / 32 + 1; pair-- > 0;) { /* from both ends inwards, the innermost first */
        hash += mix16(input + 16 * pair, xxh3_secret + 32 * pair);
        hash += mix16(input + nbytes - 16 * (pair + 1), xxh3_secret + 32 * pair + 16);
    }
    return avalanche(hash);
}

static uint64_t up_to_240(const uint8_t *input, size_t nbytes) {
    uint64_t hash = nbytes * PRIME64_1;
    for (size_t k = 0; k < 8; k++) hash += mix16(input + 16 * k, xxh3_secret + 16 * k);
    hash = avalanche(hash);
    for (size_t k = 8; k < nbytes / 16; k++) hash += mix16(input + 16 * k, xxh3_secret + 16 * (k - 8) + 3);
    return avalanche(hash + mix16(input + nbytes - 16, xxh3_secret + 136 - 17));
}

uint64_t xxh3_short(const uint8_t *input, size_t nbytes) {
    if (nbytes <= 16) return up_to_16(input, nbytes);
    return nbytes <= 128 ? up_to_128(input, nbytes) : up_to_240(input, nbytes);
}

void xxh3_begin(uint64_t acc[8]) {
    static const uint64_t start[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                      PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(acc, start, sizeof start);
}

uint64_t xxh3_end(const struct xxh3_level *level, uint64_t acc[8], const uint8_t *input, size_t nbytes) {
    size_t done = xxh3_full_blocks(nbytes) * XXH3_BLOCK;
    level->stripes(acc, input + done, xxh3_secret, (nbytes - 1 - done) / XXH3_STRIPE);
    /* the last stripe overlaps the one before, unless the length is a multiple of a stripe */
    level->stripes(acc, input + nbytes - XXH3_STRIPE, LAST_SECRET - 7, 1);
    uint64_t hash = nbytes * PRIME64_1;
    for (int k = 0; k < 8; k += 2) {
        const uint8_t *secret = xxh3_secret + 11 + 8 * k;
        hash += fold(acc[k] ^ load64(secret), acc[k + 1] ^ load64(secret + 8));
    }
    return avalanche(hash);
}

/* -- plain ------------------------------------------------------------------------------------------------------ */

static void stripes_plain(uint64_t acc[8], const uint8_t *input, const uint8_t *secret, size_t stripes) {
    for (size_t s = 0; s < stripes; s++, input += XXH3_STRIPE, secret += 8) {
        for (int lane = 0; lane < 8; lane++) {
            uint64_t data = load64(input + 8 * lane), key = data ^ load64(secret + 8 * lane);
            acc[lane ^ 1] += data;
            acc[lane] += (key & 0xffffffffU) * (key >> 32);
        }
    }
}

static void blocks_plain(uint64_t acc[8], const uint8_t *input, size_t blocks) {
    for (size_t b = 0; b < blocks; b++, input += XXH3_BLOCK) {
        stripes_plain(acc, input, xxh3_secret, XXH3_BLOCK / XXH3_STRIPE);
        for (int lane = 0; lane < 8; lane++) {
            uint64_t value = acc[lane] ^ (acc[lane] >> 47) ^ load64(LAST_SECRET + 8 * lane);
            acc[lane] = value * PRIME32_1;
        }
    }
}

const struct xxh3_level xxh3_plain = {blocks_plain, stripes_plain};

/* -- x86-64: compiled whatever the build machine has, chosen at run time ------------------------------------------ */
#if defined(__x86_64__)
#include "xxh3_x86.h"

AVX512 static void stripes_avx512(uint64_t acc[8], const uint8_t *input, const uint8_t *secret, size_t stripes) {
    __m512i sum = _mm512_loadu_si512(acc);
    for (size_t s = 0; s < stripes; s++) sum = stripe_avx512(sum, input + XXH3_STRIPE * s, secret + 8 * s);
    _mm512_storeu_si512(acc, sum);
}

AVX512 static void blocks_avx512(uint64_t acc[8], const uint8_t *input, size_t blocks) {
    __m512i sum = _mm512_loadu_si512(acc);
    for (size_t b = 0; b < blocks; b++, input += XXH3_BLOCK) {
        for (int s = 0; s < XXH3_BLOCK / XXH3_STRIPE; s++)
            sum = stripe_avx512(sum, input + XXH3_STRIPE * s, xxh3_secret + 8 * s);
        sum = scramble_avx512(sum);
    }
    _mm512_storeu_si512(acc, sum);
}

const struct xxh3_level xxh3_avx512 = {blocks_avx512, stripes_avx512};

AVX2 static void stripes_avx2(uint64_t acc[8], const uint8_t *input, const uint8_t *secret, size_t stripes) {
    __m256i low = _mm256_loadu_si256((__m256i *)acc), high = _mm256_loadu_si256((__m256i *)(acc + 4));
    for (size_t s = 0; s < stripes; s++, input += XXH3_STRIPE, secret += 8) {
        low = half_avx2(low, input, secret);
        high = half_avx2(high, input + 32, secret + 32);
    }
    _mm256_storeu_si256((__m256i *)acc, low);
    _mm256_storeu_si256((__m256i *)(acc + 4), high);
}

AVX2 static void blocks_avx2(uint64_t acc[8], const uint8_t *input, size_t blocks) {
    __m256i low = _mm256_loadu_si256((__m256i *)acc), high = _mm256_loadu_si256((__m256i *)(acc + 4));
    for (size_t b = 0; b < blocks; b++) {
        for (int s = 0; s < XXH3_BLOCK / XXH3_STRIPE; s++, input += XXH3_STRIPE) {
            low = half_avx2(low, input, xxh3_secret + 8 * s);
            high = half_avx2(high, input + 32, xxh3_secret + 8 * s + 32);
        }
        low = scramble_avx2(low, LAST_SECRET);
        high = scramble_avx2(high, LAST_SECRET + 32);
    }
    _mm256_storeu_si256((__m256i *)acc, low);
    _mm256_storeu_si256((__m256i *)(acc + 4), high);
}

const struct xxh3_level xxh3_avx2 = {blocks_avx2, stripes_avx2};

/* -- 64-bit ARM: every one has NEON ------------------------------------------------------------------------------- */
#elif defined(__aarch64__)
#include <arm_neon.h>

static inline uint64x2_t pair_neon(uint64x2_t acc, const uint8_t *input, const uint8_t *secret) {
    uint64x2_t data = vreinterpretq_u64_u8(vld1q_u8(input));
    uint64x2_t key = veorq_u64(data, vreinterpretq_u64_u8(vld1q_u8(secret)));
    acc = vaddq_u64(acc, vextq_u64(data, data, 1));
    return vmlal_u32(acc, vmovn_u64(key), vshrn_n_u64(key, 32));
}

static inline uint64x2_t scramble_neon(uint64x2_t sum, const uint8_t *secret) {
    const uint32x2_t prime = vdup_n_u32(PRIME32_1);
    sum = veorq_u64(sum, vshrq_n_u64(sum, 47));
    sum = veorq_u64(sum, vreinterpretq_u64_u8(vld1q_u8(secret)));
    uint64x2_t high = vshlq_n_u64(vmull_u32(vshrn_n_u64(sum, 32), prime), 32);
    return vmlal_u32(high, vmovn_u64(sum), prime);
}

static void stripes_neon(uint64_t acc[8], const uint8_t *input, const uint8_t *secret, size_t stripes) {
    uint64x2_t sum[4];
    for (int k = 0; k < 4; k++) sum[k] = vld1q_u64(acc + 2 * k);
    for (size_t s = 0; s < stripes; s++, input += XXH3_STRIPE, secret += 8)
        for (int k = 0; k < 4; k++) sum[k] = pair_neon(sum[k], input + 16 * k, secret + 16 * k);
    for (int k = 0; k < 4; k++) vst1q_u64(acc + 2 * k, sum[k]);
}

static void blocks_neon(uint64_t acc[8], const uint8_t *input, size_t blocks) {
    uint64x2_t sum[4];
    for (int k = 0; k < 4; k++) sum[k] = vld1q_u64(acc + 2 * k);
    for (size_t b = 0; b < blocks; b++) {
        for (int s = 0; s < XXH3_BLOCK / XXH3_STRIPE; s++, input += XXH3_STRIPE)
            for (int k = 0; k < 4; k++) sum[k] = pair_neon(sum[k], input + 16 * k, xxh3_secret + 8 * s + 16 * k);
        for (int k = 0; k < 4; k++) sum[k] = scramble_neon(sum[k], LAST_SECRET + 16 * k);
    }
    for (int k = 0; k < 4; k++) vst1q_u64(acc + 2 * k, sum[k]);
}

const struct xxh3_level xxh3_neon = {blocks_neon, stripes_neon};
#endif
