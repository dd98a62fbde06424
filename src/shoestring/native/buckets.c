/* Quantises gradients in buckets that share a scale: x ~ level * scale. Levels are integers from -127 to 127 (8 bits) or
   -7 to 7 (4 bits), or -1 and 1 times the mean magnitude (1 bit). One pass over memory adds the residuals of error
   feedback, encodes a bucket and stores the new errors.

   On the wire an 8-bit level is a byte, a 4-bit level has 7 added, and a 1-bit level is 1 if positive. A bucket is cut
   into as many equal planes as a byte holds codes; a byte holds one code of each plane, the first plane's in its low
   bits.

   Tensor k has `sizes[k]` entries, in buckets `starts[k]` to `starts[k + 1]`, the last of which is padded with zeros.
   Buckets from `starts[tensors]` on are unused. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16 };

typedef struct {
    int64_t tensors, bucket;
    const int64_t *sizes, *starts;
    float *const *flats;     /* gradients; with `residuals`, replaced by the errors of compression */
    float *const *residuals; /* error feedback of earlier exchanges; NULL without it */
} Buckets;

typedef struct {
    float *x, *residual;
    int64_t count;
} Entries;

/* The entries of bucket b; empty for an unused bucket. */
static Entries entries_of(const Buckets *all, int64_t b) {
    if (b >= all->starts[all->tensors]) return (Entries){0};
    int64_t k = 0, high = all->tensors;
    while (high - k > 1) {
        const int64_t middle = (k + high) / 2;
        if (all->starts[middle] <= b) k = middle;
        else high = middle;
    }
    const int64_t begin = (b - all->starts[k]) * all->bucket, left = all->sizes[k] - begin;
    const int64_t count = left < all->bucket ? left : all->bucket;
    return (Entries){all->flats[k] + begin, all->residuals ? all->residuals[k] + begin : 0, count};
}

static void read_sums(Entries from, float *restrict x) {
    if (from.residual)
        for (int64_t i = 0; i < from.count; i++) x[i] = from.x[i] + from.residual[i];
    else
        memcpy(x, from.x, (size_t)from.count * sizeof *x);
}

/* The mean magnitude; not finite if an entry is not. */
static float mean_magnitude(const float *x, int64_t n) {
    float sums[LANES] = {0}, total = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += fabsf(x[i + lane]);
    for (int lane = 0; lane < LANES; lane++) total += sums[lane];
    for (; i < n; i++) total += fabsf(x[i]);
    return n ? total / (float)n : 0;
}

/* The largest magnitude; not finite if an entry is not. */
static float largest(const float *x, int64_t n) {
    float most[LANES] = {0}, wrong[LANES] = {0}, maximum = 0, bad = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            const float size = fabsf(x[i + lane]);
            most[lane] = size > most[lane] ? size : most[lane];
            wrong[lane] += x[i + lane] * 0; /* NaN if the entry is not finite; comparisons with NaN are false */
        }
    for (int lane = 0; lane < LANES; lane++) {
        maximum = most[lane] > maximum ? most[lane] : maximum;
        bad += wrong[lane];
    }
    for (; i < n; i++) {
        maximum = fabsf(x[i]) > maximum ? fabsf(x[i]) : maximum;
        bad += x[i] * 0;
    }
    return maximum + bad;
}

static int64_t bytes_of(int64_t bucket, int bits) { return (bucket * bits + 7) / 8; }

static void pack(const int8_t *restrict levels, int64_t bucket, int bits, uint8_t *restrict codes) {
    const int64_t width = bytes_of(bucket, bits);
    if (bits == 8) {
        memcpy(codes, levels, (size_t)bucket);
        return;
    }
    if (bits == 4) {
        for (int64_t i = 0; i < bucket - width; i++)
            codes[i] = (uint8_t)((levels[i] + 7) | (levels[width + i] + 7) << 4);
        if (bucket % 2) codes[width - 1] = (uint8_t)(levels[width - 1] + 7);
        return;
    }
    memset(codes, 0, (size_t)width);
    for (int64_t first = 0, shift = 0; first < bucket; first += width, shift++) {
        const int64_t count = bucket - first < width ? bucket - first : width;
        for (int64_t i = 0; i < count; i++) codes[i] |= (uint8_t)((levels[first + i] > 0) << shift);
    }
}

static void unpack(const uint8_t *restrict codes, int64_t bucket, int bits, int8_t *restrict levels) {
    const int64_t width = bytes_of(bucket, bits);
    if (bits == 8) {
        memcpy(levels, codes, (size_t)bucket);
        return;
    }
    for (int64_t first = 0, shift = 0; first < bucket; first += width, shift += bits) {
        const int64_t count = bucket - first < width ? bucket - first : width;
        if (bits == 4)
            for (int64_t i = 0; i < count; i++) levels[first + i] = (int8_t)((codes[i] >> shift & 15) - 7);
        else
            for (int64_t i = 0; i < count; i++) levels[first + i] = (int8_t)((codes[i] >> shift & 1) * 2 - 1);
    }
}

/* Write the levels of x and return the scale. `noise`, 16-bit integers for stochastic rounding, shifts each level by less
   than a half; NULL rounds to nearest. */
static float encode(const float *restrict x, int64_t n, int64_t bucket, int bits, const int16_t *restrict noise,
                    int8_t *restrict levels) {
    if (bits == 1) {
        for (int64_t i = 0; i < n; i++) levels[i] = x[i] >= 0 ? 1 : -1;
        memset(levels + n, 1, (size_t)(bucket - n));
        return mean_magnitude(x, n);
    }
    const int top = bits == 8 ? 127 : 7;
    const float scale = largest(x, n) / (float)top;
    const float inverse = scale > 0 && isfinite(scale) ? 1 / scale : 0;
    memset(levels + n, 0, (size_t)(bucket - n));
    if (!(inverse > 0) || !isfinite(inverse)) {
        memset(levels, 0, (size_t)n);
        return scale;
    }
    for (int64_t i = 0; i < n; i++) {
        float q = x[i] * inverse;
        if (noise) q = (q + (float)noise[i] * 0x1p-16f) + 0x1p-17f;
        q = rintf(q);
        q = q < (float)-top ? (float)-top : q > (float)top ? (float)top : q;
        levels[i] = (int8_t)q;
    }
    return scale;
}

static void keep_errors(Entries to, const float *restrict x, const int8_t *restrict levels, float scale, float times) {
    for (int64_t i = 0; i < to.count; i++) to.x[i] = (x[i] - (float)levels[i] * scale) * times;
}

/* Encode buckets `first` to `last` as codes (last - first, bytes) and scales. If `codes` is NULL, only their largest
   magnitudes are written, to `scales`. */
void encode_buckets(int64_t tensors, int64_t bucket, const int64_t *sizes, const int64_t *starts, float *const *flats,
                    float *const *residuals, int64_t first, int64_t last, int bits, const int16_t *noise,
                    uint8_t *codes, float *scales, int threads) {
    const Buckets all = {tensors, bucket, sizes, starts, flats, residuals};
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t b = first; b < last; b++) {
        const Entries entries = entries_of(&all, b);
        const int64_t at = b - first;
        float x[bucket];
        int8_t levels[bucket];
        read_sums(entries, x);
        if (!codes) {
            scales[at] = largest(x, entries.count);
            continue;
        }
        scales[at] = encode(x, entries.count, bucket, bits, noise ? noise + at * bucket : 0, levels);
        pack(levels, bucket, bits, codes + at * bytes_of(bucket, bits));
        if (residuals) keep_errors(entries, x, levels, scales[at], 1);
    }
}

/* Encode the averages of buckets over ranks. The codes of a rank (last - first, bytes) lie `code_stride` bytes after
   those of the rank before, and its scales `scale_stride` apart; rank `own` is this one, whose exact entries are used
   instead. The errors are those of the sum over the ranks. */
void encode_averages(int64_t tensors, int64_t bucket, const int64_t *sizes, const int64_t *starts, float *const *flats,
                     float *const *residuals, int64_t first, int64_t last, int bits, const int16_t *noise,
                     uint8_t *codes, float *scales, int threads, int64_t ranks, int64_t own, const uint8_t *rank_codes,
                     int64_t code_stride, const float *rank_scales, int64_t scale_stride) {
    const Buckets all = {tensors, bucket, sizes, starts, flats, residuals};
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t b = first; b < last; b++) {
        const Entries entries = entries_of(&all, b);
        const int64_t at = b - first;
        float x[bucket], sum[bucket];
        int8_t levels[bucket];
        read_sums(entries, x);
        memset(sum, 0, sizeof sum);
        for (int64_t rank = 0; rank < ranks; rank++) {
            const float scale = rank_scales[rank * scale_stride + at];
            if (rank == own) {
                for (int64_t i = 0; i < entries.count; i++) sum[i] += x[i];
                continue;
            }
            unpack(rank_codes + rank * code_stride + at * bytes_of(bucket, bits), bucket, bits, levels);
            for (int64_t i = 0; i < entries.count; i++) sum[i] += (float)levels[i] * scale;
        }
        for (int64_t i = 0; i < entries.count; i++) sum[i] /= (float)ranks;
        scales[at] = encode(sum, entries.count, bucket, bits, noise ? noise + at * bucket : 0, levels);
        pack(levels, bucket, bits, codes + at * bytes_of(bucket, bits));
        if (residuals) keep_errors(entries, sum, levels, scales[at], (float)ranks);
    }
}

/* Decode codes (rows, buckets of a row, bytes) and scales, with strides between rows as above. All ranks decode the same
   codes with one rounding, so their results are equal bit by bit. First the errors, which were stored in place of the
   gradients, become the residuals. */
void decode_buckets(int64_t tensors, int64_t bucket, const int64_t *sizes, const int64_t *starts, float *const *flats,
                    float *const *residuals, int64_t rows, int64_t row, int bits, const uint8_t *codes,
                    int64_t code_stride, const float *scales, int64_t scale_stride, int threads) {
    const Buckets all = {tensors, bucket, sizes, starts, flats, residuals};
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t b = 0; b < rows * row; b++) {
        const Entries to = entries_of(&all, b);
        int8_t levels[bucket];
        const float scale = scales[b / row * scale_stride + b % row];
        if (to.residual) memcpy(to.residual, to.x, (size_t)to.count * sizeof *to.x);
        unpack(codes + b / row * code_stride + b % row * bytes_of(bucket, bits), bucket, bits, levels);
        for (int64_t i = 0; i < to.count; i++) to.x[i] = (float)levels[i] * scale;
    }
}
