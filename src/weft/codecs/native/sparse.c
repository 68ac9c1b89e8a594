/* The loops of topk and dgc: add to what is kept, choose entries, and add the entries that were received.
 *
 *   1  a threshold is estimated from a sample of what could be sent
 *   2  one pass: new state = old state and values; what passes the threshold is a *candidate*
 *   3  too many candidates: the largest of them are found by counting leading bits, never by sorting
 *   4  what is sent is cleared in the new state
 *
 * Sizes are compared as integers: without the sign bit, floating-point numbers are in the order of their bits, and what
 * is not finite comes after all others. The loops are those of the codecs in torch, to the bit.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX512 1
#include <immintrin.h>
#endif

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EVERY_CPU
#endif

enum { CHUNK = 65536 }; /* elements, as in plan/exchange/sparse.py */
enum { BLOCK = 1024 };  /* elements that stay in the first-level cache; a chunk is a whole number of them */
enum { SLACK = 16 };    /* candidates are written up to a whole vector at once */
enum { DIGIT_BITS = 11, NUM_DIGITS = 1 << DIGIT_BITS };

/* The tensors of a bucket: numbers of each. */
typedef struct {
    int64_t offset, numel; /* in the flat buffer */
    int64_t first_entry, num_entries, first_chunk; /* in the message */
} Place;

/* From which elements of a tensor its threshold is estimated: the rank-th largest of them. */
typedef struct {
    int64_t first, stride, num, rank;
} Sample;

typedef struct {
    double keep_residual, keep_momentum; /* on the old state */
    double momentum, is_nesterov;        /* `momentum`: on the new one, where it is Nesterov's */
} Factors;

/* A bucket. Its Python twin is in sparse.py. */
typedef struct {
    int64_t num_tensors;
    const Place *places;
    const Sample *samples;
    const Factors *factors;
    const void *values, *old_residual, *old_momentum; /* no momentum: topk */
    void *new_residual, *new_momentum;                /* may be the old ones */
    int32_t is_masking;
    int32_t is_exact; /* the largest are sent, even if the estimated threshold was too high */
    int32_t *counts;  /* of the message */
    uint16_t *offsets;
    void *row;
    int64_t capacity; /* of the candidates, which are in the three buffers below */
    uint16_t *candidate_offsets;
    void *candidates, *sizes;
} Bucket;

enum { LINE = 64, STREAMED_BYTES = 1 << 20 };

/* New state that is not in the place of the old one, of a tensor that fills caches, is better written past them: its
 * lines are not read first. */
#if defined(HAS_AVX512)
static int can_stream(void)
{
    return __builtin_cpu_supports("avx512f");
}

__attribute__((target("avx512f"))) static void stream(void *to, const void *from, size_t num_bytes)
{
    size_t head = (size_t)(-(uintptr_t)to & (LINE - 1)), at = head < num_bytes ? head : num_bytes;
    memcpy(to, from, at);
    for (; at + LINE <= num_bytes; at += LINE)
        _mm512_stream_si512((void *)((char *)to + at), _mm512_loadu_si512((const char *)from + at));
    memcpy((char *)to + at, (const char *)from + at, num_bytes - at);
}
#else
static int can_stream(void)
{
    return 0;
}

static void stream(void *to, const void *from, size_t num_bytes)
{
    memcpy(to, from, num_bytes);
}
#endif

/* The digit of a histogram that holds the *rank-th largest; *rank becomes its rank among those of this digit. */
static size_t find_digit(const size_t *histogram, size_t *rank)
{
    size_t digit = NUM_DIGITS - 1;
    while (histogram[digit] < *rank)
        *rank -= histogram[digit--];
    return digit;
}

#define REAL float
#define BITS uint32_t
#define NAME(name) name##_float
#define nearest_float __builtin_rintf
#include "sparse_choose.h"
#include "sparse_entries.h"
#undef REAL
#undef BITS
#undef NAME
#define REAL double
#define BITS uint64_t
#define NAME(name) name##_double
#define nearest_double __builtin_rint
#include "sparse_choose.h"
#include "sparse_entries.h"
