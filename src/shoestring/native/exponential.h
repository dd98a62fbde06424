/* e^x in each lane. The file that includes this includes fused.h first. */

typedef int32_t fused_ints __attribute__((vector_size(4 * FLOATS), aligned(4)));

/* e^x for x <= 0, to two units in the last place: 2^whole times a polynomial in the fraction (of Cephes' exp2f). */
static inline __attribute__((always_inline)) fused_floats exponential(fused_floats x) {
    const fused_floats none = {0};
    fused_floats t = x * 1.44269504f;
    t = (fused_floats)(((fused_ints)t & ~(t < -126.0f)) | ((fused_ints)(none - 126.0f) & (t < -126.0f))); /* NaN stays */
    const fused_floats rounder = none + 12582912.0f, whole = (t + rounder) - rounder, f = t - whole;
    fused_floats y = fused(none + 1.535336188319500e-4f, f, none + 1.339887440266574e-3f);
    y = fused(y, f, none + 9.618437357674640e-3f);
    y = fused(y, f, none + 5.550332471162809e-2f);
    y = fused(y, f, none + 2.402264791363012e-1f);
    y = fused(y, f, none + 6.931472028550421e-1f);
    y = fused(y, f, none + 1.0f);
    return y * (fused_floats)((__builtin_convertvector(whole, fused_ints) + 127) << 23);
}
