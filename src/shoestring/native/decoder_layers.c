/* The layers of a decoder over few tokens, as in decoding, in one call: norms, products, rotation, cache, attention, gates
   and residual additions. Between these operations there are only microseconds, where a framework spends as long on the
   operators of a layer as the layer's products take.

   A layer is y = x + Out(Attention(norm(x))), then y + Down(act(Gate(norm(y))) Up(norm(y))), optionally with norms of
   queries and keys by head, and with norms of what is added to x. Products and attention are the functions of the other
   files, so each row of x gives the same bits as beside other rows. Everything else is fp32, for bf16 layers too.

   Shapes: N = rows x tokens rows of x, C model width, H query heads, K key/value heads, D width of a head, F hidden width. */

#include <math.h>

#include "dense.h"
#include "exponential.h"

/* All fields have eight bytes, as in decoder_layers.py. A pointer is null if there is no such tensor. */

typedef struct {
    void (*dense)(int bf16, int64_t columns, int64_t outputs, int64_t inputs, const void *weight, const void *x, void *y,
                  int threads);
    void (*quantized[2])(int bits, int64_t columns, int64_t outputs, int64_t inputs, const void *weight, const void *scales,
                         const void *places, const float *x, void *room, float *y, int threads); /* few rows, many rows */
    void (*attention)(int bf16, int64_t rows, int64_t heads, int64_t kv_heads, int64_t queries, int64_t width,
                      int64_t window, const void *q, const void *k, const void *v, int64_t row_stride, int64_t head_stride,
                      int64_t stride, const int64_t *positions, int64_t positions_stride, void *y, int threads);
    void (*low_rank)(int bf16, int64_t groups, const void *group, const int64_t *rows, int64_t batch, int64_t tokens,
                     int64_t inputs, int64_t outputs, const void *weight, const void *x, void *y, float *low, int threads);
} Kernels;

typedef struct { /* y = x W^T + bias, and low-rank products of some rows; see lowrank_rows.c */
    int64_t bits, outputs, inputs, few; /* few: largest number of rows for the first function of `quantized` */
    int64_t groups;
    const void *weight, *scales, *places, *bias, *group;
    const int64_t *rows;
} Linear;

typedef struct { /* x w / rms(x); a null weight leaves x as it is */
    double eps, offset; /* offset: added to the weight */
    const void *weight;
} Norm;

typedef struct {
    int64_t window;         /* positions that are attended to; 0 for all */
    int64_t skipped[2];     /* whether attention and feed-forward only scale the stream, */
    double ratio[2];        /* by this */
    const float *cos, *sin; /* positions x rotated / 2; null for a layer without rotation */
    void *k, *v;            /* caches of K heads */
    Norm attention_norm, q_norm, k_norm, attention_end, mlp_norm, mlp_end;
    Linear qkv[3], out, gate_up[2], down; /* qkv and gate_up: one that has all rows in order, or one for each */
} Layer;

typedef struct {
    int64_t layers, width, heads, kv_heads, head_width, rotated, hidden;
    int64_t tanh_gelu;  /* the activation: GELU by tanh, or SiLU */
    int64_t norm_whole; /* whether a norm of queries or keys is over all heads together */
    int64_t bf16;       /* type of the cache, and of weights of 16 bits, biases and norms */
    double scale;       /* of the scores of attention, times the square root of D */
    const Kernels *kernels;
    const Layer *layer;
} Decoder;

typedef struct {
    int64_t rows, tokens, threads;
    int64_t positions_stride;                /* 0 if all rows have the same positions */
    int64_t row_stride, head_stride, stride; /* of the caches, in numbers */
    const int64_t *positions;                /* rows x tokens */
    float *x;                                /* N x C; replaced by the last layer's output */
    float *normed, *q, *k, *v, *turned, *mixed, *gate, *up; /* workspaces of N rows */
    void *narrow[2]; /* of N rows of the widest input, and of the widest output, in bf16 */
    void *room;      /* of the products with quantised weights */
    float *low;      /* of low-rank products */
} Pass;

INLINED float one(const void *p, int64_t at, int64_t bf16) {
    if (!bf16) return ((const float *)p)[at];
    const uint32_t bits = (uint32_t)((const uint16_t *)p)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINED void put(void *p, int64_t at, float value, int64_t bf16) {
    if (bf16)
        ((uint16_t *)p)[at] = rounded(value);
    else
        ((float *)p)[at] = value;
}

static void norm(const Norm *n, const float *x, int64_t width, float *y, int64_t bf16) {
    floats squares = {0};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const floats v = *(const floats *)(x + i);
        squares = fused(v, v, squares);
    }
    float sum = total(squares);
    for (; i < width; i++) sum += x[i] * x[i];
    const float inverse = 1 / sqrtf(sum / (float)width + (float)n->eps), offset = (float)n->offset;
    for (i = 0; i < width; i++) y[i] = x[i] * inverse * (one(n->weight, i, bf16) + offset);
}

/* y (N x outputs) = x (N x inputs) W^T + bias. */
static void linear(const Decoder *d, const Pass *p, const Linear *l, const float *x, float *y) {
    const int64_t count = p->rows * p->tokens;
    const int threads = (int)p->threads;
    if (l->bits == 16) {
        uint16_t *narrow = p->narrow[0], *out = p->narrow[1];
        for (int64_t i = 0; i < count * l->inputs; i++) narrow[i] = rounded(x[i]);
        if (l->groups)
            d->kernels->low_rank(1, l->groups, l->group, l->rows, p->rows, p->tokens, l->inputs, l->outputs, l->weight, narrow,
                                 out, p->low, threads);
        else
            d->kernels->dense(1, count, l->outputs, l->inputs, l->weight, narrow, out, threads);
        for (int64_t i = 0; i < count * l->outputs; i++) y[i] = one(out, i, 1);
    } else if (l->bits == 32 && !l->groups) {
        d->kernels->dense(0, count, l->outputs, l->inputs, l->weight, x, y, threads);
    } else {
        if (l->bits != 32)
            d->kernels->quantized[count > l->few]((int)l->bits, count, l->outputs, l->inputs, l->weight, l->scales, l->places,
                                                  x, p->room, y, threads);
        if (l->groups)
            d->kernels->low_rank(0, l->groups, l->group, l->rows, p->rows, p->tokens, l->inputs, l->outputs,
                                 l->bits == 32 ? l->weight : NULL, x, y, p->low, threads);
    }
    if (l->bias)
        for (int64_t n = 0; n < count; n++)
            for (int64_t i = 0; i < l->outputs; i++) y[n * l->outputs + i] += one(l->bias, i, d->bf16);
}

/* Products with parts of a layer: writes to each of `parts` where its rows begin, and to `stride` how far apart. */
static void linears(const Decoder *d, const Pass *p, const Linear *l, int count, const int64_t *sizes, const float *x,
                    float **parts, int64_t *strides) {
    if (l[1].bits) {
        for (int i = 0; i < count; i++) linear(d, p, l + i, x, parts[i]), strides[i] = sizes[i];
        return;
    }
    linear(d, p, l, x, parts[0]);
    for (int i = 1; i < count; i++) parts[i] = parts[i - 1] + sizes[i - 1];
    for (int i = 0; i < count; i++) strides[i] = l[0].outputs;
}

/* Norm of a head, and its rotation by the angles of a position: pairs (i, i + rotated / 2), as Llama's. */
static void turn(const Decoder *d, const Layer *l, const Norm *of_head, const float *x, int64_t position, float scale,
                 void *y, int64_t at) {
    const int64_t width = d->head_width, half = d->rotated / 2;
    float own[width];
    if (of_head->weight && !d->norm_whole) {
        norm(of_head, x, width, own, d->bf16);
        x = own;
    }
    if (!l->cos) {
        for (int64_t i = 0; i < width; i++) put(y, at + i, x[i] * scale, d->bf16);
        return;
    }
    const float *cos = l->cos + position * half, *sin = l->sin + position * half;
    for (int64_t i = 0; i < half; i++) {
        put(y, at + i, (x[i] * cos[i] - x[i + half] * sin[i]) * scale, d->bf16);
        put(y, at + i + half, (x[i + half] * cos[i] + x[i] * sin[i]) * scale, d->bf16);
    }
    for (int64_t i = 2 * half; i < width; i++) put(y, at + i, x[i] * scale, d->bf16);
}

static void attention(const Decoder *d, const Pass *p, const Layer *l) {
    const int64_t width = d->head_width, queries = d->heads * width, keys = d->kv_heads * width;
    float *parts[3] = {p->q, p->k, p->v};
    const int64_t sizes[3] = {queries, keys, keys};
    int64_t strides[3];
    linears(d, p, l->qkv, 3, sizes, p->normed, parts, strides);
    for (int64_t n = 0; n < p->rows * p->tokens; n++) {
        const int64_t row = n / p->tokens, position = p->positions[row * p->positions_stride + n % p->tokens];
        float *q = parts[0] + n * strides[0], *k = parts[1] + n * strides[1];
        if (d->norm_whole && l->q_norm.weight) norm(&l->q_norm, q, queries, q, d->bf16);
        if (d->norm_whole && l->k_norm.weight) norm(&l->k_norm, k, keys, k, d->bf16);
        for (int64_t h = 0; h < d->heads; h++)
            turn(d, l, &l->q_norm, q + h * width, position, (float)d->scale, p->turned, n * queries + h * width);
        for (int64_t h = 0; h < d->kv_heads; h++) {
            const int64_t at = row * p->row_stride + h * p->head_stride + position * p->stride;
            turn(d, l, &l->k_norm, k + h * width, position, 1, l->k, at);
            for (int64_t i = 0; i < width; i++) put(l->v, at + i, parts[2][n * strides[2] + h * width + i], d->bf16);
        }
    }
    void *mixed = d->bf16 ? p->narrow[0] : p->mixed;
    d->kernels->attention((int)d->bf16, p->rows, d->heads, d->kv_heads, p->tokens, width, l->window, p->turned, l->k, l->v,
                          p->row_stride, p->head_stride, p->stride, p->positions, p->positions_stride, mixed,
                          (int)p->threads);
    if (d->bf16)
        for (int64_t i = 0; i < p->rows * p->tokens * queries; i++) p->mixed[i] = one(mixed, i, 1);
}

INLINED floats sigmoid(floats x) {
    const fused_ints negative = x < 0;
    const floats e = exponential((floats)(((fused_ints)x & negative) | ((fused_ints)-x & ~negative))), whole = e + 1;
    return (floats)(((fused_ints)(e / whole) & negative) | ((fused_ints)(1 / whole) & ~negative));
}

/* gate = act(gate) up, in one row. */
static void activate(const Decoder *d, float *gate, const float *up, float *to) {
    for (int64_t i = 0; i < d->hidden; i += LANES) {
        const int64_t left = d->hidden - i < LANES ? d->hidden - i : LANES;
        const floats g = some_floats(gate + i, left), u = some_floats(up + i, left);
        const floats inner = d->tanh_gelu ? 1.5957691216f * (g + 0.044715f * g * g * g) : g;
        const floats y = g * sigmoid(inner) * u;
        memcpy(to + i, &y, 4 * left);
    }
}

static void feed_forward(const Decoder *d, const Pass *p, const Layer *l) {
    float *parts[2] = {p->gate, p->up};
    const int64_t sizes[2] = {d->hidden, d->hidden};
    int64_t strides[2];
    linears(d, p, l->gate_up, 2, sizes, p->normed, parts, strides);
    for (int64_t n = 0; n < p->rows * p->tokens; n++) /* rows become denser, so none is written before it is read */
        activate(d, parts[0] + n * strides[0], parts[1] + n * strides[1], p->gate + n * d->hidden);
}

/* Add the product of x with an output layer to the residual stream. */
static void add(const Decoder *d, const Pass *p, const Linear *out, const Norm *end, const float *x) {
    linear(d, p, out, x, p->normed);
    for (int64_t n = 0; n < p->rows * p->tokens; n++) {
        float *more = p->normed + n * d->width, *stream = p->x + n * d->width;
        if (end->weight) norm(end, more, d->width, more, d->bf16);
        for (int64_t i = 0; i < d->width; i++) stream[i] += more[i];
    }
}

static void enter(const Decoder *d, const Pass *p, const Norm *before) {
    for (int64_t n = 0; n < p->rows * p->tokens; n++) {
        const float *x = p->x + n * d->width;
        if (before->weight)
            norm(before, x, d->width, p->normed + n * d->width, d->bf16);
        else
            memcpy(p->normed + n * d->width, x, 4 * d->width);
    }
}

static void scale(const Decoder *d, const Pass *p, float ratio) {
    for (int64_t i = 0; i < p->rows * p->tokens * d->width; i++) p->x[i] *= ratio;
}

void decoder_layers(const Decoder *d, const Pass *p) {
    for (int64_t i = 0; i < d->layers; i++) {
        const Layer *l = d->layer + i;
        if (l->skipped[0]) {
            scale(d, p, (float)l->ratio[0]);
        } else {
            enter(d, p, &l->attention_norm);
            attention(d, p, l);
            add(d, p, &l->out, &l->attention_end, p->mixed);
        }
        if (l->skipped[1]) {
            scale(d, p, (float)l->ratio[1]);
        } else {
            enter(d, p, &l->mlp_norm);
            feed_forward(d, p, l);
            add(d, p, &l->down, &l->mlp_end, p->gate);
        }
    }
}
