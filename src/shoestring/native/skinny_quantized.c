/* y = x W^T for weights of 8 or 4 bits and few rows of x, reading each weight from memory once.

   The 32 inputs of a group share a scale: w = scale (q - zero), q a byte and zero 128 for 8 bits; q a nibble and zero 8
   for 4. Rows come in sixteens, one for each lane of a 512-bit vector:

   weight   sixteens x groups x chunks x 16 rows x 4 bytes; 8 chunks of four inputs, or, for 4 bits, 4 chunks whose low
            nibbles are inputs 4 chunk + (0 to 3) and whose high nibbles are those 16 further
   scales   sixteens x groups x 16 rows, fp16

   The inputs become integers of 16 bits with a scale for each group, as two bytes each: products and sums of a group are
   then exact integers (four of them an instruction where there is VNNI), and only two roundings of 2^-16 set y apart
   from the product in fp32.

   Each sum is added up in the same order whatever the number of rows of x: a row of y is the same bit by bit alone and
   beside others. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions only */
#define INLINED static inline __attribute__((always_inline))

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define GROUP 32
#define LANES 16 /* rows that lie side by side */
#if defined(__AVX512F__)
#define WIDTH 16 /* of them in a vector */
#else
#define WIDTH 8
#endif
#define MOST_COLUMNS 8
#define AHEAD 8192 /* bytes before they are needed, weights are fetched into the second-level cache */
#define LARGEST (127 * 256) /* of the integers that the inputs become: both bytes are then signed ones */

typedef float floats __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef uint8_t bytes __attribute__((vector_size(4 * WIDTH), aligned(4)));

/* A group of inputs, as integers of 16 bits: scale (256 high + low). */
typedef struct {
    int8_t high[GROUP], low[GROUP];
    float scale;
    int32_t sum; /* of the integers */
} Inputs;

typedef struct {
    int64_t groups, outputs;
    const uint8_t *weight;
    const uint16_t *scales;
    const Inputs *x; /* groups x columns, for each MOST_COLUMNS of these: read in the order in which they lie */
    float *y;
} Product;

/* Add to each lane the four products of its bytes of `weight`, of which `bits` count, with those at `x`. */
INLINED ints dot4(ints sum, bytes weight, const int8_t *x, int bits) {
#if defined(__AVX512VNNI__)
    int32_t four;
    memcpy(&four, x, 4);
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weight, _mm512_set1_epi32(four));
#elif defined(__AVX2__)
    /* By nibbles: sums of two products of whole bytes do not fit 16 bits. */
    int32_t four;
    memcpy(&four, x, 4);
    const __m256i inputs = _mm256_set1_epi32(four), nibble = _mm256_set1_epi8(15);
    const __m256i low = _mm256_maddubs_epi16(_mm256_and_si256((__m256i)weight, nibble), inputs);
    sum += (ints)_mm256_madd_epi16(low, _mm256_set1_epi16(1));
    if (bits == 4) return sum;
    const __m256i shifted = _mm256_and_si256(_mm256_srli_epi16((__m256i)weight, 4), nibble);
    return sum + (ints)_mm256_madd_epi16(_mm256_maddubs_epi16(shifted, inputs), _mm256_set1_epi16(16));
#else
    for (int lane = 0; lane < WIDTH; lane++)
        for (int i = 0; i < 4; i++) sum[lane] += weight[4 * lane + i] * x[i];
    return sum;
#endif
}

INLINED floats from_fp16(const uint16_t *bits) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)bits));
#elif defined(__F16C__)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)bits));
#else
    floats wide;
    for (int lane = 0; lane < WIDTH; lane++) { /* the exponent is moved, and what was subnormal is normal by then */
        const uint32_t sign = (uint32_t)(bits[lane] & 0x8000) << 16, rest = (uint32_t)(bits[lane] & 0x7fff) << 13;
        float value;
        memcpy(&value, &rest, sizeof value);
        value *= 0x1p112f;
        wide[lane] = sign ? -value : value;
    }
    return wide;
#endif
}

/* Sixteen rows times `columns` rows of x; `columns` and `bits` are constants where this is inlined. */
INLINED void block(Product p, int columns, int bits, int64_t sixteen, int64_t column) {
    const int64_t size = LANES * GROUP * bits / 8;
    const uint8_t *weight = p.weight + sixteen * p.groups * size;
    const uint16_t *scales = p.scales + sixteen * p.groups * LANES;
    floats y[LANES / WIDTH][MOST_COLUMNS];
    for (int half = 0; half < LANES / WIDTH; half++)
        for (int c = 0; c < columns; c++) y[half][c] = (floats){0};
    for (int64_t g = 0; g < p.groups; g++, weight += size, scales += LANES) {
        const Inputs *x = p.x + column * p.groups + g * columns;
        for (int half = 0; half < LANES / WIDTH; half++) {
            ints high[MOST_COLUMNS], low[MOST_COLUMNS];
            for (int c = 0; c < columns; c++) {
                high[c] = (ints){0};
                low[c] = (ints){0} - x[c].sum * (bits == 8 ? 128 : 8);
            }
            for (int chunk = 0; chunk < bits; chunk++) {
                const uint8_t *from = weight + 4 * (chunk * LANES + half * WIDTH);
                const bytes packed = *(const bytes *)from;
                __builtin_prefetch(from + AHEAD, 0, 2);
                for (int part = 0; part < 8 / bits; part++) {
                    const bytes q = bits == 8 ? packed : part ? packed >> 4 : packed & 15;
                    for (int c = 0; c < columns; c++) {
                        high[c] = dot4(high[c], q, x[c].high + part * 16 + chunk * 4, bits);
                        low[c] = dot4(low[c], q, x[c].low + part * 16 + chunk * 4, bits);
                    }
                }
            }
            const floats scale = from_fp16(scales + half * WIDTH);
            for (int c = 0; c < columns; c++)
                y[half][c] += __builtin_convertvector(high[c] * 256 + low[c], floats) * (scale * x[c].scale);
        }
    }
    const int64_t row = sixteen * LANES, left = p.outputs - row;
    for (int c = 0; c < columns; c++) {
        float sums[LANES];
        for (int half = 0; half < LANES / WIDTH; half++) *(floats *)(sums + half * WIDTH) = y[half][c];
        memcpy(p.y + (column + c) * p.outputs + row, sums, 4 * (left < LANES ? left : LANES));
    }
}

#define CASE(n) case n: block(p, n, bits, sixteen, column); break;

INLINED void any_columns(Product p, int columns, int bits, int64_t sixteen, int64_t column) {
    switch (columns) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
}

static void to_integers(const float *x, Inputs *to) {
    float largest = 0;
    for (int k = 0; k < GROUP; k++) largest = fabsf(x[k]) > largest ? fabsf(x[k]) : largest;
    const float inverse = largest > 0 ? LARGEST / largest : 0;
    to->sum = 0;
    for (int k = 0; k < GROUP; k++) {
        const int32_t q = (int32_t)rintf(x[k] * inverse);
        to->high[k] = (int8_t)((q + 128) >> 8);
        to->low[k] = (int8_t)(q - to->high[k] * 256);
        to->sum += q;
    }
    to->scale = largest / LARGEST;
}

/* y (columns x outputs) = x (columns x inputs) W^T. `room` is memory for columns x groups x 72 bytes. */
void skinny_quantized(int bits, int64_t columns, int64_t outputs, int64_t inputs, const uint8_t *weight,
                      const uint16_t *scales, const float *x, void *room, float *y, int threads) {
    const int64_t groups = inputs / GROUP, sixteens = (outputs + LANES - 1) / LANES;
    Inputs *integers = room;
    const Product p = {groups, outputs, weight, scales, integers, y};
    for (int64_t column = 0; column < columns; column++) {
        const int64_t first = column / MOST_COLUMNS * MOST_COLUMNS;
        const int64_t some = columns - first < MOST_COLUMNS ? columns - first : MOST_COLUMNS;
        for (int64_t g = 0; g < groups; g++)
            to_integers(x + (column * groups + g) * GROUP, integers + first * groups + g * some + column - first);
    }
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t sixteen = 0; sixteen < sixteens; sixteen++)
        for (int64_t column = 0; column < columns; column += MOST_COLUMNS) {
            const int some = columns - column < MOST_COLUMNS ? (int)(columns - column) : MOST_COLUMNS;
            if (bits == 8)
                any_columns(p, some, 8, sixteen, column);
            else
                any_columns(p, some, 4, sixteen, column);
        }
}
