/* The loops of low_rank.c for one type: REAL, the integer of its size BITS, its functions of math.h, and NAME() for the
 * functions here. */

typedef REAL NAME(vector) __attribute__((vector_size(VECTOR_BYTES)));
typedef REAL NAME(loose) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
#define VECTOR NAME(vector)
#define LANES ((int64_t)(VECTOR_BYTES / sizeof(REAL)))
#define AT(pointer) (*(NAME(loose) *)(pointer))
#define READ_AT(pointer) (*(const NAME(loose) *)(pointer))

INLINE REAL NAME(add_lanes)(const VECTOR *sums)
{
    REAL lanes[VECTOR_BYTES / sizeof(REAL)];
    memcpy(lanes, sums, sizeof lanes);
    for (int64_t half = LANES / 2; half; half /= 2)
        for (int64_t k = 0; k < half; k++)
            lanes[k] += lanes[k + half];
    return lanes[0];
}

/* Products of a row with `count` rows of a factor; with values, the row is first made of those and of what was kept. */
INLINE void NAME(multiply_row)(const REAL *values, const REAL *kept, REAL keep, REAL *row, const REAL *factors,
                               int64_t length, int64_t count, REAL *products)
{
    VECTOR sums[4] = {{0}};
    int64_t at = 0;
    for (; at + LANES <= length; at += LANES) {
        VECTOR x = READ_AT(values ? values + at : row + at);
        if (values)
            AT(row + at) = x = x + keep * READ_AT(kept + at);
        for (int64_t k = 0; k < count; k++)
            sums[k] += x * READ_AT(factors + k * length + at);
    }
    for (int64_t k = 0; k < count; k++)
        products[k] = NAME(add_lanes)(&sums[k]);
    for (; at < length; at++) {
        if (values)
            row[at] = values[at] + keep * kept[at];
        for (int64_t k = 0; k < count; k++)
            products[k] += row[at] * factors[k * length + at];
    }
}

/* wanted = values + keep * kept, and left = right * wanted^T, in one pass. */
FOR_EVERY_CPU void NAME(weft_low_rank_encode)(const Shape *shape, const REAL *values, const REAL *kept, double keep,
                                              REAL *wanted, const REAL *right, REAL *left)
{
    int64_t rows = shape->num_rows, columns = shape->num_columns, rank = shape->rank;
    for (int64_t matrix = 0; matrix < shape->num_matrices; matrix++) {
        const REAL *factors = right + matrix * rank * columns;
        REAL *products = left + matrix * rank * rows;
        for (int64_t row = 0; row < rows; row++) {
            int64_t offset = matrix * shape->distance + row * columns;
            const REAL *given = values + offset;
            for (int64_t first = 0; first < rank; first += 4) {
                REAL found[4];
                const REAL *here = factors + first * columns;
                switch (rank - first) {
                case 1:
                    NAME(multiply_row)(given, kept + offset, (REAL)keep, wanted + offset, here, columns, 1, found);
                    break;
                case 2:
                    NAME(multiply_row)(given, kept + offset, (REAL)keep, wanted + offset, here, columns, 2, found);
                    break;
                case 3:
                    NAME(multiply_row)(given, kept + offset, (REAL)keep, wanted + offset, here, columns, 3, found);
                    break;
                default:
                    NAME(multiply_row)(given, kept + offset, (REAL)keep, wanted + offset, here, columns, 4, found);
                }
                for (int64_t k = 0; k < 4 && first + k < rank; k++)
                    products[(first + k) * rows + row] = found[k];
                given = NULL; /* the row is made */
            }
        }
    }
}

/* Part of a row, from one column on: values = scale * weights * right, wanted -= share * weights * right. */
INLINE void NAME(take_part)(const REAL *weights, const REAL *right, int64_t columns, int64_t length, int64_t rank,
                            REAL scale, REAL share, REAL *values, REAL *wanted)
{
    int64_t at = 0;
    for (; at + LANES <= length; at += LANES) {
        VECTOR sum = weights[0] * READ_AT(right + at);
        for (int64_t k = 1; k < rank; k++)
            sum += weights[k] * READ_AT(right + k * columns + at);
        VECTOR kept = READ_AT(wanted + at) - share * sum; /* read before the store, which may lie 4096 bytes apart */
        AT(values + at) = scale * sum;
        AT(wanted + at) = kept;
    }
    for (; at < length; at++) {
        REAL sum = weights[0] * right[at];
        for (int64_t k = 1; k < rank; k++)
            sum += weights[k] * right[k * columns + at];
        values[at] = scale * sum;
        wanted[at] -= share * sum;
    }
}

/* values = scale * left^T * right, wanted -= share * left^T * right. `weights` has room for a column of left factors. */
FOR_EVERY_CPU void NAME(weft_low_rank_decode)(const Shape *shape, const REAL *left, const REAL *right, double scale,
                                              double share, REAL *values, REAL *wanted, REAL *weights)
{
    enum { BLOCK = BLOCK_BYTES / sizeof(REAL) };
    REAL block[BLOCK] __attribute__((aligned(VECTOR_BYTES)));
    int64_t rows = shape->num_rows, columns = shape->num_columns, rank = shape->rank;
    int is_streamed = can_stream((size_t)(shape->num_matrices * rows * columns) * sizeof(REAL));
    for (int64_t matrix = 0; matrix < shape->num_matrices; matrix++) {
        const REAL *columns_of = left + matrix * rank * rows, *factors = right + matrix * rank * columns;
        for (int64_t row = 0; row < rows; row++) {
            int64_t offset = matrix * shape->distance + row * columns;
            for (int64_t k = 0; k < rank; k++)
                weights[k] = columns_of[k * rows + row];
            for (int64_t at = 0; at < columns; at += BLOCK) {
                int64_t length = columns - at < BLOCK ? columns - at : BLOCK;
                REAL *to = is_streamed ? block : values + offset + at, *kept = wanted + offset + at;
                const REAL *from = factors + at;
                switch (rank) {
                case 1:
                    NAME(take_part)(weights, from, columns, length, 1, (REAL)scale, (REAL)share, to, kept);
                    break;
                case 2:
                    NAME(take_part)(weights, from, columns, length, 2, (REAL)scale, (REAL)share, to, kept);
                    break;
                case 4:
                    NAME(take_part)(weights, from, columns, length, 4, (REAL)scale, (REAL)share, to, kept);
                    break;
                default:
                    NAME(take_part)(weights, from, columns, length, rank, (REAL)scale, (REAL)share, to, kept);
                }
                if (is_streamed)
                    stream(values + offset + at, block, (size_t)length * sizeof(REAL));
            }
        }
    }
}

/* The largest absolute value. Without the sign bit, numbers are in the order of their bits. */
INLINE REAL NAME(largest)(const REAL *row, int64_t length)
{
    BITS found = 0;
    for (int64_t at = 0; at < length; at++) {
        BITS bits;
        memcpy(&bits, row + at, sizeof bits);
        bits &= ~(BITS)0 >> 1;
        found = bits > found ? bits : found;
    }
    REAL size;
    memcpy(&size, &found, sizeof size);
    return size;
}

/* The power of two that brings a size into [1/2, 1). */
INLINE REAL NAME(to_below_one)(REAL size)
{
    int exponent;
    REAL mantissa = FREXP(size > TINY ? size : TINY, &exponent);
    return mantissa / (size > TINY ? size : TINY);
}

INLINE void NAME(scale_row)(REAL *row, int64_t length, REAL factor)
{
    int64_t at = 0;
    for (; at + LANES <= length; at += LANES)
        AT(row + at) *= factor;
    for (; at < length; at++)
        row[at] *= factor;
}

INLINE void NAME(subtract)(REAL *row, const REAL *other, int64_t length, REAL factor)
{
    int64_t at = 0;
    for (; at + LANES <= length; at += LANES)
        AT(row + at) -= factor * READ_AT(other + at);
    for (; at < length; at++)
        row[at] -= factor * other[at];
}

INLINE REAL NAME(dot)(REAL *row, const REAL *other, int64_t length)
{
    REAL product;
    NAME(multiply_row)(NULL, NULL, 0, row, other, length, 1, &product);
    return product;
}

/* Rows of each matrix orthonormal, each made orthogonal twice to those before it; zero if it depends on them. */
FOR_EVERY_CPU void NAME(weft_low_rank_orthonormalise)(REAL *rows, int64_t num_matrices, int64_t rank, int64_t length,
                                                      double negligible)
{
    for (int64_t number = 0; number < num_matrices * rank; number++) {
        REAL *row = rows + number * length, *first = rows + number / rank * rank * length;
        NAME(scale_row)(row, length, NAME(to_below_one)(NAME(largest)(row, length)));
        REAL limit = SQRT(NAME(dot)(row, row, length)) * (REAL)negligible;
        for (int pass = 0; pass < 2; pass++)
            for (REAL *before = first; before < row; before += length)
                NAME(subtract)(row, before, length, NAME(dot)(row, before, length));
        REAL size = SQRT(NAME(dot)(row, row, length));
        NAME(scale_row)(row, length, size <= limit ? 0 : 1 / size);
    }
}

/* The start of the next exchange: right factors, scaled; the old start where one caught nothing. */
FOR_EVERY_CPU void NAME(weft_low_rank_next_start)(const REAL *right, const REAL *old, REAL *next, int64_t num_matrices,
                                                  int64_t rank, int64_t length, double size, double negligible)
{
    for (int64_t matrix = 0; matrix < num_matrices; matrix++) {
        int64_t first = matrix * rank * length;
        REAL limit = NAME(largest)(right + first, rank * length) * (REAL)negligible;
        for (int64_t at = first; at < first + rank * length; at += length) {
            REAL own = NAME(largest)(right + at, length);
            if (own <= limit) {
                memmove(next + at, old + at, (size_t)length * sizeof(REAL));
                continue;
            }
            REAL factor = NAME(to_below_one)(own) * (REAL)size;
            for (int64_t k = at; k < at + length; k++)
                next[k] = right[k] * factor;
        }
    }
}

#undef VECTOR
#undef LANES
#undef AT
#undef READ_AT
