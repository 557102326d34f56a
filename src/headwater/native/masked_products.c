/* The three products of a linear layer whose weight has a mask. Only the weights that the mask keeps are multiplied:
 *
 *   forward           out[row, column] = sum over k of input[row, k] * weight[column, k], plus bias[column]
 *   input gradient    out[row, k] = sum over columns of gradient[row, column] * weight[column, k]
 *   weight gradient   out[column, k] = sum over rows of gradient[row, column] * input[row, k]; zero where masked
 *
 * Words:
 *   tile     TILE_ROWS rows of a dense factor, transposed: the numbers of one column are adjacent. A kept weight
 *            multiplies all rows of a tile, as vectors.
 *   panel    PANEL inner numbers of a product. So many columns of a tile stay in the first level of the cache.
 *   result   a column of the forward, or a k of the input gradient.
 *   entry    a kept weight in a list: its place in the panel, and its value. Entries are sorted by panel, result and
 *            place. Each product builds the list again, because that is cheap and masks change.
 *
 * Numbers are fp32 or bf16; sums are fp32. A number of a result is a sum in a fixed order, which does not depend on the
 * number of threads.
 */

#include "vectors.h"

enum {
    OCTET = 8,
    VECTORS = 8, /* in a column of a tile: enough independent sums to keep the processor's adders busy */
    TILE_ROWS = VECTORS * LANES,
    PANEL = 32768 / (4 * TILE_ROWS),
    TOGETHER = 4, /* entries of a weight gradient whose lanes are added at once */
};

/* The chosen numbers of two octets, which are counted from 0 to 15. */
#ifdef __clang__
#define CHOSEN(left, right, ...) __builtin_shufflevector(left, right, __VA_ARGS__)
#else
#define CHOSEN(left, right, ...) __builtin_shuffle(left, right, (octet_words){__VA_ARGS__})
#endif

typedef uint32_t octet_words __attribute__((vector_size(32)));
typedef bf16 octet_halves __attribute__((vector_size(16)));

typedef struct {
    const void *left;     /* forward: input [rows, inner]; gradients: gradient [rows, columns]; contiguous */
    const void *right;    /* weight gradient: input [rows, inner], contiguous; otherwise not read */
    const void *weight;   /* [columns, inner], contiguous; not read by the weight gradient */
    const void *bias;     /* [columns], added by the forward; may be NULL */
    const uint8_t *bits;  /* the mask, one bit for each weight; the first is the highest bit of the first byte */
    void *out;            /* contiguous */
    int64_t rows, inner, columns; /* inner and columns are multiples of OCTET */
    int32_t *starts;      /* room for the number of panels times results, plus 1 */
    uint8_t *places;      /* room for all kept weights */
    float *values;        /* room for all kept weights */
    float *scratch;       /* room for `masked_scratch` numbers of each thread */
    int64_t threads;
    int32_t is_half;      /* true: all numbers are bf16; false: all are fp32 */
} Product;

typedef struct {
    const Product *product;
    bool by_column; /* true: results are columns, panels divide `inner`; false: the opposite */
} Call;

INLINE int64_t results(const Call *call) { return call->by_column ? call->product->columns : call->product->inner; }
INLINE int64_t depth(const Call *call) { return call->by_column ? call->product->inner : call->product->columns; }
INLINE int64_t panels(const Call *call) { return (depth(call) + PANEL - 1) / PANEL; }
INLINE int64_t width_of(const Call *call, int64_t panel) { return least(PANEL, depth(call) - panel * PANEL); }

/* Numbers. */

INLINE float number_at(const void *numbers, int64_t place, bool half) {
    if (!half) {
        return ((const float *)numbers)[place];
    }
    const uint32_t bits = (uint32_t)((const bf16 *)numbers)[place] << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

INLINE octet octet_at(const void *numbers, int64_t place, bool half) {
    octet wide;
    if (!half) {
        memcpy(&wide, (const float *)numbers + place, sizeof wide);
        return wide;
    }
    octet_halves narrow;
    memcpy(&narrow, (const bf16 *)numbers + place, sizeof narrow);
    const octet_words bits = __builtin_convertvector(narrow, octet_words) << 16;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* Write numbers, rounded to nearest, ties to even. */
INLINE void write_octet(void *numbers, int64_t place, octet wide, bool half) {
    if (!half) {
        memcpy((float *)numbers + place, &wide, sizeof wide);
        return;
    }
    octet_words bits;
    memcpy(&bits, &wide, sizeof bits);
    const octet_words is_nan = (octet_words)(wide != wide);
    const octet_words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const octet_halves narrow = __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), octet_halves);
    memcpy((bf16 *)numbers + place, &narrow, sizeof narrow);
}

INLINE vector vector_at(const float *numbers) {
    vector wide;
    memcpy(&wide, numbers, sizeof wide);
    return wide;
}

INLINE vector repeated(float number) { return number - (vector){0}; }

/* Transposition. */

INLINE void transpose(octet x[OCTET]) {
    octet pairs[OCTET], fours[OCTET];
#pragma GCC unroll 4
    for (int i = 0; i < OCTET; i += 2) {
        pairs[i] = CHOSEN(x[i], x[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        pairs[i + 1] = CHOSEN(x[i], x[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
#pragma GCC unroll 2
    for (int i = 0; i < OCTET; i += 4) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            const octet low = pairs[i + j], high = pairs[i + j + 2];
            fours[i + 2 * j] = CHOSEN(low, high, 0, 1, 8, 9, 4, 5, 12, 13);
            fours[i + 2 * j + 1] = CHOSEN(low, high, 2, 3, 10, 11, 6, 7, 14, 15);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < OCTET / 2; i++) {
        x[i] = CHOSEN(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        x[i + 4] = CHOSEN(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* Write `width` columns of up to TILE_ROWS rows to a tile; rows that do not exist are zeros. */
INLINE void pack(const void *numbers, int64_t stride, int64_t row, int64_t rows, int64_t column, int64_t width,
                 float *tile, bool half) {
    for (int64_t k = 0; k < width; k += OCTET) {
        for (int64_t r = 0; r < TILE_ROWS; r += OCTET) {
            octet part[OCTET];
#pragma GCC unroll 8
            for (int i = 0; i < OCTET; i++) {
                part[i] = r + i < rows ? octet_at(numbers, (row + r + i) * stride + column + k, half) : (octet){0};
            }
            transpose(part);
#pragma GCC unroll 8
            for (int i = 0; i < OCTET; i++) {
                memcpy(tile + (k + i) * TILE_ROWS + r, &part[i], sizeof part[i]);
            }
        }
    }
}

/* Write the sums of a tile's rows to `out`. */
INLINE void unpack(const Product *self, const float *sums, int64_t row, int64_t rows, int64_t count, bool half) {
    for (int64_t n = 0; n < count; n += OCTET) {
        const octet added = self->bias == NULL ? (octet){0} : octet_at(self->bias, n, half);
        for (int64_t r = 0; r < rows; r += OCTET) {
            octet part[OCTET];
#pragma GCC unroll 8
            for (int i = 0; i < OCTET; i++) {
                memcpy(&part[i], sums + (n + i) * TILE_ROWS + r, sizeof part[i]);
            }
            transpose(part);
#pragma GCC unroll 8
            for (int i = 0; i < OCTET; i++) {
                if (r + i < rows) {
                    write_octet(self->out, (row + r + i) * count + n, part[i] + added, half);
                }
            }
        }
    }
}

/* The list of entries. */

/* Return up to 64 bits of the mask from a weight on; the first is the highest. `count` is a multiple of 8. */
INLINE uint64_t bits_of(const Product *self, int64_t column, int64_t k, int64_t count) {
    const uint8_t *bytes = self->bits + (column * self->inner + k) / 8;
    uint64_t bits = 0;
    if (count >= 64) {
        memcpy(&bits, bytes, sizeof bits);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        bits = __builtin_bswap64(bits);
#endif
        return bits;
    }
    for (int64_t at = 0; at < count; at += 8) {
        bits |= (uint64_t)bytes[at / 8] << (56 - at);
    }
    return bits;
}

/* Return the place of the first bit that is set, and clear it. */
INLINE int taken(uint64_t *bits) {
    const int place = __builtin_clzll(*bits);
    *bits &= ~(UINT64_C(1) << (63 - place));
    return place;
}

/* Return the number of entries of a panel. */
static int64_t count_panel(const Call *call, int64_t panel) {
    const Product *self = call->product;
    const int64_t first = panel * PANEL, end = first + width_of(call, panel);
    const int64_t columns = call->by_column ? self->columns : end, k_end = call->by_column ? end : self->inner;
    int64_t count = 0;
    for (int64_t column = call->by_column ? 0 : first; column < columns; column++) {
        for (int64_t k = call->by_column ? first : 0; k < k_end; k += 64) {
            count += __builtin_popcountll(bits_of(self, column, k, k_end - k));
        }
    }
    return count;
}

INLINE void list_value(const Product *self, int64_t entry, int64_t column, int64_t k, bool half) {
    self->values[entry] = self->weight == NULL ? 0.0f : number_at(self->weight, column * self->inner + k, half);
}

/* List a panel of k, whose results are columns. */
INLINE void list_by_column(const Call *call, int64_t panel, bool half) {
    const Product *self = call->product;
    const int64_t first = panel * PANEL, width = width_of(call, panel);
    int32_t *starts = self->starts + panel * self->columns;
    int64_t entry = starts[0];
    for (int64_t column = 0; column < self->columns; column++) {
        starts[column] = (int32_t)entry;
        for (int64_t at = 0; at < width; at += 64) {
            for (uint64_t bits = bits_of(self, column, first + at, width - at); bits != 0; entry++) {
                const int64_t place = at + taken(&bits);
                self->places[entry] = (uint8_t)place;
                list_value(self, entry, column, first + place, half);
            }
        }
    }
}

/* List a panel of columns, whose results are the k. */
INLINE void list_by_k(const Call *call, int64_t panel, bool half) {
    const Product *self = call->product;
    const int64_t first = panel * PANEL, width = width_of(call, panel);
    int32_t *starts = self->starts + panel * self->inner;
    const int32_t base = starts[0];
    /* starts[k] is first the number of entries of k, then the place of the next entry of k that is written, and at the
     * end the place of the first entry of k. */
    memset(starts, 0, (size_t)self->inner * sizeof *starts);
    for (int64_t column = first; column < first + width; column++) {
        for (int64_t at = 0; at < self->inner; at += 64) {
            for (uint64_t bits = bits_of(self, column, at, self->inner - at); bits != 0;) {
                starts[at + taken(&bits)]++;
            }
        }
    }
    for (int64_t k = 0, start = base; k < self->inner; k++) {
        const int32_t count = starts[k];
        starts[k] = (int32_t)start;
        start += count;
    }
    for (int64_t column = first; column < first + width; column++) {
        for (int64_t at = 0; at < self->inner; at += 64) {
            for (uint64_t bits = bits_of(self, column, at, self->inner - at); bits != 0;) {
                const int64_t k = at + taken(&bits), entry = starts[k]++;
                self->places[entry] = (uint8_t)(column - first);
                list_value(self, entry, column, k, half);
            }
        }
    }
    /* All entries are written, so starts[k] is now the first place after those of k: the start of k + 1. */
    memmove(starts + 1, starts, (size_t)(self->inner - 1) * sizeof *starts);
    starts[0] = base;
}

static void list_task(void *data) {
    const Call *call = data;
    const Part part = part_of_thread(panels(call));
    for (int64_t panel = part.first; panel < part.end; panel++) {
        switch (2 * call->by_column + (call->product->is_half != 0)) {
        case 0: list_by_k(call, panel, false); break;
        case 1: list_by_k(call, panel, true); break;
        case 2: list_by_column(call, panel, false); break;
        default: list_by_column(call, panel, true);
        }
    }
}

static void run(void (*task)(void *), Call *call, int64_t parts) {
    GOMP_parallel(task, call, (unsigned)most(least(call->product->threads, parts), 1), 0);
}

static void list_entries(Call *call) {
    int32_t *starts = call->product->starts;
    int64_t entry = 0;
    for (int64_t panel = 0; panel < panels(call); panel++) {
        starts[panel * results(call)] = (int32_t)entry;
        entry += count_panel(call, panel);
    }
    starts[panels(call) * results(call)] = (int32_t)entry;
    run(list_task, call, panels(call));
}

/* Forward and input gradient. */

INLINE void add_entries(const Product *self, const int32_t *starts, const float *tile, float *sums, bool is_first) {
    vector total[VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) {
        total[i] = is_first ? (vector){0} : vector_at(sums + i * LANES);
    }
    for (int32_t entry = starts[0]; entry < starts[1]; entry++) {
        const float *numbers = tile + (int64_t)self->places[entry] * TILE_ROWS;
        const vector weight = repeated(self->values[entry]);
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++) {
            total[i] = fused(weight, vector_at(numbers + i * LANES), total[i]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) { /* one by one: a copy of the array would go through memory */
        memcpy(sums + i * LANES, &total[i], sizeof total[i]);
    }
}

INLINE void multiply_tiles(const Call *call, bool half) {
    const Product *self = call->product;
    float *tile = self->scratch + omp_get_thread_num() * (PANEL + results(call)) * TILE_ROWS;
    float *sums = tile + PANEL * TILE_ROWS;
    const Part part = part_of_thread((self->rows + TILE_ROWS - 1) / TILE_ROWS);
    for (int64_t row = part.first * TILE_ROWS; row < least(part.end * TILE_ROWS, self->rows); row += TILE_ROWS) {
        const int64_t rows = least(TILE_ROWS, self->rows - row);
        for (int64_t panel = 0; panel < panels(call); panel++) {
            pack(self->left, depth(call), row, rows, panel * PANEL, width_of(call, panel), tile, half);
            const int32_t *starts = self->starts + panel * results(call);
            for (int64_t result = 0; result < results(call); result++) {
                add_entries(self, starts + result, tile, sums + result * TILE_ROWS, panel == 0);
            }
        }
        unpack(self, sums, row, rows, results(call), half);
    }
}

static void multiply_task(void *data) {
    const Call *call = data;
    if (call->product->is_half) {
        multiply_tiles(call, true);
    } else {
        multiply_tiles(call, false);
    }
}

static void multiply(const Product *self, bool by_column) {
    Call call = {self, by_column};
    list_entries(&call);
    run(multiply_task, &call, (self->rows + TILE_ROWS - 1) / TILE_ROWS);
}

/* Weight gradient. */

INLINE octet added_in_pairs(octet left, octet right) {
    return CHOSEN(left, right, 0, 2, 8, 10, 4, 6, 12, 14) +
           CHOSEN(left, right, 1, 3, 9, 11, 5, 7, 13, 15);
}

/* Return the sums of the lanes of each vector. */
INLINE quartet totals(const vector sums[TOGETHER]) {
    const octet pairs = added_in_pairs(folded(sums[0]), folded(sums[1]));
    const octet fours = added_in_pairs(pairs, added_in_pairs(folded(sums[2]), folded(sums[3])));
    quartet low, high;
    memcpy(&low, &fours, sizeof low);
    memcpy(&high, (const char *)&fours + sizeof low, sizeof high);
    return low + high;
}

/* Add the products of a tile's rows to `count` entries; `count` is a constant where this is inlined. */
INLINE void add_rows(const Product *self, int32_t entry, int count, const float *tile, const vector gradient[VECTORS]) {
    vector sums[TOGETHER] = {0};
#pragma GCC unroll 4
    for (int each = 0; each < count; each++) {
        const float *numbers = tile + (int64_t)self->places[entry + each] * TILE_ROWS;
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++) {
            sums[each] = fused(gradient[i], vector_at(numbers + i * LANES), sums[each]);
        }
    }
    const quartet total = totals(sums);
#pragma GCC unroll 4
    for (int each = 0; each < count; each++) {
        self->values[entry + each] += total[each];
    }
}

/* Add the products of all rows to the entries of some columns. */
INLINE void add_columns(const Call *call, Part part, bool half) {
    const Product *self = call->product;
    float *tile = self->scratch + omp_get_thread_num() * (PANEL + self->columns) * TILE_ROWS;
    float *gradients = tile + PANEL * TILE_ROWS;
    for (int64_t row = 0; row < self->rows; row += TILE_ROWS) {
        const int64_t rows = least(TILE_ROWS, self->rows - row);
        pack(self->left, self->columns, row, rows, part.first, part.end - part.first, gradients, half);
        for (int64_t panel = 0; panel < panels(call); panel++) {
            pack(self->right, self->inner, row, rows, panel * PANEL, width_of(call, panel), tile, half);
            for (int64_t column = part.first; column < part.end; column++) {
                const int32_t *starts = self->starts + panel * self->columns + column;
                vector gradient[VECTORS];
#pragma GCC unroll 8
                for (int i = 0; i < VECTORS; i++) {
                    gradient[i] = vector_at(gradients + (column - part.first) * TILE_ROWS + i * LANES);
                }
                int32_t entry = starts[0];
                for (; entry + TOGETHER <= starts[1]; entry += TOGETHER) {
                    add_rows(self, entry, TOGETHER, tile, gradient);
                }
                for (; entry < starts[1]; entry++) {
                    add_rows(self, entry, 1, tile, gradient);
                }
            }
        }
    }
}

INLINE void write_columns(const Call *call, Part part, bool half) {
    const Product *self = call->product;
    const int64_t column_bytes = self->inner * number_bytes(half);
    memset((char *)self->out + part.first * column_bytes, 0, (size_t)((part.end - part.first) * column_bytes));
    for (int64_t panel = 0; panel < panels(call); panel++) {
        for (int64_t column = part.first; column < part.end; column++) {
            const int32_t *starts = self->starts + panel * self->columns + column;
            for (int32_t entry = starts[0]; entry < starts[1]; entry++) {
                const int64_t k = panel * PANEL + self->places[entry];
                write_number(self->out, column * self->inner + k, self->values[entry], half);
            }
        }
    }
}

static void differentiate_task(void *data) {
    const Call *call = data;
    Part part = part_of_thread(call->product->columns / OCTET);
    part = (Part){part.first * OCTET, part.end * OCTET};
    if (call->product->is_half) {
        add_columns(call, part, true);
        write_columns(call, part, true);
    } else {
        add_columns(call, part, false);
        write_columns(call, part, false);
    }
}

/* Return the numbers of scratch memory of a thread. */
int64_t masked_scratch(int64_t inner, int64_t columns) { return (PANEL + most(inner, columns)) * TILE_ROWS; }

/* Return the size of `starts`. */
int64_t masked_starts(int64_t inner, int64_t columns) {
    return most((inner + PANEL - 1) / PANEL * columns, (columns + PANEL - 1) / PANEL * inner) + 1;
}

void masked_forward(const Product *self) { multiply(self, true); }

void masked_input_gradient(const Product *self) { multiply(self, false); }

void masked_weight_gradient(const Product *self) {
    Call call = {self, true};
    list_entries(&call);
    run(differentiate_task, &call, self->columns / OCTET);
}
