/* Steps of LARS and LAMB on many tensors at once. Threads share blocks of entries, and tensors are processed in waves that
   fit the cache, so that the update of a wave reads from the cache what its norms have read from memory. */

#include <math.h>
#include <stdint.h>

enum {
    BLOCK = 8192,
    WAVE = 32, /* blocks of a wave, at least: 1 MB of fp32 for each list of tensors */
    LANES = 32 /* independent sums, enough to hide the latency of an addition */
};

/* The tensor that contains block b: first[k] <= b < first[k + 1]; by bisection from k to high. */
static inline int64_t tensor_of(int64_t b, int64_t k, int64_t high, const int64_t *first) {
    while (high - k > 1) {
        int64_t middle = (k + high) / 2;
        if (first[middle] <= b) k = middle;
        else high = middle;
    }
    return k;
}

/* One past the last tensor of the wave that begins with tensor k. */
static inline int64_t wave_end(int64_t k, int64_t n, const int64_t *first) {
    int64_t end = k + 1;
    while (end < n && first[end] - first[k] < WAVE) end++;
    return end;
}

static inline double norm_of(const double *partial, int64_t begin, int64_t end, int which) {
    double sum = 0;
    for (int64_t b = begin; b < end; b++) sum += partial[2 * b + which];
    return sqrt(sum);
}

static void squares(const float *x, const float *y, int64_t n, double *sums) {
    float xs[LANES] = {0}, ys[LANES] = {0}, x_sum = 0, y_sum = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int lane = 0; lane < LANES; lane++) xs[lane] += x[i + lane] * x[i + lane];
        for (int lane = 0; lane < LANES; lane++) ys[lane] += y[i + lane] * y[i + lane];
    }
    for (; i < n; i++) x_sum += x[i] * x[i], y_sum += y[i] * y[i];
    for (int lane = 0; lane < LANES; lane++) x_sum += xs[lane], y_sum += ys[lane];
    sums[0] = x_sum, sums[1] = y_sum;
}

static void step(float *restrict w, const float *restrict g, float *restrict v, int64_t n, float inner, float decay,
                 float outer, float momentum, int nesterov) {
    float d = inner * decay;
    if (nesterov) {
        for (int64_t i = 0; i < n; i++) {
            float now = inner * g[i] + d * w[i];
            v[i] = momentum * v[i] + now;
            w[i] -= outer * (momentum * v[i] + now);
        }
    } else {
        for (int64_t i = 0; i < n; i++) {
            v[i] = momentum * v[i] + (inner * g[i] + d * w[i]);
            w[i] -= outer * v[i];
        }
    }
}

/* A step of LARS on many tensors, for tensor k with

       ratio = trust |w| / (|g| + decay |w| + eps), at most `bound`; larc: min(ratio / rate, 1)
       v = momentum v + inner (g + decay w),  w = w - outer (nesterov: momentum v + inner (g + decay w) | v)

   where inner, outer are rate * ratio, 1 with the rate in the velocity, and else ratio, rate.
   Norms are sums of blocks in order, so nothing depends on the number of threads.

   first[k], n + 1 entries, is the number of blocks before tensor k. norms: 2 n norms, of weights and then of gradients,
   or null to compute them here. partial has room for two numbers a block. ratios (2 n) is written: the ratio of each
   tensor, and then that before `bound`. */
void lars_steps(int64_t n, const int64_t *sizes, const int64_t *first, float *const *weights,
                const float *const *gradients, float *const *velocities, const float *rates, const float *decays,
                const float *norms, const uint8_t *adapts, double *partial, float *ratios, double trust, double eps,
                double bound, int larc, int in_velocity, float momentum, int nesterov, int threads) {
    for (int64_t k = 0, end; k < n; k = end) {
        end = wave_end(k, n, first);
        if (!norms) {
#pragma omp parallel for schedule(static) num_threads(threads)
            for (int64_t b = first[k]; b < first[end]; b++) {
                int64_t at = tensor_of(b, k, end, first), begin = (b - first[at]) * BLOCK, left = sizes[at] - begin;
                if (adapts[at]) squares(weights[at] + begin, gradients[at] + begin, left < BLOCK ? left : BLOCK, partial + 2 * b);
            }
        }
        for (int64_t at = k; at < end; at++) {
            double ratio = 1, rate = rates[at];
            ratios[n + at] = 1;
            if (adapts[at]) {
                double w = norms ? norms[at] : norm_of(partial, first[at], first[at + 1], 0);
                double g = norms ? norms[n + at] : norm_of(partial, first[at], first[at + 1], 1);
                if (w > 0 && g > 0) ratio = trust * w / (g + decays[at] * w + eps);
                ratios[n + at] = ratio;
                if (ratio > bound) ratio = bound;
                if (larc) ratio = ratio < rate ? ratio / rate : 1;
            }
            ratios[at] = ratio;
        }
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t b = first[k]; b < first[end]; b++) {
            int64_t at = tensor_of(b, k, end, first), begin = (b - first[at]) * BLOCK, left = sizes[at] - begin;
            float inner = in_velocity ? rates[at] * ratios[at] : ratios[at], outer = in_velocity ? 1 : rates[at];
            step(weights[at] + begin, gradients[at] + begin, velocities[at] + begin, left < BLOCK ? left : BLOCK, inner,
                 decays[at], outer, momentum, nesterov);
        }
    }
}

enum { CHUNK = 1024 };

static void moments(const float *restrict w, const float *restrict g, float *restrict m, float *restrict v, int64_t n,
                    float beta1, float beta2, float slow, float root, float eps, float decay, double *sums) {
    float s[CHUNK];
    sums[0] = sums[1] = 0;
    for (int64_t begin = 0; begin < n; begin += CHUNK) {
        int64_t count = n - begin < CHUNK ? n - begin : CHUNK;
        for (int64_t i = begin; i < begin + count; i++) {
            m[i] = beta1 * m[i] + (1 - beta1) * g[i];
            v[i] = beta2 * v[i] + (1 - beta2) * g[i] * g[i];
            s[i - begin] = slow * m[i] / (sqrtf(v[i]) * root + eps) + decay * w[i];
        }
        double both[2];
        squares(w + begin, s, count, both);
        sums[0] += both[0], sums[1] += both[1];
    }
}

/* A step of LAMB on many tensors, for tensor k with the moving averages m and v of its gradient and of its square

       s = slow m / (root sqrt(v) + eps) + decay w,  ratio = |w| / |s|, at most `bound`,  w = w - rate ratio s

   where slow = 1 / (1 - beta1^t) and root = 1 / sqrt(1 - beta2^t) correct the bias of the
   averages. All other arguments are as for LARS. */
void lamb_steps(int64_t n, const int64_t *sizes, const int64_t *first, float *const *weights,
                const float *const *gradients, float *const *firsts, float *const *seconds, const float *rates,
                const float *decays, const float *slow, const float *root, const uint8_t *adapts, double *partial,
                float *ratios, float beta1, float beta2, float eps, double bound, int threads) {
    for (int64_t k = 0, end; k < n; k = end) {
        end = wave_end(k, n, first);
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t b = first[k]; b < first[end]; b++) {
            int64_t at = tensor_of(b, k, end, first), begin = (b - first[at]) * BLOCK, left = sizes[at] - begin;
            moments(weights[at] + begin, gradients[at] + begin, firsts[at] + begin, seconds[at] + begin,
                    left < BLOCK ? left : BLOCK, beta1, beta2, slow[at], root[at], eps, decays[at], partial + 2 * b);
        }
        for (int64_t at = k; at < end; at++) {
            double w = norm_of(partial, first[at], first[at + 1], 0), s = norm_of(partial, first[at], first[at + 1], 1);
            double ratio = adapts[at] && w > 0 && s > 0 ? w / s : 1;
            ratios[n + at] = ratio;
            ratios[at] = adapts[at] && ratio > bound ? bound : ratio;
        }
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t b = first[k]; b < first[end]; b++) {
            int64_t at = tensor_of(b, k, end, first), begin = (b - first[at]) * BLOCK, left = sizes[at] - begin;
            float *restrict w = weights[at] + begin;
            const float *restrict m = firsts[at] + begin, *restrict v = seconds[at] + begin;
            float by = rates[at] * ratios[at], fast = slow[at], r = root[at], decay = decays[at];
            for (int64_t i = 0, count = left < BLOCK ? left : BLOCK; i < count; i++)
                w[i] -= by * (fast * m[i] / (sqrtf(v[i]) * r + eps) + decay * w[i]);
        }
    }
}
