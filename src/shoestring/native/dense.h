/* Products x W^T of dense weights (fp32 or bf16, row-major) and few rows of x, reading each weight from memory once.

   In decoding, x has one row for each token of the pass: 1, or a few if drafts are verified. Such products are
   bandwidth-bound, so they need enough loads in flight and must read nothing twice. A block of ROWS rows of W times
   COLUMNS rows of x keeps its sums in vector registers; W is loaded once for all of them.

   The order of each sum does not depend on the number of rows of x, so a row of y is the same bit by bit alone and beside
   others.

   Vectors are those of GCC and Clang (`vector_size`), which compile for any processor. */

#include <stdint.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions only */
#define INLINED static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define LANES 16
#define MOST_SUMS 24 /* accumulators, of 32 registers */
#elif defined(__aarch64__)
#define LANES 4
#define MOST_SUMS 24
#else
#define LANES 8
#define MOST_SUMS 12 /* accumulators, of 16 registers */
#endif

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#define FLOATS LANES
#include "fused.h"

#define MOST_COLUMNS 8
/* Rows are prefetched two blocks ahead into the second-level cache, which allows more loads in flight than the first; the
   hardware prefetcher starts again at each row. Prefetching beyond the last row is harmless. */
#define PREFETCH(p) __builtin_prefetch(p, 0, 2)

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float float4 __attribute__((vector_size(16)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

INLINED floats widened(halves bits) {
    return (floats)(__builtin_convertvector(bits, words) << 16);
}

INLINED float total(floats v) {
    float4 parts[LANES / 4];
    memcpy(parts, &v, sizeof v);
    for (int width = LANES / 8; width; width /= 2)
        for (int i = 0; i < width; i++) parts[i] += parts[i + width];
    return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

/* Load `count` floats (at most a vector) from p, followed by zeros; `some_halves` does so for bf16. */
INLINED floats some_floats(const float *p, int64_t count) {
    floats v = {0};
    memcpy(&v, p, 4 * count);
    return v;
}

INLINED halves some_halves(const uint16_t *p, int64_t count) {
    halves v = {0};
    memcpy(&v, p, 2 * count);
    return v;
}

typedef struct {
    int64_t inputs, outputs;
    const void *weight, *x;
    void *y;
} Product;

INLINED uint16_t rounded(float value) { /* to bf16, to nearest even */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* `rows` rows of W from `row` on times `columns` rows of x from `column` on; inlined with both counts constant. */
INLINED void block(Product p, int rows, int columns, int bf16, int64_t row, int64_t column) {
    floats sums[MOST_SUMS];
    for (int i = 0; i < rows * columns; i++) sums[i] = (floats){0};
    int64_t k = 0;
    if (bf16) {
        const uint16_t *w = (const uint16_t *)p.weight + row * p.inputs, *x = (const uint16_t *)p.x + column * p.inputs;
#if defined(__AVX512BF16__)
        for (; k + 2 * LANES <= p.inputs; k += 2 * LANES) {
            __m512bh weights[8];
            for (int r = 0; r < rows; r++) {
                weights[r] = (__m512bh)_mm512_loadu_si512(w + r * p.inputs + k);
                PREFETCH(w + (r + 2 * rows) * p.inputs + k);
            }
            for (int c = 0; c < columns; c++) {
                const __m512bh input = (__m512bh)_mm512_loadu_si512(x + c * p.inputs + k);
                for (int r = 0; r < rows; r++)
                    sums[r * columns + c] = (floats)_mm512_dpbf16_ps((__m512)sums[r * columns + c], weights[r], input);
            }
        }
#endif
        for (; k < p.inputs; k += LANES) {
            const int64_t left = p.inputs - k < LANES ? p.inputs - k : LANES;
            for (int r = 0; r < rows; r++) {
                const uint16_t *from = w + r * p.inputs + k;
                const floats weight = widened(left == LANES ? *(const halves *)from : some_halves(from, left));
                for (int c = 0; c < columns; c++) {
                    const uint16_t *input = x + c * p.inputs + k;
                    const floats value = widened(left == LANES ? *(const halves *)input : some_halves(input, left));
                    sums[r * columns + c] = fused(weight, value, sums[r * columns + c]);
                }
            }
        }
    } else {
        const float *w = (const float *)p.weight + row * p.inputs, *x = (const float *)p.x + column * p.inputs;
        for (; k + LANES <= p.inputs; k += LANES) {
            floats weights[8];
            for (int r = 0; r < rows; r++) {
                weights[r] = *(const floats *)(w + r * p.inputs + k);
                PREFETCH(w + (r + 2 * rows) * p.inputs + k);
            }
            for (int c = 0; c < columns; c++) {
                const floats input = *(const floats *)(x + c * p.inputs + k);
                for (int r = 0; r < rows; r++) sums[r * columns + c] = fused(weights[r], input, sums[r * columns + c]);
            }
        }
        if (k < p.inputs)
            for (int r = 0; r < rows; r++) {
                const floats weight = some_floats(w + r * p.inputs + k, p.inputs - k);
                for (int c = 0; c < columns; c++)
                    sums[r * columns + c] = fused(weight, some_floats(x + c * p.inputs + k, p.inputs - k), sums[r * columns + c]);
            }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            const float sum = total(sums[r * columns + c]);
            const int64_t at = (column + c) * p.outputs + row + r;
            if (bf16)
                ((uint16_t *)p.y)[at] = rounded(sum);
            else
                ((float *)p.y)[at] = sum;
        }
}

/* As many rows of W at once as there are registers for accumulators, at most 8. */
#define ROWS_FOR(columns) (MOST_SUMS / (columns) < 8 ? MOST_SUMS / (columns) : 8)
#define CASE(n) \
    case n: \
        for (; row + ROWS_FOR(n) <= end; row += ROWS_FOR(n)) block(p, ROWS_FOR(n), n, bf16, row, column); \
        for (; row < end; row++) block(p, 1, n, bf16, row, column); \
        break;

INLINED void some_rows(Product p, int columns, int bf16, int64_t row, int64_t end, int64_t column) {
    switch (columns) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
}

#define PART_ROWS 24 /* rows of W that a thread takes at a time */

INLINED int64_t parts_of(int64_t outputs) { return (outputs + PART_ROWS - 1) / PART_ROWS; }

/* The part `part` of y (columns x outputs) = x (columns x inputs) W^T, all of one type. */
INLINED void dense_part(Product p, int bf16, int64_t columns, int64_t part) {
    const int64_t row = part * PART_ROWS, end = row + PART_ROWS < p.outputs ? row + PART_ROWS : p.outputs;
    for (int64_t column = 0; column < columns; column += MOST_COLUMNS) { /* W is in the cache after the first pass */
        const int some = columns - column < MOST_COLUMNS ? (int)(columns - column) : MOST_COLUMNS;
        if (bf16)
            some_rows(p, some, 1, row, end, column);
        else
            some_rows(p, some, 0, row, end, column);
    }
}
