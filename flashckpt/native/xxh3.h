/* XXH3, 64 bits, seed 0, default secret, written from its specification. Little-endian machines only. */
#ifndef FLASHCKPT_XXH3_H
#define FLASHCKPT_XXH3_H

#include <stddef.h>
#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "digests and formats are little-endian; without this part the Python implementation runs"
#endif

#define XXH3_STRIPE 64
#define XXH3_BLOCK 1024 /* bytes between two scrambles: 16 stripes */
#define XXH3_SHORT 240  /* up to here another formula holds */

/* How one kind of CPU works on the eight accumulators of a long input. */
struct xxh3_level {
    void (*blocks)(uint64_t acc[8], const uint8_t *input, size_t blocks);
    void (*stripes)(uint64_t acc[8], const uint8_t *input, const uint8_t *secret, size_t stripes);
};

extern const struct xxh3_level xxh3_plain;
#if defined(__x86_64__)
extern const struct xxh3_level xxh3_avx2, xxh3_avx512;
#elif defined(__aarch64__)
extern const struct xxh3_level xxh3_neon;
#endif

extern const uint8_t xxh3_secret[192];
#define LAST_SECRET (xxh3_secret + sizeof xxh3_secret - XXH3_STRIPE) /* of the scramble */
#define PRIME32_1 0x9E3779B1U

/* Digest of up to XXH3_SHORT bytes. */
uint64_t xxh3_short(const uint8_t *input, size_t nbytes);

/* A longer input: begin, then level->blocks for xxh3_full_blocks(nbytes) of them in order, then end. */
void xxh3_begin(uint64_t acc[8]);
uint64_t xxh3_end(const struct xxh3_level *level, uint64_t acc[8], const uint8_t *input, size_t nbytes);

/* Blocks that are scrambled: at least one byte always stays behind for the end. */
static inline size_t xxh3_full_blocks(size_t nbytes) { return (nbytes - 1) / XXH3_BLOCK; }

#endif
