// A small decoder with fixed numbers through the forward of one instruction set: a prompt, then a tree behind it. Prints logits.
// Arguments: number type of the weights (round.h), head dim, threads.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "round.h"

extern "C" void FORWARD(const Model*, const Batch*, void*);
extern "C" int64_t SCRATCH(const Model*, const Batch*);

static int type;
static uint32_t state = 1;

static float number() {
  state = state * 1664525u + 1013904223u;
  return (state >> 8) / 8388608.0f - 1.0f;
}

static uint16_t half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void* room(size_t size) {
  size = (size + 63) / 64 * 64;
  return memset(aligned_alloc(64, size), 0, size);
}

static Linear linear(int64_t in, int64_t out) {
  Linear one{};
  one.in = (in + 31) / 32 * 32, one.out = (out + 15) / 16 * 16;
  char* weight = (char*)room(one.in * one.out * 4);
  if (type == INT8) {
    float* scale = (float*)room(one.out * 4);
    for (int64_t i = 0; i < one.out; ++i) scale[i] = 0.002f;
    one.scale = scale;
  }
  for (int64_t o = 0; o < out; ++o)
    for (int64_t i = 0; i < in; ++i) {
      const float x = number() * 0.2f;
      const int64_t panel = o / 16 * one.in * 16, at = panel + i / 2 * 32 + o % 16 * 2 + i % 2;
      if (type == FLOAT32) ((float*)weight)[panel + i * 16 + o % 16] = x;
      if (type == BFLOAT16) ((uint16_t*)weight)[at] = half(x);
      if (type == INT8) ((int8_t*)weight)[at] = (int8_t)(x * 500);
    }
  one.weight = weight;
  return one;
}

static float* gains(int64_t size) {
  float* found = (float*)room(size * 4);
  for (int64_t i = 0; i < size; ++i) found[i] = 1 + 0.1f * number();
  return found;
}

int main(int, char** arguments) {
  type = atoi(arguments[1]);
  const int64_t dim = atoi(arguments[2]), heads = 4, kv_heads = 2, hidden = 64, ffn = 96, vocab = 80, positions = 128;
  const int64_t prompt = 71, nodes = 12;
  Layer layers[2] = {};
  for (Layer& x : layers) {
    x.qkv = linear(hidden, (heads + 2 * kv_heads) * dim), x.attention_out = linear(heads * dim, hidden);
    x.gate_up = linear(hidden, 2 * ffn), x.down = linear(ffn, hidden);
    x.norm1 = gains(hidden), x.norm2 = gains(hidden), x.q_norm = gains(dim), x.k_norm = gains(dim);
  }
  float *embedding = (float*)room(vocab * hidden * 4), *rope = (float*)room(positions * dim * 4);
  for (int64_t i = 0; i < vocab * hidden; ++i) {
    const float x = number();
    if (type == FLOAT32) embedding[i] = x;
    else ((uint16_t*)embedding)[i] = half(x);
  }
  for (int64_t p = 0; p < positions; ++p)
    for (int64_t i = 0; i < dim / 2; ++i) {
      const double angle = p * pow(10000.0, -2.0 * i / dim);
      rope[p * dim + i] = cos(angle), rope[p * dim + dim / 2 + i] = sin(angle);
    }
  Model m{};
  m.layers = layers, m.num_layers = 2, m.head = linear(hidden, vocab), m.final_norm = gains(hidden), m.embedding = embedding, m.rope = rope;
  m.hidden = m.embed_size = hidden, m.heads = heads, m.kv_heads = kv_heads, m.head_dim = dim, m.intermediate = ffn;
  m.weights = type, m.features = type == FLOAT32 ? FLOAT32 : BFLOAT16, m.block = 1, m.eps = 1e-6f, m.scale = 1 / sqrtf(dim);
  int64_t tokens[positions], at[positions], rows[positions], table[positions], cu[2] = {0, prompt}, context[1] = {0};
  uint8_t ancestors[nodes * nodes] = {};
  for (int64_t i = 0; i < positions; ++i) tokens[i] = i * 7 % vocab, at[i] = i, rows[i] = table[i] = i * 5 % positions;
  Batch b{};
  b.token_ids = tokens, b.positions = at, b.out_rows = rows, b.cu_rows = cu, b.context_lens = context, b.slot_table = table;
  b.pool = room(2 * positions * 2 * kv_heads * dim * 4), b.logits = (float*)room(positions * m.head.out * 4);
  b.num_requests = 1, b.slot_stride = positions, b.logit_stride = m.head.out, b.pool_rows = positions, b.tail = -1;
  b.num_threads = atoi(arguments[3]);
  const auto run = [&](int64_t num_rows) {
    b.num_rows = b.num_logits = num_rows;
    FORWARD(&m, &b, room(SCRATCH(&m, &b) + 64));
    for (int64_t r = 0; r < num_rows; ++r)
      for (int64_t v = 0; v < vocab; ++v) printf("%.6g\n", b.logits[r * m.head.out + v]);
  };
  run(prompt);
  for (int64_t r = 0; r < nodes; ++r) {
    int64_t depth = 0;
    ancestors[r * nodes + r] = 1;
    for (int64_t above = r; above; ++depth) above = (above - 1) / 2, ancestors[r * nodes + above] = 1;
    at[r] = prompt + depth, rows[r] = table[prompt + r], tokens[r] = (r * 11 + 3) % vocab;
  }
  cu[1] = nodes, context[0] = prompt, b.ancestors = ancestors, b.ancestor_stride = nodes;
  run(nodes);
}
