/* fused(a, b, c): a * b + c in each lane, rounded once where the processor has an instruction for that.

   It is written out, and the compiler's own contraction is off, because a compiler fuses in one loop and not in another
   (GCC avoids chains of fused operations when it tunes for Zen): the sums of a row would then depend on how many rows are
   beside it. The file that includes this defines FLOATS, the number of lanes, first. */

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

typedef float fused_floats __attribute__((vector_size(4 * FLOATS), aligned(4)));

static inline __attribute__((always_inline)) fused_floats fused(fused_floats a, fused_floats b, fused_floats c) {
#if FLOATS == 16 && defined(__AVX512F__)
    return (fused_floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif FLOATS == 8 && defined(__AVX2__) && defined(__FMA__)
    return (fused_floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif FLOATS == 4 && defined(__aarch64__)
    return (fused_floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__FP_FAST_FMAF)
    for (int lane = 0; lane < FLOATS; lane++) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return c;
#else
    return a * b + c;
#endif
}
