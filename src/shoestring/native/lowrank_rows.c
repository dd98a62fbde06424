/* y += x Aᵀ Bᵀ with factors of its own for each row of a batch, for few rows (BGMV of Punica; Chen et al., 2023); or
   y = x Wᵀ + x Aᵀ Bᵀ, which takes one parallel region for both.

   The product is bandwidth-bound: every factor is read once, however many rows share it, and B is read only where it is
   not zero. That matters for layers that fuse several others (query, key and value), whose B is block diagonal.

   The order of each sum depends on the row's own factors alone, so a row of y is the same bit by bit alone and beside
   others. Rows without an adapter are neither read nor written.

   Vectors are those of GCC and Clang (`vector_size`), which compile for any processor. */

#include "dense.h"

#define TILE 64 /* outputs whose rows of B are stored together; as in adapters_by_row.py */
#define TOGETHER 4 /* rows of A whose products with rows of x are summed at the same time */
#define TOKENS (LANES / 4) /* rows of x that are summed at the same time: their sums and those rows fill the registers */
/* Products of fewer multiplications, with factors of fewer bytes, are not shared between threads: starting them, and
   waiting for one that others keep from its core, takes longer. */
#define FEWEST_PRODUCTS 4000000
#define FEWEST_BYTES (1 << 19)

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

/* Products of `count` rows of A from row `j` on with `tokens` rows of x, which begin at `from`; inlined with `count`,
   `tokens` and `bf16` constant. The order of a sum does not depend on `count` and `tokens`. */
INLINED void dots(const Group *g, int64_t j, int count, int tokens, const void *x, const int64_t *from, int64_t inputs,
                  float *low, int bf16) {
    floats sums[TOGETHER * TOKENS];
    for (int i = 0; i < count * tokens; i++) sums[i] = (floats){0};
    int64_t k = 0;
    for (; k + LANES <= inputs; k += LANES) {
        floats weights[TOGETHER];
        for (int r = 0; r < count; r++) weights[r] = several(g->a, (j + r) * inputs + k, bf16);
        for (int t = 0; t < tokens; t++) {
            const floats input = several(x, from[t] + k, bf16);
            for (int r = 0; r < count; r++) sums[t * count + r] = fused(weights[r], input, sums[t * count + r]);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < count; r++) {
            float sum = total(sums[t * count + r]);
            for (int64_t rest = k; rest < inputs; rest++)
                sum += one(x, from[t] + rest, bf16) * one(g->a, (j + r) * inputs + rest, bf16);
            low[t * g->rank + j + r] = sum;
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
        const floats factor = (floats){0} + low[j];
        for (int i = 0; i < TILE / LANES; i++) sums[i] = fused(factor, several(g->b, at + i * LANES, bf16), sums[i]);
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

/* Products of the ranks [j, end) of a group with all rows that have it; `own` has a row of ranks for each. */
INLINED void ranks(const Group *g, int64_t j, int count, const int64_t *rows, int64_t tokens, const void *x, int64_t inputs,
                   float *own, int bf16) {
    int64_t from[TOKENS], i = 0;
    const int64_t texts = g->count * tokens;
#define FROM(i) ((rows[g->first + (i) / tokens] * tokens + (i) % tokens) * inputs)
    for (; i + TOKENS <= texts; i += TOKENS) {
        for (int t = 0; t < TOKENS; t++) from[t] = FROM(i + t);
        dots(g, j, count, TOKENS, x, from, inputs, own + i * g->rank, bf16);
    }
    for (; i < texts; i++) {
        from[0] = FROM(i);
        dots(g, j, count, 1, x, from, inputs, own + i * g->rank, bf16);
    }
}

INLINED void product(int64_t groups, const Group *group, const int64_t *rows, int64_t batch, int64_t tokens,
                     Product dense, float *low, int threads, int bf16) {
    const int64_t inputs = dense.inputs, outputs = dense.outputs;
    int64_t blocks = 0, products = 0, bytes = 0;
    for (int64_t g = 0; g < groups; g++) {
        blocks += (group[g].rank + TOGETHER - 1) / TOGETHER;
        const int64_t factors = group[g].rank * (inputs + outputs);
        products += factors * group[g].count * tokens;
        bytes += factors * (bf16 ? 2 : 4);
    }
    const int64_t tiles = (outputs + TILE - 1) / TILE, parts = dense.weight ? parts_of(outputs) : 0;
#pragma omp parallel num_threads(threads) if (dense.weight || products >= FEWEST_PRODUCTS || bytes >= FEWEST_BYTES)
    {
#pragma omp for schedule(static) nowait
        for (int64_t block = 0; block < blocks; block++) {
            const Group *g = group;
            int64_t j = block * TOGETHER;
            float *own = low;
            for (int64_t skipped; skipped = (g->rank + TOGETHER - 1) / TOGETHER * TOGETHER, j >= skipped; g++) {
                j -= skipped;
                own += g->count * tokens * g->rank;
            }
            if (j + TOGETHER <= g->rank)
                ranks(g, j, TOGETHER, rows, tokens, dense.x, inputs, own, bf16);
            else
                for (; j < g->rank; j++) ranks(g, j, 1, rows, tokens, dense.x, inputs, own, bf16);
        }
#pragma omp for schedule(static)
        for (int64_t part = 0; part < parts; part++) dense_part(dense, bf16, batch * tokens, part);
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles; tile++) {
            const float *own = low;
            for (const Group *g = group; g < group + groups; own += g->count * tokens * g->rank, g++)
                for (int64_t i = 0; i < g->count * tokens; i++) {
                    const int64_t to = (rows[g->first + i / tokens] * tokens + i % tokens) * outputs;
                    spread(g, tile, own + i * g->rank, dense.y, to, outputs, bf16);
                }
        }
    }
}

/* Args:
     groups: their number, and `group` the table of them.
     batch, tokens: rows of x (batch x tokens x inputs) and y (batch x tokens x outputs), and positions of each.
     weight: W (outputs x inputs); if it is null, the product is added to y.
     low: workspace of as many floats as the sum of rank x count x tokens over all groups. */
void lowrank_rows(int bf16, int64_t groups, const void *group, const int64_t *rows, int64_t batch, int64_t tokens,
                  int64_t inputs, int64_t outputs, const void *weight, const void *x, void *y, float *low, int threads) {
    const Product dense = {inputs, outputs, weight, x, y};
    if (bf16)
        product(groups, group, rows, batch, tokens, dense, low, threads, 1);
    else
        product(groups, group, rows, batch, tokens, dense, low, threads, 0);
}
