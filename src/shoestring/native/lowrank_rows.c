/* y += x Aᵀ Bᵀ with factors of its own for each row of a batch, for few rows (BGMV of Punica; Chen et al., 2023).

   The product is bandwidth-bound: every factor is read once, however many rows share it, and B is read only where it is
   not zero. That matters for layers that fuse several others (query, key and value), whose B is block diagonal.

   The order of each sum depends on the row's own factors alone, so a row of y is the same bit by bit alone and beside
   others. Rows without an adapter are neither read nor written.

   Vectors are those of GCC and Clang (`vector_size`), which compile for any processor. */

#include <stdint.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions only */
#define INLINED static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif
#define TILE 64 /* outputs whose rows of B are stored together; as in adapters_by_row.py */
#define TOGETHER 4 /* rows of A whose products with a row of x are summed at the same time */

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

typedef struct { /* the rows that share an adapter; its fields are columns of a table of int64 */
    const void *a;        /* rank x inputs */
    const void *b;        /* tile after tile: for each rank of the tile's span, TILE outputs */
    const int64_t *spans; /* for each tile: index of its first number in b, its first rank, and the rank after its last */
    int64_t rank;
    int64_t first, count; /* which of `rows` */
} Group;

INLINED float one(const void *p, int64_t at, int bf16) {
    if (!bf16) return ((const float *)p)[at];
    const uint32_t bits = (uint32_t)((const uint16_t *)p)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINED floats several(const void *p, int64_t at, int bf16) {
    if (!bf16) return *(const floats *)((const float *)p + at);
    return (floats)(__builtin_convertvector(*(const halves *)((const uint16_t *)p + at), words) << 16);
}

INLINED uint16_t rounded(float value) { /* to bf16, to nearest even */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Products of `count` rows of A from row `j` on with the row of x at `from`; inlined with `count` and `bf16` constant. */
INLINED void dots(const Group *g, int64_t j, int count, const void *x, int64_t from, int64_t inputs, float *low, int bf16) {
    floats sums[TOGETHER];
    for (int r = 0; r < count; r++) sums[r] = (floats){0};
    int64_t k = 0;
    for (; k + LANES <= inputs; k += LANES) {
        const floats input = several(x, from + k, bf16);
        for (int r = 0; r < count; r++) sums[r] += input * several(g->a, (j + r) * inputs + k, bf16);
    }
    for (int r = 0; r < count; r++) {
        float total = 0;
        for (int i = 0; i < LANES; i++) total += sums[r][i];
        for (int64_t rest = k; rest < inputs; rest++) total += one(x, from + rest, bf16) * one(g->a, (j + r) * inputs + rest, bf16);
        low[j + r] = total;
    }
}

/* Add the product of B with `low` (one number for each rank) to the tile `tile` of the row of y at `to`. */
INLINED void spread(const Group *g, int64_t tile, const float *low, void *y, int64_t to, int64_t outputs, int bf16) {
    const int64_t *span = g->spans + 3 * tile;
    if (span[1] == span[2]) return;
    floats sums[TILE / LANES];
    for (int i = 0; i < TILE / LANES; i++) sums[i] = (floats){0};
    int64_t at = span[0];
    for (int64_t j = span[1]; j < span[2]; j++, at += TILE) {
        for (int i = 0; i < TILE / LANES; i++) sums[i] += low[j] * several(g->b, at + i * LANES, bf16);
    }
    float out[TILE];
    memcpy(out, sums, sizeof out);
    const int64_t start = tile * TILE, count = outputs - start < TILE ? outputs - start : TILE;
    for (int64_t i = 0; i < count; i++) {
        const float sum = one(y, to + start + i, bf16) + out[i];
        if (bf16)
            ((uint16_t *)y)[to + start + i] = rounded(sum);
        else
            ((float *)y)[to + start + i] = sum;
    }
}

INLINED void product(int64_t groups, const Group *group, const int64_t *rows, int64_t tokens, int64_t inputs, int64_t outputs,
                     const void *x, void *y, float *low, int threads, int bf16) {
    int64_t blocks = 0;
    for (int64_t g = 0; g < groups; g++) blocks += (group[g].rank + TOGETHER - 1) / TOGETHER;
    const int64_t tiles = (outputs + TILE - 1) / TILE;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; block++) {
            const Group *g = group;
            int64_t j = block * TOGETHER;
            float *own = low;
            for (int64_t skipped; skipped = (g->rank + TOGETHER - 1) / TOGETHER * TOGETHER, j >= skipped; g++) {
                j -= skipped;
                own += g->count * tokens * g->rank;
            }
            for (int64_t i = 0; i < g->count * tokens; i++) {
                const int64_t from = (rows[g->first + i / tokens] * tokens + i % tokens) * inputs;
                if (j + TOGETHER <= g->rank)
                    dots(g, j, TOGETHER, x, from, inputs, own + i * g->rank, bf16);
                else
                    for (int64_t r = j; r < g->rank; r++) dots(g, r, 1, x, from, inputs, own + i * g->rank, bf16);
            }
        }
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles; tile++) {
            const float *own = low;
            for (const Group *g = group; g < group + groups; own += g->count * tokens * g->rank, g++)
                for (int64_t i = 0; i < g->count * tokens; i++) {
                    const int64_t to = (rows[g->first + i / tokens] * tokens + i % tokens) * outputs;
                    spread(g, tile, own + i * g->rank, y, to, outputs, bf16);
                }
        }
    }
}

/* Args:
     groups: their number, and `group` the table of them.
     tokens: positions of each row in x (rows x tokens x inputs) and y (rows x tokens x outputs).
     low: workspace of as many floats as the sum of rank x count x tokens over all groups. */
void lowrank_rows(int bf16, int64_t groups, const void *group, const int64_t *rows, int64_t tokens, int64_t inputs,
                  int64_t outputs, const void *x, void *y, float *low, int threads) {
    if (bf16)
        product(groups, group, rows, tokens, inputs, outputs, x, y, low, threads, 1);
    else
        product(groups, group, rows, tokens, inputs, outputs, x, y, low, threads, 0);
}
