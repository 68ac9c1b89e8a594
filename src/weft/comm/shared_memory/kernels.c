/* The two inner loops of an exchange through shared memory, for machines with a C compiler; torch's operations do the
 * same without one, to the bit. Sums are taken in the order of the terms.
 *
 * A copy that will be read by another processor next is better written past this one's caches: three times as fast.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define STREAMS 1
#include <immintrin.h>
#endif

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EVERY_CPU
#endif

enum { BLOCK = 1024 }; /* elements: a block of sums stays in the first-level cache */

enum { LINE = 64 }; /* bytes of a cache line */

#if defined(STREAMS)
/* A whole line in one store is a third faster than in four. */
__attribute__((target("avx512f"))) static void stream_wide(char *to, const char *from, size_t num_lines)
{
    for (size_t line = 0; line < num_lines; line++, to += LINE, from += LINE)
        _mm512_stream_si512((void *)to, _mm512_loadu_si512((const void *)from));
}

static void stream(char *to, const char *from, size_t num_lines)
{
    for (size_t line = 0; line < num_lines; line++, to += LINE, from += LINE)
        for (size_t k = 0; k < LINE; k += 16)
            _mm_stream_si128((__m128i *)(to + k), _mm_loadu_si128((const __m128i *)(from + k)));
}
#endif

void weft_copy(char *to, const char *from, size_t num_bytes)
{
#if defined(STREAMS)
    size_t head = (size_t)(-(uintptr_t)to & (LINE - 1));
    if (head > num_bytes)
        head = num_bytes;
    memcpy(to, from, head);
    to += head, from += head, num_bytes -= head;
    if (__builtin_cpu_supports("avx512f"))
        stream_wide(to, from, num_bytes / LINE);
    else
        stream(to, from, num_bytes / LINE);
    _mm_sfence();
    to += num_bytes / LINE * LINE, from += num_bytes / LINE * LINE, num_bytes %= LINE;
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
