/* The loops of `quantised.c` for one format, REAL, and one instruction set, CPU. */

/* Of 64 entries, which are negative. */
static inline uint64_t FN(negative_bits)(const REAL *x)
{
    uint64_t bits = 0;
#if defined(WIDE) && defined(__AVX512F__)
    for (int k = 0; k < 64; k += 16)
        bits |= (uint64_t)_mm512_cmp_ps_mask(_mm512_loadu_ps(x + k), _mm512_setzero_ps(), _CMP_LT_OQ) << k;
#elif defined(WIDE)
    for (int k = 0; k < 64; k += 8) {
        __m256 is_negative = _mm256_cmp_ps(_mm256_loadu_ps(x + k), _mm256_setzero_ps(), _CMP_LT_OQ);
        bits |= (uint64_t)(unsigned)_mm256_movemask_ps(is_negative) << k;
    }
#else
    for (int k = 0; k < 64; k++)
        bits |= (uint64_t)(x[k] < 0) << k;
#endif
    return bits;
}

static inline uint64_t FN(negative_bits_of)(const REAL *x, size_t count)
{
    if (count >= 64)
        return FN(negative_bits)(x);
    uint64_t bits = 0;
    for (size_t k = 0; k < count; k++)
        bits |= (uint64_t)(x[k] < 0) << k;
    return bits;
}

/* To each of up to 64 entries, or to nothing if they are the first, is added, message by message, that of `ones` where
 * its bit is set, else that of `zeros`; then all is scaled. */
static inline void FN(add_selected)(REAL *sum, size_t count, int is_first, size_t num_messages, const uint64_t *bits,
                                    const REAL *const *zeros, const REAL *const *ones, REAL scale)
{
#if defined(WIDE) && defined(__AVX512F__)
    for (size_t k = 0; count == 64 && k < 64; k += 16) {
        __m512 total = _mm512_loadu_ps(sum + k);
        for (size_t one = 0; one < num_messages; one++) {
            __m512 low = _mm512_loadu_ps(zeros[one] + k);
            __m512 value = _mm512_mask_loadu_ps(low, (__mmask16)(bits[one] >> k), ones[one] + k);
            total = one || !is_first ? _mm512_add_ps(total, value) : value;
        }
        _mm512_storeu_ps(sum + k, _mm512_mul_ps(total, _mm512_set1_ps(scale)));
    }
    if (count == 64)
        return;
#endif
    for (size_t one = 0; one < num_messages; one++)
        for (size_t half = 0; half < count; half += 32) {
            uint32_t word = (uint32_t)(bits[one] >> half);
            const REAL *low = zeros[one] + half, *high = ones[one] + half;
            size_t some = count - half < 32 ? count - half : 32;
            REAL value[32], *restrict total = sum + half;
            for (size_t k = 0; k < some; k++) {
                REAL if_zero = low[k], if_one = high[k];
                value[k] = word & places[k] ? if_one : if_zero;
            }
            for (size_t k = 0; k < some; k++)
                total[k] = one || !is_first ? total[k] + value[k] : value[k];
        }
    for (size_t k = 0; k < count; k++)
        sum[k] *= scale;
}

/* Sums of ROWS rows of given + old * factor, entries that are not negative and others apart, and the number of the
 * latter. */
static inline void FN(sum_rows)(const REAL *const *given, const REAL *const *old, REAL factor, size_t count,
                                REAL *restrict positive, REAL *restrict negative, int32_t *restrict num_negative)
{
    const REAL *g0 = given[0], *g1 = given[1], *g2 = given[2], *g3 = given[3];
    const REAL *g4 = given[4], *g5 = given[5], *g6 = given[6], *g7 = given[7];
    const REAL *e0 = old[0], *e1 = old[1], *e2 = old[2], *e3 = old[3];
    const REAL *e4 = old[4], *e5 = old[5], *e6 = old[6], *e7 = old[7];
    for (size_t k = 0; k < count; k++) {
        REAL x0 = g0[k] + e0[k] * factor, x1 = g1[k] + e1[k] * factor, x2 = g2[k] + e2[k] * factor;
        REAL x3 = g3[k] + e3[k] * factor, x4 = g4[k] + e4[k] * factor, x5 = g5[k] + e5[k] * factor;
        REAL x6 = g6[k] + e6[k] * factor, x7 = g7[k] + e7[k] * factor;
#define PLUS(X) (X < 0 ? 0 : X)
#define MINUS(X) (X < 0 ? X : 0)
        positive[k] = ((PLUS(x0) + PLUS(x1)) + (PLUS(x2) + PLUS(x3))) + ((PLUS(x4) + PLUS(x5)) + (PLUS(x6) + PLUS(x7)));
        negative[k] =
            ((MINUS(x0) + MINUS(x1)) + (MINUS(x2) + MINUS(x3))) + ((MINUS(x4) + MINUS(x5)) + (MINUS(x6) + MINUS(x7)));
#undef PLUS
#undef MINUS
        num_negative[k] += (x0 < 0) + (x1 < 0) + (x2 < 0) + (x3 < 0) + (x4 < 0) + (x5 < 0) + (x6 < 0) + (x7 < 0);
    }
}

/* The two means of each of `count` columns. Sums are trees over rows, neighbours first: level l holds that of a whole
 * subtree of ROWS * 2^l rows, of which another is still to come. */
static int FN(means)(const REAL *given, const REAL *old, REAL factor, size_t num_rows, size_t num_columns, size_t count,
                     REAL *positive_means, REAL *negative_means)
{
    static const REAL none[COLUMNS];
    REAL sums[LEVELS][2][COLUMNS], last[2][COLUMNS];
    int32_t num_negative[COLUMNS] = {0};
    size_t num_blocks = (num_rows + ROWS - 1) / ROWS;
    for (size_t block = 0; block < num_blocks; block++) {
        const REAL *g[ROWS], *e[ROWS];
        for (size_t k = 0; k < ROWS; k++) {
            size_t row = block * ROWS + k;
            g[k] = row < num_rows ? given + row * num_columns : none;
            e[k] = row < num_rows ? old + row * num_columns : none;
        }
        FN(sum_rows)(g, e, factor, count, last[0], last[1], num_negative);
        int level = 0;
        for (; block >> level & 1; level++)
            for (int sign = 0; sign < 2; sign++)
                for (size_t k = 0; k < count; k++)
                    last[sign][k] = sums[level][sign][k] + last[sign][k];
        memcpy(sums[level], last, sizeof last);
    }
    memset(last, 0, sizeof last);
    for (int level = 0; num_blocks >> level; level++)
        if (num_blocks >> level & 1)
            for (int sign = 0; sign < 2; sign++)
                for (size_t k = 0; k < count; k++)
                    last[sign][k] = sums[level][sign][k] + last[sign][k];
    int is_bad = 0;
    for (size_t k = 0; k < count; k++) {
        size_t negative = (size_t)num_negative[k], positive = num_rows - negative;
        positive_means[k] = last[0][k] / (REAL)(positive ? positive : 1) + 0; /* no negative zeros */
        negative_means[k] = last[1][k] / (REAL)(negative ? negative : 1) + 0;
        is_bad |= !isfinite(positive_means[k]) | !isfinite(negative_means[k]);
    }
    return is_bad;
}

/* What is kept of up to 64 entries of a row; returns which of them are negative. */
static inline uint64_t FN(subtract_means)(const REAL *given, const REAL *old, REAL factor, REAL *kept,
                                          const REAL *positive, const REAL *negative, size_t count)
{
    REAL x[64], error[64];
    for (size_t k = 0; k < count; k++) {
        REAL value = given[k] + old[k] * factor, plus = positive[k], minus = negative[k];
        x[k] = value;
        error[k] = value - (value < 0 ? minus : plus);
    }
    memcpy(kept, error, count * sizeof(REAL));
    return FN(negative_bits_of)(x, count);
}

static int FN(onebit)(const REAL *given, const REAL *old, REAL factor, REAL *kept, size_t num_rows, size_t num_columns,
                      size_t num_rest, REAL *scales, uint8_t *codes)
{
    int is_bad = 0;
    /* The bits of some columns of a row are whole bytes, or else all columns are gone through at once. */
    size_t width = num_columns % 8 ? num_columns : COLUMNS;
    struct writer out = {codes, 0, 0};
    for (size_t first = 0; num_rows && first < num_columns; first += width) {
        size_t count = num_columns - first < width ? num_columns - first : width;
        for (size_t start = first; start < first + count; start += COLUMNS) {
            size_t some = first + count - start < COLUMNS ? first + count - start : COLUMNS;
            is_bad |= FN(means)(given + start, old + start, factor, num_rows, num_columns, some, scales + start,
                                scales + num_columns + start);
        }
        for (size_t row = 0; row < num_rows; row++) {
            size_t place = row * num_columns + first;
            if (width != num_columns)
                out = (struct writer){codes + place / 8, 0, 0};
            for (size_t k = 0; k < count; k += 64, place += 64) {
                size_t some = count - k < 64 ? count - k : 64;
                const REAL *plus = scales + first + k, *minus = plus + num_columns;
                uint64_t bits = some == 64 ? FN(subtract_means)(given + place, old + place, factor, kept + place, plus,
                                                                minus, 64)
                                           : FN(subtract_means)(given + place, old + place, factor, kept + place, plus,
                                                                minus, some);
                append(&out, bits, (unsigned)some);
            }
            if (width != num_columns)
                flush(&out);
        }
    }
    if (width == num_columns)
        flush(&out);
    REAL *rest = scales + (num_rows ? 2 * num_columns : 0);
    for (size_t k = 0, place = num_rows * num_columns; k < num_rest; k++, place++) {
        rest[k] = given[place] + old[place] * factor;
        kept[place] = 0;
        is_bad |= !isfinite(rest[k]);
    }
    return is_bad;
}

static void FN(onebit_sum)(const uint8_t *messages, size_t num_messages, size_t stride, size_t num_rows,
                           size_t num_columns, size_t num_rest, REAL *sum, REAL scale)
{
    size_t num_means = num_rows ? 2 * num_columns : 0, num_coded = num_rows * num_columns;
    size_t codes_at = (num_means + num_rest) * sizeof(REAL), num_bytes = (num_coded + 7) / 8;
    for (size_t first = 0; num_rows && first < num_columns; first += MEANS) {
        size_t count = num_columns - first < MEANS ? num_columns - first : MEANS;
        for (size_t row = 0; row < num_rows; row++)
            for (size_t k = first; k < first + count; k += 64) {
                size_t some = first + count - k < 64 ? first + count - k : 64, place = row * num_columns + k;
                for (size_t done = 0; done < num_messages; done += MESSAGES) {
                    size_t num_now = num_messages - done < MESSAGES ? num_messages - done : MESSAGES;
                    uint64_t bits[MESSAGES];
                    const REAL *positive[MESSAGES], *negative[MESSAGES];
                    for (size_t one = 0; one < num_now; one++) {
                        const uint8_t *message = messages + (done + one) * stride;
                        positive[one] = (const REAL *)(const void *)message + k;
                        negative[one] = positive[one] + num_columns;
                        bits[one] = bits_at(message + codes_at, num_bytes, place);
                    }
                    FN(add_selected)(sum + place, some, done == 0, num_now, bits, positive, negative,
                                     done + num_now == num_messages ? scale : 1);
                }
            }
    }
    for (size_t k = 0; k < num_rest; k++) {
        REAL total = ((const REAL *)(const void *)messages)[num_means + k];
        for (size_t one = 1; one < num_messages; one++)
            total += ((const REAL *)(const void *)(messages + one * stride))[num_means + k];
        sum[num_coded + k] = total * scale;
    }
}

/* The largest size of an entry; infinite or not a number if one is. */
static inline REAL FN(largest)(const REAL *x, size_t count)
{
    REAL found = 0, is_bad = 0;
    enum { LANES = 32 };
    REAL most[LANES] = {0}, zero[LANES] = {0};
    size_t k = 0;
    for (; k + LANES <= count; k += LANES)
        for (size_t j = 0; j < LANES; j++) {
            REAL size = x[k + j] < 0 ? -x[k + j] : x[k + j];
            most[j] = size > most[j] ? size : most[j];
            zero[j] += x[k + j] - x[k + j]; /* not a number unless finite */
        }
    for (; k < count; k++) {
        REAL size = x[k] < 0 ? -x[k] : x[k];
        found = size > found ? size : found;
        is_bad += x[k] - x[k];
    }
    for (size_t j = 0; j < LANES; j++) {
        found = most[j] > found ? most[j] : found;
        is_bad += zero[j];
    }
    return found + is_bad;
}

static int FN(sign)(const REAL *given, size_t count, uint8_t *codes)
{
    int is_bad = 0;
    struct writer out = {codes, 0, 0};
    for (size_t start = 0; start < count; start += BLOCK) {
        size_t length = count - start < BLOCK ? count - start : BLOCK;
        is_bad |= !isfinite(FN(largest)(given + start, length));
        for (size_t k = start; k < start + length; k += 64) {
            size_t some = start + length - k < 64 ? start + length - k : 64;
            append(&out, FN(negative_bits_of)(given + k, some), (unsigned)some);
        }
    }
    flush(&out);
    return is_bad;
}

static void FN(sign_sum)(const uint8_t *messages, size_t num_messages, size_t stride, size_t count, REAL *sum)
{
    static const REAL plus[64] = {
        1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
        1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
    };
    REAL minus[64];
    for (int k = 0; k < 64; k++)
        minus[k] = -plus[k];
    const REAL *zero = plus, *one = minus;
    size_t num_bytes = (count + 7) / 8;
    for (size_t start = 0; start < count; start += 64) {
        uint64_t planes[PLANES] = {0};
        int num_planes = 0;
        for (size_t message = 0; message < num_messages; message++)
            num_planes = add_vote(planes, num_planes, bits_at(messages + message * stride, num_bytes, start));
        uint64_t against = reaches(planes, num_planes, num_messages / 2 + 1);
        FN(add_selected)(sum + start, count - start < 64 ? count - start : 64, 1, 1, &against, &zero, &one, 1);
    }
}

static int FN(qsgd)(const REAL *given, size_t count, int bits, uint32_t key, uint32_t second, REAL *scales,
                    uint8_t *codes)
{
    int is_bad = 0, num_steps = (1 << bits) / 2 - 1;
    for (size_t start = 0; start < count; start += BLOCK) {
        size_t length = count - start < BLOCK ? count - start : BLOCK;
        REAL padded[BLOCK];
        const REAL *x = given + start;
        if (length < BLOCK) {
            memset(padded, 0, sizeof padded);
            x = memcpy(padded, x, length * sizeof(REAL));
        }
        double sums[BLOCK / 2];
        for (size_t k = 0; k < BLOCK / 2; k++)
            sums[k] = (double)x[k] * (double)x[k] + (double)x[k + BLOCK / 2] * (double)x[k + BLOCK / 2];
        for (size_t half = BLOCK / 4; half; half /= 2)
            for (size_t k = 0; k < half; k++)
                sums[k] += sums[k + half];
        REAL norm = (REAL)sqrt(sums[0]), divisor = norm == 0 ? (REAL)INFINITY : norm;
        scales[start / BLOCK] = norm;
        is_bad |= !isfinite(norm);
        uint8_t found[BLOCK];
        for (size_t k = 0; k < BLOCK; k++) {
            REAL draw = (REAL)(int32_t)(random_bits((uint32_t)(start + k), key, second) >> 8) * (REAL)0x1p-24;
            REAL size = x[k] < 0 ? -x[k] : x[k];
            int32_t steps = (int32_t)(size / divisor * (REAL)num_steps + draw);
            steps = steps < num_steps ? steps : num_steps;
            int32_t sign = x[k] < 0 ? -1 : 0;
            found[k] = (uint8_t)(num_steps + (steps ^ sign) - sign);
        }
        if (length < BLOCK)
            memset(found + length, 0, BLOCK - length);
        if (is_bad)
            return 1; /* codes have no meaning, and may be too large */
        pack(found, bits, codes + start * (size_t)bits / 8, (length * (size_t)bits + 7) / 8);
    }
    return 0;
}

static int FN(terngrad)(const REAL *given, size_t count, uint32_t key, uint32_t second, REAL *scales, uint8_t *codes)
{
    REAL largest = FN(largest)(given, count);
    scales[0] = largest;
    if (!isfinite(largest))
        return 1;
    REAL divisor = largest == 0 ? 1 : largest;
    for (size_t start = 0; start < count; start += BLOCK) {
        size_t length = count - start < BLOCK ? count - start : BLOCK;
        const REAL *x = given + start;
        uint8_t found[BLOCK];
        for (size_t k = 0; k < length; k++) {
            REAL draw = (REAL)(int32_t)(random_bits((uint32_t)(start + k), key, second) >> 8) * (REAL)0x1p-24;
            REAL size = x[k] < 0 ? -x[k] : x[k];
            int32_t sign = x[k] < 0 ? -1 : 1, is_sent = draw < size / divisor;
            found[k] = (uint8_t)(1 + (sign & -is_sent));
        }
        if (length < BLOCK)
            memset(found + length, 0, BLOCK - length);
        pack(found, 2, codes + start / 4, (length + 3) / 4);
    }
    return 0;
}

/* Sums of codes that count steps, of `per_scale` entries each a share of one scale. */
static void FN(steps_sum)(const uint8_t *messages, size_t num_messages, size_t stride, size_t count, int bits,
                          int num_steps, size_t per_scale, size_t codes_at, REAL *sum, REAL scale)
{
    for (size_t start = 0; start < count; start += BLOCK) {
        size_t length = count - start < BLOCK ? count - start : BLOCK;
        REAL *total = sum + start;
        for (size_t one = 0; one < num_messages; one++) {
            const uint8_t *message = messages + one * stride;
            REAL size = ((const REAL *)(const void *)message)[start / per_scale];
            uint8_t codes[BLOCK];
            unpack(message + codes_at + start * (size_t)bits / 8, (length * (size_t)bits + 7) / 8, bits, codes);
            if (one == 0)
                for (size_t k = 0; k < length; k++)
                    total[k] = (REAL)(codes[k] - num_steps) / (REAL)num_steps * size;
            else
                for (size_t k = 0; k < length; k++)
                    total[k] += (REAL)(codes[k] - num_steps) / (REAL)num_steps * size;
        }
        for (size_t k = 0; k < length; k++)
            total[k] *= scale;
    }
}
