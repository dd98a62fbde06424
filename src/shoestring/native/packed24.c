/* y = x W^T for packed 2:4 weights: of each four neighbouring inputs two have a weight.

   values   rows x (inputs / 2), row-major, ascending input within a group
   indices  rows x (inputs / 8) bytes: the place (0 to 3) of value v within its group at bits 2 (v mod 4) of byte v / 4

   Products in decoding are bandwidth-bound: a weight matrix is read once for a handful of inputs. So packing pays as
   long as unpacking takes less time than loading the bytes it avoids. On AVX2 four groups are unpacked by five
   instructions: a shift puts the places of eight values into the low bits of eight lanes, and two in-lane permutations
   (a 128-bit lane is two groups) and a blend select the inputs.

   Inputs are arranged first, so that a 256-bit vector holds groups 0 and 2 of four, and the next one groups 1 and 3. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define MOST_ROWS_OF_X 8 /* rows of x processed at once; the weights are read again for every further eight */

static inline float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

static inline float sum_of(__m256 v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

static inline __m256 eight_values(const void *values, int64_t at, int bf16) {
    if (!bf16) return _mm256_loadu_ps((const float *)values + at);
    __m128i narrow = _mm_loadu_si128((const __m128i *)((const uint16_t *)values + at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

/* `rows` rows of W times `columns` rows of x; inlined with both constant, so that the sums stay in registers. */
static inline __attribute__((always_inline)) void block(
    int rows, int columns, int bf16, int64_t inputs, const void *values, const uint8_t *indices, int64_t row,
    const float *arranged, const float *x, float *y, int64_t outputs, int prefetch) {
    const __m256i shifts = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    const int64_t of_values = inputs / 2, of_indices = inputs / 8, whole = inputs / 16 * 16;
    __m256 sums[4][MOST_ROWS_OF_X];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sums[r][c] = _mm256_setzero_ps();
    for (int64_t k = 0; k < whole; k += 16) {
        for (int r = 0; r < rows; r++) {
            const int64_t at = (row + r) * of_values + k / 2;
            uint16_t places;
            memcpy(&places, indices + (row + r) * of_indices + k / 8, sizeof places);
            const __m256i place = _mm256_srlv_epi32(_mm256_set1_epi32(places), shifts);
            const __m256 value = eight_values(values, at, bf16);
            if (prefetch) _mm_prefetch((const char *)values + (at + 256) * (bf16 ? 2 : 4), _MM_HINT_T0);
            for (int c = 0; c < columns; c++) {
                const float *from = arranged + c * whole + k;
                const __m256 even = _mm256_permutevar_ps(_mm256_loadu_ps(from), place);
                const __m256 odd = _mm256_permutevar_ps(_mm256_loadu_ps(from + 8), place);
                sums[r][c] = _mm256_fmadd_ps(value, _mm256_blend_ps(even, odd, 0xCC), sums[r][c]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            float sum = sum_of(sums[r][c]);
            for (int64_t v = whole / 2; v < of_values; v++) { /* the last eight inputs, if their number is not a multiple of 16 */
                const int64_t at = (row + r) * of_values + v;
                const int place = indices[(row + r) * of_indices + v / 4] >> 2 * (v % 4) & 3;
                const float value = bf16 ? from_bf16(((const uint16_t *)values)[at]) : ((const float *)values)[at];
                sum += value * x[c * inputs + v / 2 * 4 + place];
            }
            y[c * outputs + row + r] = sum;
        }
}

#define COLUMNS(n) case n: block(ROWS, n, BF16, inputs, values, indices, row, arranged, x, y, outputs, 1); break;
#define ALL_COLUMNS switch (columns) { COLUMNS(1) COLUMNS(2) COLUMNS(3) COLUMNS(4) COLUMNS(5) COLUMNS(6) COLUMNS(7) COLUMNS(8) }

static void some_rows(int bf16, int columns, int64_t inputs, const void *values, const uint8_t *indices, int64_t row,
                      int64_t end, const float *arranged, const float *x, float *y, int64_t outputs) {
    if (columns <= 2)
        for (; row + 4 <= end; row += 4) {
#define ROWS 4
            if (bf16) {
#define BF16 1
                switch (columns) { COLUMNS(1) COLUMNS(2) }
#undef BF16
            } else {
#define BF16 0
                switch (columns) { COLUMNS(1) COLUMNS(2) }
#undef BF16
            }
#undef ROWS
        }
    for (; row < end; row++) {
#define ROWS 1
        if (bf16) {
#define BF16 1
            ALL_COLUMNS
#undef BF16
        } else {
#define BF16 0
            ALL_COLUMNS
#undef BF16
        }
#undef ROWS
    }
}

static void arrange(int64_t inputs, int columns, const float *x, float *arranged) {
    const int64_t whole = inputs / 16 * 16;
    for (int c = 0; c < columns; c++)
        for (int64_t k = 0; k < whole; k += 16) {
            const float *from = x + c * inputs + k;
            float *to = arranged + c * whole + k;
            memcpy(to, from, 16), memcpy(to + 4, from + 8, 16);
            memcpy(to + 8, from + 4, 16), memcpy(to + 12, from + 12, 16);
        }
}

#else

static void arrange(int64_t inputs, int columns, const float *x, float *arranged) {
    (void)inputs, (void)columns, (void)x, (void)arranged;
}

static void some_rows(int bf16, int columns, int64_t inputs, const void *values, const uint8_t *indices, int64_t row,
                      int64_t end, const float *arranged, const float *x, float *y, int64_t outputs) {
    (void)arranged;
    for (; row < end; row++)
        for (int c = 0; c < columns; c++) {
            float sums[4] = {0};
            for (int64_t v = 0; v < inputs / 2; v += 4) {
                const int64_t at = row * (inputs / 2) + v;
                const uint8_t places = indices[row * (inputs / 8) + v / 4];
                const float *from = x + c * inputs + v * 2;
                for (int i = 0; i < 4; i++) {
                    const float value = bf16 ? from_bf16(((const uint16_t *)values)[at + i])
                                             : ((const float *)values)[at + i];
                    sums[i] += value * from[i / 2 * 4 + (places >> 2 * i & 3)];
                }
            }
            y[c * outputs + row] = sums[0] + sums[1] + sums[2] + sums[3];
        }
}

#endif

/* NaN for a row of x with an entry that is not finite, else 0. In a dense product such an entry spoils all outputs, also
   where its weight is zero, and the packed product must agree. */
static float not_finite(int64_t inputs, const float *x) {
    int wrong = 0;
    for (int64_t k = 0; k < inputs; k++) wrong |= !(fabsf(x[k]) <= 0x1.fffffep127f);
    return wrong ? NAN : 0;
}

/* y (columns x outputs) = x (columns x inputs) W^T. `arranged` is room for columns x inputs floats. */
void packed24(int bf16, int64_t columns, int64_t outputs, int64_t inputs, const void *values,
                     const uint8_t *indices, const float *x, float *arranged, float *y, int threads) {
    for (int64_t first = 0; first < columns; first += MOST_ROWS_OF_X) {
        const int some = columns - first < MOST_ROWS_OF_X ? (int)(columns - first) : MOST_ROWS_OF_X;
        const float *here = x + first * inputs;
        float *out = y + first * outputs;
        arrange(inputs, some, here, arranged);
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t part = 0; part < (outputs + 63) / 64; part++) {
            const int64_t end = part * 64 + 64 < outputs ? part * 64 + 64 : outputs;
            some_rows(bf16, some, inputs, values, indices, part * 64, end, arranged, here, out, outputs);
        }
        for (int c = 0; c < some; c++) {
            const float wrong = not_finite(inputs, here + c * inputs);
            for (int64_t row = 0; wrong != 0 && row < outputs; row++) out[c * outputs + row] = wrong;
        }
    }
}
