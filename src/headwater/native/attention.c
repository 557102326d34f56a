/* Attention in bf16 on processors with AVX-512: softmax(scale · Q Kᵀ) V, and its gradients.
 *
 * The method is that of FlashAttention (arXiv:2205.14135, arXiv:2307.08691): blocks of scores are computed,
 * used and forgotten, and the backward computes them again from the logarithm of each row's sum. Scores,
 * softmax and all sums are fp32. The softmax P and its gradient dS are rounded to bf16 only where they are
 * factors of a matrix product, because the instruction of AVX-512 BF16 that multiplies takes bf16. A processor
 * without this extension widens both numbers of a pair to fp32, and multiplies these.
 *
 * Words used here:
 *   pair     two bf16 numbers in 32 bits. 16 pairs are multiplied by 16 pairs: the two products of each are
 *            added to one of 16 fp32 numbers.
 *   tile     TILE_ROWS x (up to) PANEL_COLUMNS numbers of a result, which stay in registers.
 *   panel    PANEL_COLUMNS columns of a right factor, stored so that a tile reads it from start to end:
 *            for each pair of rows, the pairs of all columns.
 *   block    the scores of some queries and some keys.
 *
 * A task is one head of one sequence; a forward may divide its queries further. Each number of a result is
 * computed by one task in a fixed order, so results do not depend on the number of threads.
 */

#include <immintrin.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* GCC compiles `#pragma omp parallel` to calls of the first function, which libgomp, libomp and libiomp5 have.
 * The call is written out here because clang's pragma needs a library that torch may not have loaded. */
void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags);
int omp_get_max_threads(void);

enum {
    LANES = 16,
    TILE_ROWS = 4, /* a divisor of LANES, so that the keys of a tile lie in one vector of scores */
    PANEL_VECTORS = 4,
    PANEL_COLUMNS = PANEL_VECTORS * LANES,
    FORWARD_QUERIES = 64,
    FORWARD_KEYS = 512,
    BACKWARD_QUERIES = 128,
    BACKWARD_KEYS = 128,
    ALIGNMENT_BYTES = 64,
};

#define LOG2_E 1.44269504088896340736f

typedef uint16_t bf16;
typedef uint32_t pair;

/* A tensor [batch, head, row, size] whose last dimension is contiguous. Strides count elements. */
typedef struct {
    bf16 *data;
    int64_t batch_stride, head_stride, row_stride;
} Tensor;

typedef struct {
    int64_t batches, heads, key_heads, queries, keys, size;
    float scale;
    int32_t causal;
} Shape;

/* The rows of one head. */
typedef struct {
    bf16 *data;
    int64_t stride;
} Rows;

/* Scores of `queries` x `keys`. Row r sees the columns up to r + diagonal. */
typedef struct {
    int64_t queries, keys, diagonal;
} Block;

/* A left factor: pair number s of row r is at data[r * row + s * step]. */
typedef struct {
    const pair *data;
    int64_t row, step;
} Left;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

static Rows head_rows(const Tensor *tensor, int64_t batch, int64_t head) {
    return (Rows){tensor->data + batch * tensor->batch_stride + head * tensor->head_stride, tensor->row_stride};
}

static Rows rows_from(Rows rows, int64_t first) {
    return (Rows){rows.data + first * rows.stride, rows.stride};
}

/* Return the shape of the attention in one sequence of the batch. Its queries see the first `key_counts[batch]` keys, or
 * all keys if `key_counts` is NULL. */
static Shape shape_in(const Shape *shape, const int64_t *key_counts, int64_t batch) {
    Shape own = *shape;
    if (key_counts != NULL) {
        own.keys = key_counts[batch];
    }
    return own;
}

static Block block_of(const Shape *shape, int64_t query, int64_t queries, int64_t key, int64_t keys) {
    /* Without a causal mask the diagonal is so far to the right that every row sees all keys. */
    return (Block){queries, keys, shape->causal ? query - key : shape->keys};
}

/* Return the number of columns that a row sees. */
static inline int64_t seen(const Block *block, int64_t row) {
    return most(0, least(block->keys, row + block->diagonal + 1));
}

/* Return the number of columns that any row of a tile sees. */
static inline int64_t seen_by_tile(const Block *block, int64_t row) {
    return seen(block, row / TILE_ROWS * TILE_ROWS + TILE_ROWS - 1);
}

/* ---- Pairs and rounding ------------------------------------------------------------------------------ */

#ifdef __AVX512BF16__

typedef __m512bh Pairs;

static inline Pairs pairs_of(__m512i bits) { return (Pairs)bits; }

static inline __m512 add_products(__m512 sums, Pairs left, Pairs right) {
    return _mm512_dpbf16_ps(sums, left, right);
}

static inline __m256i rounded_half(__m512 numbers) { return (__m256i)_mm512_cvtneps_pbh(numbers); }

#else

typedef struct {
    __m512 even, odd;
} Pairs;

/* A bf16 number is the upper half of an fp32 number. */
static inline Pairs pairs_of(__m512i bits) {
    return (Pairs){_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)),
                   _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32((int)0xffff0000)))};
}

static inline __m512 add_products(__m512 sums, Pairs left, Pairs right) {
    return _mm512_fmadd_ps(left.odd, right.odd, _mm512_fmadd_ps(left.even, right.even, sums));
}

/* Round to the nearest bf16, to the even one of two. NaN stays NaN. */
static inline __m256i rounded_half(__m512 numbers) {
    const __m512i bits = _mm512_castps_si512(numbers);
    const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i sums = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
    sums = _mm512_mask_mov_epi32(sums, is_nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(sums, 16));
}

#endif

/* ---- Copies of factors ------------------------------------------------------------------------------- */

/* Transpose 16 x 16 numbers of 32 bits in place. */
static inline void transpose(__m512i x[LANES]) {
    __m512i y[LANES];
    for (int i = 0; i < LANES; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) {
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    }
    /* x[4 g + c] has the columns c, c + 4, c + 8, c + 12 of the rows 4 g to 4 g + 3. */
    for (int c = 0; c < 4; c++) {
        __m512i low = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x88), high = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xdd);
        __m512i low2 = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x88);
        __m512i high2 = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xdd);
        y[c] = _mm512_shuffle_i32x4(low, low2, 0x88);
        y[8 + c] = _mm512_shuffle_i32x4(low, low2, 0xdd);
        y[4 + c] = _mm512_shuffle_i32x4(high, high2, 0x88);
        y[12 + c] = _mm512_shuffle_i32x4(high, high2, 0xdd);
    }
    memcpy(x, y, sizeof y);
}

/* Write panels of the transposed rows: a pair holds two adjacent numbers of a row, and a column of a panel is a row. */
static void pack_transposed(Rows rows, int64_t count, int64_t size, pair *panels) {
    const int64_t pairs = size / 2;
    for (int64_t row = 0; row < round_up(count, LANES); row += LANES) {
        pair *column = panels + row / PANEL_COLUMNS * PANEL_COLUMNS * pairs + row % PANEL_COLUMNS;
        for (int64_t first = 0; first < pairs; first += LANES) {
            const int64_t width = least(LANES, pairs - first);
            const __mmask16 mask = (__mmask16)((1u << width) - 1);
            __m512i part[LANES];
            for (int i = 0; i < LANES; i++) {
                part[i] = row + i < count ? _mm512_maskz_loadu_epi32(mask, rows_from(rows, row + i).data + 2 * first)
                                          : _mm512_setzero_si512();
            }
            transpose(part);
            for (int i = 0; i < width; i++) {
                _mm512_store_si512(column + (first + i) * PANEL_COLUMNS, part[i]);
            }
        }
    }
}

static inline __m512i widened(const bf16 *numbers) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)numbers));
}

/* Return LANES numbers of a row, or zeros after the last one of `count` rows. */
static inline __m512i part_of_row(Rows rows, int64_t count, int64_t row, int64_t column) {
    return row < count ? widened(rows_from(rows, row).data + column) : _mm512_setzero_si512();
}

/* Write panels of rows: a pair holds the numbers of two adjacent rows in one column. Rows from `count` up to `padded`,
 * an even number, are zeros. */
static void pack_pairs(Rows rows, int64_t count, int64_t padded, int64_t size, pair *panels) {
    for (int64_t row = 0; row < padded; row += 2) {
        for (int64_t column = 0; column < size; column += LANES) {
            const __m512i even = part_of_row(rows, count, row, column);
            const __m512i odd = part_of_row(rows, count, row + 1, column);
            pair *panel = panels + column / PANEL_COLUMNS * PANEL_COLUMNS * (padded / 2);
            pair *target = panel + row / 2 * PANEL_COLUMNS + column % PANEL_COLUMNS;
            _mm512_store_si512(target, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        }
    }
}

/* Copy rows one after the other, without gaps. Rows from `count` up to `padded` are zeros. */
static void copy_rows(Rows rows, int64_t count, int64_t padded, int64_t size, pair *copy) {
    const size_t bytes = (size_t)size * sizeof(bf16);
    for (int64_t row = 0; row < count; row++) {
        memcpy(copy + row * size / 2, rows.data + row * rows.stride, bytes);
    }
    memset(copy + count * size / 2, 0, (size_t)(padded - count) * bytes);
}

/* ---- Matrix products --------------------------------------------------------------------------------- */

/* Compute TILE_ROWS rows and `vectors` vectors of columns of a product. `vectors` and `add` are constants where this is
 * inlined, so the compiler keeps the sums in registers. */
static inline __attribute__((always_inline)) void multiply_tile(
    Left left, const pair *panel, int64_t steps, float *result, int64_t result_stride, int vectors, bool add) {
    __m512 sums[TILE_ROWS][PANEL_VECTORS];
    for (int r = 0; r < TILE_ROWS; r++) {
        for (int v = 0; v < vectors; v++) {
            sums[r][v] = add ? _mm512_load_ps(result + r * result_stride + v * LANES) : _mm512_setzero_ps();
        }
    }
    for (int64_t step = 0; step < steps; step++) {
        Pairs right[PANEL_VECTORS];
        for (int v = 0; v < vectors; v++) {
            right[v] = pairs_of(_mm512_load_si512(panel + step * PANEL_COLUMNS + v * LANES));
        }
        for (int r = 0; r < TILE_ROWS; r++) {
            const Pairs factor = pairs_of(_mm512_set1_epi32((int)left.data[r * left.row + step * left.step]));
            for (int v = 0; v < vectors; v++) {
                sums[r][v] = add_products(sums[r][v], factor, right[v]);
            }
        }
    }
    for (int r = 0; r < TILE_ROWS; r++) {
        for (int v = 0; v < vectors; v++) {
            _mm512_store_ps(result + r * result_stride + v * LANES, sums[r][v]);
        }
    }
}

static inline __attribute__((always_inline)) void multiply_columns(
    Left left, const pair *panel, int64_t steps, float *result, int64_t result_stride, int64_t columns, bool add) {
    switch (least(PANEL_COLUMNS, round_up(columns, LANES)) / LANES) {
    case 1: multiply_tile(left, panel, steps, result, result_stride, 1, add); break;
    case 2: multiply_tile(left, panel, steps, result, result_stride, 2, add); break;
    case 3: multiply_tile(left, panel, steps, result, result_stride, 3, add); break;
    default: multiply_tile(left, panel, steps, result, result_stride, 4, add);
    }
}

/* Compute the scores that are seen: rows [queries, size] times panels of transposed keys. */
static void multiply_scores(const Block *block, const pair *rows, const pair *keys, int64_t size, float *scores,
                            int64_t scores_stride) {
    const int64_t pairs = size / 2;
    for (int64_t key = 0; key < block->keys; key += PANEL_COLUMNS) {
        for (int64_t row = 0; row < block->queries; row += TILE_ROWS) {
            const int64_t columns = seen_by_tile(block, row) - key;
            if (columns > 0) {
                const Left left = {rows + row * pairs, pairs, 1};
                multiply_columns(left, keys + key * pairs, pairs, scores + row * scores_stride + key, scores_stride,
                                 columns, false);
            }
        }
    }
}

/* Compute or add to [queries, size]: weights [queries, keys] times panels of the keys' rows. */
static void multiply_keys(const Block *block, const pair *weights, int64_t weights_stride, const pair *panels,
                          int64_t panel_pairs, int64_t size, float *result, bool add) {
    for (int64_t column = 0; column < size; column += PANEL_COLUMNS) {
        const pair *panel = panels + column * panel_pairs;
        for (int64_t row = 0; row < block->queries; row += TILE_ROWS) {
            const Left left = {weights + row * weights_stride, weights_stride, 1};
            const int64_t steps = (seen_by_tile(block, row) + 1) / 2;
            float *tile = result + row * size + column;
            if (add) {
                multiply_columns(left, panel, steps, tile, size, size - column, true);
            } else {
                multiply_columns(left, panel, steps, tile, size, size - column, false);
            }
        }
    }
}

/* Add to [keys, size]: transposed weights times panels of the queries' rows. The weights are pairs of adjacent
 * queries, one row of `weights_stride` pairs for every two queries. */
static void add_queries(const Block *block, const pair *weights, int64_t weights_stride, const pair *panels,
                        int64_t panel_pairs, int64_t size, float *result) {
    for (int64_t column = 0; column < size; column += PANEL_COLUMNS) {
        for (int64_t key = 0; key < block->keys; key += TILE_ROWS) {
            /* Tiles of rows above the diagonal do not see this key, and have no weights for it. */
            const int64_t first = most(0, key - block->diagonal) / TILE_ROWS * TILE_ROWS / 2;
            if (first < block->queries / 2) {
                const Left left = {weights + first * weights_stride + key, 1, weights_stride};
                const pair *panel = panels + column * panel_pairs + first * PANEL_COLUMNS;
                multiply_columns(left, panel, block->queries / 2 - first, result + key * size + column, size,
                                 size - column, true);
            }
        }
    }
}

/* ---- Vectors ----------------------------------------------------------------------------------------- */

static inline __mmask16 first_lanes(int64_t count) {
    return count >= LANES ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}

/* Return 2^x: a polynomial for the fraction (minimax on [-1/2, 1/2], relative error 2e-9), times a power of two. */
static inline __m512 exp2_vector(__m512 x) {
    /* 2^-200 is 0 in fp32, so smaller x need not be told apart. Without the limit, -inf would lead to inf - inf below.
     * The second operand of `max` is returned if it is NaN, so NaN stays. */
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    __m512 power = _mm512_set1_ps(0.000153533618f);
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(0.00133988744f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(0.00961843736f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(0.0555033247f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(0.240226479f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(0.693147203f));
    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(power, whole);
}

static inline void store_rounded(bf16 *target, __m512 numbers) {
    _mm256_storeu_si256((__m256i *)target, rounded_half(numbers));
}

/* Write fp32 rows [count, size], multiplied, as bf16. */
static void write_rows(const float *numbers, const float *factors, float factor, int64_t count, int64_t size,
                       Rows rows) {
    for (int64_t row = 0; row < count; row++) {
        const __m512 multiplier = _mm512_set1_ps(factors ? factors[row] * factor : factor);
        for (int64_t column = 0; column < size; column += LANES) {
            const __m512 part = _mm512_load_ps(numbers + row * size + column);
            store_rounded(rows.data + row * rows.stride + column, _mm512_mul_ps(part, multiplier));
        }
    }
}

/* ---- Forward ----------------------------------------------------------------------------------------- */

/* Memory of one thread in a forward. */
typedef struct {
    pair *keys, *values; /* of one head, packed */
    pair *queries;       /* of a block, rows */
    float *scores;
    bf16 *weights;
    float *output;
    float greatest[FORWARD_QUERIES], sums[FORWARD_QUERIES];
} Forward;

/* Return the greatest of the first `count` scores and of `greatest`. */
static float greatest_score(const float *scores, int64_t count, float greatest) {
    __m512 found = _mm512_set1_ps(greatest);
    for (int64_t key = 0; key < count; key += LANES) {
        const __mmask16 mask = first_lanes(count - key);
        found = _mm512_mask_max_ps(found, mask, found, _mm512_load_ps(scores + key));
    }
    return _mm512_reduce_max_ps(found);
}

/* Write 2^((scores - base) · factor) rounded, zeros from `count` to `end`, and return their sum. */
static float write_weights(const float *scores, int64_t count, int64_t end, float factor, float base, bf16 *weights) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t key = 0; key < end; key += LANES) {
        /* Multiply after the subtraction: the difference of two huge products could be only their rounding errors. */
        const __m512 distance = _mm512_sub_ps(_mm512_load_ps(scores + key), _mm512_set1_ps(base));
        const __m512 exponent = _mm512_mul_ps(distance, _mm512_set1_ps(factor));
        const __m512 part = _mm512_maskz_mov_ps(first_lanes(count - key), exp2_vector(exponent));
        store_rounded(weights + key, part);
        sum = _mm512_add_ps(sum, part);
    }
    return _mm512_reduce_add_ps(sum);
}

static void scale_row(float *row, int64_t size, float factor) {
    for (int64_t column = 0; column < size; column += LANES) {
        _mm512_store_ps(row + column, _mm512_mul_ps(_mm512_load_ps(row + column), _mm512_set1_ps(factor)));
    }
}

/* Replace the scores of a block by weights relative to the greatest score so far, and rescale what was summed
 * relative to an older one. */
static void soften(Forward *self, const Block *block, int64_t size, float factor, bool first) {
    for (int64_t row = 0; row < block->queries; row++) {
        const float *scores = self->scores + row * FORWARD_KEYS;
        const int64_t count = seen(block, row), end = round_up(seen_by_tile(block, row), LANES);
        const float before = self->greatest[row], now = greatest_score(scores, count, before);
        /* If all scores so far are -inf, their weights are 0 and not inf - inf. */
        const float base = now == -INFINITY ? 0.0f : now;
        bf16 *weights = self->weights + row * FORWARD_KEYS;
        const float sum = write_weights(scores, count, end, factor, base, weights);
        const float kept = first ? 0.0f : exp2f((before - base) * factor);
        self->greatest[row] = now;
        self->sums[row] = self->sums[row] * kept + sum;
        if (!first && kept != 1.0f) {
            scale_row(self->output + row * size, size, kept);
        }
    }
}

/* Return the factor of scores in exponents of 2. */
static float exponent_factor(const Shape *shape) { return shape->scale * LOG2_E; }

/* Write the output of a block of queries and the logarithms of the sums of their rows. */
static void finish_queries(Forward *self, const Shape *shape, int64_t count, Rows output, float *log2_sums) {
    for (int64_t row = 0; row < count; row++) {
        const float greatest = self->greatest[row] == -INFINITY ? 0.0f : self->greatest[row];
        log2_sums[row] = greatest * exponent_factor(shape) + log2f(self->sums[row]);
        self->sums[row] = 1.0f / self->sums[row];
    }
    write_rows(self->output, self->sums, 1.0f, count, shape->size, output);
}

static void attend_queries(Forward *self, const Shape *shape, Rows queries, int64_t query, Rows output,
                           float *log2_sums) {
    const int64_t count = least(FORWARD_QUERIES, shape->queries - query), size = shape->size;
    const int64_t padded = round_up(count, TILE_ROWS);
    const int64_t keys = shape->causal ? least(shape->keys, query + count) : shape->keys;
    const int64_t key_pairs = round_up(shape->keys, LANES) / 2;
    copy_rows(rows_from(queries, query), count, padded, size, self->queries);
    for (int64_t row = 0; row < padded; row++) {
        self->greatest[row] = -INFINITY;
        self->sums[row] = 0.0f;
    }
    for (int64_t key = 0; key < keys; key += FORWARD_KEYS) {
        const Block block = block_of(shape, query, padded, key, least(FORWARD_KEYS, keys - key));
        multiply_scores(&block, self->queries, self->keys + key * size / 2, size, self->scores, FORWARD_KEYS);
        soften(self, &block, size, exponent_factor(shape), key == 0);
        multiply_keys(&block, (const pair *)self->weights, FORWARD_KEYS / 2,
                      self->values + key / 2 * PANEL_COLUMNS, key_pairs, size, self->output, key > 0);
    }
    finish_queries(self, shape, count, rows_from(output, query), log2_sums + query);
}

/* ---- Memory and tasks -------------------------------------------------------------------------------- */

/* Return the number of a task that no other thread has taken. */
static int64_t take_next(int64_t *next) { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); }

/* Consecutive parts of one allocation. With `start` NULL the parts are only counted. */
typedef struct {
    char *start;
    size_t used_bytes;
} Arena;

static void *take(Arena *arena, int64_t count, size_t element_bytes) {
    void *part = arena->start ? arena->start + arena->used_bytes : NULL;
    arena->used_bytes += (size_t)round_up((int64_t)((size_t)count * element_bytes), ALIGNMENT_BYTES);
    return part;
}

/* Return the number of pairs in the panels of a factor. All panels are PANEL_COLUMNS wide, also the last one. */
static int64_t panel_pairs(int64_t rows, int64_t columns) {
    return round_up(rows, LANES) / 2 * round_up(columns, PANEL_COLUMNS);
}

/* Divide memory of one thread. */
static void place_forward(Forward *self, Arena *arena, const Shape *shape) {
    self->keys = take(arena, panel_pairs(shape->size, shape->keys), sizeof(pair));
    self->values = take(arena, panel_pairs(shape->keys, shape->size), sizeof(pair));
    self->queries = take(arena, FORWARD_QUERIES * shape->size / 2, sizeof(pair));
    self->scores = take(arena, FORWARD_QUERIES * FORWARD_KEYS, sizeof(float));
    self->weights = take(arena, FORWARD_QUERIES * FORWARD_KEYS, sizeof(bf16));
    self->output = take(arena, FORWARD_QUERIES * shape->size, sizeof(float));
}

/* Compute part `part` of `parts` of a head's queries. */
static void attend_part(Forward *self, const Shape *shape, int64_t part, int64_t parts, Rows queries, Rows keys,
                        Rows values, Rows output, float *log2_sums) {
    const int64_t blocks = (shape->queries + FORWARD_QUERIES - 1) / FORWARD_QUERIES;
    const int64_t begin = blocks * part / parts * FORWARD_QUERIES;
    const int64_t end = least(shape->queries, blocks * (part + 1) / parts * FORWARD_QUERIES);
    const int64_t count = shape->causal ? least(shape->keys, end) : shape->keys;
    pack_transposed(keys, count, shape->size, self->keys);
    pack_pairs(values, count, round_up(shape->keys, LANES), shape->size, self->values);
    for (int64_t query = begin; query < end; query += FORWARD_QUERIES) {
        attend_queries(self, shape, queries, query, output, log2_sums);
    }
}

/* A call of `attention_forward`, for its threads. */
typedef struct {
    const Shape *shape;
    const Tensor *query, *key, *value, *output;
    float *log2_sums;
    const int64_t *key_counts;
    int64_t parts, tasks, next; /* number of parts of a head and of all tasks; the first task not taken */
} ForwardCall;

static void attend_tasks(void *data) {
    ForwardCall *call = data;
    const Shape *shape = call->shape;
    const int64_t group = shape->heads / shape->key_heads;
    Forward self;
    Arena arena = {NULL, 0};
    place_forward(&self, &arena, shape);
    char *memory = aligned_alloc(ALIGNMENT_BYTES, arena.used_bytes);
    if (memory == NULL) {
        return; /* the other threads take the tasks */
    }
    arena = (Arena){memory, 0};
    place_forward(&self, &arena, shape);
    for (int64_t task; (task = take_next(&call->next)) < call->tasks;) {
        const int64_t number = task / call->parts, batch = number / shape->heads, head = number % shape->heads;
        const Shape own = shape_in(shape, call->key_counts, batch);
        attend_part(&self, &own, task % call->parts, call->parts, head_rows(call->query, batch, head),
                    head_rows(call->key, batch, head / group), head_rows(call->value, batch, head / group),
                    head_rows(call->output, batch, head), call->log2_sums + number * shape->queries);
    }
    free(memory);
}

/* Compute the attention, and the logarithm to base 2 of the sum of exponentials of each row of scores.
 *
 * `log2_sums` has the shape [batches, heads, queries] and is contiguous. `key_counts` [batches] has the number of keys
 * that the queries of each sequence see, at least 1; if it is NULL, they see all keys. Returns 0, or 1 if memory is
 * missing. */
int attention_forward(const Shape *shape, const Tensor *query, const Tensor *key, const Tensor *value,
                      const Tensor *output, float *log2_sums, const int64_t *key_counts) {
    const int64_t heads = shape->batches * shape->heads;
    const int64_t blocks = (shape->queries + FORWARD_QUERIES - 1) / FORWARD_QUERIES;
    /* Two tasks for each thread, if there are fewer heads. The parts do not change the results. */
    const int64_t parts = most(1, least(blocks, 2 * omp_get_max_threads() / heads));
    ForwardCall call = {shape, query, key, value, output, log2_sums, key_counts, parts, heads * parts, 0};
    GOMP_parallel(attend_tasks, &call, 0, 0);
    return call.next < call.tasks;
}

/* ---- Backward ---------------------------------------------------------------------------------------- */

/* Memory of one thread in a backward. "Gradient" alone is the gradient of the output. */
typedef struct {
    /* Of one head. Rows are padded to tiles. */
    pair *query_rows, *gradient_rows, *query_panels, *gradient_panels;
    float *query_gradient;
    float *log2_sums; /* +inf in the padding, so that its weights are 0 */
    float *dots;      /* of each row of the output with its gradient */
    /* Of a block of keys. */
    pair *key_columns, *value_columns, *key_panels;
    float *key_gradient, *value_gradient;
    /* Of a block of queries and keys. */
    float *scores, *weight_gradients;
    pair *weight_pairs, *score_pairs; /* of adjacent queries */
    bf16 *score_rows;                 /* gradients of scores */
} Backward;

/* The tensors of one head. Gradients of keys and values are fp32 if heads share them, and bf16 if not. */
typedef struct {
    Rows query, key, value, output, gradient, query_gradient, key_gradient, value_gradient;
    float *key_sum, *value_sum;
    const float *log2_sums;
} Head;

static void place_backward(Backward *self, Arena *arena, const Shape *shape) {
    const int64_t size = shape->size, queries = round_up(shape->queries, LANES);
    self->query_rows = take(arena, queries * size / 2, sizeof(pair));
    self->gradient_rows = take(arena, queries * size / 2, sizeof(pair));
    self->query_panels = take(arena, panel_pairs(queries, size), sizeof(pair));
    self->gradient_panels = take(arena, panel_pairs(queries, size), sizeof(pair));
    self->query_gradient = take(arena, queries * size, sizeof(float));
    self->log2_sums = take(arena, queries, sizeof(float));
    self->dots = take(arena, queries, sizeof(float));
    self->key_columns = take(arena, panel_pairs(size, BACKWARD_KEYS), sizeof(pair));
    self->value_columns = take(arena, panel_pairs(size, BACKWARD_KEYS), sizeof(pair));
    self->key_panels = take(arena, panel_pairs(BACKWARD_KEYS, size), sizeof(pair));
    self->key_gradient = take(arena, BACKWARD_KEYS * size, sizeof(float));
    self->value_gradient = take(arena, BACKWARD_KEYS * size, sizeof(float));
    self->scores = take(arena, BACKWARD_QUERIES * BACKWARD_KEYS, sizeof(float));
    self->weight_gradients = take(arena, BACKWARD_QUERIES * BACKWARD_KEYS, sizeof(float));
    self->weight_pairs = take(arena, BACKWARD_QUERIES * BACKWARD_KEYS / 2, sizeof(pair));
    self->score_pairs = take(arena, BACKWARD_QUERIES * BACKWARD_KEYS / 2, sizeof(pair));
    self->score_rows = take(arena, BACKWARD_QUERIES * BACKWARD_KEYS, sizeof(bf16));
}

static inline __m512 as_float(const bf16 *numbers) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(widened(numbers), 16));
}

static float dot(const bf16 *a, const bf16 *b, int64_t size) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t column = 0; column < size; column += LANES) {
        sum = _mm512_fmadd_ps(as_float(a + column), as_float(b + column), sum);
    }
    return _mm512_reduce_add_ps(sum);
}

static void load_queries(Backward *self, const Shape *shape, const Head *head, int64_t padded) {
    const int64_t count = shape->queries, size = shape->size;
    copy_rows(head->query, count, padded, size, self->query_rows);
    copy_rows(head->gradient, count, padded, size, self->gradient_rows);
    pack_pairs(head->query, count, padded, size, self->query_panels);
    pack_pairs(head->gradient, count, padded, size, self->gradient_panels);
    for (int64_t row = 0; row < padded; row++) {
        const bool real = row < count;
        self->log2_sums[row] = real ? head->log2_sums[row] : INFINITY;
        self->dots[row] = real ? dot(rows_from(head->output, row).data, rows_from(head->gradient, row).data, size) : 0;
    }
}

static void load_keys(Backward *self, const Shape *shape, const Head *head, int64_t key, int64_t count) {
    pack_transposed(rows_from(head->key, key), count, shape->size, self->key_columns);
    pack_transposed(rows_from(head->value, key), count, shape->size, self->value_columns);
    pack_pairs(rows_from(head->key, key), count, BACKWARD_KEYS, shape->size, self->key_panels);
}

/* Round two rows and join them: the first is the lower half. */
static inline __m512i rounded(__m512 first, __m512 second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(rounded_half(first)), rounded_half(second), 1);
}

/* Return pairs of the numbers of the lower and the upper half. */
static inline __m512i paired(__m512i halves) {
    static const uint16_t ORDER[2 * LANES] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER), halves);
}

/* Compute one vector of weights and of the scores' gradients. */
static inline void differentiate(const Backward *self, int64_t place, int64_t query, __mmask16 mask, float factor,
                                 __m512 *weights, __m512 *gradients) {
    /* If one score is far above all others, this product equals the logarithm of the sum, and the weight is 1. */
    const __m512 products = _mm512_mul_ps(_mm512_load_ps(self->scores + place), _mm512_set1_ps(factor));
    const __m512 exponents = _mm512_sub_ps(products, _mm512_set1_ps(self->log2_sums[query]));
    const __m512 weight_gradients = _mm512_load_ps(self->weight_gradients + place);
    *weights = _mm512_maskz_mov_ps(mask, exp2_vector(exponents));
    *gradients = _mm512_maskz_mul_ps(mask, *weights,
                                     _mm512_sub_ps(weight_gradients, _mm512_set1_ps(self->dots[query])));
}

/* From scores and gradients of weights compute weights and gradients of scores, as factors of products. */
static void differentiate_block(Backward *self, const Block *block, int64_t query, float factor) {
    for (int64_t row = 0; row < block->queries; row += 2) {
        const int64_t end = seen_by_tile(block, row);
        for (int64_t key = 0; key < end; key += LANES) {
            const int64_t place = row * BACKWARD_KEYS + key;
            __m512 weights[2], gradients[2];
            for (int i = 0; i < 2; i++) {
                differentiate(self, place + i * BACKWARD_KEYS, query + row + i, first_lanes(seen(block, row + i) - key),
                              factor, weights + i, gradients + i);
            }
            const __m512i halves = rounded(gradients[0], gradients[1]);
            bf16 *target = self->score_rows + place;
            _mm512_store_si512(self->weight_pairs + place / 2 + key / 2, paired(rounded(weights[0], weights[1])));
            _mm512_store_si512(self->score_pairs + place / 2 + key / 2, paired(halves));
            _mm256_store_si256((__m256i *)target, _mm512_castsi512_si256(halves));
            _mm256_store_si256((__m256i *)(target + BACKWARD_KEYS), _mm512_extracti64x4_epi64(halves, 1));
        }
    }
}

/* Add the gradients of a block of queries and keys. */
static void add_block(Backward *self, const Shape *shape, const Block *block, int64_t query, bool first) {
    const int64_t size = shape->size, query_pairs = round_up(shape->queries, TILE_ROWS) / 2;
    const int64_t panel_start = query / 2 * PANEL_COLUMNS, start = query * size / 2;
    multiply_scores(block, self->query_rows + start, self->key_columns, size, self->scores, BACKWARD_KEYS);
    multiply_scores(block, self->gradient_rows + start, self->value_columns, size, self->weight_gradients,
                    BACKWARD_KEYS);
    differentiate_block(self, block, query, exponent_factor(shape));
    add_queries(block, self->weight_pairs, BACKWARD_KEYS, self->gradient_panels + panel_start, query_pairs, size,
                self->value_gradient);
    add_queries(block, self->score_pairs, BACKWARD_KEYS, self->query_panels + panel_start, query_pairs, size,
                self->key_gradient);
    multiply_keys(block, (const pair *)self->score_rows, BACKWARD_KEYS / 2, self->key_panels, BACKWARD_KEYS / 2, size,
                  self->query_gradient + query * size, !first);
}

/* Compute the gradients of a block of keys, and their part of the gradients of queries. */
static void differentiate_keys(Backward *self, const Shape *shape, const Head *head, int64_t key, int64_t padded) {
    const int64_t count = least(BACKWARD_KEYS, shape->keys - key), size = shape->size;
    const size_t bytes = (size_t)(round_up(count, TILE_ROWS) * size) * sizeof(float);
    load_keys(self, shape, head, key, count);
    memset(self->key_gradient, 0, bytes);
    memset(self->value_gradient, 0, bytes);
    for (int64_t query = shape->causal ? key / BACKWARD_QUERIES * BACKWARD_QUERIES : 0; query < shape->queries;
         query += BACKWARD_QUERIES) {
        const Block block = block_of(shape, query, least(BACKWARD_QUERIES, padded - query), key, count);
        add_block(self, shape, &block, query, key == 0);
    }
    if (head->key_sum == NULL) {
        write_rows(self->key_gradient, NULL, shape->scale, count, size, rows_from(head->key_gradient, key));
        write_rows(self->value_gradient, NULL, 1.0f, count, size, rows_from(head->value_gradient, key));
    } else {
        memcpy(head->key_sum + key * size, self->key_gradient, (size_t)(count * size) * sizeof(float));
        memcpy(head->value_sum + key * size, self->value_gradient, (size_t)(count * size) * sizeof(float));
    }
}

static void differentiate_head(Backward *self, const Shape *shape, const Head *head) {
    const int64_t padded = round_up(shape->queries, TILE_ROWS);
    load_queries(self, shape, head, padded);
    for (int64_t key = 0; key < shape->keys; key += BACKWARD_KEYS) {
        differentiate_keys(self, shape, head, key, padded);
    }
    write_rows(self->query_gradient, NULL, shape->scale, shape->queries, shape->size, head->query_gradient);
}

/* Write zeros as the gradients of keys that no query sees. */
static void clear_unseen(const Head *head, int64_t seen_keys, int64_t keys, int64_t size) {
    if (head->key_sum != NULL) {
        const size_t bytes = (size_t)((keys - seen_keys) * size) * sizeof(float);
        memset(head->key_sum + seen_keys * size, 0, bytes);
        memset(head->value_sum + seen_keys * size, 0, bytes);
        return;
    }
    for (int64_t key = seen_keys; key < keys; key++) {
        memset(rows_from(head->key_gradient, key).data, 0, (size_t)size * sizeof(bf16));
        memset(rows_from(head->value_gradient, key).data, 0, (size_t)size * sizeof(bf16));
    }
}

/* Sum the gradients of the keys or values that a group of heads shares, in the order of the heads. */
static void write_sum(float *sums, int64_t group, const Shape *shape, float factor, Rows rows) {
    const int64_t count = shape->keys * shape->size;
    for (int64_t head = 1; head < group; head++) {
        const float *part = sums + head * count;
        for (int64_t i = 0; i < count; i += LANES) {
            _mm512_store_ps(sums + i, _mm512_add_ps(_mm512_load_ps(sums + i), _mm512_load_ps(part + i)));
        }
    }
    write_rows(sums, NULL, factor, shape->keys, shape->size, rows);
}

/* A call of `attention_backward`, for its threads. */
typedef struct {
    const Shape *shape;
    const Tensor *query, *key, *value, *output, *gradient, *query_gradient, *key_gradient, *value_gradient;
    const float *log2_sums;
    const int64_t *key_counts;
    float *sums;                 /* see `attention_backward` */
    int64_t next, next_key_head; /* the first tasks not taken */
} BackwardCall;

/* Return the sums of values that follow those of keys, or NULL if heads share no keys. */
static float *value_sums_of(const BackwardCall *call) {
    const Shape *shape = call->shape;
    return call->sums ? call->sums + shape->batches * shape->heads * shape->keys * shape->size : NULL;
}

static void differentiate_tasks(void *data) {
    BackwardCall *call = data;
    const Shape *shape = call->shape;
    const int64_t group = shape->heads / shape->key_heads, numbers = shape->keys * shape->size;
    Backward self;
    Arena arena = {NULL, 0};
    place_backward(&self, &arena, shape);
    char *memory = aligned_alloc(ALIGNMENT_BYTES, arena.used_bytes);
    if (memory == NULL) {
        return; /* the other threads take the tasks */
    }
    arena = (Arena){memory, 0};
    place_backward(&self, &arena, shape);
    for (int64_t number; (number = take_next(&call->next)) < shape->batches * shape->heads;) {
        const int64_t batch = number / shape->heads, head = number % shape->heads, shared = head / group;
        const Head task = {
            head_rows(call->query, batch, head),
            head_rows(call->key, batch, shared),
            head_rows(call->value, batch, shared),
            head_rows(call->output, batch, head),
            head_rows(call->gradient, batch, head),
            head_rows(call->query_gradient, batch, head),
            head_rows(call->key_gradient, batch, shared),
            head_rows(call->value_gradient, batch, shared),
            call->sums ? call->sums + number * numbers : NULL,
            call->sums ? value_sums_of(call) + number * numbers : NULL,
            call->log2_sums + number * shape->queries,
        };
        const Shape own = shape_in(shape, call->key_counts, batch);
        differentiate_head(&self, &own, &task);
        clear_unseen(&task, own.keys, shape->keys, shape->size);
    }
    free(memory);
}

static void add_shared(void *data) {
    BackwardCall *call = data;
    const Shape *shape = call->shape;
    const int64_t group = shape->heads / shape->key_heads, numbers = group * shape->keys * shape->size;
    for (int64_t number; (number = take_next(&call->next_key_head)) < shape->batches * shape->key_heads;) {
        const int64_t batch = number / shape->key_heads, shared = number % shape->key_heads;
        write_sum(call->sums + number * numbers, group, shape, shape->scale,
                  head_rows(call->key_gradient, batch, shared));
        write_sum(value_sums_of(call) + number * numbers, group, shape, 1.0f,
                  head_rows(call->value_gradient, batch, shared));
    }
}

/* Compute the gradients of queries, keys and values. Arguments are those of `attention_forward`, its results, the
 * gradient of the output, and places for the gradients. `sums` is memory for the gradients of keys and of values
 * from each head, [2, batches, heads, keys, size], aligned to ALIGNMENT_BYTES; NULL if heads share no keys.
 * Returns 0, or 1 if memory is missing. */
int attention_backward(const Shape *shape, const Tensor *query, const Tensor *key, const Tensor *value,
                       const Tensor *output, const float *log2_sums, const Tensor *gradient,
                       const Tensor *query_gradient, const Tensor *key_gradient, const Tensor *value_gradient,
                       float *sums, const int64_t *key_counts) {
    BackwardCall call = {shape,        query,          key,       value,      output, gradient, query_gradient,
                         key_gradient, value_gradient, log2_sums, key_counts, sums,   0,        0};
    GOMP_parallel(differentiate_tasks, &call, 0, 0);
    if (call.next < shape->batches * shape->heads) {
        return 1;
    }
    if (sums != NULL) {
        GOMP_parallel(add_shared, &call, 0, 0);
    }
    return 0;
}
