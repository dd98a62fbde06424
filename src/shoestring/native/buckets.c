/* Gradients in buckets that share a scale: x ~ level * scale, levels from -top to top, 127 or 7, or of one bit, -1 and 1
   times the mean magnitude. One pass over memory encodes a bucket, adds what earlier exchanges left out, and keeps what
   this one leaves out.

   A level of 8 bits travels as it is. Of 4 bits, 7 is added to it; of 1 bit, the bit says that it is positive. A bucket
   is cut into as many equal planes as a byte has codes; a byte has the codes of an entry of each, the first one's in its
   low bits.

   Tensor k has `sizes[k]` entries, in buckets `starts[k]` to `starts[k + 1]`, the last of which may be filled up with
   zeros; buckets from `starts[tensors]` on hold nothing. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16 };

typedef struct {
    int64_t tensors, bucket;
    const int64_t *sizes, *starts;
    float *const *flats;     /* gradients; with `residuals`, the errors of compression take their place */
    float *const *residuals; /* what earlier exchanges left out; NULL where nothing is kept */
} Buckets;

typedef struct {
    float *x, *residual;
    int64_t count;
} Entries;

/* The entries of bucket b; none of an unused one. */
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

/* The mean magnitude; not finite where an entry is not. */
static float mean_magnitude(const float *x, int64_t n) {
    float sums[LANES] = {0}, found = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += fabsf(x[i + lane]);
    for (int lane = 0; lane < LANES; lane++) found += sums[lane];
    for (; i < n; i++) found += fabsf(x[i]);
    return n ? found / (float)n : 0;
}

/* The largest magnitude; not finite where an entry is not. */
static float largest(const float *x, int64_t n) {
    float most[LANES] = {0}, wrong[LANES] = {0}, found = 0, bad = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            const float size = fabsf(x[i + lane]);
            most[lane] = size > most[lane] ? size : most[lane];
            wrong[lane] += x[i + lane] * 0; /* NaN where the entry is not finite, which no comparison tells */
        }
    for (int lane = 0; lane < LANES; lane++) {
        found = most[lane] > found ? most[lane] : found;
        bad += wrong[lane];
    }
    for (; i < n; i++) {
        found = fabsf(x[i]) > found ? fabsf(x[i]) : found;
        bad += x[i] * 0;
    }
    return found + bad;
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

/* Store the levels of x, and return the scale. `noise` of 16 bits moves each by less than a half, or is NULL. */
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

/* Codes (last - first, bytes) and scales of buckets; without `codes`, their largest magnitudes alone. */
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

/* Codes and scales of the averages of `ranks` sets of buckets: `theirs` (ranks, last - first, bytes), those of a rank
   `code_stride` bytes after those of the one before, with `their_scales`, `scale_stride` apart; but for this rank's,
   `own`, which are exact. Errors are those of the sum over the ranks. */
void encode_averages(int64_t tensors, int64_t bucket, const int64_t *sizes, const int64_t *starts, float *const *flats,
                     float *const *residuals, int64_t first, int64_t last, int bits, const int16_t *noise,
                     uint8_t *codes, float *scales, int threads, int64_t ranks, int64_t own, const uint8_t *theirs,
                     int64_t code_stride, const float *their_scales, int64_t scale_stride) {
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
            const float scale = their_scales[rank * scale_stride + at];
            if (rank == own) {
                for (int64_t i = 0; i < entries.count; i++) sum[i] += x[i];
                continue;
            }
            unpack(theirs + rank * code_stride + at * bytes_of(bucket, bits), bucket, bits, levels);
            for (int64_t i = 0; i < entries.count; i++) sum[i] += (float)levels[i] * scale;
        }
        for (int64_t i = 0; i < entries.count; i++) sum[i] /= (float)ranks;
        scales[at] = encode(sum, entries.count, bucket, bits, noise ? noise + at * bucket : 0, levels);
        pack(levels, bucket, bits, codes + at * bytes_of(bucket, bits));
        if (residuals) keep_errors(entries, sum, levels, scales[at], (float)ranks);
    }
}

/* Entries from codes (rows, buckets of a row, bytes) and scales, rows as far apart as above: one rounding, so that all
   ranks have the same bits. Before that the errors, which stood in the place of the entries, become the residuals. */
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
