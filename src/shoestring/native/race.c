/* Samples tokens by an exponential race: the argmax of p[i] / E_i with E_i exponential has the distribution p.

   The random numbers are those of decode/randomness.py: E_i = -log(u_i), u_i a hash of the key and of i. Logarithms cost
   more than the rest, and most are avoided: -log(u) >= 1 - u, so a token that does not win with 1 - u does not win. */

#include <math.h>
#include <stdint.h>

static inline uint64_t hash(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* p is (rows, tokens), float or double; keys (rows); first (rows) is written. Of equal tokens the first wins; NaN never wins. */
void race(int is_double, int64_t rows, int64_t tokens, const void *p, const uint64_t *keys, int64_t *first) {
    for (int64_t row = 0; row < rows; row++) {
        double best = -1.0;
        first[row] = 0;
        for (int64_t token = 0; token < tokens; token++) {
            int64_t at = row * tokens + token;
            double rate = is_double ? ((const double *)p)[at] : (double)((const float *)p)[at];
            uint64_t bits = hash(keys[row] + (uint64_t)(token + 1) * 0x9E3779B97F4A7C15u) >> 11;
            double u = ((double)bits + 0.5) * 0x1p-53;
            if (!(rate > best * (1.0 - u))) continue;
            double speed = rate / -log(u);
            if (speed > best) best = speed, first[row] = token;
        }
    }
}
