/* The loops of powersgd: products of matrices with thin factors, fused with what is done to the matrices' elements, and
 * factors made orthonormal. They read every matrix along its rows, once per message.
 *
 * Sums are made in vectors of 64 bytes whatever the CPU has, in one order and without fused multiply-adds: every x86 CPU
 * computes the same bits, so that replicas on different ones stay equal.
 */
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
