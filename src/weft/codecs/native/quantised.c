/* The codecs that send few bits of every entry, for machines with a C compiler; torch's operations do the same without
 * one, to the bit (`codecs/quantised.py` and its subclasses have the rules).
 *
 * `quantised_loops.h` is compiled for both formats, and that of training, where GCC can, for three instruction sets, of
 * which the widest that the processor has is taken: comparisons that give bits are not found by the compiler itself.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "codes are packed eight bytes at a time, low byte first"
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EVERY_CPU 1
#include <immintrin.h>
#endif

enum {
    BLOCK = 512,     /* entries of qsgd that share a norm; what others work on at a time */
    ROWS = 8,        /* of a matrix, added up at once */
    COLUMNS = 256,   /* whose sums are kept at once */
    LEVELS = 40,     /* of a tree of sums */
    MEANS = 2048,    /* columns whose means are in use at once */
    MESSAGES = 16,   /* added up at once */
    PLANES = 32,     /* bits of a count of votes */
};

/* As `random_bits.py`. */
static inline uint32_t random_bits(uint32_t place, uint32_t key, uint32_t second)
{
    uint32_t x = place ^ key;
    x ^= x >> 16;
    x = x * 0x21F0AAADu + second;
    x ^= x >> 15;
    x *= 0x735A2D97u;
    return x ^ x >> 15;
}

static inline uint64_t load_word(const uint8_t *from)
{
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

/* Codes of a block, one per byte, to codes of so many bits, of which `num_bytes` are wanted. */
static inline void pack(const uint8_t *codes, int bits, uint8_t *packed, size_t num_bytes)
{
    uint8_t all[BLOCK];
    if (bits == 4)
        for (size_t k = 0; k < BLOCK / 8; k++) {
            uint64_t word = load_word(codes + 8 * k);
            word = (word | word >> 4) & 0x00FF00FF00FF00FFu;
            word = (word | word >> 8) & 0x0000FFFF0000FFFFu;
            uint32_t half = (uint32_t)(word | word >> 16);
            memcpy(all + 4 * k, &half, sizeof half);
        }
    else if (bits == 2)
        for (size_t k = 0; k < BLOCK / 8; k++) {
            uint64_t word = load_word(codes + 8 * k);
            word = (word | word >> 6) & 0x000F000F000F000Fu;
            word = (word | word >> 12) & 0x000000FF000000FFu;
            uint16_t quarter = (uint16_t)(word | word >> 24);
            memcpy(all + 2 * k, &quarter, sizeof quarter);
        }
    memcpy(packed, bits == 8 ? codes : all, num_bytes);
}

/* Codes of so many bits to those of a block, one per byte, the last ones without meaning if so many bytes lack. */
static inline void unpack(const uint8_t *packed, size_t num_bytes, int bits, uint8_t *codes)
{
    uint8_t all[BLOCK];
    if (num_bytes < (size_t)bits * BLOCK / 8)
        packed = memcpy(all, packed, num_bytes);
    if (bits == 4)
        for (size_t k = 0; k < BLOCK / 8; k++) {
            uint32_t half;
            memcpy(&half, packed + 4 * k, sizeof half);
            uint64_t word = half;
            word = (word | word << 16) & 0x0000FFFF0000FFFFu;
            word = (word | word << 8) & 0x00FF00FF00FF00FFu;
            word = (word | word << 4) & 0x0F0F0F0F0F0F0F0Fu;
            memcpy(codes + 8 * k, &word, sizeof word);
        }
    else if (bits == 2)
        for (size_t k = 0; k < BLOCK / 8; k++) {
            uint16_t quarter;
            memcpy(&quarter, packed + 2 * k, sizeof quarter);
            uint64_t word = quarter;
            word = (word | word << 24) & 0x000000FF000000FFu;
            word = (word | word << 12) & 0x000F000F000F000Fu;
            word = (word | word << 6) & 0x0303030303030303u;
            memcpy(codes + 8 * k, &word, sizeof word);
        }
    else
        memcpy(codes, packed, BLOCK);
}

/* 64 bits, or those that are there, from bit `place` on. */
static inline uint64_t bits_at(const uint8_t *packed, size_t num_bytes, size_t place)
{
    size_t byte = place / 8;
    unsigned shift = place % 8;
    if (byte + 9 <= num_bytes) {
        uint64_t word = load_word(packed + byte) >> shift;
        return shift ? word | (uint64_t)packed[byte + 8] << (64 - shift) : word;
    }
    uint64_t word = 0;
    for (unsigned k = 0; k < 9 && byte + k < num_bytes; k++) {
        int to = (int)(8 * k) - (int)shift;
        word |= to < 0 ? (uint64_t)packed[byte + k] >> -to : (uint64_t)packed[byte + k] << to;
    }
    return word;
}

static const uint32_t places[32] = {
    1u << 0,  1u << 1,  1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,  1u << 8,  1u << 9,  1u << 10,
    1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15, 1u << 16, 1u << 17, 1u << 18, 1u << 19, 1u << 20, 1u << 21,
    1u << 22, 1u << 23, 1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29, 1u << 30, 1u << 31,
};

/* A stream of bits. */
struct writer {
    uint8_t *to;
    uint64_t pending;
    unsigned count;
};

static inline void append(struct writer *out, uint64_t bits, unsigned count)
{
    out->pending |= bits << out->count;
    if (out->count + count < 64) {
        out->count += count;
        return;
    }
    memcpy(out->to, &out->pending, 8);
    out->to += 8;
    out->pending = out->count ? bits >> (64 - out->count) : 0;
    out->count = out->count + count - 64;
}

static inline void flush(struct writer *out)
{
    memcpy(out->to, &out->pending, (out->count + 7) / 8);
}

/* Votes of 64 entries at once: bit p of each entry's count is in planes[p]. Returns the number of planes in use. */
static inline int add_vote(uint64_t *planes, int num_planes, uint64_t carry)
{
    for (int plane = 0; carry; plane++) {
        uint64_t both = planes[plane] & carry;
        planes[plane] ^= carry;
        carry = both;
        num_planes = plane < num_planes ? num_planes : plane + 1;
    }
    return num_planes;
}

/* Of each entry, whether its count is at least so many. */
static inline uint64_t reaches(const uint64_t *planes, int num_planes, size_t least)
{
    uint64_t more = 0, equal = ~(uint64_t)0;
    if (least >> num_planes)
        return 0;
    for (int plane = num_planes - 1; plane >= 0; plane--) {
        uint64_t wanted = least >> plane & 1 ? ~(uint64_t)0 : 0;
        more |= equal & planes[plane] & ~wanted;
        equal &= ~(planes[plane] ^ wanted);
    }
    return more | equal;
}

#define JOIN(A, B, C) A##_##B##_##C
#define NAMED(A, B, C) JOIN(A, B, C)
#define FN(NAME) NAMED(NAME, REAL, CPU)

#define CPU any
#define REAL double
#include "quantised_loops.h"
#undef REAL
#define REAL float
#include "quantised_loops.h"
#undef CPU

#if defined(FOR_EVERY_CPU)
#define WIDE 1
#pragma GCC push_options
#pragma GCC target("avx2")
#define CPU avx2
#include "quantised_loops.h"
#undef CPU
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,avx512f,avx512bw,avx512dq,avx512vl")
#define CPU avx512
#include "quantised_loops.h"
#undef CPU
#pragma GCC pop_options

static int widest(void)
{
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return 2;
    return __builtin_cpu_supports("avx2") ? 1 : 0;
}
#define CALL_float(NAME, ...)                                                                                          \
    (widest() == 2   ? NAME##_float_avx512(__VA_ARGS__)                                                                \
     : widest() == 1 ? NAME##_float_avx2(__VA_ARGS__)                                                                  \
                     : NAME##_float_any(__VA_ARGS__))
#else
#define CALL_float(NAME, ...) NAME##_float_any(__VA_ARGS__)
#endif
#define CALL_double(NAME, ...) NAME##_double_any(__VA_ARGS__)

/* Encoding returns 0 if all entries are finite. `scales` and `codes` are places in the message. In decoding, `messages`
 * is the place of the scales in the first of `num_messages`, `stride` bytes apart, and `codes_at` that of the codes
 * from there. */
#define DEFINE(TYPE)                                                                                                   \
    int weft_onebit_##TYPE(const TYPE *given, const TYPE *old, TYPE factor, TYPE *kept, size_t num_rows,               \
                           size_t num_columns, size_t num_rest, TYPE *scales, uint8_t *codes)                          \
    {                                                                                                                  \
        return CALL_##TYPE(onebit, given, old, factor, kept, num_rows, num_columns, num_rest, scales, codes);          \
    }                                                                                                                  \
    int weft_sign_##TYPE(const TYPE *given, size_t count, uint8_t *codes)                                              \
    {                                                                                                                  \
        return CALL_##TYPE(sign, given, count, codes);                                                                 \
    }                                                                                                                  \
    int weft_qsgd_##TYPE(const TYPE *given, size_t count, int bits, uint32_t key, uint32_t second, TYPE *scales,       \
                         uint8_t *codes)                                                                               \
    {                                                                                                                  \
        return CALL_##TYPE(qsgd, given, count, bits, key, second, scales, codes);                                      \
    }                                                                                                                  \
    int weft_terngrad_##TYPE(const TYPE *given, size_t count, uint32_t key, uint32_t second, TYPE *scales,             \
                             uint8_t *codes)                                                                           \
    {                                                                                                                  \
        return CALL_##TYPE(terngrad, given, count, key, second, scales, codes);                                        \
    }                                                                                                                  \
    void weft_onebit_sum_##TYPE(const uint8_t *messages, size_t num_messages, size_t stride, size_t num_rows,          \
                                size_t num_columns, size_t num_rest, TYPE *sum, TYPE scale)                            \
    {                                                                                                                  \
        CALL_##TYPE(onebit_sum, messages, num_messages, stride, num_rows, num_columns, num_rest, sum, scale);          \
    }                                                                                                                  \
    void weft_sign_sum_##TYPE(const uint8_t *messages, size_t num_messages, size_t stride, size_t count, TYPE *sum)    \
    {                                                                                                                  \
        CALL_##TYPE(sign_sum, messages, num_messages, stride, count, sum);                                             \
    }                                                                                                                  \
    void weft_steps_sum_##TYPE(const uint8_t *messages, size_t num_messages, size_t stride, size_t count, int bits,    \
                               int num_steps, size_t per_scale, size_t codes_at, TYPE *sum, TYPE scale)                \
    {                                                                                                                  \
        CALL_##TYPE(steps_sum, messages, num_messages, stride, count, bits, num_steps, per_scale, codes_at, sum,       \
             scale);                                                                                                   \
    }

DEFINE(float)
DEFINE(double)
