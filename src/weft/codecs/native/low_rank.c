/* The loops of powersgd: products of matrices with thin factors, fused with what is done to the matrices' elements, and
 * factors made orthonormal. They read every matrix along its rows, once per message.
 *
 * Sums are made in vectors of 64 bytes whatever the CPU has, in one order and without fused multiply-adds: every x86 CPU
 * computes the same bits, so that replicas on different ones stay equal.
 */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O2") /* vectors are written out; more would take seconds to compile, for nothing */
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EVERY_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

enum { VECTOR_BYTES = 64 };

enum { BLOCK_BYTES = 4096, STREAMED_BYTES = 1 << 20 };

/* Results of matrices that fill caches are better written past them: their lines are not read first. */
#if defined(__x86_64__) && defined(__GNUC__)
static int can_stream(size_t num_bytes)
{
    return num_bytes >= STREAMED_BYTES && __builtin_cpu_supports("avx512f");
}

__attribute__((target("avx512f"))) static void stream(void *to, const void *from, size_t num_bytes)
{
    size_t head = (size_t)(-(uintptr_t)to & (VECTOR_BYTES - 1)), at = head < num_bytes ? head : num_bytes;
    memcpy(to, from, at);
    for (; at + VECTOR_BYTES <= num_bytes; at += VECTOR_BYTES)
        _mm512_stream_si512((void *)((char *)to + at), _mm512_loadu_si512((const char *)from + at));
    memcpy((char *)to + at, (const char *)from + at, num_bytes - at);
}
#else
static int can_stream(size_t num_bytes)
{
    return num_bytes < 0;
}

static void stream(void *to, const void *from, size_t num_bytes)
{
    memcpy(to, from, num_bytes);
}
#endif

/* Matrices of one shape, at equal distances from each other. */
typedef struct {
    int64_t num_matrices, rank, num_rows, num_columns, distance;
} Shape;

#define REAL float
#define BITS uint32_t
#define TINY FLT_MIN
#define FREXP frexpf
#define SQRT sqrtf
#define NAME(name) name##_float
#include "low_rank_loops.h"
#undef REAL
#undef BITS
#undef TINY
#undef FREXP
#undef SQRT
#undef NAME
#define REAL double
#define BITS uint64_t
#define TINY DBL_MIN
#define FREXP frexp
#define SQRT sqrt
#define NAME(name) name##_double
#include "low_rank_loops.h"
