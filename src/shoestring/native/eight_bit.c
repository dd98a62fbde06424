/* A step of AdamW with 8-bit moments on many tensors at once. Threads share blocks of elements; a block is decoded,
   updated and encoded while it is in the first cache.

   The code tables are those of optim/eight_bit.py. Decade d of a table, from 0 to 6, is [0.1, 1] x 10^(d - 6), divided
   into 2^d equal intervals (for the first moment, which has a sign) or 2^(d + 1) (for the root of the second moment).
   So a code's decade is the position of its highest bit, and no table of 256 values has to be searched. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions only */

enum { BLOCK = 256, LANES = 8, ZERO = 127 /* code of 0 in the signed table */ };

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1)));
#define INLINE static inline __attribute__((always_inline))

/* Of a code table. A code's *position* is its index among the values above 0, plus 2^bits: so decade d has the positions
   from 2^(d + bits) on, and the highest bit of a position tells its decade. 1 has the last position, and the "decade" 7. */
typedef struct {
    float middle[LANES], width[LANES]; /* first midpoint and width of a decade's intervals, by the highest bit plus 127 */
    float from[LANES];  /* from[d]: quotients from here on are nearest to a value of decade d + 1 or above */
    float slope[LANES], offset[LANES], last[LANES]; /* slope x + offset: position of x in decade d; the last one there */
    float least; /* quotients below are nearest to 0 */
    float first; /* position of the first value above 0 */
} Table;

/* Decade d has 2^(d + bits) intervals. */
static Table table_of(int bits) {
    Table table = {.first = 1 << bits};
    double below = 0; /* last midpoint of the decade below */
    for (int d = 0; d < 8; d++) {
        double low = 0.1 * pow(10, d - 6), count = 1 << (d + bits), width = d < 7 ? 9 * low / count : 0;
        double first = d < 7 ? low + width / 2 : 1;
        int entry = (127 + d + bits) % LANES;
        table.middle[entry] = first, table.width[entry] = width;
        if (d) table.from[d - 1] = (below + first) / 2;
        else table.least = first / 2;
        table.slope[d] = d < 7 ? 1 / width : 0;
        table.offset[d] = d < 7 ? count * 8 / 9 : count;
        table.last[d] = d < 7 ? 2 * count - 1 : count;
        below = low + 9 * low - width / 2;
    }
    table.from[7] = INFINITY;
    return table;
}

INLINE floats pick(const float *entries, ints index) {
#if defined(__AVX2__)
    return (floats)_mm256_permutevar8x32_ps(_mm256_loadu_ps(entries), (__m256i)index);
#else
    floats picked;
    for (int lane = 0; lane < LANES; lane++) picked[lane] = entries[index[lane] & (LANES - 1)];
    return picked;
#endif
}

INLINE floats root_of(floats x) {
#if defined(__AVX2__)
    return (floats)_mm256_sqrt_ps((__m256)x);
#else
    for (int lane = 0; lane < LANES; lane++) x[lane] = sqrtf(x[lane]);
    return x;
#endif
}

INLINE floats where(ints mask, floats one, floats other) { return (floats)((mask & (ints)one) | (~mask & (ints)other)); }

INLINE floats larger(floats one, floats other) {
#if defined(__AVX2__)
    return (floats)_mm256_max_ps((__m256)one, (__m256)other);
#else
    return where(one > other, one, other);
#endif
}

INLINE floats smaller(floats one, floats other) {
#if defined(__AVX2__)
    return (floats)_mm256_min_ps((__m256)one, (__m256)other);
#else
    return where(one < other, one, other);
#endif
}

INLINE floats size_of(floats x) { return (floats)((ints)x & INT32_MAX); }

INLINE ints widened(const uint8_t *codes) {
#if defined(__AVX2__)
    return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes));
#else
    return __builtin_convertvector(*(const bytes *)codes, ints);
#endif
}

/* Writes numbers as codes; numbers below 0 as 0. */
INLINE void narrow(ints numbers, uint8_t *codes) {
#if defined(__AVX2__) /* GCC extracts one lane after the other */
    __m128i words = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)numbers), _mm256_extracti128_si256((__m256i)numbers, 1));
    _mm_storel_epi64((__m128i *)codes, _mm_packus_epi16(words, words));
#else
    *(bytes *)codes = __builtin_convertvector(numbers & (numbers > 0), bytes);
#endif
}

INLINE floats value_of(const Table *table, ints position) {
    floats number = __builtin_convertvector(position, floats), power = (floats)((ints)number & 0x7F800000);
    ints highest = (ints)number >> 23; /* plus 127; only its last three bits are read */
    return pick(table->middle, highest) + pick(table->width, highest) * (number - power);
}

INLINE floats decode_signed(const Table *table, const uint8_t *codes) {
    ints position = widened(codes) - ZERO, sign = position & INT32_MIN, negative = position >> 31;
    position = (position ^ negative) - negative;
    return (floats)(((ints)value_of(table, position) & (position != 0)) | sign);
}

INLINE floats decode_unsigned(const Table *table, const uint8_t *codes) {
    ints code = widened(codes);
    return (floats)((ints)value_of(table, code + 1) & (code != 0));
}

/* The position of the value above 0 that is nearest to a quotient. */
INLINE ints position_of(const Table *table, floats quotient) {
    const floats none = {0};
    /* A float's bits, read as a number, are nearly linear in its logarithm: too small by 0.026 decades at most. A decade
       begins up to 0.28 decades above its lower end, where quotients are nearest to its values. So what is 0.29 less
       than the logarithm tells the decade or the one below. */
    floats decades = __builtin_convertvector((ints)quotient, floats) * 3.5885577e-8f - 31.52f;
    ints decade = __builtin_convertvector(larger(decades, none), ints);
    decade -= quotient >= pick(table->from, decade);
    floats position = quotient * pick(table->slope, decade) + pick(table->offset, decade);
    return __builtin_convertvector(larger(smaller(position, pick(table->last, decade)), none + table->first), ints);
}

INLINE void encode_signed(const Table *table, floats x, float inverse, uint8_t *codes) {
    floats quotient = size_of(x) * inverse;
    ints position = position_of(table, quotient) & (quotient >= table->least), negative = (ints)x >> 31;
    narrow(((position ^ negative) - negative) + ZERO, codes); /* there is no -1: what is nearest becomes code 0 */
}

INLINE void encode_unsigned(const Table *table, floats x, float inverse, uint8_t *codes) {
    narrow((position_of(table, x * inverse) - 1) & (x > 0), codes); /* only 0 itself is encoded as 0 */
}

INLINE float largest_of(floats most) {
    float largest = 0;
    for (int lane = 0; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
    return largest;
}

/* What all elements of a tensor have in common in a step. */
typedef struct {
    float from_first; /* 1 - beta1: share of the gradient in the new first moment */
    float beta2, from_second, eps;
    float rate;  /* of the step, with the correction of the first moment's bias */
    float root;  /* correction of the root of the second moment */
    float keeps; /* share of a weight that weight decay leaves */
} Step;

static void step_block(float *w, const float *g, uint8_t *first, float *first_scale, uint8_t *root, float *root_scale,
                       const Step *by, const Table *moments, const Table *roots) {
    float ms[BLOCK], rs[BLOCK], m_scale = *first_scale, r_scale = *root_scale;
    floats most_m = {0}, most_r = {0}, poison = {0};
    for (int i = 0; i < BLOCK; i += LANES) {
        floats gradient = *(const floats *)(g + i), weight = *(const floats *)(w + i);
        floats m = decode_signed(moments, first + i) * m_scale, r = decode_unsigned(roots, root + i) * r_scale;
        m += by->from_first * (gradient - m);
        r = root_of(r * r * by->beta2 + by->from_second * gradient * gradient);
        *(floats *)(w + i) = weight * by->keeps - by->rate * (m / (r * by->root + by->eps));
        most_m = larger(size_of(m), most_m), most_r = larger(r, most_r);
        floats both = m + r;
        poison += both - both; /* 0, or NaN if a moment is not finite */
        *(floats *)(ms + i) = m, *(floats *)(rs + i) = r;
    }
    float bad = 0, m_most = largest_of(most_m), r_most = largest_of(most_r);
    for (int lane = 0; lane < LANES; lane++) bad += poison[lane];
    float m_inverse = m_most > 1e-37f ? 1 / m_most : 0, r_inverse = r_most > 1e-37f ? 1 / r_most : 0;
    for (int i = 0; i < BLOCK; i += LANES) {
        encode_signed(moments, *(floats *)(ms + i), m_inverse, first + i);
        encode_unsigned(roots, *(floats *)(rs + i), r_inverse, root + i);
    }
    *first_scale = m_most + bad, *root_scale = r_most + bad;
}

/* Steps n tensors. first[k], n + 1 entries, is the number of blocks before tensor k. `rates`, `roots` and `keeps` have an
   entry for each tensor; see Step. */
void eight_bit_steps(int64_t n, const int64_t *sizes, const int64_t *before, float *const *weights,
                     const float *const *gradients, uint8_t *const *firsts, float *const *first_scales,
                     uint8_t *const *roots, float *const *root_scales, const float *rates, const float *corrections,
                     const float *keeps, float from_first, float beta2, float from_second, float eps,
                     int threads) {
    const Table moments = table_of(0), of_roots = table_of(1);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t b = 0; b < before[n]; b++) {
        int64_t k = 0, high = n;
        while (high - k > 1) {
            int64_t middle = (k + high) / 2;
            if (before[middle] <= b) k = middle;
            else high = middle;
        }
        const Step by = {from_first, beta2, from_second, eps, rates[k], corrections[k], keeps[k]};
        int64_t number = b - before[k], at = number * BLOCK, left = sizes[k] - at;
        float *w = weights[k] + at, *m_scale = first_scales[k] + number, *r_scale = root_scales[k] + number;
        uint8_t *m = firsts[k] + at, *r = roots[k] + at;
        if (left >= BLOCK) {
            step_block(w, gradients[k] + at, m, m_scale, r, r_scale, &by, &moments, &of_roots);
        } else { /* the last block of a tensor is filled up with elements that are 0 and stay 0 */
            float weight[BLOCK] = {0}, gradient[BLOCK] = {0};
            uint8_t first[BLOCK], root[BLOCK] = {0};
            memset(first, ZERO, BLOCK);
            memcpy(weight, w, left * sizeof *w), memcpy(gradient, gradients[k] + at, left * sizeof *w);
            memcpy(first, m, left), memcpy(root, r, left);
            step_block(weight, gradient, first, m_scale, root, r_scale, &by, &moments, &of_roots);
            memcpy(w, weight, left * sizeof *w), memcpy(m, first, left), memcpy(r, root, left);
        }
    }
}
