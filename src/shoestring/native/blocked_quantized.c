/* y = x W^T for weights of 8 or 4 bits and many rows of x, as in reading a prompt; the formats of weights and places, and the
   rounding of inputs, are those of skinny_quantized.c, and so is each sum: bit by bit the same.

   Here arithmetic limits, not memory. Sixteen rows of W are widened once to integers of 16 bits, in pairs of inputs, and
   then multiplied by all rows of x, a tile of TILE at a time. An instruction multiplies pairs of 16-bit integers and adds
   each pair to a sum of 32 bits: twice as many products as a fused operation on floats. The sum over a group of 32 inputs
   is exact: 32 x 127 x 256 x 128 < 2^31.

   panel   groups x 16 pairs x 16 rows x 2 integers of 16 bits */

#include <omp.h>

#include "quantized.h"

#define PAIRS (GROUP / 2)
#define HALVES (LANES / WIDTH)
#if defined(WIDE)
#define TILE 8 /* rows of x whose sums stay in registers */
#else
#define TILE 4
#endif

typedef int16_t shorts __attribute__((vector_size(4 * WIDTH), aligned(4)));

typedef struct {
    int64_t groups, outputs;
    const int16_t *panel, *x; /* x: columns x groups x 32 */
    const float *x_scales;    /* columns x groups */
    float *y;
} Product;

/* Add to each lane the products of its two integers of `some` and those of `others`. */
INLINED ints dot2(ints sum, shorts some, shorts others) {
#if defined(WIDE)
    return (ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)some, (__m512i)others);
#elif defined(__AVX2__)
    return sum + (ints)_mm256_madd_epi16((__m256i)some, (__m256i)others);
#elif defined(__aarch64__)
    const int16x8_t s = (int16x8_t)some, o = (int16x8_t)others;
    return sum + (ints)vpaddq_s32(vmull_s16(vget_low_s16(s), vget_low_s16(o)), vmull_high_s16(s, o));
#else
    for (int lane = 0; lane < WIDTH; lane++)
        sum[lane] += some[2 * lane] * others[2 * lane] + some[2 * lane + 1] * others[2 * lane + 1];
    return sum;
#endif
}

/* Two inputs, repeated in each lane. */
INLINED shorts two_of(const int16_t *x) {
    int32_t two;
    memcpy(&two, x, 4);
    return (shorts)((ints){0} + two);
}

/* Keep a value in a register: GCC would load it again for each product, and loads would then be the limit. */
INLINED shorts in_register(shorts v) {
#if defined(__AVX2__)
    __asm__("" : "+v"(v));
#endif
    return v;
}

/* Sixteen rows of W times `columns` rows of x; inlined with `columns` constant. `scales` are fp32, groups x 16. */
INLINED void tile(Product p, int columns, const float *scales, int64_t sixteen, int64_t column) {
    floats y[HALVES][TILE];
    for (int half = 0; half < HALVES; half++)
        for (int c = 0; c < columns; c++) y[half][c] = (floats){0};
    const int16_t *panel = p.panel, *x = p.x + column * p.groups * GROUP;
    for (int64_t g = 0; g < p.groups; g++, panel += GROUP * LANES, x += GROUP, scales += LANES) {
        ints sums[HALVES][TILE];
        for (int half = 0; half < HALVES; half++)
            for (int c = 0; c < columns; c++) sums[half][c] = (ints){0};
        for (int pair = 0; pair < PAIRS; pair++) {
            shorts weights[HALVES];
            for (int half = 0; half < HALVES; half++)
                weights[half] = in_register(*(const shorts *)(panel + 2 * (pair * LANES + half * WIDTH)));
            for (int c = 0; c < columns; c++) {
                const shorts two = two_of(x + c * p.groups * GROUP + 2 * pair);
                for (int half = 0; half < HALVES; half++) sums[half][c] = dot2(sums[half][c], weights[half], two);
            }
        }
        for (int half = 0; half < HALVES; half++) {
            const floats scale = *(const floats *)(scales + half * WIDTH);
            for (int c = 0; c < columns; c++) {
                const float of_x = p.x_scales[(column + c) * p.groups + g];
                y[half][c] = fused(__builtin_convertvector(sums[half][c], floats), scale * of_x, y[half][c]);
            }
        }
    }
    const int64_t row = sixteen * LANES, left = p.outputs - row;
    for (int c = 0; c < columns; c++) {
        float sums[LANES];
        for (int half = 0; half < HALVES; half++) *(floats *)(sums + half * WIDTH) = y[half][c];
        memcpy(p.y + (column + c) * p.outputs + row, sums, 4 * (left < LANES ? left : LANES));
    }
}

/* Of the four signed bytes of each lane, the first two (`place` 0) or the last two (`place` 2), widened. */
INLINED shorts widened(bytes four, int place) {
#if defined(WIDE)
    const __m512i where = _mm512_set1_epi32((int)(0x01800080u + place * 0x01000100u)); /* 128 + … is zero */
    const __m512i lanes = _mm512_set4_epi32(0x0c000c00, 0x08000800, 0x04000400, 0);
    return (shorts)_mm512_srai_epi16(_mm512_shuffle_epi8((__m512i)four, _mm512_add_epi8(where, lanes)), 8);
#elif defined(__AVX2__)
    const __m256i where = _mm256_set1_epi32((int)(0x01800080u + place * 0x01000100u));
    const __m256i lanes = _mm256_setr_epi32(0, 0x04000400, 0x08000800, 0x0c000c00, 0, 0x04000400, 0x08000800, 0x0c000c00);
    return (shorts)_mm256_srai_epi16(_mm256_shuffle_epi8((__m256i)four, _mm256_add_epi8(where, lanes)), 8);
#elif defined(__aarch64__)
    const int16x8_t twos = (int16x8_t)four;
    return (shorts)vmovl_s8((int8x8_t)vget_low_s16(place ? vuzp2q_s16(twos, twos) : vuzp1q_s16(twos, twos)));
#else
    shorts wide;
    for (int i = 0; i < 2 * WIDTH; i++) wide[i] = (int8_t)four[i / 2 * 4 + i % 2 + place];
    return wide;
#endif
}

/* Write four inputs of WIDTH rows, which are two pairs, to a panel. */
INLINED void put(bytes four, int16_t *panel) {
    *(shorts *)panel = widened(four, 0);
    *(shorts *)(panel + 2 * LANES) = widened(four, 2);
}

/* Widen a group of sixteen rows. */
INLINED void widen(int bits, const uint8_t *weight, int16_t *panel) {
    for (int chunk = 0; chunk < bits; chunk++)
        for (int half = 0; half < HALVES; half++) {
            const bytes packed = *(const bytes *)(weight + 4 * (chunk * LANES + half * WIDTH));
            int16_t *to = panel + 2 * (2 * chunk * LANES + half * WIDTH);
            if (bits == 8) {
                put(packed ^ 128, to);
            } else {
                put((packed & 15) - 8, to);
                put((packed >> 4) - 8, to + GROUP / 2 * LANES);
            }
        }
}

/* Widen a group of sixteen rows of a 2:4 weight, which spans two groups of inputs. */
INLINED void widen24(int bits, const uint8_t *weight, const uint8_t *places, int16_t *panel) {
    memset(panel, 0, 2 * GROUP * LANES * sizeof *panel);
    for (int value = 0; value < GROUP; value++) {
        const int chunk = value / 4, i = value % 4;
        for (int lane = 0; lane < LANES; lane++) {
            const int at = bits == 8 ? chunk : chunk % 4;
            const int byte = weight[4 * (at * LANES + lane) + i];
            const int q = bits == 8 ? byte - 128 : ((chunk < 4 ? byte & 15 : byte >> 4) - 8);
            const int place = places[4 * (chunk / 4 * LANES + lane) + chunk % 4] >> 2 * i & 3;
            const int k = 8 * chunk + 4 * (i / 2) + place;
            panel[(k / 2 * LANES + lane) * 2 + k % 2] = (int16_t)q;
        }
    }
}

#define LAST(n) case n: tile(p, n, wide, sixteen, column); break;

/* y (columns x outputs) = x (columns x inputs) W^T. `places` is NULL for a dense weight. `room` is a workspace of
   columns x inputs x 2 + columns x inputs / 32 x 4 + threads x inputs x 34 bytes. */
void blocked_quantized(int bits, int64_t columns, int64_t outputs, int64_t inputs, const uint8_t *weight,
                       const uint16_t *scales, const uint8_t *places, const float *x, void *room, float *y, int threads) {
    const int64_t groups = inputs / GROUP, stored = places ? groups / 2 : groups;
    int16_t *integers = room;
    float *x_scales = (float *)(integers + columns * inputs);
    char *panels = (char *)(x_scales + columns * groups);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t at = 0; at < columns * groups; at++) {
            int32_t q[GROUP];
            x_scales[at] = round_group(x + at * GROUP, q);
            for (int k = 0; k < GROUP; k++) integers[at * GROUP + k] = (int16_t)q[k];
        }
#pragma omp for schedule(static)
        for (int64_t sixteen = 0; sixteen < (outputs + LANES - 1) / LANES; sixteen++) {
            const int64_t whole = stored * LANES, size = LANES * GROUP * bits / 8;
            int16_t *panel = (int16_t *)(panels + omp_get_thread_num() * inputs * (2 * LANES + 4 * LANES / GROUP));
            float *wide = (float *)(panel + inputs * LANES);
            for (int64_t g = 0; g < stored; g++) {
                const uint8_t *from = weight + (sixteen * stored + g) * size;
                if (places) {
                    const uint8_t *where = places + (sixteen * stored + g) * LANES * GROUP / 4;
                    widen24(bits, from, where, panel + 2 * g * GROUP * LANES);
                } else if (bits == 8) {
                    widen(8, from, panel + g * GROUP * LANES);
                } else {
                    widen(4, from, panel + g * GROUP * LANES);
                }
                for (int half = 0; half < LANES; half += WIDTH) {
                    const floats scale = from_fp16(scales + sixteen * whole + g * LANES + half);
                    for (int part = 0; part < (places ? 2 : 1); part++)
                        *(floats *)(wide + ((places ? 2 : 1) * g + part) * LANES + half) = scale;
                }
            }
            const Product p = {groups, outputs, panel, integers, x_scales, y};
            int64_t column = 0;
            for (; column + TILE <= columns; column += TILE) tile(p, TILE, wide, sixteen, column);
            switch (columns - column) {
                LAST(1) LAST(2) LAST(3)
#if TILE > 4
                LAST(4) LAST(5) LAST(6) LAST(7)
#endif
            }
        }
    }
}
