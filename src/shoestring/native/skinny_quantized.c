/* y = x W^T for weights of 8 or 4 bits and few rows of x, reading each weight from memory once; and the conversion of
   such weights to fp32 or bf16.

   The 32 inputs of a group share a scale: w = scale (q - zero), q a byte and zero 128 for 8 bits; q a nibble and zero 8
   for 4. Rows are interleaved in groups of sixteen, one for each lane of a 512-bit vector:

   weight   sixteens x groups x chunks x 16 rows x 4 bytes; 8 chunks of four inputs, or, for 4 bits, 4 chunks whose low
            nibbles are inputs 4 chunk + (0 to 3) and whose high nibbles are those 16 further
   scales   sixteens x groups x 16 rows, fp16

   A 2:4 weight stores only its values, 32 a group, which then spans 64 inputs, and their places:

   places   sixteens x groups x 2 halves x 16 rows x 4 chunks, a byte each; value i of the four of a chunk is at the
            place of bits 2 i and 2 i + 1 in the first (i < 2) or the second four of the chunk's eight inputs

   Inputs are rounded to 16-bit integers with a scale for each 32 of them, and stored as two bytes each. Products and sums
   are then exact integers (VNNI computes four products in an instruction), and y differs from the fp32 product only by
   two roundings of 2^-16.

   The order of each sum does not depend on the number of rows of x, so a row of y is the same bit by bit alone and beside
   others. */

#include "quantized.h"

#define MOST_COLUMNS 8
/* Bytes that weights are prefetched ahead, into the second-level cache. Prefetching further than the hardware does, or not as
   far, costs up to a third, as measured with weights in pages of 4 KiB and of 2 MiB. */
#define AHEAD(bits, columns) ((bits) == 4 ? 8192 : (columns) == 1 ? 2048 : 3072)

/* 32 inputs, as integers of 16 bits: scale (256 high + low). For a 2:4 weight, 128 is added to both bytes. */
typedef struct {
    int8_t high[GROUP], low[GROUP];
    float scale;
    int32_t sum; /* of the integers */
} Inputs;

typedef struct {
    int64_t groups, outputs;
    const uint8_t *weight, *places;
    const uint16_t *scales;
    const Inputs *x; /* groups x columns, for each MOST_COLUMNS columns: stored in the order of reading */
    float *y;
} Product;

/* Add to each lane the products of its four unsigned bytes of `some`, of which the low `bits` are used, with its four
   signed bytes of `others`. */
INLINED ints dot4(ints sum, bytes some, bytes others, int bits) {
#if defined(WIDE)
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)some, (__m512i)others);
#elif defined(__AVX2__)
    /* By nibbles, because the sum of two products of whole bytes does not fit 16 bits. */
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i low = _mm256_maddubs_epi16(_mm256_and_si256((__m256i)some, nibble), (__m256i)others);
    sum += (ints)_mm256_madd_epi16(low, _mm256_set1_epi16(1));
    if (bits == 4) return sum;
    const __m256i shifted = _mm256_and_si256(_mm256_srli_epi16((__m256i)some, 4), nibble);
    return sum + (ints)_mm256_madd_epi16(_mm256_maddubs_epi16(shifted, (__m256i)others), _mm256_set1_epi16(16));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (ints)vusdotq_s32((int32x4_t)sum, (uint8x16_t)some, (int8x16_t)others);
#elif defined(__ARM_FEATURE_DOTPROD)
    if (bits == 4) return (ints)vdotq_s32((int32x4_t)sum, (int8x16_t)some, (int8x16_t)others);
    /* Both signed: some = (some ^ 128) + 128, as a signed byte and a constant. */
    const int32x4_t all = vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), (int8x16_t)others);
    return (ints)vdotq_s32((int32x4_t)sum, (int8x16_t)(some ^ 128), (int8x16_t)others) + ((ints)all << 7);
#elif defined(__aarch64__) /* a product of two bytes fits 16 bits */
    const uint8x16_t s = (uint8x16_t)some;
    const int8x16_t o = (int8x16_t)others;
    const int16x8_t low = vmulq_s16((int16x8_t)vmovl_u8(vget_low_u8(s)), vmovl_s8(vget_low_s8(o)));
    const int16x8_t high = vmulq_s16((int16x8_t)vmovl_high_u8(s), vmovl_high_s8(o));
    return sum + (ints)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#else
    for (int lane = 0; lane < WIDTH; lane++)
        for (int i = 0; i < 4; i++) sum[lane] += some[4 * lane + i] * (int8_t)others[4 * lane + i];
    return sum;
#endif
}

/* Four inputs, repeated in each lane. */
INLINED bytes four_of(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return (bytes)((ints){0} + four);
}

/* The indices of the four of eight inputs that each lane uses in a chunk, from its four bytes of `places`; for `chosen`. */
INLINED bytes choice_of(ints places, int chunk) {
    const bytes second = (bytes)((ints){0} + 0x04040000);
#if defined(WIDE) && defined(__AVX512VBMI__)
    const int64_t shifts = 0x2624222006040200 + chunk * 0x0808080808080808;
    return ((bytes)_mm512_multishift_epi64_epi8(_mm512_set1_epi64(shifts), (__m512i)places) & 3) | second;
#else
    const ints p = places >> 8 * chunk & 255;
    return ((bytes)(p | p << 6 | p << 12 | p << 18) & 3) | second;
#endif
}

INLINED bytes chosen(const int8_t *x, bytes choice) {
#if defined(WIDE)
    int64_t eight;
    memcpy(&eight, x, 8);
    return (bytes)_mm512_shuffle_epi8(_mm512_set1_epi64(eight), (__m512i)choice);
#elif defined(__AVX2__)
    int64_t eight;
    memcpy(&eight, x, 8);
    return (bytes)_mm256_shuffle_epi8(_mm256_set1_epi64x(eight), (__m256i)choice);
#elif defined(__aarch64__)
    const uint8x8_t eight = vld1_u8((const uint8_t *)x);
    return (bytes)vqtbl1q_u8(vcombine_u8(eight, eight), (uint8x16_t)choice);
#else
    bytes four;
    for (int i = 0; i < 4 * WIDTH; i++) four[i] = (uint8_t)x[choice[i]];
    return four;
#endif
}

/* Write the sums of a block to y, without rows beyond the last. */
INLINED void write(Product p, int columns, int64_t sixteen, int64_t column, floats (*y)[MOST_COLUMNS]) {
    const int64_t row = sixteen * LANES, left = p.outputs - row;
    for (int c = 0; c < columns; c++) {
        float sums[LANES];
        for (int half = 0; half < LANES / WIDTH; half++) *(floats *)(sums + half * WIDTH) = y[half][c];
        memcpy(p.y + (column + c) * p.outputs + row, sums, 4 * (left < LANES ? left : LANES));
    }
}

/* Sixteen rows of W times `columns` rows of x; inlined with `columns` and `bits` constant. */
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
                __builtin_prefetch(from + AHEAD(bits, columns), 0, 2);
                for (int part = 0; part < 8 / bits; part++) {
                    const bytes q = bits == 8 ? packed : part ? packed >> 4 : packed & 15;
                    for (int c = 0; c < columns; c++) {
                        high[c] = dot4(high[c], q, four_of(x[c].high + part * 16 + chunk * 4), bits);
                        low[c] = dot4(low[c], q, four_of(x[c].low + part * 16 + chunk * 4), bits);
                    }
                }
            }
            const floats scale = from_fp16(scales + half * WIDTH);
            for (int c = 0; c < columns; c++)
                y[half][c] = fused(__builtin_convertvector(high[c] * 256 + low[c], floats), scale * x[c].scale, y[half][c]);
        }
    }
    write(p, columns, sixteen, column, y);
}

/* The same for a 2:4 weight. Here the weights are the signed operand and the inputs the unsigned one. The 128 added to each
   input byte is corrected by the sum of the weights, which is then the same for all columns; the other way round it would
   need a sum over the inputs that each row selects. 4-bit weights are scaled by 16. */
INLINED void block24(Product p, int columns, int bits, int64_t sixteen, int64_t column) {
    const int64_t size = LANES * GROUP * bits / 8;
    const uint8_t *weight = p.weight + sixteen * p.groups * size;
    const uint8_t *places = p.places + sixteen * p.groups * LANES * GROUP / 4;
    const uint16_t *scales = p.scales + sixteen * p.groups * LANES;
    floats y[LANES / WIDTH][MOST_COLUMNS];
    for (int half = 0; half < LANES / WIDTH; half++)
        for (int c = 0; c < columns; c++) y[half][c] = (floats){0};
    for (int64_t g = 0; g < p.groups; g++, weight += size, places += LANES * GROUP / 4, scales += LANES)
        for (int half = 0; half < LANES / WIDTH; half++) {
            const floats scale = from_fp16(scales + half * WIDTH) * (bits == 8 ? 1 : 0.0625f);
            for (int part = 0; part < 2; part++) {
                const Inputs *x = p.x + 2 * column * p.groups + (2 * g + part) * columns;
                const uint8_t *where = places + 4 * (part * LANES + half * WIDTH);
                const ints of_rows = *(const ints *)where;
                __builtin_prefetch(where + AHEAD(bits, columns), 0, 2);
                ints high[MOST_COLUMNS], low[MOST_COLUMNS], added = {0};
                for (int c = 0; c < columns; c++) high[c] = low[c] = (ints){0};
                for (int chunk = 0; chunk < 4; chunk++) {
                    const int number = bits == 8 ? 4 * part + chunk : chunk;
                    const uint8_t *from = weight + 4 * (number * LANES + half * WIDTH);
                    const bytes packed = *(const bytes *)from;
                    __builtin_prefetch(from + AHEAD(bits, columns), 0, 2);
                    const bytes q = (bits == 8 ? packed : (part ? packed : packed << 4) & 240) ^ 128;
                    const bytes choice = choice_of(of_rows, chunk);
                    added = dot4(added, (bytes){0} + 128, q, 8);
                    for (int c = 0; c < columns; c++) {
                        high[c] = dot4(high[c], chosen(x[c].high + 8 * chunk, choice), q, 8);
                        low[c] = dot4(low[c], chosen(x[c].low + 8 * chunk, choice), q, 8);
                    }
                }
                for (int c = 0; c < columns; c++) {
                    const ints sum = high[c] * 256 + low[c] - added * 257;
                    y[half][c] = fused(__builtin_convertvector(sum, floats), scale * x[c].scale, y[half][c]);
                }
            }
        }
    write(p, columns, sixteen, column, y);
}

#define CASE(n) case n: sparse ? block24(p, n, bits, sixteen, column) : block(p, n, bits, sixteen, column); break;

INLINED void any_columns(Product p, int columns, int bits, int sparse, int64_t sixteen, int64_t column) {
    switch (columns) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
}

/* Round a group of inputs to integers, with `added` in each byte. */
static void to_integers(const float *x, int added, Inputs *to) {
    int32_t q[GROUP];
    to->scale = round_group(x, q);
    to->sum = 0;
    for (int k = 0; k < GROUP; k++) {
        const int32_t high = (q[k] + 128) >> 8;
        to->high[k] = (int8_t)(high + added);
        to->low[k] = (int8_t)(q[k] - high * 256 + added);
        to->sum += q[k];
    }
}

/* Largest number of rows of x for which this is faster than blocked_quantized.c. Without an instruction that multiplies bytes
   and adds four products, arithmetic soon is the limit; the places of 2:4 weights are slow to widen. With Arm's, there is none
   that multiplies pairs of 16 bits as fast. Measured, but for Arm, where instructions are counted. */
int few_rows(int sparse) {
#if defined(__ARM_FEATURE_DOTPROD) || defined(__ARM_FEATURE_MATMUL_INT8)
    return INT32_MAX;
#elif defined(WIDE)
    return sparse ? 40 : 16;
#else
    return sparse ? 40 : 3;
#endif
}

/* y (columns x outputs) = x (columns x inputs) W^T. `places` is NULL for a dense weight. `room` is a workspace of
   columns x inputs / 32 x 72 bytes. */
void skinny_quantized(int bits, int64_t columns, int64_t outputs, int64_t inputs, const uint8_t *weight,
                      const uint16_t *scales, const uint8_t *places, const float *x, void *room, float *y,
                      int threads) {
    const int64_t of_inputs = inputs / GROUP, sixteens = (outputs + LANES - 1) / LANES;
    Inputs *integers = room;
    const Product p = {places ? of_inputs / 2 : of_inputs, outputs, weight, places, scales, integers, y};
    for (int64_t column = 0; column < columns; column++) {
        const int64_t first = column / MOST_COLUMNS * MOST_COLUMNS;
        const int64_t some = columns - first < MOST_COLUMNS ? columns - first : MOST_COLUMNS;
        for (int64_t g = 0; g < of_inputs; g++)
            to_integers(x + (column * of_inputs + g) * GROUP, places ? 128 : 0,
                        integers + first * of_inputs + g * some + column - first);
    }
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t sixteen = 0; sixteen < sixteens; sixteen++)
        for (int64_t column = 0; column < columns; column += MOST_COLUMNS) {
            const int some = columns - column < MOST_COLUMNS ? (int)(columns - column) : MOST_COLUMNS;
            if (places && bits == 8)
                any_columns(p, some, 8, 1, sixteen, column);
            else if (places)
                any_columns(p, some, 4, 1, sixteen, column);
            else if (bits == 8)
                any_columns(p, some, 8, 0, sixteen, column);
            else
                any_columns(p, some, 4, 0, sixteen, column);
        }
}

/* Round to nearest, ties to even. */
static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fc0; /* the sum below could overflow the bits of a NaN */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINED void dequantize_sixteen(int bits, int bf16, int64_t rows, int64_t groups, const uint8_t *weight,
                                const uint16_t *scales, void *dense, int64_t sixteen) {
    const int lanes = rows - sixteen * LANES < LANES ? (int)(rows - sixteen * LANES) : LANES;
    for (int64_t g = sixteen * groups; g < (sixteen + 1) * groups; g++) {
        const uint8_t *numbers = weight + g * GROUP * LANES * bits / 8;
        float scale[LANES];
        for (int half = 0; half < LANES; half += WIDTH) *(floats *)(scale + half) = from_fp16(scales + g * LANES + half);
        for (int lane = 0; lane < lanes; lane++) {
            float values[GROUP];
            for (int chunk = 0; chunk < bits; chunk++)
                for (int i = 0; i < 4; i++) {
                    const int number = numbers[4 * (chunk * LANES + lane) + i];
                    if (bits == 8) {
                        values[4 * chunk + i] = (float)(number - 128) * scale[lane];
                    } else {
                        values[4 * chunk + i] = (float)((number & 15) - 8) * scale[lane];
                        values[16 + 4 * chunk + i] = (float)((number >> 4) - 8) * scale[lane];
                    }
                }
            const int64_t at = ((sixteen * LANES + lane) * groups + g % groups) * GROUP;
            if (bf16)
                for (int k = 0; k < GROUP; k++) ((uint16_t *)dense)[at + k] = to_bf16(values[k]);
            else
                memcpy((float *)dense + at, values, sizeof values);
        }
    }
}

/* W (rows x 32 groups) in fp32 or bf16. */
void dequantize(int bits, int bf16, int64_t rows, int64_t groups, const uint8_t *weight, const uint16_t *scales,
                void *dense, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t sixteen = 0; sixteen < (rows + LANES - 1) / LANES; sixteen++) {
        if (bits == 8 && bf16)
            dequantize_sixteen(8, 1, rows, groups, weight, scales, dense, sixteen);
        else if (bits == 8)
            dequantize_sixteen(8, 0, rows, groups, weight, scales, dense, sixteen);
        else if (bf16)
            dequantize_sixteen(4, 1, rows, groups, weight, scales, dense, sixteen);
        else
            dequantize_sixteen(4, 0, rows, groups, weight, scales, dense, sixteen);
    }
}
