/* Attention of a few new tokens to a cache, reading keys and values from memory once.

   softmax(q k^T / sqrt(D)) v for T queries of each of H heads, which share the keys and values of K heads in groups of
   H / K; the query at position p attends to the positions p - window + 1 to p. Positions are processed in chunks that
   fit the first-level cache, for all queries of a key/value head in turn, with a running maximum and sum (online softmax;
   Milakov & Gimelshein, 2018).

   Chunks begin at multiples of CHUNK, and the order of a query's sums does not depend on the other queries, so its result
   is the same bit by bit alone and beside others. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions only */
#define INLINED static inline __attribute__((always_inline))

#if defined(__aarch64__)
#define LANES 4
#else
#define LANES 16 /* narrower vectors are several of the processor's */
#endif
#define CHUNK 64 /* positions; a multiple of LANES */
#define WIDEST 256 /* entries of a head */
#define FLOATS LANES
#include "fused.h"
#include "exponential.h"

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));
typedef float float4 __attribute__((vector_size(16)));

typedef struct {
    int64_t heads, kv_heads, queries, width, window;
    const void *q, *k, *v;                         /* q: rows x queries x heads x width */
    int64_t row_stride, head_stride, stride;       /* of k and v, in entries */
    const int64_t *positions;                      /* rows x queries */
    int64_t positions_stride;                      /* 0 if all rows have the same */
    void *y;                                       /* as q */
} Problem;

INLINED floats load(const void *p, int64_t at, int bf16) {
    if (!bf16) return *(const floats *)((const float *)p + at);
    return (floats)(__builtin_convertvector(*(const halves *)((const uint16_t *)p + at), words) << 16);
}

INLINED void store(void *p, int64_t at, floats v, int bf16) {
    if (!bf16) {
        *(floats *)((float *)p + at) = v;
        return;
    }
    const words bits = (words)v, nan = (words)(v != v); /* rounding could carry a NaN over into its sign */
    const words even = ((bits + 0x7fff + (bits >> 16 & 1)) & ~nan) | (nan & 0x7fc00000);
    *(halves *)((uint16_t *)p + at) = __builtin_convertvector(even >> 16, halves);
}

INLINED float total(floats v) {
    float4 parts[LANES / 4];
    memcpy(parts, &v, sizeof v);
    for (int step = LANES / 8; step; step /= 2)
        for (int i = 0; i < step; i++) parts[i] += parts[i + step];
    return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

/* In each group of 2 x `width` lanes of `a` and then of `b`, the sum of its two halves. */
INLINED floats paired(floats a, floats b, const int width) {
    ints low, high;
    for (int i = 0; i < LANES; i++) {
        low[i] = i / width % 2 * LANES + i / (2 * width) * 2 * width + i % width;
        high[i] = low[i] + width;
    }
#if defined(__clang__)
    floats sum;
    for (int i = 0; i < LANES; i++)
        sum[i] = low[i] < LANES ? a[low[i]] + a[high[i]] : b[low[i] - LANES] + b[high[i] - LANES];
    return sum;
#else
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
#endif
}

/* The totals of LANES vectors, in order. */
INLINED floats totals(floats v[LANES]) {
#if LANES == 16
    for (int i = 0; i < 8; i++) v[i] = paired(v[i], v[i + 8], 8);
    for (int i = 0; i < 4; i++) v[i] = paired(v[i], v[i + 4], 4);
#endif
    for (int i = 0; i < 2; i++) v[i] = paired(v[i], v[i + 2], 2);
    return paired(v[0], v[1], 1);
}

INLINED floats larger(floats a, floats b) {
    return (floats)(((ints)a & (a > b)) | ((ints)b & ~(a > b)));
}

typedef struct {
    floats sums[WIDEST / LANES], q[WIDEST / LANES];
    float largest, sum;
    int64_t first, end, at; /* the range of positions it attends to, and its offset in q and y */
} Query;

/* Add the positions `from` to `from` + CHUNK, as far as the query attends to them; `vectors` is width / LANES. */
INLINED void add(Problem p, Query *query, const void *k, const void *v, int64_t from, int vectors, int bf16) {
    const int64_t first = query->first > from ? query->first - from : 0;
    const int64_t end = query->end - from < CHUNK ? query->end - from : CHUNK;
    if (first >= end) return;
    floats scores[CHUNK / LANES];
    for (int i = 0; i < CHUNK / LANES; i++) scores[i] = (floats){0} - INFINITY;
    float largest = query->largest;
    for (int64_t i = first; i < end;) {
        if (i % LANES == 0 && i + LANES <= end) {
            floats products[LANES];
            for (int lane = 0; lane < LANES; lane++) {
                products[lane] = query->q[0] * load(k, (i + lane) * p.stride, bf16);
                for (int d = 1; d < vectors; d++)
                    products[lane] = fused(query->q[d], load(k, (i + lane) * p.stride + d * LANES, bf16), products[lane]);
            }
            scores[i / LANES] = totals(products);
            i += LANES;
        } else {
            floats product = query->q[0] * load(k, i * p.stride, bf16);
            for (int d = 1; d < vectors; d++)
                product = fused(query->q[d], load(k, i * p.stride + d * LANES, bf16), product);
            scores[i / LANES][i % LANES] = total(product);
            i++;
        }
    }
    floats most = scores[0];
    for (int i = 1; i < CHUNK / LANES; i++) most = larger(most, scores[i]);
    for (int lane = 0; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
    const float shrink = query->largest == largest ? 1.0f : expf(query->largest - largest);
    floats sum = {0}; /* masked positions add 2^-126 each, which vanishes in the sum */
    for (int i = 0; i < CHUNK / LANES; i++) sum += scores[i] = exponential(scores[i] - largest);
    const float *weights = (const float *)scores;
    floats sums[WIDEST / LANES];
    for (int d = 0; d < vectors; d++) sums[d] = query->sums[d] * shrink;
    for (int64_t i = first; i < end; i++)
        for (int d = 0; d < vectors; d++)
            sums[d] = fused((floats){0} + weights[i], load(v, i * p.stride + d * LANES, bf16), sums[d]);
    for (int d = 0; d < vectors; d++) query->sums[d] = sums[d];
    query->sum = query->sum * shrink + total(sum);
    query->largest = largest;
}

/* All queries of a key/value head, at most 64 at a time. */
INLINED void head(Problem p, int64_t row, int64_t kv_head, int vectors, int bf16) {
    const int64_t group = p.heads / p.kv_heads, count = group * p.queries;
    const int64_t start = row * p.row_stride + kv_head * p.head_stride;
    const int64_t *positions = p.positions + row * p.positions_stride;
    const float scale = 1 / sqrtf((float)p.width);
    Query some[64];
    for (int64_t begin = 0; begin < count; begin += 64) {
        const int64_t these = count - begin < 64 ? count - begin : 64;
        int64_t first = INT64_MAX, end = 0;
        for (int64_t i = 0; i < these; i++) {
            const int64_t t = (begin + i) / group, position = positions[t];
            Query *query = some + i;
            query->at = ((row * p.queries + t) * p.heads + kv_head * group + (begin + i) % group) * p.width;
            query->first = p.window && position >= p.window ? position - p.window + 1 : 0;
            query->end = position + 1;
            query->largest = -INFINITY, query->sum = 0;
            for (int d = 0; d < vectors; d++) {
                query->q[d] = load(p.q, query->at + d * LANES, bf16) * scale;
                query->sums[d] = (floats){0};
            }
            first = query->first < first ? query->first : first;
            end = query->end > end ? query->end : end;
        }
        for (int64_t from = first / CHUNK * CHUNK; from < end; from += CHUNK) {
            const int64_t size = bf16 ? 2 : 4, at = (start + from * p.stride) * size;
            for (int64_t i = 0; i < these; i++)
                add(p, some + i, (const char *)p.k + at, (const char *)p.v + at, from, vectors, bf16);
        }
        for (int64_t i = 0; i < these; i++)
            for (int d = 0; d < vectors; d++) store(p.y, some[i].at + d * LANES, some[i].sums[d] / some[i].sum, bf16);
    }
}

static void any_head(Problem p, int64_t row, int64_t kv_head, int bf16) {
    const int vectors = (int)(p.width / LANES);
    if (vectors == 4 && !bf16)
        head(p, row, kv_head, 4, 0);
    else if (vectors == 4)
        head(p, row, kv_head, 4, 1);
    else if (vectors == 8 && !bf16)
        head(p, row, kv_head, 8, 0);
    else if (vectors == 8)
        head(p, row, kv_head, 8, 1);
    else if (!bf16)
        head(p, row, kv_head, vectors, 0);
    else
        head(p, row, kv_head, vectors, 1);
}

void skinny_attention(int bf16, int64_t rows, int64_t heads, int64_t kv_heads, int64_t queries, int64_t width, int64_t window,
                      const void *q, const void *k, const void *v, int64_t row_stride, int64_t head_stride, int64_t stride,
                      const int64_t *positions, int64_t positions_stride, void *y, int threads) {
    const Problem p = {heads, kv_heads, queries, width, window, q, k, v, row_stride, head_stride, stride,
                       positions, positions_stride, y};
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t task = 0; task < rows * kv_heads; task++) any_head(p, task / kv_heads, task % kv_heads, bf16);
}
