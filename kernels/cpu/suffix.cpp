// Suffix automata of growing texts, and what they expect next: serving/drafters/suffix_automaton.py says in Python what is
// computed here, in the same order of operations. suffix.py fills the records, whose members it repeats.
//
// A state's first transition lies in the state, because most states have no other; the others lie in one table of the
// automaton, found by (state, token), and a list for each state keeps their order.
#include <math.h>
#include <stdint.h>

#include <algorithm>
#include <vector>

// How contexts are blended (serving/drafters/suffix_automaton.py).
struct Blend {
  const double* miss;  // by match length
  double min_mass;
  int64_t min_context, max_blended, newest_bonus, max_next;
};

// Whose end is matched: that of these tokens; `is_own_end`: the first automaton's is its own text's.
struct Ends {
  void* const* automata;
  const int64_t* token_ids;
  int64_t num_automata, num_tokens, is_own_end;
};

namespace {

struct State {
  int32_t first_token, first_target;  // target 0: none, no way leads to the root
  int32_t more, more_last;            // other transitions in the order they were made, 0: none
  int32_t link, length;
  int32_t count, latest;  // occurrences, end of the newest one
};

struct Transition {
  int32_t state, token, target, next;
};

struct Match {
  int32_t state, length;
};

struct Automaton {
  int32_t max_length, num_tokens = 0;
  uint64_t seed;  // nobody outside can choose tokens that all lie at one place
  int32_t last = 0;
  int32_t tail = 0, tail_length = 0;  // state of the newest max_length + 1 tokens, and how many they are
  std::vector<State> states{{0, 0, 0, 0, -1, 0, 0, 0}};
  std::vector<Transition> others{{}};  // number 0 is none
  std::vector<int32_t> table = std::vector<int32_t>(16);  // of numbers in `others`, by open addressing

  size_t place(int32_t state, int32_t token) const {
    uint64_t key = ((uint64_t)(uint32_t)state << 32 | (uint32_t)token) ^ seed;
    key = (key ^ key >> 30) * 0xbf58476d1ce4e5b9ull;
    key = (key ^ key >> 27) * 0x94d049bb133111ebull;
    size_t at = (key ^ key >> 31) & (table.size() - 1);
    while (table[at] != 0 && (others[table[at]].state != state || others[table[at]].token != token))
      at = (at + 1) & (table.size() - 1);
    return at;
  }

  int32_t target(int32_t state, int32_t token) const {
    const State& own = states[state];
    if (own.first_token == token) return own.first_target;
    return own.more == 0 ? 0 : others[table[place(state, token)]].target;
  }

  void set(int32_t state, int32_t token, int32_t target) {
    State& own = states[state];
    if (own.first_token == token || own.first_target == 0) {
      own.first_token = token, own.first_target = target;
      return;
    }
    const size_t at = place(state, token);
    if (table[at] != 0) {
      others[table[at]].target = target;
      return;
    }
    const int32_t number = (int32_t)others.size();
    others.push_back({state, token, target, 0});
    table[at] = number;
    if (own.more == 0)
      own.more = number;
    else
      others[own.more_last].next = number;
    own.more_last = number;
    if (2 * others.size() <= table.size()) return;
    table.assign(2 * table.size(), 0);
    for (int32_t i = 1; i < (int32_t)others.size(); ++i) table[place(others[i].state, others[i].token)] = i;
  }

  int32_t add(int32_t length) {
    states.push_back({0, 0, 0, 0, 0, length, 0, 0});
    return (int32_t)states.size() - 1;
  }

  // The state of the longest string of `state` and the token, made by splitting if it lies inside another.
  int32_t split(int32_t state, int32_t token) {
    const int32_t whole = target(state, token);
    if (states[state].length + 1 == states[whole].length) return whole;
    const int32_t part = add(states[state].length + 1);
    const State from = states[whole];
    states[part].first_token = from.first_token, states[part].first_target = from.first_target;
    for (int32_t i = from.more; i != 0; i = others[i].next) {
      const Transition own = others[i];
      set(part, own.token, own.target);
    }
    states[part].link = from.link, states[part].count = from.count, states[part].latest = from.latest;
    for (; state >= 0 && target(state, token) == whole; state = states[state].link) set(state, token, part);
    states[whole].link = part;
    return part;
  }

  void append(int32_t token) {
    const int32_t fresh = add(states[last].length + 1);
    int32_t state = last;
    for (; state >= 0 && target(state, token) == 0; state = states[state].link) set(state, token, fresh);
    if (state >= 0) {
      const int32_t link = split(state, token);
      states[fresh].link = link;
    }
    last = fresh;
    num_tokens += 1;
    // Splitting may have moved the tail's short strings to the state that it now links to.
    while (tail != 0 && states[states[tail].link].length >= tail_length) tail = states[tail].link;
    tail = target(tail, token);
    tail_length = std::min(tail_length + 1, max_length + 1);
    while (states[states[tail].link].length >= tail_length) tail = states[tail].link;
    for (int32_t i = tail; i != 0; i = states[i].link) states[i].count += 1, states[i].latest = num_tokens;
  }

  Match advance(Match found, int32_t token) const {
    int32_t next = target(found.state, token);
    while (next == 0) {
      if (found.state == 0) return {0, 0};
      found.state = states[found.state].link;
      found.length = states[found.state].length;
      next = target(found.state, token);
    }
    const int32_t length = std::min(found.length + 1, max_length);
    while (states[states[next].link].length >= length) next = states[next].link;
    return {next, length};
  }

  Match continued(Match found) const {
    while (found.state != 0 && states[found.state].first_target == 0) {
      found.state = states[found.state].link;
      found.length = states[found.state].length;
    }
    return found;
  }

  Match ending() const {
    Match found = continued({tail, tail_length});
    while (found.state != 0 && states[states[found.state].link].length >= max_length)
      found.state = states[found.state].link;
    return {found.state, std::min(found.length, max_length)};
  }

  Match match(const int64_t* token_ids, int64_t num_given) const {
    Match found = {0, 0};
    for (int64_t i = std::max<int64_t>(0, num_given - max_length); i < num_given; ++i)
      found = advance(found, (int32_t)token_ids[i]);
    return continued(found);
  }

  Match shorter(Match found) const {
    const int32_t state = found.state != 0 ? states[found.state].link : 0;
    return {state, states[state].length};
  }
};

struct Context {
  int32_t length;
  const Automaton* automaton;
  int32_t state;
};

struct Follower {
  int64_t token, weight;
  int32_t end;
};

struct Expected {
  int64_t token;
  double mass;
};

Match first_match(const Ends& e, int64_t i) {
  const Automaton& own = *(const Automaton*)e.automata[i];
  return i == 0 && e.is_own_end ? own.ending() : own.match(e.token_ids, e.num_tokens);
}

void follow(const Automaton& automaton, int32_t state, std::vector<Follower>& out) {
  const State& own = automaton.states[state];
  out.clear();
  if (own.first_target == 0) return;
  auto take = [&](int32_t token, int32_t target) {
    if (token >= 0) out.push_back({token, automaton.states[target].count, automaton.states[target].latest});
  };
  take(own.first_token, own.first_target);
  for (int32_t i = own.more; i != 0; i = automaton.others[i].next)
    take(automaton.others[i].token, automaton.others[i].target);
}

// What comes next, most probable first.
void expect(const Blend& blend, const std::vector<const Automaton*>& automata, const std::vector<Match>& found,
            std::vector<Expected>& masses) {
  thread_local std::vector<Context> contexts;
  thread_local std::vector<Follower> followers;
  contexts.clear(), masses.clear();
  for (size_t a = 0; a < automata.size(); ++a) {
    Match own = found[a];
    for (int64_t i = 0; i < blend.max_blended && own.length >= blend.min_context; ++i) {
      contexts.push_back({own.length, automata[a], own.state});
      own = automata[a]->shorter(own);
    }
  }
  std::stable_sort(contexts.begin(), contexts.end(),
                   [](const Context& a, const Context& b) { return a.length > b.length; });
  double rest = 1.0;
  for (size_t c = 0; c < contexts.size() && c < (size_t)blend.max_blended; ++c) {
    follow(*contexts[c].automaton, contexts[c].state, followers);
    if (followers.empty()) continue;
    int64_t num_seen = 0;
    int32_t newest = 0;
    for (const Follower& own : followers) num_seen += own.weight, newest = std::max(newest, own.end);
    double share = rest * (1.0 - blend.miss[contexts[c].length] / sqrt((double)std::min<int64_t>(num_seen, 4)));
    rest -= share;
    share /= (double)(num_seen + blend.newest_bonus);
    for (Follower& own : followers) own.weight += own.end == newest ? blend.newest_bonus : 0;
    if (followers.size() > (size_t)blend.max_next) {
      std::stable_sort(followers.begin(), followers.end(),
                       [](const Follower& a, const Follower& b) { return a.weight > b.weight; });
      followers.resize(blend.max_next);
    }
    for (const Follower& own : followers) {
      const double mass = share * (double)own.weight;
      auto at = std::find_if(masses.begin(), masses.end(), [&](const Expected& e) { return e.token == own.token; });
      if (at == masses.end())
        masses.push_back({own.token, mass});
      else
        at->mass += mass;
    }
  }
  std::stable_sort(masses.begin(), masses.end(), [](const Expected& a, const Expected& b) { return a.mass > b.mass; });
}

}  // namespace

extern "C" {

void* suffix_new(int64_t max_length, int64_t seed) {
  Automaton* made = new Automaton;
  made->max_length = (int32_t)max_length;
  made->seed = (uint64_t)seed;
  return made;
}

void suffix_free(void* automaton) { delete (Automaton*)automaton; }

// Appends tokens to the text; returns how many of its last tokens occur with something behind them.
int64_t suffix_extend(void* automaton, const int64_t* token_ids, int64_t num_tokens) {
  Automaton& own = *(Automaton*)automaton;
  for (int64_t i = 0; i < num_tokens; ++i) own.append((int32_t)token_ids[i]);
  return own.ending().length;
}

// Tokens of the longest end that occurs with something behind it, in any of the automata.
int64_t suffix_longest(const Ends* ends) {
  int64_t longest = 0;
  for (int64_t i = 0; i < ends->num_automata; ++i) longest = std::max<int64_t>(longest, first_match(*ends, i).length);
  return longest;
}

// What is expected in each of S slots: tokens and log-probabilities (S, K), best first; what is not written stays as it is.
void suffix_slots(const Ends* ends, const Blend* blend, int64_t num_slots, int64_t num_candidates, int64_t* token_ids,
                  float* logprobs) {
  thread_local std::vector<const Automaton*> automata;
  thread_local std::vector<Match> found;
  thread_local std::vector<Expected> expected;
  automata.clear(), found.clear();
  for (int64_t i = 0; i < ends->num_automata; ++i) {
    automata.push_back((const Automaton*)ends->automata[i]);
    found.push_back(first_match(*ends, i));
  }
  double mass = 1.0;
  for (int64_t slot = 0; slot < num_slots && mass >= blend->min_mass; ++slot) {
    expect(*blend, automata, found, expected);
    if (expected.empty()) return;
    for (int64_t k = 0; k < num_candidates && k < (int64_t)expected.size(); ++k) {
      token_ids[slot * num_candidates + k] = expected[k].token;
      logprobs[slot * num_candidates + k] = (float)log(expected[k].mass);
    }
    mass *= expected[0].mass;
    for (size_t a = 0; a < automata.size(); ++a)
      found[a] = automata[a]->continued(automata[a]->advance(found[a], (int32_t)expected[0].token));
  }
}

}  // extern "C"
