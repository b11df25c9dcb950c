#include "copy.h"

#include <string.h>

/* Bytes that are copied and then digested: still in the first-level cache for the digest, and whole blocks of it. Which
 * size and order of stores is faster depends on the maker of the CPU (decision native-copy). */
#define LANES_PIECE 16384 /* in four lanes, for CPUs that read ahead within a page alone */
#define NEAR_PIECE XXH3_BLOCK /* in one lane: short enough that the CPU digests one piece while it waits for the next */
/* Rows below this go through the cache: their ends, which do, would be most of them. */
#define STREAM_FROM 2048
#define LINE 64
#define MOST_CHUNKS 4 /* that are digested side by side */
/* Rows of a few hundred bytes wait for memory, each at another place: ask this many rows ahead. */
#define AHEAD 6

/* -- stores that pass the cache: what is overwritten is not read first, and the program's data stays in -------------
 *
 * A piece is copied in four lanes at once, as pages of memory are read ahead one by one (on an Intel Xeon 0.85 times as
 * long as a single lane), or in one lane, whose page ahead is asked for (on an AMD EPYC 0.65 times as long as four).
 * QUAD copies four cache lines, ONE copies one; both targets are aligned. */
#define QUAD_BYTES (4 * LINE)
#define PAGE 4096
#define DEFINE_STREAM(NAME, ATTRIBUTE, QUAD, ONE)                                                                     \
    ATTRIBUTE static void NAME(uint8_t *target, const uint8_t *source, size_t n) {                                     \
        size_t lane = n / 4 / QUAD_BYTES * QUAD_BYTES;                                                                 \
        for (size_t at = 0; at < lane; at += QUAD_BYTES)                                                               \
            for (size_t k = 0; k < 4; k++) QUAD(target + k * lane + at, source + k * lane + at);                       \
        for (size_t at = 4 * lane; at < n; at += LINE) ONE(target + at, source + at);                                  \
    }

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f")))
#define AVX2 __attribute__((target("avx2")))

AVX512 static inline void line_avx512(uint8_t *target, const uint8_t *source) {
    _mm512_stream_si512((void *)target, _mm512_loadu_si512(source));
}

AVX512 static inline void quad_avx512(uint8_t *target, const uint8_t *source) {
    __m512i a = _mm512_loadu_si512(source), b = _mm512_loadu_si512(source + LINE);
    __m512i c = _mm512_loadu_si512(source + 2 * LINE), d = _mm512_loadu_si512(source + 3 * LINE);
    _mm512_stream_si512((void *)target, a);
    _mm512_stream_si512((void *)(target + LINE), b);
    _mm512_stream_si512((void *)(target + 2 * LINE), c);
    _mm512_stream_si512((void *)(target + 3 * LINE), d);
}

AVX2 static inline void line_avx2(uint8_t *target, const uint8_t *source) {
    __m256i a = _mm256_loadu_si256((const __m256i *)source), b = _mm256_loadu_si256((const __m256i *)(source + 32));
    _mm256_stream_si256((__m256i *)target, a);
    _mm256_stream_si256((__m256i *)(target + 32), b);
}

AVX2 static inline void quad_avx2(uint8_t *target, const uint8_t *source) {
    for (size_t at = 0; at < QUAD_BYTES; at += LINE) line_avx2(target + at, source + at);
}

DEFINE_STREAM(stream_avx512, AVX512, quad_avx512, line_avx512)
DEFINE_STREAM(stream_avx2, AVX2, quad_avx2, line_avx2)

AVX2 static void near_avx2(uint8_t *target, const uint8_t *source, size_t n) {
    size_t at = 0;
    for (; at + QUAD_BYTES <= n; at += QUAD_BYTES) {
        for (size_t line = 0; line < QUAD_BYTES; line += LINE) __builtin_prefetch(source + at + PAGE + line);
        quad_avx2(target + at, source + at);
    }
    for (; at < n; at += LINE) line_avx2(target + at, source + at);
}

static void settle(void) { _mm_sfence(); } /* such stores are ordered by nothing else */

static const struct level level_avx2 = {"avx2", &xxh3_avx2, numbers_avx2, fused_avx2, stream_avx2, 0, LANES_PIECE};
static const struct level level_avx512 = {"avx512", &xxh3_avx512, numbers_avx512, fused_avx512, stream_avx512, 1, LANES_PIECE};
static const struct level level_avx2_near = {"avx2-near", &xxh3_avx2, numbers_avx2, fused_avx2, near_avx2, 0, NEAR_PIECE};

#elif defined(__aarch64__)

static inline void line_neon(uint8_t *target, const uint8_t *source) {
    __asm__ volatile("ldp q0, q1, [%0]\n\tldp q2, q3, [%0, #32]\n\t"
                     "stnp q0, q1, [%1]\n\tstnp q2, q3, [%1, #32]"
                     :
                     : "r"(source), "r"(target)
                     : "v0", "v1", "v2", "v3", "memory");
}

static inline void quad_neon(uint8_t *target, const uint8_t *source) {
    for (size_t at = 0; at < QUAD_BYTES; at += LINE) line_neon(target + at, source + at);
}

DEFINE_STREAM(stream_neon, , quad_neon, line_neon)

static void settle(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

static const struct level level_neon = {"neon", &xxh3_neon, numbers_plain, fused_none, stream_neon, 0, LANES_PIECE};

#else
static void settle(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#endif

static const struct level level_plain = {"plain", &xxh3_plain, numbers_plain, fused_none, NULL, 0, LANES_PIECE};

size_t usable_levels(const struct level *found[MOST_LEVELS]) {
    size_t count = 0;
    found[count++] = &level_plain;
#if defined(__x86_64__)
    int has_avx2 = __builtin_cpu_supports("avx2"), is_amd = __builtin_cpu_is("amd");
    if (has_avx2 && !is_amd) found[count++] = &level_avx2_near;
    if (has_avx2) found[count++] = &level_avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) found[count++] = &level_avx512;
    if (has_avx2 && is_amd) found[count++] = &level_avx2_near;
#elif defined(__aarch64__)
    found[count++] = &level_neon;
#endif
    return count;
}

/* -- one row ------------------------------------------------------------------------------------------------------- */

/* How far a row has been copied. The first bytes, up to a cache line of the target, and the last go through the cache. */
struct copy_state {
    const struct level *level;
    const uint8_t *source;
    uint8_t *target; /* NULL: nothing is copied */
    size_t done, nbytes;
};

static void start_copy(struct copy_state *copy, const struct level *level, const struct row *row) {
    *copy = (struct copy_state){level, (const uint8_t *)(uintptr_t)row->source, (uint8_t *)(uintptr_t)row->target, 0,
                                (size_t)row->nbytes};
    if (copy->target == NULL || level->stream == NULL || copy->nbytes < STREAM_FROM) return;
    copy->done = (size_t)(-(uintptr_t)copy->target & (LINE - 1));
    memcpy(copy->target, copy->source, copy->done);
}

/* Copy at least up to byte `stop` of the row, by whole cache lines until its end. */
static void copy_up_to(struct copy_state *copy, size_t stop) {
    if (copy->target == NULL || stop <= copy->done) return;
    size_t n = stop - copy->done, lines = 0;
    if (copy->level->stream != NULL && copy->nbytes >= STREAM_FROM) {
        lines = n & ~(size_t)(LINE - 1);
        copy->level->stream(copy->target + copy->done, copy->source + copy->done, lines);
        copy->done += lines;
        if (stop < copy->nbytes) return; /* the rest of this line comes with the next piece */
        n -= lines;
    }
    memcpy(copy->target + copy->done, copy->source + copy->done, n);
    copy->done += n;
}

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* Return where the next nbytes go while what was copied is digested; NULL: they are not to be copied so, or end behind `end`. */
static uint8_t *weave_target(const struct copy_state *copy, size_t nbytes, size_t end) {
    int may = copy->level->weaves && copy->target != NULL && copy->nbytes >= STREAM_FROM && copy->done + nbytes <= end;
    return may ? copy->target + copy->done : NULL;
}

/* Have the first lines of each page of the next piece fetched meanwhile; the CPU itself then goes on within the page. */
static inline void ask_for_piece(const uint8_t *input, size_t piece) {
    for (size_t page = 0; page < piece; page += PAGE)
        for (size_t line = 0; line < 8; line++) __builtin_prefetch(input + page + line * LINE);
}

/* Digest whole blocks that are not copied. With each one an equal share of the four pages of the next piece is asked for: a
 * CPU that reads ahead within a page alone waits a third longer. `room`: bytes of the row from `input` on. */
static void digest_blocks(const struct level *level, uint64_t acc[8], const uint8_t *input, size_t blocks, size_t room) {
    if (level->piece < LANES_PIECE) {
        level->hash->blocks(acc, input, blocks);
        return;
    }
    for (size_t b = 0; b < blocks; b++, input += XXH3_BLOCK, room -= XXH3_BLOCK) {
        size_t lane = b % (LANES_PIECE / XXH3_BLOCK) * QUAD_BYTES, next = LANES_PIECE - 3 * lane;
        for (size_t page = 0; page < LANES_PIECE && next + page + QUAD_BYTES <= room; page += PAGE)
            for (size_t line = 0; line < QUAD_BYTES; line += LINE) __builtin_prefetch(input + next + page + line);
        level->hash->blocks(acc, input, 1);
    }
}

/* -- figures: how large all numbers are; squares of all in short chunks, else of a few in each stretch: all of them cost
 * three times as much as the size. */
#define WHOLE 4096
#define APART 65536
#define NUMBERS 128
struct look {
    const struct numbers *numbers; /* of the row's kind; NULL: none */
    fused_loop fused;              /* NULL: none */
    struct figures *found;
    size_t nbytes;  /* of the chunk */
    size_t squared; /* bytes whose squares are in it */
};

static void look_at_top(struct look *look, const uint8_t *input, size_t nbytes) {
    uint64_t top = look->numbers->top(input, nbytes);
    if (top > look->found->top) look->found->top = top;
}

/* Take note of bytes [begin, begin + nbytes) of the chunk, which the digest has brought into the cache. */
static void look_at(struct look *look, const uint8_t *chunk, size_t begin, size_t nbytes, int is_seen) {
    if (look->numbers == NULL) return;
    if (!is_seen) look_at_top(look, chunk + begin, nbytes);
    size_t some = nbytes;
    if (look->nbytes > WHOLE) some = begin % APART == 0 ? smaller(nbytes, NUMBERS * look->numbers->width) : 0;
    if (some) look->found->squares += look->numbers->squares(chunk + begin, some);
    look->squared += some;
}

/* Digest bytes [begin, end) of the row's source, at most a chunk, each piece right behind its copy. */
static uint64_t copy_chunk(struct copy_state *copy, size_t begin, size_t end, struct look *look) {
    const uint8_t *input = copy->source + begin;
    const struct xxh3_level *hash = copy->level->hash;
    size_t nbytes = end - begin;
    if (nbytes <= XXH3_SHORT) {
        copy_up_to(copy, end);
        look_at(look, input, 0, nbytes, 0);
        return xxh3_short(input, nbytes);
    }
    uint64_t acc[8];
    uint8_t seen[64] = {0};
    xxh3_begin(acc);
    size_t blocks = xxh3_full_blocks(nbytes), piece = copy->target != NULL ? copy->level->piece : LANES_PIECE;
    if (copy->target == NULL && look->numbers == NULL) {
        digest_blocks(copy->level, acc, input, blocks, copy->nbytes - begin);
        return xxh3_end(hash, acc, input, nbytes);
    }
    for (size_t b = 0; b < blocks; b += piece / XXH3_BLOCK) {
        size_t some = smaller(piece / XXH3_BLOCK, blocks - b);
        copy_up_to(copy, begin + (b + some) * XXH3_BLOCK);
        if (copy->level->piece > PAGE && b + some < blocks) ask_for_piece(input + (b + some) * XXH3_BLOCK, piece);
        if (look->fused != NULL) {
            uint8_t *target = weave_target(copy, some * XXH3_BLOCK, begin + blocks * XXH3_BLOCK);
            look->fused(acc, input + b * XXH3_BLOCK, some, seen, target, copy->source + copy->done);
            copy->done += target != NULL ? some * XXH3_BLOCK : 0;
        } else {
            hash->blocks(acc, input + b * XXH3_BLOCK, some);
        }
        look_at(look, input, b * XXH3_BLOCK, some * XXH3_BLOCK, look->fused != NULL);
    }
    copy_up_to(copy, end);
    if (look->fused != NULL && look->numbers != NULL) look_at_top(look, seen, sizeof seen);
    look_at(look, input, blocks * XXH3_BLOCK, nbytes - blocks * XXH3_BLOCK, 0);
    return xxh3_end(hash, acc, input, nbytes);
}

/* Digest whole chunks that are not copied, a block of each in turn: a CPU that reads ahead within a page alone then waits for a
 * page of each at the same time (on an AMD EPYC 0.7 times as long as for one chunk behind the other). Return how many. */
static size_t digest_chunks(const struct xxh3_level *hash, const uint8_t *input, size_t nbytes, uint64_t *digests) {
    uint64_t acc[MOST_CHUNKS][8];
    size_t chunks = smaller(MOST_CHUNKS, nbytes / CHUNK_BYTES);
    for (size_t k = 0; k < chunks; k++) xxh3_begin(acc[k]);
    for (size_t b = 0; b < xxh3_full_blocks(CHUNK_BYTES); b++)
        for (size_t k = 0; k < chunks; k++) hash->blocks(acc[k], input + k * CHUNK_BYTES + b * XXH3_BLOCK, 1);
    for (size_t k = 0; k < chunks; k++) digests[k] = xxh3_end(hash, acc[k], input + k * CHUNK_BYTES, CHUNK_BYTES);
    return chunks;
}

static void copy_row(const struct level *level, const struct row *row, uint64_t *digests, struct figures *figures,
                     int kind) {
    struct copy_state copy;
    start_copy(&copy, level, row);
    if (digests == NULL) {
        if (level->stream != NULL) /* else the C library is free to take the whole row */
            for (size_t stop = level->piece; stop < copy.nbytes; stop += level->piece) copy_up_to(&copy, stop);
        copy_up_to(&copy, copy.nbytes);
        return;
    }
    size_t begin = 0;
    if (copy.target == NULL && kind == NO_NUMBERS && level->piece < LANES_PIECE)
        for (size_t chunks; copy.nbytes - begin >= CHUNK_BYTES; begin += chunks * CHUNK_BYTES, digests += chunks)
            chunks = digest_chunks(level->hash, copy.source + begin, copy.nbytes - begin, digests);
    for (; begin < copy.nbytes; begin += CHUNK_BYTES, figures++) {
        size_t end = smaller(begin + CHUNK_BYTES, copy.nbytes);
        struct look look = {NULL, level->fused[kind], figures, end - begin, 0};
        if (kind != NO_NUMBERS) look.numbers = &level->numbers[kind];
        if (kind != NO_NUMBERS) *figures = (struct figures){0, 0};
        *digests++ = copy_chunk(&copy, begin, end, &look);
        if (look.squared) figures->squares *= (double)(end - begin) / (double)look.squared;
    }
}

/* Ask for the start of a row that is not its turn yet; the CPU itself sees how a longer one goes on. */
static void ask_for_row(const struct row *row) {
    const char *source = (const char *)(uintptr_t)row->source;
    for (int64_t at = 0; at < row->nbytes && at < 512; at += LINE) __builtin_prefetch(source + at);
}

static size_t take_row(int64_t *next, size_t own) {
    return next == NULL ? own : (size_t)__atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
}

int64_t copy_rows(const struct level *level, const struct row *rows, size_t count, const struct digest_output *out,
                  int64_t *next) {
    int64_t chunks = 0, copied = 0;
    for (size_t k = take_row(next, 0); k < count; k = take_row(next, k + 1)) {
        if (k + AHEAD < count) ask_for_row(&rows[k + AHEAD]);
        if (rows[k].nbytes == 0) continue;
        int64_t first = out->first != NULL ? out->first[k] : chunks;
        chunks += chunk_count(rows[k].nbytes);
        int is_digested = out->digests != NULL && first >= 0;
        int kind = is_digested && out->kinds != NULL && out->kinds[k] < KINDS ? out->kinds[k] : NO_NUMBERS;
        copy_row(level, &rows[k], is_digested ? out->digests + first : NULL,
                 kind != NO_NUMBERS ? out->figures + first : NULL, kind);
        copied += rows[k].nbytes;
    }
    settle();
    return copied;
}
