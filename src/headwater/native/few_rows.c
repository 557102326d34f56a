/* Products of few rows: out[row, column] = sum over k of left[row, k] * weight[column, k], plus bias[column].
 *
 * Such a product computes little with each number of the weight, so it takes as long as the memory needs to
 * deliver the weight. Each thread therefore reads a part of the weight once, from start to end, for all rows.
 *
 * Numbers are fp32 or bf16; sums are fp32. A number of the result is a sum in a fixed order: lane i of a vector
 * adds the products of k = i, i + LANES, ...; the lanes are added in pairs. So it depends neither on the number
 * of threads nor on the number of rows.
 */

#include "vectors.h"

enum {
    MOST_ROWS = 8,
    MOST_HALF_ROWS = 4,
    COLUMNS = 4,                 /* most columns of the weight that are read side by side */
    COLUMNS_AHEAD = 8,           /* most columns between the one that is read and the one that is prefetched */
    BYTES_AHEAD = 1 << 16,       /* most bytes between them */
    LINE_BYTES = 64,
    NUMBERS_OF_THREAD = 1 << 18, /* least numbers of the weight for each thread, because waking a thread takes long */
};

typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef bf16 halves __attribute__((vector_size(2 * LANES)));

typedef struct {
    const void *left, *weight, *bias; /* `left` is contiguous; `bias` may be NULL */
    void *out;                        /* contiguous */
    int64_t rows, inner, columns, weight_stride;
    int64_t threads; /* most threads to use */
    int32_t is_half; /* true: all numbers are bf16, and there are at most MOST_HALF_ROWS rows; false: all are fp32 */
} Product;

INLINE const char *at(const void *numbers, int64_t place, bool half) {
    return (const char *)numbers + place * number_bytes(half);
}

INLINE vector widened(halves numbers) {
    const words bits = __builtin_convertvector(numbers, words) << 16;
    vector wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* Return `count` numbers, and zeros in the other lanes. */
INLINE vector loaded(const void *numbers, int64_t place, int64_t count, bool half) {
    const size_t bytes = (size_t)(count * number_bytes(half));
    if (half) {
        halves narrow = {0};
        memcpy(&narrow, at(numbers, place, half), bytes);
        return widened(narrow);
    }
    vector wide = {0};
    memcpy(&wide, at(numbers, place, half), bytes);
    return wide;
}

INLINE float total(vector sums) {
    const octet eight = folded(sums);
    quartet four, upper;
    memcpy(&four, &eight, sizeof four);
    memcpy(&upper, (const char *)&eight + sizeof four, sizeof upper);
    four += upper;
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* Sums of all rows and of the columns that are read side by side. They stay in registers. */
typedef struct {
    vector of[MOST_ROWS][COLUMNS];
} Sums;

/* Add the products of `count` numbers from `k` on, for `rows` rows and `columns` columns. */
INLINE void add_products(const Product *self, int64_t column, int64_t k, int64_t count, int rows, int columns,
                         bool half, Sums *sums) {
    vector weights[COLUMNS];
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) {
        weights[c] = loaded(self->weight, (column + c) * self->weight_stride + k, count, half);
    }
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) {
        const vector left = loaded(self->left, row * self->inner + k, count, half);
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            sums->of[row][c] = fused(left, weights[c], sums->of[row][c]);
        }
    }
}

INLINE void multiply_columns(const Product *self, int64_t column, int64_t ahead, int rows, int columns, bool half) {
    const int64_t whole = self->inner / LANES * LANES, in_line = LINE_BYTES / number_bytes(half);
    Sums sums = {0};
    for (int64_t k = 0; k < whole; k += LANES) {
        if (k % in_line == 0) {
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) {
                /* Into the second level of the cache, which fetches twice as fast as the first. An address
                 * outside of the weight has no effect. */
                __builtin_prefetch(at(self->weight, (column + c + ahead) * self->weight_stride + k, half), 0, 2);
            }
        }
        add_products(self, column, k, LANES, rows, columns, half, &sums);
    }
    if (whole < self->inner) {
        add_products(self, column, whole, self->inner - whole, rows, columns, half, &sums);
    }
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) {
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            const float added = self->bias == NULL ? 0.0f : loaded(self->bias, column + c, 1, half)[0];
            write_number(self->out, row * self->columns + column + c, total(sums.of[row][c]) + added, half);
        }
    }
}

/* Multiply the columns from `first` up to `end`. `rows` and `half` are constants where this is inlined. */
INLINE void multiply_part(const Product *self, int64_t first, int64_t end, int rows, bool half) {
    /* With AVX-512 there are 32 registers for sums, columns and a row. */
    const int together = rows <= 2 && !half ? 2 : rows <= 6 ? COLUMNS : COLUMNS - 1;
    const int64_t bytes = self->weight_stride * number_bytes(half);
    const int64_t ahead = most(least(COLUMNS_AHEAD, BYTES_AHEAD / most(bytes, 1)), together);
    int64_t column = first;
    for (; column + together <= end; column += together) {
        multiply_columns(self, column, ahead, rows, together, half);
    }
    for (; column < end; column++) {
        multiply_columns(self, column, ahead, rows, 1, half);
    }
}

static void multiply(const Product *self, int64_t first, int64_t end) {
    switch (self->is_half ? -self->rows : self->rows) {
        case 1:
            multiply_part(self, first, end, 1, false);
            break;
        case 2:
            multiply_part(self, first, end, 2, false);
            break;
        case 3:
            multiply_part(self, first, end, 3, false);
            break;
        case 4:
            multiply_part(self, first, end, 4, false);
            break;
        case 5:
            multiply_part(self, first, end, 5, false);
            break;
        case 6:
            multiply_part(self, first, end, 6, false);
            break;
        case 7:
            multiply_part(self, first, end, 7, false);
            break;
        case 8:
            multiply_part(self, first, end, 8, false);
            break;
        case -1:
            multiply_part(self, first, end, 1, true);
            break;
        case -2:
            multiply_part(self, first, end, 2, true);
            break;
        case -3:
            multiply_part(self, first, end, 3, true);
            break;
        case -4:
            multiply_part(self, first, end, 4, true);
            break;
    }
}

/* Compute the part of one thread. */
static void multiply_task(void *product) {
    const Product *self = product;
    const Part blocks = part_of_thread((self->columns + COLUMNS - 1) / COLUMNS);
    multiply(self, blocks.first * COLUMNS, least(blocks.end * COLUMNS, self->columns));
}

/* Compute a product of few rows. */
void multiply_few_rows(Product *self) {
    const int64_t worth_it = self->inner * self->columns / NUMBERS_OF_THREAD;
    const int64_t threads = least(worth_it, self->threads);
    if (threads <= 1) {
        multiply(self, 0, self->columns);
    } else {
        GOMP_parallel(multiply_task, self, (unsigned)threads, 0);
    }
}
