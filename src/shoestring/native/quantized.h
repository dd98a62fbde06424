/* What the products with weights of 8 and 4 bits share: vectors, and how inputs are rounded to integers. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions only */
#define INLINED static inline __attribute__((always_inline))

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WIDE
#endif

#define GROUP 32
#define LANES 16 /* rows that are interleaved */
#if defined(WIDE)
#define WIDTH 16 /* rows in a vector */
#elif defined(__aarch64__)
#define WIDTH 4
#else
#define WIDTH 8
#endif
#define FLOATS WIDTH
#include "fused.h"

#define LARGEST (127 * 256) /* largest integer of an input, so that both of its bytes fit a signed byte */

typedef float floats __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef uint8_t bytes __attribute__((vector_size(4 * WIDTH), aligned(4)));

INLINED floats from_fp16(const uint16_t *bits) {
#if defined(WIDE)
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)bits));
#elif defined(__F16C__)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)bits));
#elif defined(__aarch64__)
    return (floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(bits)));
#else
    floats wide;
    for (int lane = 0; lane < WIDTH; lane++) { /* rebias the exponent by a product, which also normalizes subnormals */
        const uint32_t sign = (uint32_t)(bits[lane] & 0x8000) << 16, rest = (uint32_t)(bits[lane] & 0x7fff) << 13;
        float value;
        memcpy(&value, &rest, sizeof value);
        value *= 0x1p112f;
        if (rest >= 0x7c00u << 13) value = rest > 0x7c00u << 13 ? NAN : INFINITY;
        wide[lane] = sign ? -value : value;
    }
    return wide;
#endif
}

/* Round a group of inputs to integers q of 16 bits, and return their scale: x = scale q. A group with an entry that is not
   finite becomes zeros with a scale of NaN, so every output is NaN, as in a dense product with a NaN; infinity becomes NaN,
   too. */
INLINED float round_group(const float *x, int32_t *q) {
    float largest = 0;
    int wrong = 0;
    for (int k = 0; k < GROUP; k++) {
        largest = fabsf(x[k]) > largest ? fabsf(x[k]) : largest;
        wrong |= !(fabsf(x[k]) <= 0x1.fffffep127f);
    }
    if (wrong) {
        memset(q, 0, GROUP * sizeof *q);
        return NAN;
    }
    const float inverse = largest > 0x1p-100f ? LARGEST / largest : 0; /* the inverse of smaller values may overflow */
    for (int k = 0; k < GROUP; k++) q[k] = (int32_t)rintf(x[k] * inverse);
    return largest / LARGEST;
}
