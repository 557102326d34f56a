/* Vectors of fp32 numbers, conversion from and to bf16, and threads: the common part of the kernels for products. */

#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#ifdef __FMA__
#include <immintrin.h>
#endif

/* See `attention.c`: every copy of OpenMP has these functions. */
void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags);
int omp_get_num_threads(void);
int omp_get_thread_num(void);

enum {
#ifdef __AVX512F__
    LANES = 16,
#else
    LANES = 8,
#endif
};

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef float vector __attribute__((vector_size(4 * LANES)));
typedef float octet __attribute__((vector_size(32)));
typedef float quartet __attribute__((vector_size(16)));

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE int64_t number_bytes(bool half) { return (int64_t)(half ? sizeof(bf16) : sizeof(float)); }

/* Return left * right + sum, rounded once if the processor can. The compiler must not choose where to fuse
 * (-ffp-contract=off): on processors where GCC avoids chains of fused sums, such as a Zen 3, its choice, and so the bits
 * of the results, would depend on the number of rows. */
INLINE vector fused(vector left, vector right, vector sum) {
#if defined(__AVX512F__)
    return (vector)_mm512_fmadd_ps((__m512)left, (__m512)right, (__m512)sum);
#elif defined(__FMA__)
    return (vector)_mm256_fmadd_ps((__m256)left, (__m256)right, (__m256)sum);
#elif defined(__FP_FAST_FMAF)
    for (int lane = 0; lane < LANES; lane++) {
        sum[lane] = __builtin_fmaf(left[lane], right[lane], sum[lane]);
    }
    return sum;
#else
    return left * right + sum;
#endif
}

/* Return the sums of the lower and the upper lanes. */
INLINE octet folded(vector sums) {
    octet low, high = {0};
    memcpy(&low, &sums, sizeof low);
    if (LANES == 16) {
        memcpy(&high, (const char *)&sums + sizeof sums - sizeof high, sizeof high);
        low += high;
    }
    return low;
}

/* Write a number, rounded to nearest, ties to even. */
INLINE void write_number(void *numbers, int64_t place, float number, bool half) {
    if (!half) {
        ((float *)numbers)[place] = number;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    const bool is_nan = number != number;
    ((bf16 *)numbers)[place] = is_nan ? 0x7fc0 : (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* The part of a range that one thread computes: from `first` up to, but not including, `end`. */
typedef struct {
    int64_t first, end;
} Part;

INLINE Part part_of_thread(int64_t count) {
    const int64_t number = omp_get_thread_num(), threads = omp_get_num_threads();
    return (Part){count * number / threads, count * (number + 1) / threads};
}
