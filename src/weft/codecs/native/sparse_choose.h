/* Choosing what is sent, for one type: REAL, the unsigned integer of its size BITS, and NAME() for its functions. */

typedef BITS __attribute__((may_alias)) NAME(bits);
static const BITS NAME(SIZE) = ~(BITS)0 >> 1; /* all but the sign */

static inline BITS NAME(size_of)(REAL x)
{
    BITS bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & NAME(SIZE);
}

/* One tensor of a bucket. */
typedef struct {
    const REAL *values, *old_residual, *old_momentum;
    REAL *new_residual, *new_momentum;
    Sample sample;
    REAL keep_residual, keep_momentum, momentum;
    int is_nesterov;
    size_t numel, num_sent, num_chunks, capacity;
    int32_t *counts;
    uint16_t *candidate_offsets;
    REAL *candidates;
    BITS *sizes;
} NAME(Job);

/* The rank-th largest of some sizes, which are lost; *num_larger of them are larger. */
static BITS NAME(find_largest)(BITS *sizes, size_t count, size_t rank, size_t *num_larger)
{
    size_t wanted = rank;
    BITS found = 0;
    for (int top = 8 * (int)sizeof(BITS) - 1; top > 0; top -= DIGIT_BITS) {
        int shift = top > DIGIT_BITS ? top - DIGIT_BITS : 0, width = top - shift;
        size_t histogram[NUM_DIGITS] = {0}, left = 0;
        for (size_t k = 0; k < count; k++)
            histogram[sizes[k] >> shift & (((BITS)1 << width) - 1)]++;
        size_t digit = find_digit(histogram, &rank);
        found |= (BITS)digit << shift;
        for (size_t k = 0; k < count; k++) {
            BITS size = sizes[k];
            sizes[left] = size;
            left += (size >> shift & (((BITS)1 << width) - 1)) == digit;
        }
        count = left;
    }
    *num_larger = wanted - rank;
    return found;
}

/* Keep the num_sent largest of the candidates, of equal ones the first; *count and `counts`, of the first chunks, are
 * set. Returns the size of the smallest. */
static BITS NAME(drop)(const NAME(Job) *job, size_t *count, size_t num_chunks)
{
    BITS *sizes = job->sizes;
    REAL *values = job->candidates;
    uint16_t *offsets = job->candidate_offsets;
    for (size_t k = 0; k < *count; k++)
        sizes[k] = NAME(size_of)(values[k]);
    size_t num_larger, from = 0, to = 0;
    BITS least = NAME(find_largest)(sizes, *count, job->num_sent, &num_larger);
    size_t room = job->num_sent - num_larger; /* for those of the least size */
    for (size_t chunk = 0; chunk < num_chunks; chunk++) {
        size_t stop = from + (size_t)job->counts[chunk], first = to;
        for (; from < stop; from++) {
            BITS size = NAME(size_of)(values[from]);
            size_t is_least = size == least && room > 0;
            values[to] = values[from];
            offsets[to] = offsets[from];
            to += (size > least) | is_least;
            room -= is_least;
        }
        job->counts[chunk] = (int32_t)(to - first);
    }
    *count = to;
    return least;
}

/* The new residual of topk, and the new momentum and residual of dgc, of one block. */
FOR_EVERY_CPU static void NAME(add_values)(const REAL *g, const REAL *e, REAL *e_new, size_t count, REAL keep)
{
    for (size_t k = 0; k < count; k++)
        e_new[k] = e[k] * keep + g[k];
}

FOR_EVERY_CPU static void NAME(add_momentum)(const REAL *g, const REAL *u, const REAL *v, REAL *u_new, REAL *v_new,
                                             size_t count, REAL keep_u, REAL keep_v)
{
    for (size_t k = 0; k < count; k++) {
        REAL next = u[k] * keep_u + g[k];
        REAL total = v[k] * keep_v + next;
        u_new[k] = next;
        v_new[k] = total;
    }
}

FOR_EVERY_CPU static void NAME(add_nesterov)(const REAL *g, const REAL *u, const REAL *v, REAL *u_new, REAL *v_new,
                                             size_t count, REAL keep_u, REAL keep_v, REAL momentum)
{
    for (size_t k = 0; k < count; k++) {
        REAL next = (u[k] * keep_u + g[k]) * momentum;
        REAL total = v[k] * keep_v + next + g[k];
        u_new[k] = next;
        v_new[k] = total;
    }
}

static void NAME(add)(const NAME(Job) *job, const REAL *g, const REAL *u, const REAL *v, REAL *u_new, REAL *v_new, size_t count)
{
    REAL keep_v = job->keep_residual, keep_u = job->keep_momentum;
    if (!job->old_momentum)
        NAME(add_values)(g, v, v_new, count, keep_v);
    else if (job->is_nesterov)
        NAME(add_nesterov)(g, u, v, u_new, v_new, count, keep_u, keep_v, job->momentum);
    else
        NAME(add_momentum)(g, u, v, u_new, v_new, count, keep_u, keep_v);
}

/* The rank-th largest size of a sample. */
static BITS NAME(estimate)(const NAME(Job) *job)
{
    const REAL *values = job->values, *residual = job->old_residual;
    const REAL *momentum = job->old_momentum ? job->old_momentum : residual;
    REAL g[BLOCK], u[BLOCK], v[BLOCK];
    BITS *sizes = job->sizes;
    size_t num_larger, num_sampled = (size_t)job->sample.num, stride = (size_t)job->sample.stride;
    size_t at = (size_t)job->sample.first;
    for (size_t first = 0; first < num_sampled; first += BLOCK) {
        size_t count = num_sampled - first < BLOCK ? num_sampled - first : BLOCK;
        for (size_t k = 0; k < count; k++, at += stride) {
            g[k] = values[at];
            u[k] = momentum[at];
            v[k] = residual[at];
        }
        NAME(add)(job, g, u, v, u, v, count);
        for (size_t k = 0; k < count; k++)
            sizes[first + k] = NAME(size_of)(v[k]);
    }
    return NAME(find_largest)(sizes, num_sampled, (size_t)job->sample.rank, &num_larger);
}

/* Elements of a block whose size reaches the threshold; returns how many there are. The largest size is noted. */
#if defined(HAS_AVX512)
__attribute__((target("avx512f"))) static size_t NAME(collect_wide)(const REAL *values, size_t first, BITS threshold,
                                                                    uint16_t *offsets, REAL *found, BITS *largest)
{
    size_t count = 0;
    __m512i most = _mm512_setzero_si512();
    BITS each[64 / sizeof(BITS)];
    if (sizeof(BITS) == 4) {
        const __m512i size_bits = _mm512_set1_epi32(0x7FFFFFFF), least = _mm512_set1_epi32((int)threshold);
        __m512i places = _mm512_add_epi32(_mm512_set1_epi32((int)first), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7,
                                                                                          6, 5, 4, 3, 2, 1, 0));
        for (size_t k = 0; k < BLOCK; k += 16) {
            __m512i value = _mm512_loadu_si512((const void *)(values + k)), size = _mm512_and_si512(value, size_bits);
            __mmask16 is_found = _mm512_cmpge_epu32_mask(size, least);
            most = _mm512_max_epu32(most, size);
            _mm512_storeu_si512((void *)(found + count), _mm512_maskz_compress_epi32(is_found, value));
            _mm256_storeu_si256((__m256i *)(offsets + count),
                                _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(is_found, places)));
            places = _mm512_add_epi32(places, _mm512_set1_epi32(16));
            count += (size_t)__builtin_popcount(is_found);
        }
    } else {
        const __m512i size_bits = _mm512_set1_epi64(INT64_MAX), least = _mm512_set1_epi64((long long)threshold);
        __m512i places = _mm512_add_epi64(_mm512_set1_epi64((long long)first), _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
        for (size_t k = 0; k < BLOCK; k += 8) {
            __m512i value = _mm512_loadu_si512((const void *)(values + k)), size = _mm512_and_si512(value, size_bits);
            __mmask8 is_found = _mm512_cmpge_epu64_mask(size, least);
            most = _mm512_max_epu64(most, size);
            _mm512_storeu_si512((void *)(found + count), _mm512_maskz_compress_epi64(is_found, value));
            _mm_storeu_si128((__m128i *)(offsets + count),
                             _mm512_cvtepi64_epi16(_mm512_maskz_compress_epi64(is_found, places)));
            places = _mm512_add_epi64(places, _mm512_set1_epi64(8));
            count += (size_t)__builtin_popcount(is_found);
        }
    }
    _mm512_storeu_si512((void *)each, most);
    for (size_t k = 0; k < sizeof each / sizeof *each; k++)
        *largest = each[k] > *largest ? each[k] : *largest;
    return count;
}
#endif

FOR_EVERY_CPU static size_t NAME(collect_any)(const REAL *values, size_t length, size_t first, BITS threshold,
                                              uint16_t *offsets, REAL *found, BITS *largest)
{
    enum { GROUP = 32 }; /* most groups have nothing to send */
    const NAME(bits) *all = (const NAME(bits) *)values;
    size_t count = 0;
    for (size_t start = 0; start < length; start += GROUP) {
        size_t stop = length - start < GROUP ? length : start + GROUP;
        BITS most = 0;
        for (size_t k = start; k < stop; k++) {
            BITS size = all[k] & NAME(SIZE);
            most = size > most ? size : most;
        }
        *largest = most > *largest ? most : *largest;
        if (most < threshold)
            continue;
        for (size_t k = start; k < stop; k++) {
            found[count] = values[k];
            offsets[count] = (uint16_t)(first + k);
            count += (all[k] & NAME(SIZE)) >= threshold;
        }
    }
    return count;
}

static size_t NAME(collect)(const REAL *values, size_t length, size_t first, BITS threshold, uint16_t *offsets,
                            REAL *found, BITS *largest)
{
#if defined(HAS_AVX512)
    if (length == BLOCK && __builtin_cpu_supports("avx512f"))
        return NAME(collect_wide)(values, first, threshold, offsets, found, largest);
#endif
    return NAME(collect_any)(values, length, first, threshold, offsets, found, largest);
}

/* One pass over the tensor; with `add` the new state is made in it, else only read again. Returns the number of
 * candidates. */
static size_t NAME(pass)(const NAME(Job) *job, BITS threshold, int add, BITS *largest)
{
    size_t numel = job->numel, num_found = 0;
    const REAL *g = job->values, *u = job->old_momentum, *v = job->old_residual;
    REAL *u_new = job->new_momentum, *v_new = job->new_residual;
    REAL u_block[BLOCK], v_block[BLOCK];
    int is_streamed = add && v != v_new && numel * sizeof(REAL) >= STREAMED_BYTES && can_stream();
    memset(job->counts, 0, job->num_chunks * sizeof *job->counts);
    for (size_t at = 0; at < numel; at += BLOCK) {
        size_t length = numel - at < BLOCK ? numel - at : BLOCK, chunk = at / CHUNK;
        REAL *next = is_streamed ? v_block : v_new + at;
        if (add)
            NAME(add)(job, g + at, u ? u + at : u, v + at, is_streamed || !u ? u_block : u_new + at, next, length);
        size_t count = NAME(collect)(next, length, at % CHUNK, threshold, job->candidate_offsets + num_found,
                                     job->candidates + num_found, largest);
        if (is_streamed)
            stream(v_new + at, v_block, length * sizeof(REAL));
        if (is_streamed && u)
            stream(u_new + at, u_block, length * sizeof(REAL));
        num_found += count;
        job->counts[chunk] += (int32_t)count;
        if (num_found + BLOCK + SLACK > job->capacity)
            threshold = NAME(drop)(job, &num_found, chunk + 1) + 1; /* of equal ones the first are there already */
    }
#if defined(HAS_AVX512)
    _mm_sfence();
#endif
    return num_found;
}

/* The candidates that are sent, exactly those; returns how many. The largest size of all is noted. */
static size_t NAME(choose)(const NAME(Job) *job, int is_exact, BITS *largest)
{
    BITS threshold = job->num_sent < job->numel ? NAME(estimate)(job) : 0;
    threshold += threshold == 0; /* zeros are never sent */
    size_t num_found = NAME(pass)(job, threshold, 1, largest);
    if (is_exact && num_found < job->num_sent && threshold > 1)
        num_found = NAME(pass)(job, 1, 0, largest);
    if (num_found > job->num_sent)
        NAME(drop)(job, &num_found, job->num_chunks);
    return num_found;
}

/* New state and entries of all tensors. Returns whether a value is not finite; what is written is without meaning then. */
int NAME(weft_sparse_choose)(const Bucket *bucket)
{
    BITS largest = 0;
    for (int64_t tensor = 0; tensor < bucket->num_tensors; tensor++) {
        const Place *place = bucket->places + tensor;
        const Factors *factors = bucket->factors + tensor;
        int64_t at = place->offset;
        NAME(Job) job = {
            .values = (const REAL *)bucket->values + at,
            .old_residual = (const REAL *)bucket->old_residual + at,
            .new_residual = (REAL *)bucket->new_residual + at,
            .old_momentum = bucket->old_momentum ? (const REAL *)bucket->old_momentum + at : NULL,
            .new_momentum = bucket->new_momentum ? (REAL *)bucket->new_momentum + at : NULL,
            .sample = bucket->samples[tensor],
            .keep_residual = (REAL)factors->keep_residual,
            .keep_momentum = (REAL)factors->keep_momentum,
            .momentum = (REAL)factors->momentum,
            .is_nesterov = factors->is_nesterov != 0,
            .numel = (size_t)place->numel,
            .num_sent = (size_t)place->num_entries,
            .num_chunks = (size_t)(place->numel + CHUNK - 1) / CHUNK,
            .capacity = (size_t)bucket->capacity,
            .counts = bucket->counts + place->first_chunk,
            .candidate_offsets = bucket->candidate_offsets,
            .candidates = bucket->candidates,
            .sizes = bucket->sizes,
        };
        size_t num_found = NAME(choose)(&job, bucket->is_exact, &largest), num_unused = job.num_sent - num_found;
        uint16_t *offsets = bucket->offsets + place->first_entry;
        REAL *row = (REAL *)bucket->row + place->first_entry;
        memcpy(offsets, job.candidate_offsets, num_found * sizeof *offsets);
        memset(offsets + num_found, 0, num_unused * sizeof *offsets);
        memcpy(row, job.candidates, num_found * sizeof *row);
        memset(row + num_found, 0, num_unused * sizeof *row);
        for (size_t chunk = 0, entry = 0; chunk < job.num_chunks; chunk++)
            for (size_t stop = entry + (size_t)job.counts[chunk]; entry < stop; entry++) {
                job.new_residual[chunk * CHUNK + offsets[entry]] = 0;
                if (bucket->is_masking)
                    job.new_momentum[chunk * CHUNK + offsets[entry]] = 0;
            }
    }
    return largest >= NAME(size_of)((REAL)__builtin_inf());
}
