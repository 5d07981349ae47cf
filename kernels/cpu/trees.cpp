// Trees: what a decoding round computes beside its forwards, on the host: trees of a proposal, the accepted paths, the rows
// that move, the score calibration. serving/trees specifies all of it in NumPy; the same numbers come out here, bit for bit
// (but for the calibration's exp and log, which differ in the last bit).
//
// Candidates of a request lie in one list, its root first; of equal scores the first one is the better, as there.
// Shape legend: B requests of the round, G requests of one drafter, F nodes of a proposal, S slots, K candidates of a slot,
// R rank classes, E slots with edges, W widest tree, N packed rows (roots included), L longest row table.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <vector>

// What a drafter proposes, contiguous.
struct Proposal {
  const int64_t* token_ids;    // (F, S, K)
  const float* logprobs;       // (F, S, K)
  const int64_t* widths;       // (F, S) or null
  const float* edge_logprobs;  // (F, S - 1, K, K) or null
  int64_t num_nodes, num_slots, num_candidates;
  int64_t vocab_size;  // negative: any token
};

// How trees grow from it.
struct Growth {
  const float* kappa;      // (2, G or 1, S, R) or null
  int64_t kappa_requests;  // G or 1
  int64_t is_product, max_nodes;
  int64_t bundle_width;  // 0: the heaviest nodes
};

// What was drawn at the packed rows: the tokens, or, where null, the first best logit of each row.
struct Draws {
  const int64_t* tokens;
  const float* logits;
  int64_t stride, vocab_size;
};

extern "C" int64_t available_isas();  // isa.cpp

enum Found { TAKEN = 0, EMPTY = 1, WRONG = 2 };

namespace {

constexpr int64_t RANK_CLASSES = 3;
constexpr float ABSENT = -INFINITY;
constexpr double HIGHEST = 1e-3;  // log-probability

struct Candidate {
  float score;  // log of the estimated path mass
  int32_t parent, depth;
  int32_t cell;  // of the calibration, -1: root
  int32_t node;  // of the proposal that it came with
  int64_t token_id;
};

struct Node {
  int64_t token_id;
  float score;
  int32_t parent, depth, cell;
};

struct Request {
  std::vector<Candidate> candidates;
  int32_t first = 0;  // of the latest block
};

struct Leaf {
  int32_t request, candidate;
};

// Of a score at most 0: magnitudes rise as scores fall, and so do their bits; then the own order.
inline uint64_t sort_key(float score, uint32_t index) {
  uint32_t bits;
  memcpy(&bits, &score, 4);
  return (uint64_t)(bits & 0x7fffffff) << 32 | index;
}

// Which (parent, token) came before, and at which candidate.
struct Siblings {
  struct Entry {
    int64_t token_id;
    int32_t parent, candidate, stamp;
  };
  std::vector<Entry> entries;
  int32_t stamp = 0;
  uint32_t mask = 0;

  void clear(size_t count) {
    size_t size = 16;
    while (size < 2 * count) size *= 2;
    if (entries.size() < size) entries.assign(size, Entry{0, 0, 0, 0}), stamp = 0;
    mask = (uint32_t)entries.size() - 1;
    if (++stamp == INT32_MAX) entries.assign(entries.size(), Entry{0, 0, 0, 0}), stamp = 1;
  }
  // The first candidate with this parent and token: itself if none came before.
  int32_t first(int32_t parent, int64_t token_id, int32_t candidate) {
    uint32_t at = ((uint32_t)parent * 0x9E3779B1u ^ (uint32_t)token_id * 0x85EBCA77u);
    for (at = (at ^ at >> 15) & mask;; at = (at + 1) & mask) {
      Entry& entry = entries[at];
      if (entry.stamp != stamp) {
        entry = Entry{token_id, parent, candidate, stamp};
        return candidate;
      }
      if (entry.parent == parent && entry.token_id == token_id) return entry.candidate;
    }
  }
};

struct Trees {
  std::vector<Request> requests;  // of the drafter whose blocks gather
  int64_t num_requests = 0, num_slots = 0, max_nodes = 0, bundle_width = 0;
  int64_t num_blocks = 0, kappa_requests = 0;
  std::vector<float> kappa;  // (2, G or 1, S, R) or nothing
  std::vector<Leaf> leaves;
  std::vector<std::vector<Node>> lines;  // largest tree of every request of the round, root first
  std::vector<int64_t> counts;
  // scratch
  std::vector<float> scores, edge_scores;
  std::vector<int32_t> edge_columns, place, kept_as;
  std::vector<uint64_t> keys;
  std::vector<std::vector<int32_t>> best;
  std::vector<char> flags;
  Siblings siblings;
};

Candidate root() { return {0.0f, 0, 0, -1, 0, -1}; }

int64_t check(const Proposal& p) {
  const int64_t size = p.num_nodes * p.num_slots * p.num_candidates;
  bool is_right = true, is_empty = true;
  for (int64_t i = 0; i < size; ++i) {
    is_right &= (double)p.logprobs[i] <= HIGHEST;
    is_empty &= p.logprobs[i] == ABSENT;
  }
  if (p.edge_logprobs != nullptr)
    for (int64_t i = 0; i < p.num_nodes * (p.num_slots - 1) * p.num_candidates * p.num_candidates; ++i)
      is_right &= (double)p.edge_logprobs[i] <= HIGHEST;
  if (p.vocab_size >= 0)
    for (int64_t i = 0; i < size; ++i) is_right &= (uint64_t)p.token_ids[i] < (uint64_t)p.vocab_size;
  return !is_right ? WRONG : is_empty ? EMPTY : TAKEN;
}

inline float calibrated(float logprob, const float* kappa, int64_t rank) {
  if (kappa != nullptr) logprob += kappa[std::min(rank, RANK_CLASSES - 1)];
  return std::min(logprob, 0.0f);
}

// Slot scores (S, K) of a node; kappa: (S, R) or null.
void slot_scores(const Proposal& p, int64_t node, const float* kappa, float* scores) {
  const int64_t num = p.num_candidates;
  for (int64_t slot = 0; slot < p.num_slots; ++slot) {
    const float* logprobs = p.logprobs + (node * p.num_slots + slot) * num;
    const int64_t width = p.widths == nullptr ? num : p.widths[node * p.num_slots + slot];
    const float* own = kappa == nullptr ? nullptr : kappa + slot * RANK_CLASSES;
    for (int64_t i = 0; i < num; ++i) scores[slot * num + i] = i < width ? calibrated(logprobs[i], own, i) : ABSENT;
  }
}

// Candidates of all slots, each below the chain of first ones; what they hang below: `above`.
void hang_chain(
    const Proposal& p, int64_t node, const float* scores, int32_t above, int64_t first_cell, std::vector<Candidate>& out) {
  const int64_t num = p.num_candidates;
  const float base = out[above].score;
  const int32_t base_depth = out[above].depth;
  double chain = 0.0;
  int32_t parent = above;
  for (int64_t slot = 0; slot < p.num_slots; ++slot) {
    const int32_t first = (int32_t)out.size();
    for (int64_t i = 0; i < num; ++i) {
      float score = scores[slot * num + i];
      if (slot > 0) score = (float)((double)score + chain);
      out.push_back(
          {score + base, parent, base_depth + (int32_t)slot + 1,
           (int32_t)(first_cell + slot * RANK_CLASSES + std::min(i, RANK_CLASSES - 1)), (int32_t)node,
           p.token_ids[(node * p.num_slots + slot) * num + i]});
    }
    chain += (double)scores[slot * num];
    parent = first;
  }
}

// Scores of the candidates of slots 1.. below each one of the slot before, best first, and their columns: (S - 1, K, K) each.
void rank_edges(Trees& t, const Proposal& p, int64_t node, const float* kappa) {
  const int64_t num = p.num_candidates, num_edge_slots = p.num_slots - 1;
  t.edge_scores.resize(num_edge_slots * num * num);
  t.edge_columns.resize(num_edge_slots * num * num);
  for (int64_t slot = 0; slot < num_edge_slots; ++slot) {
    const int64_t width = p.widths == nullptr ? num : p.widths[node * p.num_slots + slot + 1];
    const float* own = kappa == nullptr ? nullptr : kappa + (slot + 1) * RANK_CLASSES;
    for (int64_t line = slot * num; line < (slot + 1) * num; ++line) {
      const float* logprobs = p.edge_logprobs + (node * num_edge_slots * num + line) * num;
      int32_t* columns = t.edge_columns.data() + line * num;
      for (int64_t i = 0; i < num; ++i) columns[i] = (int32_t)i;
      std::stable_sort(columns, columns + num, [&](int32_t a, int32_t b) { return logprobs[a] > logprobs[b]; });
      for (int64_t i = 0; i < num; ++i) {
        const float logprob = logprobs[columns[i]];
        t.edge_scores[line * num + i] =
            i >= width ? ABSENT : own == nullptr ? logprob : calibrated(logprob, own, i);
      }
    }
  }
}

// The `count` smallest keys, in order.
void keep_smallest(std::vector<uint64_t>& keys, size_t count) {
  if (count < keys.size()) {
    std::nth_element(keys.begin(), keys.begin() + count, keys.end());
    keys.resize(count);
  }
  std::sort(keys.begin(), keys.end());
}

struct Held {  // a node of a level that has children
  float score;
  int32_t candidate, column;
};

void hang_table(Trees& t, const Proposal& p, int64_t node, const float* scores, std::vector<Candidate>& out) {
  const int64_t num = p.num_candidates;
  const bool is_bundled = t.bundle_width > 0;
  const int64_t width = is_bundled ? std::min(t.bundle_width, num) : num;
  std::vector<Held> held{{0.0f, 0, 0}}, next;
  std::vector<float> level;
  for (int64_t slot = 0; slot < p.num_slots; ++slot) {
    const bool has_edges = slot > 0 && p.edge_logprobs != nullptr;
    const float* own = scores + slot * num;
    level.resize(held.size() * width);
    t.keys.clear();
    for (size_t parent = 0; parent < held.size(); ++parent) {
      if (has_edges) own = t.edge_scores.data() + ((slot - 1) * num + held[parent].column) * num;
      for (int64_t rank = 0; rank < width; ++rank) {
        const uint32_t at = (uint32_t)(parent * width + rank);
        level[at] = held[parent].score + own[rank];
        t.keys.push_back(sort_key(level[at], at));
      }
    }
    keep_smallest(t.keys, (size_t)t.max_nodes);
    const auto column_of = [&](uint32_t at) -> int32_t {
      const int32_t rank = (int32_t)(at % width);
      return has_edges ? t.edge_columns[((slot - 1) * num + held[at / width].column) * num + rank] : rank;
    };
    const auto add = [&](uint32_t at) {
      const int64_t token_id = p.token_ids[(node * p.num_slots + slot) * num + column_of(at)];
      const int32_t cell = (int32_t)(slot * RANK_CLASSES + std::min<int64_t>(at % width, RANK_CLASSES - 1));
      out.push_back({level[at], held[at / width].candidate, (int32_t)slot + 1, cell, (int32_t)node, token_id});
    };
    const int32_t base = (int32_t)out.size();
    next.clear();
    if (is_bundled)
      for (uint32_t at = 0; at < level.size(); ++at) add(at);
    for (size_t i = 0; i < t.keys.size(); ++i) {
      const uint32_t at = (uint32_t)t.keys[i];
      if (!is_bundled) add(at);
      next.push_back({level[at], base + (int32_t)(is_bundled ? at : i), column_of(at)});
    }
    held.swap(next);
  }
}

const float* kappa_of(const Trees& t, int64_t block, int64_t request) {
  if (t.kappa.empty()) return nullptr;
  const int64_t line = block * t.kappa_requests + (t.kappa_requests > 1 ? request : 0);
  return t.kappa.data() + line * t.num_slots * RANK_CLASSES;
}

// Candidates that are there, best first, `limit` of them beside the root.
void find_best(Trees& t, const std::vector<Candidate>& candidates, size_t limit, std::vector<int32_t>& best) {
  t.keys.clear();
  for (size_t i = 0; i < candidates.size(); ++i)
    if (candidates[i].score > ABSENT) t.keys.push_back(sort_key(candidates[i].score, (uint32_t)i));
  keep_smallest(t.keys, limit + 1);
  best.resize(t.keys.size());
  for (size_t i = 0; i < best.size(); ++i) best[i] = (int32_t)(uint32_t)t.keys[i];
}

bool has_twins(Trees& t, const std::vector<Candidate>& candidates, const std::vector<int32_t>& best) {
  t.siblings.clear(best.size());
  for (int32_t i : best)
    if (i > 0 && t.siblings.first(candidates[i].parent, candidates[i].token_id, i) != i) return true;
  return false;
}

// Siblings with equal tokens become one: the better one takes over the other's children.
void merge(Trees& t, std::vector<Candidate>& candidates) {
  std::vector<int32_t>& order = t.place;
  find_best(t, candidates, candidates.size(), order);
  t.siblings.clear(order.size());
  t.kept_as.resize(candidates.size());
  t.kept_as[0] = 0;
  for (int32_t i : order) {  // parents first
    if (i == 0) continue;
    Candidate& own = candidates[i];
    own.parent = t.kept_as[own.parent];
    t.kept_as[i] = t.siblings.first(own.parent, own.token_id, i);
    if (t.kept_as[i] != i) own.score = ABSENT;
  }
}

// The order in which bundles of W children are added: by the place of the parent among all, then the own.
void order_bundles(Trees& t, const std::vector<Candidate>& candidates, std::vector<int32_t>& order) {
  find_best(t, candidates, candidates.size(), order);
  t.place.assign(candidates.size(), 0);
  for (size_t i = 0; i < order.size(); ++i) t.place[order[i]] = (int32_t)i;
  std::sort(order.begin() + 1, order.end(), [&](int32_t a, int32_t b) {
    const int32_t above = t.place[candidates[a].parent], other = t.place[candidates[b].parent];
    return above != other ? above < other : t.place[a] < t.place[b];
  });
  t.flags.assign(candidates.size(), 0);
  t.flags[0] = 1;
  int64_t number = 0;
  for (size_t i = 1; i < order.size(); ++i) {
    const int32_t parent = candidates[order[i]].parent;
    number = i > 1 && candidates[order[i - 1]].parent == parent ? number + 1 : 0;
    // Parents come before their children; what hangs below a child that no bundle holds is not there.
    t.flags[order[i]] = number < t.bundle_width && t.flags[parent];
  }
  order.erase(std::remove_if(order.begin(), order.end(), [&](int32_t i) { return !t.flags[i]; }), order.end());
  if ((int64_t)order.size() > t.max_nodes + 1) order.resize(t.max_nodes + 1);
}

void find_leaves(Trees& t, int64_t max_frontier, bool is_limited) {
  bool is_again = false;
  if ((int64_t)t.best.size() < t.num_requests) t.best.resize(t.num_requests);
  for (int64_t r = 0; r < t.num_requests; ++r) {
    const auto& candidates = t.requests[r].candidates;
    find_best(t, candidates, is_limited ? (size_t)t.max_nodes : candidates.size(), t.best[r]);
    is_again |= is_limited && has_twins(t, candidates, t.best[r]);  // fewer nodes when they are merged
  }
  if (is_again) return find_leaves(t, max_frontier, false);
  t.leaves.clear();
  for (int64_t r = 0; r < t.num_requests; ++r) {
    const auto& [candidates, first] = t.requests[r];
    t.flags.assign(candidates.size(), 0);
    if (t.num_blocks == 1 || t.num_slots > 1)  // one slot alone hangs below what came before
      for (size_t i = first; i < candidates.size(); ++i)
        if (candidates[i].score > ABSENT) t.flags[candidates[i].parent] = 1;
    int64_t count = 0;
    for (int32_t i : t.best[r])
      if (i >= first && !t.flags[i] && count++ < max_frontier) t.leaves.push_back({(int32_t)r, i});
  }
}

typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(64), aligned(4), may_alias));

// Index of the largest of the numbers, the first one on ties; of the first that is none, if there is one.
__attribute__((always_inline)) inline int64_t find_largest(const float* x, int64_t size) {
  constexpr int64_t BLOCK = 1024, LANES = 16, CHAINS = 4;
  float best = -INFINITY;
  int64_t found = 0;
  for (int64_t start = 0; start < size; start += BLOCK) {
    const int64_t stop = std::min(start + BLOCK, size), whole = start + (stop - start) / (CHAINS * LANES) * (CHAINS * LANES);
    Lanes chains[CHAINS];
    Bits are[CHAINS];
    for (int c = 0; c < CHAINS; ++c) chains[c] = Lanes{} - INFINITY, are[c] = ~Bits{};
    for (int64_t i = start; i < whole; i += CHAINS * LANES)
      for (int c = 0; c < CHAINS; ++c) {
        const Lanes more = *(const Lanes*)(x + i + c * LANES);
        are[c] &= (Bits)(more == more);
        chains[c] = more > chains[c] ? more : chains[c];
      }
    Lanes lanes = chains[0];
    Bits is_number = are[0];
    for (int c = 1; c < CHAINS; ++c) lanes = chains[c] > lanes ? chains[c] : lanes, is_number &= are[c];
    float largest = -INFINITY;
    bool are_numbers = true;
    for (int64_t lane = 0; lane < LANES; ++lane)
      largest = std::max(largest, lanes[lane]), are_numbers &= is_number[lane] != 0;
    for (int64_t i = whole; i < stop; ++i) largest = std::max(largest, x[i]), are_numbers &= x[i] == x[i];
    if (!are_numbers) {
      while (x[start] == x[start]) ++start;
      return start;
    }
    if (largest > best) {
      best = largest;
      found = start;
    }
  }
  while (found < size && x[found] != best) ++found;
  return found < size ? found : 0;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) int64_t find_largest_avx2(const float* x, int64_t size) { return find_largest(x, size); }
__attribute__((target("avx512f"))) int64_t find_largest_avx512(const float* x, int64_t size) {
  return find_largest(x, size);
}
#endif

int64_t argmax(const float* x, int64_t size) {
#if defined(__x86_64__)
  static const bool is_avx512 = available_isas() & 4, is_avx2 = available_isas() & 2;
  if (is_avx512) return find_largest_avx512(x, size);
  if (is_avx2) return find_largest_avx2(x, size);
#endif
  return find_largest(x, size);
}

inline int64_t drawn_at(const Draws& draws, int64_t row) {
  return draws.tokens != nullptr ? draws.tokens[row] : argmax(draws.logits + row * draws.stride, draws.vocab_size);
}

}  // namespace

extern "C" {

void* trees_new() { return new Trees(); }
void trees_free(void* trees) { delete (Trees*)trees; }

// A round of B requests begins: their trees are roots.
void trees_start(void* trees, int64_t num_requests) {
  Trees& t = *(Trees*)trees;
  if ((int64_t)t.lines.size() < num_requests) t.lines.resize(num_requests);
  t.counts.assign(num_requests, 1);
  for (int64_t b = 0; b < num_requests; ++b) t.lines[b].assign(1, Node{-1, 0.0f, 0, 0, -1});
}

// The first block of a drafter's requests: TAKEN, EMPTY or WRONG.
int64_t trees_begin(void* trees, const Proposal* proposal, const Growth* growth) {
  Trees& t = *(Trees*)trees;
  const Proposal& p = *proposal;
  const int64_t found = check(p);
  t.num_requests = p.num_nodes, t.num_slots = p.num_slots, t.num_blocks = 1;
  t.max_nodes = growth->max_nodes, t.bundle_width = growth->bundle_width;
  t.leaves.clear();
  if (found != TAKEN) return found;
  t.kappa_requests = growth->kappa_requests;
  if (growth->kappa == nullptr)
    t.kappa.clear();
  else
    t.kappa.assign(growth->kappa, growth->kappa + 2 * t.kappa_requests * p.num_slots * RANK_CLASSES);
  if ((int64_t)t.requests.size() < t.num_requests) t.requests.resize(t.num_requests);
  t.scores.resize(p.num_slots * p.num_candidates);
  for (int64_t r = 0; r < t.num_requests; ++r) {
    Request& own = t.requests[r];
    own.candidates.assign(1, root());
    own.first = 1;
    const float* kappa = kappa_of(t, 0, r);
    slot_scores(p, r, kappa, t.scores.data());
    if (growth->is_product) {
      if (p.edge_logprobs != nullptr) rank_edges(t, p, r, kappa);
      hang_table(t, p, r, t.scores.data(), own.candidates);
    } else {
      hang_chain(p, r, t.scores.data(), 0, 0, own.candidates);
    }
  }
  return TAKEN;
}

// The heaviest leaves of the latest block: how many; fields (5, G * max_frontier) are request, slot, token, node, number.
int64_t trees_leaves(void* trees, int64_t max_frontier, int64_t is_limited, int64_t* fields, double* scores) {
  Trees& t = *(Trees*)trees;
  find_leaves(t, max_frontier, is_limited);
  const int64_t stride = t.num_requests * max_frontier;
  for (size_t i = 0; i < t.leaves.size(); ++i) {
    const Candidate& leaf = t.requests[t.leaves[i].request].candidates[t.leaves[i].candidate];
    fields[i] = t.leaves[i].request;
    fields[stride + i] = leaf.cell / RANK_CLASSES - (t.num_blocks > 1 ? t.num_slots : 0);
    fields[2 * stride + i] = leaf.token_id;
    fields[3 * stride + i] = leaf.node;
    fields[4 * stride + i] = (int64_t)i;
    scores[i] = (double)leaf.score;
  }
  return (int64_t)t.leaves.size();
}

// The block below the F leaves of these numbers: TAKEN or WRONG.
int64_t trees_extend(void* trees, const Proposal* proposal, const int64_t* numbers) {
  Trees& t = *(Trees*)trees;
  const Proposal& p = *proposal;
  if (check(p) == WRONG) return WRONG;
  if (!t.kappa.empty() && p.num_slots != t.num_slots) return WRONG;
  t.num_slots = p.num_slots;
  t.num_blocks += 1;
  for (int64_t r = 0; r < t.num_requests; ++r) t.requests[r].first = (int32_t)t.requests[r].candidates.size();
  t.scores.resize(p.num_slots * p.num_candidates);
  for (int64_t f = 0; f < p.num_nodes; ++f) {
    const Leaf leaf = t.leaves[numbers[f]];
    slot_scores(p, f, kappa_of(t, 1, leaf.request), t.scores.data());
    auto& candidates = t.requests[leaf.request].candidates;
    const int64_t late = p.num_slots * RANK_CLASSES;
    hang_chain(p, f, t.scores.data(), leaf.candidate, late, candidates);
  }
  return TAKEN;
}

// The largest trees of the drafter's requests become those of these rows (G,) of the round.
void trees_rank(void* trees, const int64_t* rows) {
  Trees& t = *(Trees*)trees;
  for (int64_t r = 0; r < t.num_requests; ++r) {
    auto& candidates = t.requests[r].candidates;
    if (t.best.empty()) t.best.resize(1);
    std::vector<int32_t>& best = t.best[0];
    find_best(t, candidates, t.bundle_width > 0 ? candidates.size() : (size_t)t.max_nodes, best);
    if (has_twins(t, candidates, best)) {
      merge(t, candidates);
      if (t.bundle_width == 0) find_best(t, candidates, (size_t)t.max_nodes, best);
    }
    if (t.bundle_width > 0) order_bundles(t, candidates, best);
    std::vector<int32_t>& row_of = t.kept_as;
    row_of.resize(candidates.size());
    const int64_t b = rows == nullptr ? r : rows[r];
    t.lines[b].resize(best.size());
    for (size_t i = 0; i < best.size(); ++i) {
      const Candidate& own = candidates[best[i]];
      row_of[best[i]] = (int32_t)i;
      t.lines[b][i] = {own.token_id, own.score, i == 0 ? 0 : row_of[own.parent], own.depth, own.cell};
    }
  }
}

// Scores of the draft nodes of all requests, (B, max_nodes), falling, -inf = absent.
void trees_scores(void* trees, int64_t max_nodes, double* scores) {
  const Trees& t = *(Trees*)trees;
  for (size_t b = 0; b < t.counts.size(); ++b)
    for (int64_t i = 0; i < max_nodes; ++i)
      scores[b * max_nodes + i] = i + 1 < (int64_t)t.lines[b].size() ? (double)t.lines[b][i + 1].score : -INFINITY;
}

// How many rows the trees have with so many draft nodes each (B,), fewer where they run out; nodes: cut to what there is.
int64_t trees_cut(void* trees, int64_t* nodes, int64_t* width) {
  Trees& t = *(Trees*)trees;
  int64_t size = 0;
  *width = 1;
  for (size_t b = 0; b < t.counts.size(); ++b) {
    nodes[b] = std::max<int64_t>(0, std::min<int64_t>(nodes[b], (int64_t)t.lines[b].size() - 1));
    t.counts[b] = nodes[b] + 1;
    size += t.counts[b];
    *width = std::max(*width, t.counts[b]);
  }
  return size;
}

void trees_pack(void* trees, const int64_t* anchors, int64_t size, int64_t width, int64_t* columns, float* scores,
                int64_t* cu_nodes, uint8_t* ancestors) {
  const Trees& t = *(Trees*)trees;
  int64_t at = 0;
  memset(ancestors, 0, size * width);
  for (size_t b = 0; b < t.counts.size(); ++b) {
    cu_nodes[b] = at;
    const int64_t start = at;
    for (int64_t i = 0; i < t.counts[b]; ++i, ++at) {
      const Node& node = t.lines[b][i];
      columns[at] = i == 0 ? anchors[b] : node.token_id;
      columns[size + at] = i == 0 ? -1 : node.parent;
      columns[2 * size + at] = node.depth;
      columns[3 * size + at] = node.cell;
      scores[at] = node.score;
      if (i > 0) memcpy(ancestors + at * width, ancestors + (start + node.parent) * width, (size_t)i);
      ancestors[at * width + i] = 1;
    }
  }
  cu_nodes[t.counts.size()] = at;
}

// Walks every tree while the token drawn at a row is one of its children: path rows (M <= N) one request after the other,
// roots first, the tokens drawn there (those of the next rows, and the bonus), and how many rows each request has. Returns M.
int64_t trees_walk(const int64_t* token_ids, const int64_t* parents, const int64_t* cu_nodes, const Draws* draws,
                   int64_t num_requests, int64_t* rows, int64_t* tokens, int64_t* counts) {
  int64_t at = 0;
  for (int64_t b = 0; b < num_requests; ++b) {
    const int64_t start = at;
    int64_t current = cu_nodes[b];
    int64_t drawn = drawn_at(*draws, current);
    rows[at] = current, tokens[at++] = drawn;
    for (int64_t i = current + 1; i < cu_nodes[b + 1]; ++i) {  // parents come first
      if (cu_nodes[b] + parents[i] != current || token_ids[i] != drawn) continue;
      current = i;
      drawn = drawn_at(*draws, i);
      rows[at] = i, tokens[at++] = drawn;
    }
    counts[b] = at - start;
  }
  return at;
}

// Copies rows of each of the layers; all rows of a layer are read before one is written. Returns 1, and does nothing, where a
// row is not there.
int64_t trees_copy(char* to, const char* from, const int64_t* to_rows, const int64_t* from_rows, int64_t num_rows,
                   int64_t row_bytes, int64_t num_layers, int64_t num_to, int64_t num_from) {
  thread_local std::vector<char> room;
  for (int64_t i = 0; i < num_rows; ++i)
    if ((uint64_t)to_rows[i] >= (uint64_t)num_to || (uint64_t)from_rows[i] >= (uint64_t)num_from) return 1;
  room.resize(num_rows * row_bytes);
  for (int64_t layer = 0; layer < num_layers; ++layer, to += num_to * row_bytes, from += num_from * row_bytes) {
    for (int64_t i = 0; i < num_rows; ++i)
      memcpy(room.data() + i * row_bytes, from + from_rows[i] * row_bytes, (size_t)row_bytes);
    for (int64_t i = 0; i < num_rows; ++i)
      memcpy(to + to_rows[i] * row_bytes, room.data() + i * row_bytes, (size_t)row_bytes);
  }
  return 0;
}

// Folds the tested nodes of some requests, those whose parent was accepted, into the sums of their key.
struct Fold {
  const int64_t *parents, *cells;  // (N,)
  const float* scores;             // (N,)
  const int64_t* cu_nodes;         // (B + 1,)
  const int64_t* accepted;         // (M,) rows of the paths, roots included
  const int64_t* is_folded;        // (B,)
  double *predicted, *hits, *kappa;  // (Q,)
  float* blocks;                   // (Q,)
  int64_t num_accepted, num_requests, num_cells;
  double decay, prior;
};

// Returns 0; 1 where a cell is none of the key's: then nothing was folded.
int64_t trees_fold(const Fold* fold) {
  const Fold& f = *fold;
  struct Test {
    double predicted, hit;
    int64_t cell, so_far;
  };
  thread_local std::vector<Test> tests;
  thread_local std::vector<int64_t> touched, latest;
  thread_local std::vector<double> sums;
  thread_local std::vector<char> is_accepted;
  tests.clear();
  touched.assign(f.num_cells, 0), latest.assign(f.num_cells, -1), sums.assign(2 * f.num_cells, 0.0);
  is_accepted.assign(f.cu_nodes[f.num_requests], 0);
  for (int64_t i = 0; i < f.num_accepted; ++i) is_accepted[f.accepted[i]] = 1;
  for (int64_t b = 0; b < f.num_requests; ++b) {
    if (!f.is_folded[b]) continue;
    const int64_t start = f.cu_nodes[b];
    for (int64_t i = start + 1; i < f.cu_nodes[b + 1]; ++i) {
      const int64_t above = start + f.parents[i], cell = f.cells[i];
      if (!is_accepted[above]) continue;
      if (cell < 0 || cell >= f.num_cells) return 1;
      if (latest[cell] != b) latest[cell] = b, touched[cell] += 1;
      // The mass before calibration: kappa is still the one that the tree was drafted with.
      const float gain = std::min(f.scores[i] - f.scores[above], 0.0f);
      tests.push_back({std::min(exp((double)gain - f.kappa[cell]), 1.0), (double)is_accepted[i], cell, touched[cell]});
    }
  }
  for (const Test& test : tests) {  // decayed by the requests behind
    const double weight = pow(f.decay, (double)(touched[test.cell] - test.so_far));
    sums[test.cell] += test.predicted * weight;
    sums[f.num_cells + test.cell] += test.hit * weight;
  }
  for (int64_t cell = 0; cell < f.num_cells; ++cell) {
    if (touched[cell] == 0) continue;
    const double decay = pow(f.decay, (double)touched[cell]);
    f.predicted[cell] = f.predicted[cell] * decay + sums[cell];
    f.hits[cell] = f.hits[cell] * decay + sums[f.num_cells + cell];
    const double ratio = (f.hits[cell] + f.prior) / (f.predicted[cell] + f.prior);
    f.kappa[cell] = std::min(std::max(log(ratio), -3.0), 0.5);
    f.blocks[cell] = (float)f.kappa[cell];
  }
  return 0;
}

}  // extern "C"
