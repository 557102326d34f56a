/* Adam and AdamW over pieces of parameters in host memory, in one pass.

   A pass reads the master (joined from its halves where it is stored so), the gradient and both moments,
   and writes master, wire image and moments. The arithmetic is that of torch's fused CPU kernels in a build
   with fused multiply-add: `fmaf` stands where the compiler of torch contracts a product and a sum, and
   nowhere else, so this file must be compiled with -ffp-contract=off. torch updates the elements of a tensor
   after its last whole vector (the tail) by other code, in which another product and sum are contracted.

   Nothing here allocates memory or can fail. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* GCC compiles `#pragma omp parallel` to calls of this function, which libgomp, libomp and libiomp5 have. The
   call is written out here because clang's pragma needs a library that torch may not have loaded. */
void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags);

enum encoding { SAME, SPLIT, EVEN }; /* as headwater.store.native_adam numbers them */

struct settings {
    double lr, beta1, beta2, eps, weight_decay, step;
    int32_t decoupled, maximize;
};

struct piece {
    void *wire;           /* bf16, or fp32 if it is the master */
    void *master;         /* SPLIT, EVEN: lower halves; SAME: not used */
    uint8_t *ties;        /* EVEN: a bit for each element, the lowest of a byte first; otherwise not used */
    const void *gradient; /* fp32 or bf16 */
    void *mean, *square;  /* moments, fp32 or bf16 */
    int64_t numel;
    int64_t mean_place, square_place; /* of the first element in the table of random numbers */
    int32_t settings;                 /* index */
    int32_t encoding;
    int32_t bf16_gradient, bf16_state;
    int32_t is_first; /* the moments have no values yet */
    float factor;     /* of the gradient */
    float limit;      /* of its absolute value, after the factor */
};

struct noise {
    const int32_t *table; /* `length` numbers, twice in a row */
    int64_t length;
};

/* The settings as torch's kernels use them. */
struct numbers {
    float decay, shrink, mean_weight, beta2, square_weight, root_correction, eps, negative_step_size;
    int decays_gradient, maximize;
};

/* RUN: elements that all loops process before the next ones, few enough to stay in the first-level cache.
   BLOCK: elements that a thread takes at a time. */
enum { RUN = 512, BLOCK = 1 << 14 };

static struct numbers numbers_of(const struct settings *s)
{
    double step_size = s->lr / (1 - pow(s->beta1, s->step));
    struct numbers n = {
        .decay = (float)s->weight_decay,
        .shrink = (float)fma(-s->lr, s->weight_decay, 1.0),
        .mean_weight = (float)(1 - s->beta1),
        .beta2 = (float)s->beta2,
        .square_weight = (float)(1 - s->beta2),
        .root_correction = (float)sqrt(1 - pow(s->beta2, s->step)),
        .eps = (float)s->eps,
        .negative_step_size = (float)-step_size,
        .decays_gradient = s->weight_decay != 0 && !s->decoupled,
        .maximize = s->maximize,
    };
    if (s->weight_decay == 0 || !s->decoupled)
        n.shrink = 1;
    return n;
}

static float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static void widen(const uint16_t *restrict from, float *restrict to, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = from_bits((uint32_t)from[i] << 16);
}

static void read_gradient(const struct piece *p, int64_t at, int64_t count, int negate, float *restrict to)
{
    if (p->bf16_gradient)
        widen((const uint16_t *)p->gradient + at, to, count);
    else
        memcpy(to, (const float *)p->gradient + at, count * sizeof *to);
    float factor = p->factor, high = p->limit, low = -p->limit;
    for (int64_t i = 0; i < count; i++) {
        float g = to[i] * factor;
        g = g < low ? low : g; /* NaN stays */
        g = g > high ? high : g;
        to[i] = negate ? -g : g;
    }
}

static void join(const uint16_t *restrict high, const int16_t *restrict low, float *restrict to, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = from_bits(((uint32_t)high[i] << 16) + (uint32_t)(int32_t)low[i]);
}

/* Rounds to the nearest bf16, ties away from zero. */
static void round_to_wire(const float *restrict from, uint16_t *restrict to, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = (uint16_t)((to_bits(from[i]) + 0x8000u) >> 16);
}

/* Rounds to the nearest bf16, ties to the even one. */
static void round_to_even(const float *restrict from, uint16_t *restrict to, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = to_bits(from[i]);
        to[i] = (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
    }
}

/* Returns true if a bit of these elements may be set: also if the bit of a neighbour in the same byte is set. */
static int may_have_ties(const uint8_t *ties, int64_t at, int64_t count)
{
    int found = 0;
    for (int64_t byte = at / 8; byte < (at + count + 7) / 8; byte++)
        found |= ties[byte];
    return found;
}

/* Adds one to the upper halves of joined masters that were rounded down at a tie. */
static void join_ties(const uint8_t *ties, int64_t at, float *joined, int64_t count)
{
    if (!may_have_ties(ties, at, count)) /* almost always */
        return;
    for (int64_t i = 0; i < count; i++)
        joined[i] = from_bits(to_bits(joined[i]) + ((uint32_t)(ties[(at + i) / 8] >> (at + i) % 8 & 1) << 16));
}

/* Sets the bits of masters that are ties and are rounded down, and clears the others. */
static void keep_ties(const float *from, uint8_t *ties, int64_t at, int64_t count)
{
    int found = 0;
    for (int64_t i = 0; i < count; i++)
        found |= (to_bits(from[i]) & 0xffffu) == 0x8000u;
    if (!found && !may_have_ties(ties, at, count)) /* almost always */
        return;
    for (int64_t i = 0; i < count; i++) {
        uint8_t bit = (uint8_t)(1 << (at + i) % 8), *byte = ties + (at + i) / 8;
        *byte = (to_bits(from[i]) & 0x1ffffu) == 0x8000u ? *byte | bit : *byte & (uint8_t)~bit;
    }
}

/* Gives each NaN the same bits. Rounding would turn some NaNs into zeros or infinities. */
static void make_nans_canonical(float *restrict values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = to_bits(values[i]);
        values[i] = from_bits((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits);
    }
}

static void keep_low_halves(const float *restrict from, int16_t *restrict to, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = (int16_t)(uint16_t)to_bits(from[i]);
}

static void round_stochastically(
    const float *restrict from, uint16_t *restrict to, const int32_t *restrict random, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = (uint16_t)((to_bits(from[i]) + (uint32_t)random[i]) >> 16);
}

static void adam(
    float *restrict weight, const float *restrict gradient, float *restrict mean, float *restrict square,
    int64_t count, const struct numbers *n, int is_tail)
{
    const float decay = n->decay, shrink = n->shrink, beta2 = n->beta2, square_weight = n->square_weight;
    const float root_correction = n->root_correction, eps = n->eps, step_size = n->negative_step_size;
    const int decays_gradient = n->decays_gradient, from_mean = n->mean_weight < 0.5f;
    /* 1 - w and w - 1 differ in the sign of zero. */
    const float far_weight = is_tail ? -(1.0f - n->mean_weight) : n->mean_weight - 1.0f;
    const float weight_of_change = from_mean ? n->mean_weight : far_weight;
    for (int64_t i = 0; i < count; i++) {
        float w = weight[i] * shrink, g = gradient[i], m = mean[i], v = square[i];
        g = decays_gradient ? fmaf(w, decay, g) : g;
        m = fmaf(weight_of_change, g - m, from_mean ? m : g);
        float scaled = square_weight * g;
        v = is_tail ? fmaf(v, beta2, scaled * g) : fmaf(scaled, g, v * beta2);
        mean[i] = m;
        square[i] = v;
        weight[i] = w + step_size * m / (sqrtf(v) / root_correction + eps);
    }
}

/* Returns the moments of a run as fp32: where they are stored, or widened in `space`. */
static float *read_moment(void *stored, const struct piece *p, int64_t at, int64_t count, float *space)
{
    float *values = p->bf16_state ? space : (float *)stored + at;
    if (p->is_first)
        memset(values, 0, count * sizeof *values);
    else if (p->bf16_state)
        widen((const uint16_t *)stored + at, values, count);
    return values;
}

static void write_moment(
    void *stored, int64_t place, const struct piece *p, int64_t at, int64_t count, const float *values,
    const struct noise *noise)
{
    if (p->bf16_state)
        round_stochastically(
            values, (uint16_t *)stored + at, noise->table + (place + at) % noise->length, count);
}

static void update_run(
    const struct piece *p, const struct numbers *n, const struct noise *noise, int64_t at, int64_t count,
    int is_tail)
{
    float gradient[RUN], joined[RUN], means[RUN], squares[RUN];
    read_gradient(p, at, count, n->maximize, gradient);
    float *mean = read_moment(p->mean, p, at, count, means);
    float *square = read_moment(p->square, p, at, count, squares);
    float *weight = p->encoding == SAME ? (float *)p->wire + at : joined;
    if (p->encoding != SAME)
        join((uint16_t *)p->wire + at, (int16_t *)p->master + at, joined, count);
    if (p->encoding == EVEN)
        join_ties(p->ties, at, joined, count);
    adam(weight, gradient, mean, square, count, n, is_tail);
    if (p->encoding != SAME) {
        make_nans_canonical(weight, count);
        keep_low_halves(weight, (int16_t *)p->master + at, count);
    }
    if (p->encoding == SPLIT)
        round_to_wire(weight, (uint16_t *)p->wire + at, count);
    if (p->encoding == EVEN) {
        keep_ties(weight, p->ties, at, count);
        round_to_even(weight, (uint16_t *)p->wire + at, count);
    }
    write_moment(p->mean, p->mean_place, p, at, count, mean, noise);
    write_moment(p->square, p->square_place, p, at, count, square, noise);
}

/* Updates some elements of a piece. The last numel % width elements of the piece are its tail. */
static void update_block(
    const struct piece *p, const struct numbers *n, const struct noise *noise, int64_t begin, int64_t end,
    int64_t width)
{
    int64_t tail = p->numel - p->numel % width;
    for (int64_t at = begin, stop; at < end; at = stop) {
        int is_tail = at >= tail;
        stop = at + RUN < end ? at + RUN : end;
        if (!is_tail && stop > tail)
            stop = tail;
        update_run(p, n, noise, at, stop - at, is_tail);
    }
}

static int64_t num_blocks(const struct piece *p)
{
    return (p->numel + BLOCK - 1) / BLOCK;
}

/* A call of `headwater_adam`, for its threads. */
struct call {
    const struct piece *pieces;
    int64_t count;
    const struct settings *settings;
    const struct noise *noise;
    int64_t width;
    int64_t next; /* the first block that no thread has taken */
};

/* Updates blocks until none is left. Each thread computes whole blocks. */
static void take_blocks(void *data)
{
    struct call *call = data;
    int64_t first = 0; /* number of the first block of piece `index` */
    int32_t known = -1;
    struct numbers numbers = {0};
    for (int64_t index = 0;;) {
        int64_t block = __atomic_fetch_add(&call->next, 1, __ATOMIC_RELAXED);
        while (index < call->count && block >= first + num_blocks(&call->pieces[index]))
            first += num_blocks(&call->pieces[index++]);
        if (index == call->count)
            return;
        const struct piece *p = &call->pieces[index];
        if (p->settings != known)
            numbers = numbers_of(&call->settings[known = p->settings]);
        int64_t begin = (block - first) * BLOCK, end = begin + BLOCK < p->numel ? begin + BLOCK : p->numel;
        update_block(p, &numbers, call->noise, begin, end, call->width);
    }
}

void headwater_adam(
    const struct piece *pieces, int64_t count, const struct settings *settings, const struct noise *noise,
    int64_t width)
{
    struct call call = {pieces, count, settings, noise, width, 0};
    int64_t elements = 0;
    for (int64_t i = 0; i < count; i++)
        elements += pieces[i].numel;
    /* For so few elements, the start of other threads takes longer than the work. */
    if (elements <= BLOCK)
        take_blocks(&call);
    else
        GOMP_parallel(take_blocks, &call, 0, 0);
}
