#include "numbers.h"

#include <string.h>

/* Loops that the compiler makes vectors of (GCC and Clang alike, at -O3), compiled for each level. */

static inline double of_bits64(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float of_bits32(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float of_brain16(uint16_t bits) { return of_bits32((uint32_t)bits << 16); }

/* The exponent of float16 is read as that of float32, which is 2^112 too small; subnormal numbers come out right too. */
static inline float of_half16(uint16_t bits) { return of_bits32((uint32_t)bits << 13) * 0x1p112F; }

/* Both have a place in float16: e5m2 is its upper half, and the bias of e4m3 is 8 smaller. */
static inline float of_e5m2(uint8_t bits) { return of_half16((uint16_t)(bits << 8)); }
static inline float of_e4m3(uint8_t bits) { return of_half16((uint16_t)(bits << 7)) * 0x1p8F; }

/* Those without infinity and -0, whose one NaN is the pattern of -0; their biases are 1 larger. */
static inline float of_e5m2_fnuz(uint8_t bits) { return of_e5m2(bits) * 0.5F; }
static inline float of_e4m3_fnuz(uint8_t bits) { return of_e4m3(bits) * 0.5F; }

/* Without the sign magnitudes compare as signed integers, which every CPU has vectors for. */
#define UNSIGNED(TYPE, bits) ((TYPE)(bits & (TYPE)((TYPE)~(TYPE)0 >> 1)))
#define FNUZ(TYPE, bits) ((bits) == 0x80 ? 0xff : (bits) & 0x7f)

/* Sums in LANES lanes, as one alone would wait for each addition. They are double where squares overflow or become
 * subnormal numbers, as those of optimizers do: these take a CPU a hundred times as long. */
#define LANES 16

#define DEFINE_KIND(NAME, ATTRIBUTE, TYPE, ORDERED, MAGNITUDE, VALUE, SUM)                                             \
    ATTRIBUTE static uint64_t NAME##_top(const uint8_t *input, size_t nbytes) {                                        \
        ORDERED top = 0;                                                                                               \
        for (size_t k = 0; k < nbytes / sizeof(TYPE); k++) {                                                           \
            TYPE bits;                                                                                                 \
            memcpy(&bits, input + k * sizeof bits, sizeof bits);                                                       \
            ORDERED magnitude = (ORDERED)MAGNITUDE(TYPE, bits);                                                        \
            top = magnitude > top ? magnitude : top;                                                                   \
        }                                                                                                              \
        return (uint64_t)top;                                                                                          \
    }                                                                                                                  \
    ATTRIBUTE static inline void NAME##_add(SUM sums[LANES], const TYPE bits[LANES]) {                                 \
        for (size_t lane = 0; lane < LANES; lane++) {                                                                  \
            SUM value = VALUE(UNSIGNED(TYPE, bits[lane]));                                                             \
            sums[lane] += value * value;                                                                               \
        }                                                                                                              \
    }                                                                                                                  \
    ATTRIBUTE static double NAME##_squares(const uint8_t *input, size_t nbytes) {                                      \
        SUM sums[LANES] = {0};                                                                                         \
        TYPE bits[LANES];                                                                                              \
        for (; nbytes >= sizeof bits; nbytes -= sizeof bits, input += sizeof bits) {                                   \
            memcpy(bits, input, sizeof bits); /* of a known size: a register is filled, no function called */          \
            NAME##_add(sums, bits);                                                                                    \
        }                                                                                                              \
        memset(bits, 0, sizeof bits);                                                                                  \
        memcpy(bits, input, nbytes);                                                                                   \
        NAME##_add(sums, bits);                                                                                        \
        double sum = 0;                                                                                                \
        for (size_t lane = 0; lane < LANES; lane++) sum += sums[lane];                                                 \
        return sum;                                                                                                    \
    }

#define DEFINE_LEVEL(LEVEL, ATTRIBUTE)                                                                                 \
    DEFINE_KIND(float64_##LEVEL, ATTRIBUTE, uint64_t, int64_t, UNSIGNED, of_bits64, double)                            \
    DEFINE_KIND(float32_##LEVEL, ATTRIBUTE, uint32_t, int32_t, UNSIGNED, of_bits32, double)                            \
    DEFINE_KIND(float16_##LEVEL, ATTRIBUTE, uint16_t, int16_t, UNSIGNED, of_half16, float)                             \
    DEFINE_KIND(brain16_##LEVEL, ATTRIBUTE, uint16_t, int16_t, UNSIGNED, of_brain16, double)                           \
    DEFINE_KIND(e5m2_##LEVEL, ATTRIBUTE, uint8_t, uint8_t, UNSIGNED, of_e5m2, float)                                   \
    DEFINE_KIND(e4m3_##LEVEL, ATTRIBUTE, uint8_t, uint8_t, UNSIGNED, of_e4m3, float)                                   \
    DEFINE_KIND(e5m2_fnuz_##LEVEL, ATTRIBUTE, uint8_t, uint8_t, FNUZ, of_e5m2_fnuz, float)                             \
    DEFINE_KIND(e4m3_fnuz_##LEVEL, ATTRIBUTE, uint8_t, uint8_t, FNUZ, of_e4m3_fnuz, float)                             \
    const struct numbers numbers_##LEVEL[KINDS] = {                                                                    \
        [FLOAT64] = {8, float64_##LEVEL##_top, float64_##LEVEL##_squares},                                             \
        [FLOAT32] = {4, float32_##LEVEL##_top, float32_##LEVEL##_squares},                                             \
        [FLOAT16] = {2, float16_##LEVEL##_top, float16_##LEVEL##_squares},                                             \
        [BFLOAT16] = {2, brain16_##LEVEL##_top, brain16_##LEVEL##_squares},                                            \
        [E5M2] = {1, e5m2_##LEVEL##_top, e5m2_##LEVEL##_squares},                                                      \
        [E4M3] = {1, e4m3_##LEVEL##_top, e4m3_##LEVEL##_squares},                                                      \
        [E5M2_FNUZ] = {1, e5m2_fnuz_##LEVEL##_top, e5m2_fnuz_##LEVEL##_squares},                                       \
        [E4M3_FNUZ] = {1, e4m3_fnuz_##LEVEL##_top, e4m3_fnuz_##LEVEL##_squares},                                       \
    };

DEFINE_LEVEL(plain, ) /* on 64-bit ARM these are the NEON loops: every one has it */
#if defined(__x86_64__)
DEFINE_LEVEL(avx2, __attribute__((target("avx2"))))
DEFINE_LEVEL(avx512, __attribute__((target("avx512f"))))
#endif
