// Round: the records that Python fills and every instruction set's code reads. Plain C layout, 8-byte members first.
// Shape legend: N packed rows, B requests, M rows with logits, W widest tree, R pool rows, L layers, H/Hkv query/KV heads,
// Dh head dim, Dm hidden size, I intermediate size, V vocabulary, P positions, m tapped layers; of a drafter: E width of the
// embedding (else Dm), C rows of target features, F their width.
#pragma once
#include <stdint.h>

enum NumberType { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

// A packed weight (out, in): panels of 16 outputs, each [in / 2][16][2] (bfloat16, int8) or [in][16] (float32).
struct Linear {
  const void* weight;
  const float* scale;  // (out,) of int8 weights; null = 1
  int64_t in;          // a multiple of 32, inputs beyond the layer's are zeros
  int64_t out;         // a multiple of 16
};

// What versions of a layer add to its output: y += up @ (down @ x), packed as weights are, version after version. Null: nothing.
struct Delta {
  const void* down;  // (versions, rank, in)
  const void* up;    // (versions, out, rank)
};

struct Layer {
  struct Linear qkv, attention_out, gate_up, down;  // gate_up: panels of gate and up in turn
  const float *norm1, *norm2;                       // (Dm,)
  const float *q_norm, *k_norm;                     // (Dh,) or null
  const float* embed_norm;                          // (E,): qkv reads [normed embedding of the token, normed row]; or null
  struct Linear shift;                              // of [row, row before it in its block] before the layer; or null
  int64_t tap;                                      // bit j: its output is the j-th tapped hidden state
  int64_t norms_stream;                             // whether the attention's output is added to the normed row
  struct Delta attention_out_delta, gate_up_delta, down_delta;
};

struct Model {
  const struct Layer* layers;
  struct Linear head;
  struct Linear condition;    // of rows of features: what rows of the stream begin with; or what is normed for
  struct Linear context_kv;   // keys and values of all layers, layer by layer, which are written before the layers run
  const void* embedding;      // (V, E) in number type `features`
  const float *final_norm, *condition_norm;  // (Dm,)
  const float* rope;          // (P, Dh): cosines of Dh / 2 pairs, then sines
  int64_t num_layers, hidden, heads, kv_heads, head_dim, intermediate, num_taps, embed_size, feature_size;
  int64_t weights, features;  // number types: of the weights; of embedding, tapped states and features
  int64_t uses_tiles;         // products of bfloat16 and int8 weights by AMX
  int64_t delta_rank;         // of what versions add: a multiple of 32
  int64_t block;              // rows of a block, of a drafter: its pool has so many rows for each row of a table
  float eps, scale;           // scale: of attention scores
};

struct Batch {
  const int64_t *token_ids, *positions, *out_rows;  // (N,)
  float* stream;                                    // (N, Dm): rows begin with it and end in it; null: with token_ids
  const int64_t *cu_rows, *context_lens;            // (B + 1,), (B,)
  const int64_t* slot_table;                        // (., slot_stride)
  const int64_t* table_rows;                        // (B,) row of the table of each request; null: the request's own
  const int64_t *cu_keys, *key_rows;                // (B + 1,), pool rows of the keys behind a context; null: the rows' own
  const uint8_t* ancestors;                         // (N, ancestor_stride) of those keys, or null: causal inside the request
  const int64_t* logit_rows;                        // (M,) or null: all rows in order
  void* pool;                                       // (L, R, 2, Hkv, Dh): float32 beside float32 weights, else bfloat16
  float* logits;                                    // (M, logit_stride)
  void* tapped;                                     // (N, m * Dm) or null
  const void* features;                             // (C, F), or null
  const int64_t *feature_positions, *feature_rows;  // (C,) of the keys and values that `context_kv` makes; null: C = N
  const int64_t* deltas;                            // (B,) whose additions a request's rows get; negative: none; null: nobody's
  int64_t num_rows, num_requests, num_logits, slot_stride, ancestor_stride, logit_stride, pool_rows, num_threads;
  int64_t num_features;
  int64_t tail;  // rows of each request, its last ones, that go on in the last layer behind its K/V; negative: all
};

// The threads of a call (threads.cpp): `work(argument, thread, num_threads)` on each; `meet` waits for all of a call.
typedef void (*Work)(void* argument, int thread, int num_threads);
void run_on_threads(Work work, void* argument, int num_threads);
void meet(int num_threads);
