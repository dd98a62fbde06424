/* y = x W^T for dense weights and few rows of x: see dense.h. */

#include "dense.h"

void skinny_dense(int bf16, int64_t columns, int64_t outputs, int64_t inputs, const void *weight, const void *x, void *y, int threads) {
    const Product p = {inputs, outputs, weight, x, y};
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t part = 0; part < parts_of(outputs); part++) dense_part(p, bf16, columns, part);
}
