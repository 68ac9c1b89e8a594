/* The two inner loops of an exchange through shared memory, for machines with a C compiler; torch's operations do the
 * same without one, to the bit. Sums are taken in the order of the terms.
 *
 * A copy that will be read by another processor next is better written past this one's caches: three times as fast.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EVERY_CPU
#endif

enum { BLOCK = 1024 }; /* elements: a block of sums stays in the first-level cache */

void weft_copy(char *to, const char *from, size_t num_bytes)
{
#if defined(__SSE2__)
    size_t head = (size_t)(-(uintptr_t)to & 15);
    if (head > num_bytes)
        head = num_bytes;
    memcpy(to, from, head);
    to += head, from += head, num_bytes -= head;
    for (; num_bytes >= 64; to += 64, from += 64, num_bytes -= 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32)), d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, a), _mm_stream_si128((__m128i *)(to + 16), b);
        _mm_stream_si128((__m128i *)(to + 32), c), _mm_stream_si128((__m128i *)(to + 48), d);
    }
    _mm_sfence();
#endif
    memcpy(to, from, num_bytes);
}

/* Every target ends as the sum of all terms; with `add` the first target, which is no term, grows by it instead. Targets
 * may be terms: a block is summed before any of it is written. */
#define DEFINE_SUM(NAME, TYPE)                                                                                         \
    FOR_EVERY_CPU void NAME(TYPE *const *to, size_t num_to, const TYPE *const *from, size_t num_from, size_t count,    \
                            int add)                                                                                   \
    {                                                                                                                  \
        TYPE sum[BLOCK];                                                                                               \
        for (size_t start = 0; start < count; start += BLOCK) {                                                        \
            size_t length = count - start < BLOCK ? count - start : BLOCK;                                             \
            const TYPE *first = from[0] + start, *second = from[1] + start;                                            \
            for (size_t k = 0; k < length; k++)                                                                        \
                sum[k] = first[k] + second[k];                                                                         \
            for (size_t term = 2; term < num_from; term++) {                                                           \
                const TYPE *more = from[term] + start;                                                                 \
                for (size_t k = 0; k < length; k++)                                                                    \
                    sum[k] += more[k];                                                                                 \
            }                                                                                                          \
            if (add)                                                                                                   \
                for (size_t k = 0; k < length; k++)                                                                    \
                    to[0][start + k] += sum[k];                                                                        \
            for (size_t target = add ? 1 : 0; target < num_to; target++)                                               \
                memcpy(to[target] + start, sum, length * sizeof(TYPE));                                                \
        }                                                                                                              \
    }

DEFINE_SUM(weft_sum_float, float)
DEFINE_SUM(weft_sum_double, double)
