// Round: a whole packed forward of a dense decoder (RMSNorm, grouped attention over paged KV, SwiGLU) in one call.
//
// This file is compiled once for every instruction set (ISA names it). A row's numbers do not depend on which rows are
// computed beside it, on how many threads there are, or on whether its context was committed or lies in the tree above it:
// every sum runs over its inputs in one order, and keys that a row does not see are left out, not masked. So a tree's rows get
// bit for bit what plain decoding would have got.
#include "round.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <initializer_list>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#ifndef ISA
#define ISA generic
#endif
#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)

namespace {

constexpr int LANES = 16;

// 16 numbers, in as many of the machine's registers as they take.
#if defined(__AVX512F__)
constexpr int REGISTER = 16;
constexpr int TILE_ROWS = 14, TILE_PANELS = 2;  // 28 sums and 2 weights of 32 registers; inputs are read by the products
constexpr int SOME_ROWS = 9, SOME_PANELS = 3;   // 27 sums and 3 weights
constexpr int FEW_ROWS = 7, FEW_PANELS = 4;     // 28 sums and 4 weights
#elif defined(__AVX2__)
constexpr int REGISTER = 8;
constexpr int TILE_ROWS = 6, TILE_PANELS = 1;  // 12 halves of sums, 2 of weights and 1 input of 16 registers
constexpr int FEW_ROWS = 3, FEW_PANELS = 2;
#else
constexpr int REGISTER = 4;
constexpr int TILE_ROWS = 6, TILE_PANELS = 1;  // 24 quarters of sums, 4 of weights and 1 input of 32 registers
constexpr int FEW_ROWS = 3, FEW_PANELS = 2;
#endif
#if !defined(__AVX512F__)
constexpr int SOME_ROWS = FEW_ROWS, SOME_PANELS = FEW_PANELS;
#endif
constexpr int PIECES = LANES / REGISTER;
typedef float Piece __attribute__((vector_size(4 * REGISTER), aligned(4), may_alias));
typedef int32_t IntPiece __attribute__((vector_size(4 * REGISTER), aligned(4), may_alias));
typedef uint32_t WordPiece __attribute__((vector_size(4 * REGISTER), aligned(4), may_alias));
typedef uint16_t HalfPiece __attribute__((vector_size(2 * REGISTER), aligned(2), may_alias));

struct Floats {
  Piece v[PIECES];
};
#define EACH(expression) \
  Floats y;              \
  for (int i = 0; i < PIECES; ++i) y.v[i] = expression; \
  return y
inline Floats operator+(const Floats& a, const Floats& b) { EACH(a.v[i] + b.v[i]); }
inline Floats operator-(const Floats& a, const Floats& b) { EACH(a.v[i] - b.v[i]); }
inline Floats operator*(const Floats& a, const Floats& b) { EACH(a.v[i] * b.v[i]); }
inline Floats operator/(const Floats& a, const Floats& b) { EACH(a.v[i] / b.v[i]); }
inline Floats operator*(const Floats& a, float b) { EACH(a.v[i] * b); }
inline Floats operator-(const Floats& a) { EACH(-a.v[i]); }
inline Floats& operator+=(Floats& a, const Floats& b) { return a = a + b; }
inline Floats larger(const Floats& a, const Floats& b) { EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline Floats load(const float* p) { EACH(*(const Piece*)(p + i * REGISTER)); }
inline Floats all(float x) { EACH(Piece{} + x); }
inline void store(float* p, const Floats& x) {
  for (int i = 0; i < PIECES; ++i) *(Piece*)(p + i * REGISTER) = x.v[i];
}

inline float sum_lanes(const Floats& x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x.v[0]);
#else
  float s[LANES];
  store(s, x);
  for (int n = LANES / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) s[i] += s[i + n];
  return s[0];
#endif
}

inline float max_lanes(const Floats& x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x.v[0]);
#else
  float s[LANES];
  store(s, x);
  for (int i = 1; i < LANES; ++i) s[0] = s[i] > s[0] ? s[i] : s[0];
  return s[0];
#endif
}

// e^x to about 1e-7 of it (Cephes' polynomial of degree 5); results below the smallest normal number are 0.
inline Piece exponential(Piece x) {
  const IntPiece is_tiny = x < Piece{} - 87.33f;
  x = is_tiny ? Piece{} - 87.33f : x;
  x = x > Piece{} + 88.37f ? Piece{} + 88.37f : x;
  const Piece shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the nearest integer in the low bits
  const Piece n = shifted - 12582912.0f;
  Piece r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Piece p = Piece{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const IntPiece power = ((IntPiece)shifted + (127 - 0x4b400000)) << 23;
  return is_tiny ? Piece{} : p * (Piece)power;
}
inline Floats exponential(const Floats& x) { EACH(exponential(x.v[i])); }

// ---- numbers in memory -----------------------------------------------------------------------------------------
template <class T>
inline Floats widen(const T* p);
template <>
inline Floats widen<float>(const float* p) {
  return load(p);
}
template <>
inline Floats widen<uint16_t>(const uint16_t* p) {
  EACH((Piece)(__builtin_convertvector(*(const HalfPiece*)(p + i * REGISTER), WordPiece) << 16));
}

template <class T>
inline void narrow(T* p, const Floats& x);
template <>
inline void narrow<float>(float* p, const Floats& x) {
  store(p, x);
}
template <>
inline void narrow<uint16_t>(uint16_t* p, const Floats& x) {  // to nearest, ties to even
#if defined(__AVX512BF16__)
  const __m256bh h = _mm512_cvtneps_pbh((__m512)x.v[0]);
  memcpy(p, &h, 32);
#else
  for (int i = 0; i < PIECES; ++i) {
    const WordPiece w = (WordPiece)x.v[i];
    const WordPiece rounded = (w + 0x7fff + (w >> 16 & 1)) >> 16;
    const WordPiece quiet = w >> 16 | 64;  // not a number stays so
    *(HalfPiece*)(p + i * REGISTER) =
        __builtin_convertvector((w & 0x7fffffff) > 0x7f800000 ? quiet : rounded, HalfPiece);
  }
#endif
}

// ---- products --------------------------------------------------------------------------------------------------
// Weights: float of a float32 panel, uint16_t of a bfloat16 one, int8_t. Inputs of float32 weights are float32, of the
// others bfloat16: exact for what follows, and the products are added up in float32.
template <class W>
struct Input {
  typedef uint16_t Number;
};
template <>
struct Input<float> {
  typedef float Number;
};

// Two neighbouring inputs times a panel's weights for them, in STEPS additions: what every one reads of both.
template <class W>
struct Pair;

#if defined(__AVX512BF16__)
struct PackedPair {
  typedef uint16_t Number;
  static constexpr int STEPS = 1;
  template <int STEP>
  static inline __m512bh input(const uint16_t* x) {
    int32_t two;
    memcpy(&two, x, 4);
    return (__m512bh)_mm512_set1_epi32(two);
  }
  static inline Floats add(const Floats& sum, __m512bh w, __m512bh x) {
    return {{(Piece)_mm512_dpbf16_ps((__m512)sum.v[0], w, x)}};
  }
};
template <>
struct Pair<uint16_t> : PackedPair {
  template <int STEP>
  static inline __m512bh weights(const uint16_t* p) {
    return (__m512bh)_mm512_loadu_si512(p);
  }
};
template <>
struct Pair<int8_t> : PackedPair {
  template <int STEP>
  static inline __m512bh weights(const int8_t* p) {
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
    const __m512 even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(wide, 16), 16));
    const __m512 odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(wide, 16));
    // Integers up to 127 are exact in bfloat16: their float32 form ends in 16 zero bits.
    return (__m512bh)_mm512_or_si512(_mm512_srli_epi32((__m512i)even, 16), (__m512i)odd);
  }
};
#endif
struct SplitPair {
  typedef float Number;
  static constexpr int STEPS = 2;
  static inline Floats add(const Floats& sum, const Floats& w, float x) { return sum + w * x; }
};
template <>
struct Pair<float> : SplitPair {
  template <int STEP>
  static inline float input(const float* x) {
    return x[STEP];
  }
  template <int STEP>
  static inline Floats weights(const float* p) {
    return load(p + STEP * LANES);
  }
};
#if !defined(__AVX512BF16__)
// The odd one first, as the instruction for both does.
struct OddPair : SplitPair {
  template <int STEP>
  static inline float input(const float* x) {
    return x[1 - STEP];
  }
};
template <>
struct Pair<uint16_t> : OddPair {
  template <int STEP>
  static inline Floats weights(const uint16_t* p) {
    const auto at = [&](int i) { return *(const WordPiece*)(p + 2 * i * REGISTER); };
    EACH((Piece)(STEP ? at(i) << 16 : at(i) & 0xffff0000u));
  }
};
template <>
struct Pair<int8_t> : OddPair {
  template <int STEP>
  static inline Floats weights(const int8_t* p) {
    typedef int16_t Couples __attribute__((vector_size(2 * REGISTER), aligned(1), may_alias));  // bytes of both inputs
    const auto at = [&](int i) { return __builtin_convertvector(*(const Couples*)(p + 2 * i * REGISTER), IntPiece); };
    EACH(__builtin_convertvector(STEP ? at(i) << 24 >> 24 : at(i) >> 8, Piece));
  }
};
#endif

// Bytes that are asked for before they are read, of all panels that are read together: a core that waits for its own
// prefetcher reads from memory and multiplies in turn, not at once. About what a core's line buffers have on their way.
constexpr int AHEAD = 2048;

// Products below write y, or with `adds` add to it.
inline void put_sum(float* y, const Floats& sum, bool adds) { store(y, adds ? load(y) + sum : sum); }

template <class W, int STEP, int ROWS, int PANELS>
inline __attribute__((always_inline)) void add_step(const typename Pair<W>::Number* x, int64_t stride, const W* w,
                                                    int64_t panel_size, int64_t ahead, Floats (&sum)[ROWS][PANELS]) {
  decltype(Pair<W>::template weights<STEP>(w)) weights[PANELS];
#pragma GCC unroll 4
  for (int b = 0; b < PANELS; ++b) {
    const W* at = w + b * panel_size;
    if (STEP == 0 || sizeof(W) == 4) __builtin_prefetch((const char*)(at + STEP * LANES) + ahead);
    weights[b] = Pair<W>::template weights<STEP>(at);
  }
#pragma GCC unroll 14
  for (int r = 0; r < ROWS; ++r) {
    const auto input = Pair<W>::template input<STEP>(x + r * stride);
#pragma GCC unroll 4
    for (int b = 0; b < PANELS; ++b) sum[r][b] = Pair<W>::add(sum[r][b], weights[b], input);
  }
}

template <class W, int ROWS, int PANELS>
inline __attribute__((always_inline)) void add_steps(const typename Pair<W>::Number* x, int64_t stride, const W* w, int64_t in,
                                                     int64_t first, int64_t last, int64_t ahead, Floats (&sum)[ROWS][PANELS]) {
  for (int64_t k = first; k < last; k += 2) {
    add_step<W, 0>(x + k, stride, w + k * LANES, in * LANES, ahead, sum);
    if constexpr (Pair<W>::STEPS > 1) add_step<W, 1>(x + k, stride, w + k * LANES, in * LANES, ahead, sum);
  }
}

template <class W, int ROWS, int PANELS>
inline void tile(const typename Pair<W>::Number* x, int64_t stride, const W* w, int64_t in, float* y, int64_t y_stride, bool adds) {
  Floats sum[ROWS][PANELS];
#pragma GCC unroll 14
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < PANELS; ++b) sum[r][b] = Floats{};
  constexpr int64_t OF_EACH = AHEAD / PANELS, INPUTS = OF_EACH / (int64_t)(2 * sizeof(W) * LANES) * 2;
  const int64_t last = in > INPUTS ? in - INPUTS : 0;  // what is ahead of a panel's end lies behind its group's
  add_steps<W>(x, stride, w, in, 0, last, OF_EACH, sum);
  add_steps<W>(x, stride, w, in, last, in, OF_EACH + (PANELS - 1) * in * LANES * (int64_t)sizeof(W), sum);
#pragma GCC unroll 14
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < PANELS; ++b) put_sum(y + r * y_stride + b * LANES, sum[r][b], adds);
}

template <class W, int PANELS, int ROWS>
inline void tile_of(const typename Pair<W>::Number* x, int64_t rows, int64_t stride, const W* w, int64_t in, float* y,
                    int64_t y_stride, bool adds) {
  if (rows == ROWS) return tile<W, ROWS, PANELS>(x, stride, w, in, y, y_stride, adds);
  if constexpr (ROWS > 1) tile_of<W, PANELS, ROWS - 1>(x, rows, stride, w, in, y, y_stride, adds);
}

// Rows in as few tiles as take them, all of about one height.
template <class W, int PANELS, int ROWS>
inline void panels(const typename Pair<W>::Number* x, int64_t rows, int64_t stride, const W* w, int64_t in, float* y,
                   int64_t y_stride, bool adds) {
  for (int64_t num = (rows + ROWS - 1) / ROWS; num > 0; --num) {
    const int64_t height = (rows + num - 1) / num;
    tile_of<W, PANELS, ROWS>(x, height, stride, w, in, y, y_stride, adds);
    x += height * stride, y += height * y_stride, rows -= height;
  }
}

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
constexpr int64_t ROW_BLOCK = 16;  // rows are computed 16 at a time; buffers are that much longer than they must be

// Tile loads are no reads in the compiler's eyes: what they read must be written before.
inline void settle_memory() { asm volatile("" ::: "memory"); }

inline const void* weights_of(const uint16_t* w, uint16_t*) { return w; }
inline const void* weights_of(const int8_t* w, uint16_t* room) {  // 16 pairs of a panel
  for (int i = 0; i < 16; ++i) {
    const auto pair = Pair<int8_t>::weights<0>(w + i * 32);
    memcpy(room + i * 32, &pair, 64);
  }
  settle_memory();
  return room;
}

struct Tiles {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline void store_rows(const float* found, int64_t rows, float* y, int64_t y_stride, bool adds) {
  for (int64_t r = 0; r < rows; ++r) put_sum(y + r * y_stride, load(found + r * LANES), adds);
}

// One block of rows times two panels, or two blocks times two: sums in tiles 0-3.
template <class W>
inline void tile_panels(const uint16_t* x, int64_t rows, int64_t stride, const W* w, int64_t num_panels, int64_t in, float* y,
                        int64_t y_stride, bool adds) {
  alignas(64) uint16_t room[4][512];
  alignas(64) float found[256];
  const int64_t step = stride * 2;
  settle_memory();
  for (int64_t b = 0; b < num_panels; b += 2) {
    const W *w0 = w + b * in * LANES, *w1 = b + 1 < num_panels ? w0 + in * LANES : w0;
    const bool is_pair = b + 1 < num_panels;
    int64_t r = 0;
    for (; r < rows; r += 2 * ROW_BLOCK) {
      const bool is_both = r + ROW_BLOCK < rows;
      const uint16_t *x0 = x + r * stride, *x1 = is_both ? x0 + ROW_BLOCK * stride : x0;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      // Weights are widened one step before a tile loads them: a load that follows its stores at once waits for them.
      const void *next0 = weights_of(w0, room[0]), *next1 = weights_of(w1, room[1]);
      int turn = 0;
      const auto widen = [&](int64_t k, const void** now0, const void** now1) {
        *now0 = next0, *now1 = next1, turn ^= 2;
        if (k + 32 >= in) return;
        next0 = weights_of(w0 + (k + 32) * LANES, room[turn]);
        next1 = weights_of(w1 + (k + 32) * LANES, room[turn + 1]);
      };
      const void *now0, *now1;
      if (is_both) {
        for (int64_t k = 0; k < in; k += 32) {
          widen(k, &now0, &now1);
          _tile_loadd(4, x0 + k, step);
          _tile_loadd(5, x1 + k, step);
          _tile_loadd(6, now0, 64);
          _tile_loadd(7, now1, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      } else {
        for (int64_t k = 0; k < in; k += 32) {
          widen(k, &now0, &now1);
          _tile_loadd(4, x0 + k, step);
          _tile_loadd(6, now0, 64);
          _tile_dpbf16ps(0, 4, 6);
          if (!is_pair) continue;
          _tile_loadd(7, now1, 64);
          _tile_dpbf16ps(1, 4, 7);
        }
      }
      float* out = y + r * y_stride + b * LANES;
      const int64_t first = rows - r < ROW_BLOCK ? rows - r : ROW_BLOCK;
      _tile_stored(0, found, 64);
      store_rows(found, first, out, y_stride, adds);
      if (is_pair) {
        _tile_stored(1, found, 64);
        store_rows(found, first, out + LANES, y_stride, adds);
      }
      if (is_both) {
        const int64_t second = rows - r - ROW_BLOCK < ROW_BLOCK ? rows - r - ROW_BLOCK : ROW_BLOCK;
        _tile_stored(2, found, 64);
        store_rows(found, second, out + ROW_BLOCK * y_stride, y_stride, adds);
        if (is_pair) {
          _tile_stored(3, found, 64);
          store_rows(found, second, out + ROW_BLOCK * y_stride + LANES, y_stride, adds);
        }
      }
    }
  }
}
#else
constexpr int64_t ROW_BLOCK = 1;
#endif

inline void share(int64_t count, int thread, int num_threads, int64_t* first, int64_t* last) {
  *first = count * thread / num_threads;
  *last = count * (thread + 1) / num_threads;
}

template <class W, int PANELS, int ROWS>
void panel_groups(const typename Pair<W>::Number* x, int64_t rows, int64_t stride, const W* w, int64_t in, int64_t num_panels,
                  float* y, int64_t y_stride, bool adds) {
  int64_t b = 0;
  for (; b + PANELS <= num_panels; b += PANELS)
    panels<W, PANELS, ROWS>(x, rows, stride, w + b * in * LANES, in, y + b * LANES, y_stride, adds);
  if constexpr (PANELS > 2)
    for (; b + 2 <= num_panels; b += 2)
      panels<W, 2, ROWS>(x, rows, stride, w + b * in * LANES, in, y + b * LANES, y_stride, adds);
  for (; b < num_panels; ++b) panels<W, 1, ROWS>(x, rows, stride, w + b * in * LANES, in, y + b * LANES, y_stride, adds);
}

// As many sums as there are registers, however few rows a tile has.
template <class W>
void register_product(const typename Pair<W>::Number* x, int64_t rows, int64_t stride, const W* w, int64_t in,
                      int64_t num_panels, float* y, int64_t y_stride, bool adds) {
  const int64_t num_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, height = (rows + num_tiles - 1) / num_tiles;
  if (rows == 1)
    panel_groups<W, 4, 1>(x, rows, stride, w, in, num_panels, y, y_stride, adds);
  else if (height <= FEW_ROWS)
    panel_groups<W, FEW_PANELS, FEW_ROWS>(x, rows, stride, w, in, num_panels, y, y_stride, adds);
  else if (height <= SOME_ROWS)
    panel_groups<W, SOME_PANELS, SOME_ROWS>(x, rows, stride, w, in, num_panels, y, y_stride, adds);
  else
    panel_groups<W, TILE_PANELS, TILE_ROWS>(x, rows, stride, w, in, num_panels, y, y_stride, adds);
}

constexpr int64_t ROOM_ROWS = 4 * TILE_ROWS;  // whose inputs lie beside the weights in a core's cache

// Memory of the calling thread, which keeps it.
inline void* thread_room(int64_t num_bytes) {
  static thread_local void* room = nullptr;
  static thread_local int64_t size = 0;
  if (num_bytes > size) {
    free(room);
    size = (num_bytes + 63) / 64 * 64, room = aligned_alloc(64, size);
    if (!room) abort();
  }
  return room;
}

template <class N, class E>
inline void copy_lanes(N* to, const E* from) {
  if constexpr (sizeof(N) == sizeof(E))
    memcpy(to, from, LANES * sizeof(N));
  else
    store(to, widen(from));
}

// y (rows, y_stride)[:, : 16 num_panels] = x @ w.T of these panels.
template <class W>
inline void panel_product(const typename Input<W>::Number* x, int64_t rows, const W* w, int64_t in, int64_t num_panels, float* y,
                          int64_t y_stride, [[maybe_unused]] bool uses_tiles, bool adds = false) {
#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
  if constexpr (sizeof(W) < 4)
    if (uses_tiles) return tile_panels<W>(x, rows, in, w, num_panels, in, y, y_stride, adds);
#endif
  // Inputs are widened once, where every panel's tiles would do it again, and their rows lie off one cache set.
  typedef typename Pair<W>::Number N;
  if constexpr (sizeof(N) == sizeof(*x))
    if (num_panels == 1) return register_product<W>(x, rows, in, w, in, 1, y, y_stride, adds);  // read once: no copy pays
  const int64_t stride = in + 64 / (int64_t)sizeof(N);
  for (int64_t r = 0; r < rows; r += ROOM_ROWS) {
    const int64_t count = rows - r < ROOM_ROWS ? rows - r : ROOM_ROWS;
    N* room = (N*)thread_room(count * stride * (int64_t)sizeof(N));
    for (int64_t i = 0; i < count; ++i)
      for (int64_t k = 0; k < in; k += LANES) copy_lanes(room + i * stride + k, x + (r + i) * in + k);
    register_product<W>(room, count, stride, w, in, num_panels, y + r * y_stride, y_stride, adds);
  }
}

// y (rows, y_stride)[:, 16 first : 16 last] = x @ w.T of these panels.
template <class W>
void product(const typename Input<W>::Number* x, int64_t rows, const Linear& linear, int64_t first, int64_t last, float* y,
             int64_t y_stride, bool uses_tiles) {
  const W* w = (const W*)linear.weight + first * linear.in * LANES;
  panel_product<W>(x, rows, w, linear.in, last - first, y + first * LANES, y_stride, uses_tiles);
  if (linear.scale)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = first * LANES; i < last * LANES; i += LANES) {
        float* at = y + r * y_stride + i;
        store(at, load(at) * load(linear.scale + i));
      }
}

// ---- the parts of a layer --------------------------------------------------------------------------------------
template <class E>
inline float mean_square_root(const E* x, int64_t size, float eps) {
  Floats sum{};
  for (int64_t i = 0; i < size; i += LANES) sum += widen<E>(x + i) * widen<E>(x + i);
  return 1.0f / sqrtf(sum_lanes(sum) / (float)size + eps);
}

template <class X, class E>
inline void normalise(const E* x, const float* weight, int64_t size, float eps, X* y) {
  const Floats factor = all(mean_square_root(x, size, eps));
  for (int64_t i = 0; i < size; i += LANES) narrow<X>(y + i, widen<E>(x + i) * factor * load(weight + i));
}

// A head's values, normed and turned by the angles of its position; pairs are half a head apart.
inline void turn(float* x, const float* weight, const float* angles, int64_t dim, float eps, float scale) {
  const int64_t half = dim / 2;
  float factor = scale;
  if (weight) {
    factor *= mean_square_root(x, dim, eps);
    for (int64_t i = 0; i < dim; ++i) x[i] *= weight[i];
  }
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i] * factor, b = x[i + half] * factor;
    x[i] = a * angles[i] - b * angles[half + i];
    x[i + half] = b * angles[i] + a * angles[half + i];
  }
}

constexpr int64_t QUERY_ROWS = 16;  // rows of a request that one task attends
constexpr int64_t KEY_BLOCK = 32;   // keys that a softmax takes in at a time: their K and V are read shortly after each other

struct Keys {  // of one request: pool rows of its context, then of its own packed rows or those named instead
  const int64_t *context, *own;
  int64_t num_context, num_own;
  const uint8_t* ancestors;  // of its first row, or null
  int64_t stride;
  inline bool is_seen(int64_t row, int64_t key) const { return ancestors ? ancestors[row * stride + key] : key <= row; }
};

#if defined(__AVX512F__)
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntPiece{__VA_ARGS__})
#endif
inline void transpose(Floats* rows) {
  Piece* t = (Piece*)rows;
  for (int i = 0; i < 16; i += 2) {
    const Piece a = t[i], b = t[i + 1];
    t[i] = SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    t[i + 1] = SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
  for (int i = 0; i < 16; ++i) {
    if (i & 2) continue;
    const Piece a = t[i], b = t[i + 2];
    t[i] = SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    t[i + 2] = SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  for (int i = 0; i < 16; ++i) {
    if (i & 4) continue;
    const Piece a = t[i], b = t[i + 4];
    t[i] = SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    t[i + 4] = SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  for (int i = 0; i < 8; ++i) {
    const Piece a = t[i], b = t[i + 8];
    t[i] = SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    t[i + 8] = SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
}
#else
inline void transpose(Floats* t) {
  float from[LANES][LANES], to[LANES][LANES];
  for (int i = 0; i < LANES; ++i) store(from[i], t[i]);
  for (int i = 0; i < LANES; ++i)
    for (int j = 0; j < LANES; ++j) to[i][j] = from[j][i];
  for (int i = 0; i < LANES; ++i) t[i] = load(to[i]);
}
#endif

// What is read a block later, asked for a cache line at a time. Into the second level: a block fills the first, and memory takes
// longer than a part of a block (asked for 16 keys ahead, contexts beyond the caches were read at a third of this speed).
// `rows` may be null.
template <class X>
struct Next {
  const X* const* rows;
  int64_t shift;
  inline void ask(int64_t row, int64_t at) const {
    if (rows && at * (int64_t)sizeof(X) % 64 == 0) __builtin_prefetch(rows[row] + shift + at, 0, 2);
  }
};

// 16 keys' words (of 4 bytes: a number or a pair) side by side, from `size` words of each that lie `at` numbers behind it.
template <class X, int SIZE>
inline void pack_words(const X* const* keys, int64_t at, X* panel) {
  Floats t[LANES];
  for (int c = 0; c < LANES; ++c) {
    if (SIZE < LANES) t[c] = Floats{};
    memcpy(&t[c], keys[c] + at, SIZE * 4);
  }
  transpose(t);
  memcpy(panel, t, SIZE * LANES * 4);
}

// The panel of 16 keys of PARTS * 16 numbers, each `shift` behind its address: scores are the product of queries with it.
template <class X, int PARTS>
inline void pack_keys(const X* const* keys, int64_t shift, X* panel, const Next<X>& next = {nullptr, 0}) {
  constexpr int words = PARTS * LANES * sizeof(X) / 4, step = LANES * 4 / sizeof(X);
  int at = 0;
  for (; at + step <= PARTS * LANES; at += step) {
    for (int c = 0; c < LANES; ++c) next.ask(c, at);
    pack_words<X, LANES>(keys, shift + at, panel + at * LANES);
  }
  if constexpr (words % LANES != 0) pack_words<X, words % LANES>(keys, shift + at, panel + at * LANES);
}

// A query's softmax so far: its largest score, exponentials added up lane by lane, values added up in their proportion.
struct Softmax {
  float *most, *total, *sum;
};

// One compiled form for all callers: another one might fuse other products and sums, and end in other bits.
#if defined(__clang__)
#define ONE_FORM __attribute__((noinline))
#else
#define ONE_FORM __attribute__((noipa))
#endif

// Takes in the scores of up to KEY_BLOCK further keys, which become shares; `size` is a multiple of 16.
template <int PARTS>
ONE_FORM void take_scores(float* scores, int64_t size, const Softmax& of) {
  Floats largest = load(scores);
  for (int64_t i = LANES; i < size; i += LANES) largest = larger(largest, load(scores + i));
  const float found = max_lanes(largest);
  if (found > *of.most) {  // else the factor is 1
    const Floats factor = exponential(all(*of.most - found));
    store(of.total, load(of.total) * factor);
    for (int i = 0; i < PARTS; ++i) store(of.sum + i * LANES, load(of.sum + i * LANES) * factor);
    *of.most = found;
  }
  const Floats top = all(*of.most);
  Floats total = load(of.total);
  for (int64_t i = 0; i < size; i += LANES) {
    const Floats e = exponential(load(scores + i) - top);
    store(scores + i, e);
    total += e;
  }
  store(of.total, total);
}

template <int N>
struct Number {
  static constexpr int value = N;
};

// Values are added up two parts at a time where a register holds both as bfloat16: even numbers, then odd ones, which takes no
// shuffle. The sums of a query lie in that order; `put` takes them back.
template <class X, int PARTS>
constexpr bool IS_PAIRED = sizeof(X) == 2 && PARTS % 2 == 0 && REGISTER == LANES;

template <bool IS_PAIR, class X>
inline void widen_parts(const X* p, Floats* to) {
  if constexpr (IS_PAIR) {
    const WordPiece w = *(const WordPiece*)p;
    to[0].v[0] = (Piece)(w << 16);
    to[1].v[0] = (Piece)(w & 0xffff0000u);
  } else {
    to[0] = widen(p);
  }
}

template <class X, int PARTS>
inline void put(X* y, const float* sum, const Floats& factor) {
  for (int i = 0; i < PARTS; ++i) narrow<X>(y + i * LANES, load(sum + i * LANES) * factor);
  if constexpr (IS_PAIRED<X, PARTS>)
    for (int i = 0; i < PARTS; i += 2) {
      X parts[2 * LANES];
      memcpy(parts, y + i * LANES, sizeof parts);
      for (int j = 0; j < LANES; ++j) y[i * LANES + 2 * j] = parts[j], y[i * LANES + 2 * j + 1] = parts[LANES + j];
    }
}

// Each query's sum (PARTS * 16 numbers) grows by up to 16 values in turn, times its share of each.
template <class X, int PARTS>
inline void add_values(const X* const* rows, int64_t shift, int64_t size, const float* shares, int64_t stride, int64_t count,
                       float* sums, const Next<X>& next = {nullptr, 0}) {
  constexpr bool IS_PAIR = IS_PAIRED<X, PARTS>;
  constexpr int STEP = IS_PAIR ? 2 : 1;
  if (size == LANES && count <= 4) {  // few queries: values go from memory into the sums
    const auto add = [&](auto num) {
      constexpr int NUM = decltype(num)::value;
      for (int i = 0; i < PARTS; i += STEP) {
        Floats sum[NUM][STEP], value[STEP];
        for (int q = 0; q < NUM; ++q)
          for (int p = 0; p < STEP; ++p) sum[q][p] = load(sums + (q * PARTS + i + p) * LANES);
        for (int64_t j = 0; j < LANES; ++j) {
          widen_parts<IS_PAIR>(rows[j] + shift + i * LANES, value);
          for (int q = 0; q < NUM; ++q) {
            const Floats part = all(shares[q * stride + j]);
            for (int p = 0; p < STEP; ++p) sum[q][p] += value[p] * part;
          }
          next.ask(j, i * LANES);
        }
        for (int q = 0; q < NUM; ++q)
          for (int p = 0; p < STEP; ++p) store(sums + (q * PARTS + i + p) * LANES, sum[q][p]);
      }
    };
    if (count == 1) return add(Number<1>{});
    if (count == 2) return add(Number<2>{});
    if (count == 3) return add(Number<3>{});
    return add(Number<4>{});
  }
  Floats wide[LANES][PARTS];
  for (int64_t j = 0; j < size; ++j)
    for (int i = 0; i < PARTS; i += STEP) {
      widen_parts<IS_PAIR>(rows[j] + shift + i * LANES, wide[j] + i);
      next.ask(j, i * LANES);
    }
  for (int64_t q = 0; q < count; ++q, shares += stride, sums += PARTS * LANES) {
    Floats sum[PARTS];
    for (int i = 0; i < PARTS; ++i) sum[i] = load(sums + i * LANES);
    for (int64_t j = 0; j < size; ++j)
      for (int i = 0; i < PARTS; ++i) sum[i] += wide[j][i] * shares[j];
    for (int i = 0; i < PARTS; ++i) store(sums + i * LANES, sum[i]);
  }
}

// Attention of rows [first, last) of one request to the keys of KV heads [head0, head1): a pool row's heads lie side by side
// and are read together, and keys and values block by block. A row's blocks are those of the keys that it sees, in order:
// first all that every row sees, whole blocks for all rows together, then the rest row by row.
// query (row, H * Dh) of the request's first row; room: see room_size; y (row, y_stride).
template <class X, int PARTS>
void attend(const float* query, int64_t query_stride, const X* pool, int64_t head0, int64_t head1, int64_t kv_heads,
            int64_t groups, const Keys& keys, int64_t first, int64_t last, float* room, int64_t score_stride, X* y,
            int64_t y_stride, bool uses_tiles) {
  constexpr int64_t dim = PARTS * LANES;
  const int64_t num = last - first, count = num * groups, heads = head1 - head0, row_size = 2 * kv_heads * dim;
  const int64_t values = kv_heads * dim, most_queries = QUERY_ROWS * groups;
  float *scores = room, *own_scores = scores + most_queries * score_stride, *totals = own_scores + most_queries * LANES;
  float *mosts = totals + most_queries * LANES, *sums = mosts + most_queries * LANES;
  X* queries = (X*)(sums + most_queries * dim);
  const auto softmax_of = [&](int64_t q) { return Softmax{mosts + q, totals + q * LANES, sums + q * dim}; };
  const auto head_of = [&](int64_t q) { return head0 * groups + q / count * groups + q % groups; };
  for (int64_t q = 0; q < heads * count; ++q) {
    const float* from = query + (first + q % count / groups) * query_stride + head_of(q) * dim;
    mosts[q] = -INFINITY;
    store(totals + q * LANES, Floats{});
    for (int64_t i = 0; i < dim; i += LANES) {
      narrow<X>(queries + q * dim + i, load(from + i));
      store(sums + q * dim + i, Floats{});
    }
  }
  const int64_t num_own = keys.ancestors || keys.num_own < last ? keys.num_own : last;  // those that any of the rows sees
  const int64_t num_before = keys.ancestors ? 0 : first < num_own ? first : num_own;    // those that all rows see
  const int64_t shared = keys.num_context + num_before, whole = shared / KEY_BLOCK * KEY_BLOCK, rest = shared - whole;
  const auto row_of = [&](int64_t key) {
    return pool + head0 * dim + (key < keys.num_context ? keys.context[key] : keys.own[key - keys.num_context]) * row_size;
  };
  alignas(64) X panel[dim * LANES];
  const auto score = [&](int64_t h, float* to, int64_t stride) {
    panel_product<X>(queries + h * count * dim, count, panel, dim, 1, to, stride, uses_tiles && dim % 32 == 0);
  };
  const X* found[KEY_BLOCK];
  for (int64_t at = 0; at < whole; at += KEY_BLOCK) {
    for (int64_t i = 0; i < KEY_BLOCK; ++i) found[i] = row_of(at + i);
    const X* next[KEY_BLOCK];  // the block behind this one
    for (int64_t i = 0; i < KEY_BLOCK; ++i) next[i] = row_of(at + KEY_BLOCK + i < shared ? at + KEY_BLOCK + i : at);
    for (int64_t c = 0; c < KEY_BLOCK; c += LANES)
      for (int64_t h = 0; h < heads; ++h) {
        pack_keys<X, PARTS>(found + c, h * dim, panel, Next<X>{next + c, h * dim});
        score(h, scores + h * count * KEY_BLOCK + c, KEY_BLOCK);
      }
    for (int64_t q = 0; q < heads * count; ++q) take_scores<PARTS>(scores + q * KEY_BLOCK, KEY_BLOCK, softmax_of(q));
    for (int64_t c = 0; c < KEY_BLOCK; c += LANES)
      for (int64_t h = 0; h < heads; ++h)
        add_values<X, PARTS>(found + c, values + h * dim, LANES, scores + h * count * KEY_BLOCK + c, KEY_BLOCK, count,
                             sums + h * count * dim, Next<X>{next + c, values + h * dim});
  }
  const auto padded_block = [](int64_t size) { return size < KEY_BLOCK ? (size + LANES - 1) / LANES * LANES : KEY_BLOCK; };
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t shift = h * dim, query0 = h * count;
    int64_t seen[QUERY_ROWS];
    for (int64_t i = 0; i < padded_block(rest); ++i) found[i] = row_of(whole + (i < rest ? i : 0));
    for (int64_t c = 0; c < rest; c += LANES) {
      pack_keys<X, PARTS>(found + c, shift, panel);
      score(h, scores + c, score_stride);
    }
    for (int64_t r = 0; r < num; ++r) seen[r] = rest;
    const X* own[LANES];
    for (int64_t c = num_before; c < num_own; c += LANES) {
      const int64_t size = num_own - c < LANES ? num_own - c : LANES;
      for (int64_t i = 0; i < LANES; ++i) own[i] = row_of(keys.num_context + c + (i < size ? i : 0));
      pack_keys<X, PARTS>(own, shift, panel);
      score(h, own_scores, LANES);
      for (int64_t r = 0; r < num; ++r)
        for (int64_t i = 0; i < size; ++i) {
          if (!keys.is_seen(first + r, c + i)) continue;
          for (int64_t q = r * groups; q < (r + 1) * groups; ++q) scores[q * score_stride + seen[r]] = own_scores[q * LANES + i];
          ++seen[r];
        }
    }
    for (int64_t q = 0; q < count; ++q) {
      float* at = scores + q * score_stride;
      if (seen[q / groups] == 0) continue;  // its keys were whole blocks
      for (int64_t i = seen[q / groups]; i % LANES; ++i) at[i] = -INFINITY;
      take_scores<PARTS>(at, padded_block(seen[q / groups]), softmax_of(query0 + q));
    }
    for (int64_t c = 0; c < rest; c += LANES)
      add_values<X, PARTS>(found + c, values + shift, rest - c < LANES ? rest - c : LANES, scores + c, score_stride, count,
                           sums + query0 * dim);
    for (int64_t r = 0; r < num; ++r) {
      int64_t at = rest, held = 0;
      const auto add = [&] {
        const int64_t q = r * groups;
        add_values<X, PARTS>(own, values + shift, held, scores + q * score_stride + at, score_stride, groups,
                             sums + (query0 + q) * dim);
        at += held, held = 0;
        if (at % KEY_BLOCK == 0 && at < seen[r])
          for (int64_t g = q; g < q + groups; ++g)
            take_scores<PARTS>(scores + g * score_stride + at, padded_block(seen[r] - at), softmax_of(query0 + g));
      };
      for (int64_t c = num_before; c < num_own; ++c) {
        if (!keys.is_seen(first + r, c)) continue;
        own[held++] = row_of(keys.num_context + c);
        if (held == LANES || (at + held) % KEY_BLOCK == 0) add();
      }
      if (held) add();
    }
  }
  for (int64_t q = 0; q < heads * count; ++q) {
    const Floats factor = all(1.0f / sum_lanes(load(totals + q * LANES)));
    put<X, PARTS>(y + (first + q % count / groups) * y_stride + head_of(q) * dim, sums + q * dim, factor);
  }
}

// Floats that a thread needs for it: scores, of keys that not all rows see before they are sorted out, and of each query its
// softmax (lanes of the total, the largest in a register's room, the sum) and its numbers, with room for a block's last rows.
inline int64_t room_size(int64_t groups, int64_t dim, int64_t score_stride) {
  return QUERY_ROWS * groups * (score_stride + 3 * LANES + 2 * dim) + 2 * ROW_BLOCK * dim;
}

// Attention of all rows of a batch: tasks (request, rows, KV heads) in turn over the threads. `query` (N, query_stride),
// y (N, y_stride), `room` this thread's.
template <class X, int PARTS>
void attend_all(const Model& m, const Batch& b, const float* query, int64_t query_stride, const X* pool, float* room,
                int64_t score_stride, X* y, int64_t y_stride, const int64_t* table, int64_t table_stride, int64_t tail,
                int thread, int num_threads) {
  const int64_t groups = m.heads / m.kv_heads, fair = (m.kv_heads + num_threads - 1) / num_threads;
  int64_t task = 0;
  for (int64_t i = 0; i < b.num_requests; ++i) {
    const int64_t start = b.cu_rows[i], num = b.cu_rows[i + 1] - start;
    const int64_t skipped = tail < 0 ? 0 : num - tail, to = tail < 0 ? start : i * tail - skipped;
    const Keys keys = {table + (b.table_rows ? b.table_rows[i] : i) * table_stride,
                       b.key_rows ? b.key_rows + b.cu_keys[i] : b.out_rows + start,
                       b.context_lens[i],
                       b.key_rows ? b.cu_keys[i + 1] - b.cu_keys[i] : num,
                       b.ancestors ? b.ancestors + start * b.ancestor_stride : nullptr,
                       b.ancestor_stride};
    for (int64_t first = skipped; first < num; first += QUERY_ROWS) {
      const int64_t last = first + QUERY_ROWS < num ? first + QUERY_ROWS : num;
      const int64_t fitting = QUERY_ROWS / (last - first), heads = fitting < fair ? fitting : fair;
      for (int64_t head = 0; head < m.kv_heads; head += heads, ++task)
        if (task % num_threads == thread)
          attend<X, PARTS>(query + start * query_stride, query_stride, pool, head,
                           head + heads < m.kv_heads ? head + heads : m.kv_heads, m.kv_heads, groups, keys, first, last, room,
                           score_stride, y + to * y_stride, y_stride, m.uses_tiles);
    }
  }
}

template <class X>
using AttendAll = void (*)(const Model&, const Batch&, const float*, int64_t, const X*, float*, int64_t, X*, int64_t,
                           const int64_t*, int64_t, int64_t, int, int);

template <class X>
AttendAll<X> attention_of(int64_t head_dim) {
  switch (head_dim / LANES) {
    case 1: return attend_all<X, 1>;
    case 2: return attend_all<X, 2>;
    case 3: return attend_all<X, 3>;
    case 4: return attend_all<X, 4>;
    case 5: return attend_all<X, 5>;
    case 6: return attend_all<X, 6>;
    case 8: return attend_all<X, 8>;
    default: return attend_all<X, 16>;
  }
}

// ---- the forward -----------------------------------------------------------------------------------------------
constexpr int64_t LOWERED = 2 * LANES;  // numbers of a lowered row that are computed at once, at most

inline int64_t padded(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

inline int64_t largest(std::initializer_list<int64_t> sizes) {
  int64_t found = 0;
  for (int64_t size : sizes) found = size > found ? size : found;
  return found;
}

struct Part {  // rows of neighbours whose version is the same
  int64_t first, last, version;
};

template <class W>
struct Run {
  typedef typename Input<W>::Number X;
  const Model& m;
  const Batch& b;
  char* scratch;
  int64_t size = 0;  // of the scratch that was handed out
  int64_t rows, longest = 0, num_last;
  const int64_t* table;  // pool rows of every position, of a drafter block by block
  int64_t table_stride;
  X *inputs = nullptr, *attended = nullptr, *acts = nullptr;
  float *stream = nullptr, *wide = nullptr, *scores = nullptr;
  int64_t wide_stride, score_stride, score_size, groups;
  struct Parts {
    Part* at = nullptr;
    int64_t num = 0;
  } parts, last_parts;  // of all rows, and of those that go beyond the last layer's K/V
  X* lowered = nullptr;  // (rows, rank) of `parts`, inputs of what they add
  float* lowering = nullptr;

  template <class T>
  T* take(int64_t count) {
    T* found = (T*)(scratch + size);
    size += padded(count * (int64_t)sizeof(T), 64) + 64;  // the gap keeps columns off one cache set
    return found;
  }

  Run(const Model& model, const Batch& batch, void* memory) : m(model), b(batch), scratch((char*)memory) {
    rows = padded(b.num_rows > b.num_features ? b.num_rows : b.num_features, ROW_BLOCK * 2);
    if (b.deltas) rows += ROW_BLOCK;  // a part of them may begin anywhere
    groups = m.heads / m.kv_heads;
    for (int64_t i = 0; i < b.num_requests; ++i) {
      const int64_t* cu = b.key_rows ? b.cu_keys : b.cu_rows;
      const int64_t own = cu[i + 1] - cu[i];
      longest = own > longest ? own : longest;
    }
    const Layer& one = m.layers[0];
    wide_stride = largest({one.qkv.out, one.gate_up.out, one.down.out, m.condition.out, m.context_kv.out});
    score_stride = padded(longest + KEY_BLOCK, LANES) + LANES;
    score_size = room_size(groups, m.head_dim, score_stride);
    int64_t most_in = largest({one.qkv.in, one.gate_up.in, m.head.in, m.condition.in, m.context_kv.in});
    for (int64_t l = 0; l < m.num_layers; ++l) most_in = largest({most_in, m.layers[l].shift.in});
    num_last = b.tail < 0 ? b.num_rows : b.tail * b.num_requests;
    inputs = take<X>(rows * most_in);
    attended = take<X>(rows * one.attention_out.in);
    acts = take<X>(rows * one.down.in);
    stream = b.stream ? b.stream : take<float>(rows * m.hidden);
    wide = take<float>(rows * wide_stride);
    scores = take<float>(score_size * b.num_threads);
    if (b.deltas) {
      lowered = take<X>(rows * m.delta_rank);
      lowering = take<float>(rows * LOWERED * b.num_threads);
      parts.at = take<Part>(b.num_requests);
      last_parts.at = take<Part>(b.num_requests);
      if (memory) find_parts(parts, -1), find_parts(last_parts, b.tail);
    }
    table = b.slot_table, table_stride = b.slot_stride;
    if (m.block > 1) {
      int64_t lines = 0, whole = 0;
      for (int64_t i = 0; i < b.num_requests; ++i) {
        const int64_t line = b.table_rows ? b.table_rows[i] : i, num = b.context_lens[i];
        lines = line + 1 > lines ? line + 1 : lines;
        whole = num > whole ? num : whole;
      }
      table_stride = padded(whole, m.block);
      int64_t* flat = take<int64_t>(lines * table_stride);
      if (memory)
        for (int64_t i = 0; i < lines; ++i)
          for (int64_t c = 0; c < table_stride / m.block; ++c)
            for (int64_t s = 0; s < m.block; ++s)
              flat[i * table_stride + c * m.block + s] = b.slot_table[i * b.slot_stride + c] * m.block + s;
      table = flat;
    }
  }

  // tail: rows of each request, which then lie side by side; negative: all.
  void find_parts(Parts& found, int64_t tail) {
    for (int64_t i = 0; i < b.num_requests; ++i) {
      const int64_t first = tail < 0 ? b.cu_rows[i] : i * tail, last = tail < 0 ? b.cu_rows[i + 1] : first + tail;
      if (b.deltas[i] < 0 || first == last) continue;
      Part* before = found.num ? found.at + found.num - 1 : nullptr;
      if (before && before->version == b.deltas[i] && before->last == first)
        before->last = last;
      else
        found.at[found.num++] = {first, last, b.deltas[i]};
    }
  }

  // y[:, 16 first : 16 last] = x @ w.T of n rows, and what the versions of these parts of them add.
  void product_of(const X* x, int64_t n, const Linear& linear, const Delta& delta, const Parts& of, int64_t first, int64_t last,
                  float* y, int64_t y_stride, int thread, int num_threads) {
    if (!delta.down || !of.num) return product<W>(x, n, linear, first, last, y, y_stride, m.uses_tiles);
    const int64_t rank = m.delta_rank, width = of.num * rank / LOWERED < num_threads ? LANES : LOWERED, pieces = rank / width;
    int64_t piece0, piece1;
    float* found = lowering + thread * rows * LOWERED;
    share(of.num * pieces, thread, num_threads, &piece0, &piece1);
    for (int64_t at = piece0; at < piece1; ++at) {
      const Part& part = of.at[at / pieces];
      const int64_t to = at % pieces * width;
      const W* down = (const W*)delta.down + (part.version * rank + to) * linear.in;
      panel_product<W>(x + part.first * linear.in, part.last - part.first, down, linear.in, width / LANES, found, LOWERED,
                       m.uses_tiles);
      for (int64_t r = part.first; r < part.last; ++r)
        for (int64_t i = 0; i < width; i += LANES)
          narrow<X>(lowered + r * rank + to + i, load(found + (r - part.first) * LOWERED + i));
    }
    product<W>(x, n, linear, first, last, y, y_stride, m.uses_tiles);
    meet(num_threads);
    for (const Part* part = of.at; part < of.at + of.num; ++part) {
      const W* up = (const W*)delta.up + (part->version * linear.out + first * LANES) * rank;
      panel_product<W>(lowered + part->first * rank, part->last - part->first, up, rank, last - first,
                       y + part->first * y_stride + first * LANES, y_stride, m.uses_tiles, true);
    }
  }

  // Inputs beyond a layer's are multiplied by zeros: they must be finite.
  void clear(X* from, int64_t width, int64_t in) {
    for (int64_t r = 0; r < b.num_rows && width < in; ++r) memset(from + r * in + width, 0, (in - width) * sizeof(X));
  }

  void clear() {
    clear(attended, m.heads * m.head_dim, m.layers[0].attention_out.in);
    clear(acts, m.layers[0].gate_up.out / 2, m.layers[0].down.in);
  }

  void clear_rest(int64_t row, int64_t width, int64_t in) { memset(inputs + row * in + width, 0, (in - width) * sizeof(X)); }

  // Row r of a product's inputs from a row of hidden states.
  void norm_row(const float* x, const float* weight, int64_t r, int64_t in) {
    normalise<X>(x, weight, m.hidden, m.eps, inputs + r * in);
    clear_rest(r, m.hidden, in);
  }

  // What a layer's first product reads of row r of the stream.
  template <class E>
  void enter(const Layer& layer, int64_t r) {
    float* row = stream + r * m.hidden;
    if (layer.embed_norm) {
      X* to = inputs + r * layer.qkv.in;
      normalise<X>((const E*)m.embedding + b.token_ids[r] * m.embed_size, layer.embed_norm, m.embed_size, m.eps, to);
      normalise<X>(row, layer.norm1, m.hidden, m.eps, to + m.embed_size);
      clear_rest(r, m.embed_size + m.hidden, layer.qkv.in);
    } else {
      norm_row(row, layer.norm1, r, layer.qkv.in);
    }
    if (layer.norms_stream) normalise<float>(row, layer.norm1, m.hidden, m.eps, row);
  }

  template <class E>
  void take_features(int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const E* from = (const E*)b.features + r * m.feature_size;
      for (int64_t i = 0; i < m.feature_size; i += LANES) narrow<X>(inputs + r * m.condition.in + i, widen<E>(from + i));
      clear_rest(r, m.feature_size, m.condition.in);
    }
  }

  // Rows of features: what rows of the stream begin with, or the source of keys and values in every layer.
  void condition(int thread, int num_threads) {
    int64_t row0, row1, first, last;
    const int64_t n = b.num_features, dim = m.head_dim, num = 2 * m.kv_heads;
    share(n, thread, num_threads, &row0, &row1);
    if (m.features == BFLOAT16)
      take_features<uint16_t>(row0, row1);
    else
      take_features<float>(row0, row1);
    meet(num_threads);
    share(m.condition.out / LANES, thread, num_threads, &first, &last);
    product<W>(inputs, n, m.condition, first, last, wide, wide_stride, m.uses_tiles);
    if (!m.context_kv.weight) add_columns(n, first * LANES, last * LANES, false);
    meet(num_threads);
    if (!m.context_kv.weight) return;
    for (int64_t r = row0; r < row1; ++r) norm_row(wide + r * wide_stride, m.condition_norm, r, m.context_kv.in);
    meet(num_threads);
    share(m.context_kv.out / LANES, thread, num_threads, &first, &last);
    product<W>(inputs, n, m.context_kv, first, last, wide, wide_stride, m.uses_tiles);
    meet(num_threads);
    share(n * m.num_layers * num, thread, num_threads, &first, &last);
    for (int64_t at = first; at < last; ++at) {
      const int64_t r = at / (m.num_layers * num), l = at / num % m.num_layers, h = at % num;
      float* x = wide + r * wide_stride + (l * num + h) * dim;
      if (h < m.kv_heads) turn(x, m.layers[l].k_norm, m.rope + b.feature_positions[r] * dim, dim, m.eps, 1.0f);
      X* to = (X*)b.pool + ((l * b.pool_rows + b.feature_rows[r]) * num + h) * dim;
      for (int64_t i = 0; i < dim; i += LANES) narrow<X>(to + i, load(x + i));
    }
    meet(num_threads);
  }

  template <class E>
  void embed(int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const E* from = (const E*)m.embedding + b.token_ids[r] * m.hidden;
      for (int64_t i = 0; i < m.hidden; i += LANES) store(stream + r * m.hidden + i, widen<E>(from + i));
    }
  }

  template <class E>
  void tap(int64_t bits, int64_t first, int64_t last) {
    for (int64_t j = 0; j < m.num_taps; ++j)
      if (bits >> j & 1)
        for (int64_t r = first; r < last; ++r)
          for (int64_t i = 0; i < m.hidden; i += LANES)
            narrow<E>((E*)b.tapped + (r * m.num_taps + j) * m.hidden + i, load(stream + r * m.hidden + i));
  }

  void turn_rows(const Layer& layer, X* pool, int64_t first, int64_t last) {
    const int64_t dim = m.head_dim, num = m.heads + 2 * m.kv_heads, row_size = 2 * m.kv_heads * dim;
    for (int64_t at = first; at < last; ++at) {
      const int64_t r = at / num, h = at % num;
      float* x = wide + r * wide_stride + h * dim;
      const float* angles = m.rope + b.positions[r] * dim;
      if (h < m.heads) {
        turn(x, layer.q_norm, angles, dim, m.eps, m.scale);
        continue;
      }
      if (h < m.heads + m.kv_heads) turn(x, layer.k_norm, angles, dim, m.eps, 1.0f);
      X* to = pool + b.out_rows[r] * row_size + (h - m.heads) * dim;
      for (int64_t i = 0; i < dim; i += LANES) narrow<X>(to + i, load(x + i));
    }
  }

  // Rows of the stream beside those before them in their block; the first of a block beside itself.
  void pair_rows(int64_t first, int64_t last, int64_t in) {
    for (int64_t r = first; r < last; ++r) {
      const float* before = stream + (r % m.block ? r - 1 : r) * m.hidden;
      for (int64_t i = 0; i < m.hidden; i += LANES) {
        narrow<X>(inputs + r * in + i, load(stream + r * m.hidden + i));
        narrow<X>(inputs + r * in + m.hidden + i, load(before + i));
      }
    }
  }

  // The stream keeps the last rows of every request.
  void keep_tails() {
    for (int64_t i = 0; i < b.num_requests; ++i)
      memmove(stream + i * b.tail * m.hidden, stream + (b.cu_rows[i + 1] - b.tail) * m.hidden, b.tail * m.hidden * 4);
  }

  // The stream's columns [first, last) of n rows grow by those of `wide`, or become them.
  void add_columns(int64_t n, int64_t first, int64_t last, bool is_sum = true) {
    last = last < m.hidden ? last : m.hidden;
    for (int64_t r = 0; r < n; ++r)
      for (int64_t i = first; i < last; i += LANES) {
        float* at = stream + r * m.hidden + i;
        const Floats found = load(wide + r * wide_stride + i);
        store(at, is_sum ? load(at) + found : found);
      }
  }

  void work(int thread, int num_threads) {
    int64_t row0, row1;
    share(b.num_rows, thread, num_threads, &row0, &row1);
#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
    alignas(64) const Tiles tiles;
    if (m.uses_tiles) _tile_loadconfig(&tiles);
#endif
    if (!b.stream) {
      if (m.features == BFLOAT16)
        embed<uint16_t>(row0, row1);
      else
        embed<float>(row0, row1);
    }
    if (b.features) condition(thread, num_threads);
    if (b.num_rows) layers(thread, num_threads, row0, row1);
#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
    if (m.uses_tiles) _tile_release();
#endif
  }

  void layers(int thread, int num_threads, int64_t row0, int64_t row1) {
    int64_t first, last, n = b.num_rows;
    const AttendAll<X> attend_all = attention_of<X>(m.head_dim);
    const int64_t attended_in = m.layers[0].attention_out.in;
    const int64_t layer_size = b.pool_rows * 2 * m.kv_heads * m.head_dim;
    for (int64_t l = 0; l < m.num_layers; ++l) {
      const Layer& layer = m.layers[l];
      const int64_t tail = l + 1 < m.num_layers ? -1 : b.tail;
      X* pool = (X*)b.pool + l * layer_size;
      if (layer.shift.weight) {
        pair_rows(row0, row1, layer.shift.in);
        meet(num_threads);
        share(layer.shift.out / LANES, thread, num_threads, &first, &last);
        product<W>(inputs, n, layer.shift, first, last, wide, wide_stride, m.uses_tiles);
        add_columns(n, first * LANES, last * LANES, false);
        meet(num_threads);
      }
      for (int64_t r = row0; r < row1; ++r)
        if (m.features == BFLOAT16)
          enter<uint16_t>(layer, r);
        else
          enter<float>(layer, r);
      meet(num_threads);
      share(layer.qkv.out / LANES, thread, num_threads, &first, &last);
      product<W>(inputs, n, layer.qkv, first, last, wide, wide_stride, m.uses_tiles);
      meet(num_threads);
      share(n * (m.heads + 2 * m.kv_heads), thread, num_threads, &first, &last);
      turn_rows(layer, pool, first, last);
      meet(num_threads);
      if (tail == 0) break;
      attend_all(m, b, wide, wide_stride, pool, scores + thread * score_size, score_stride, attended, attended_in, table,
                 table_stride, tail, thread, num_threads);
      if (tail > 0) {
        if (thread == 0) keep_tails();
        n = num_last;
        share(n, thread, num_threads, &row0, &row1);
      }
      meet(num_threads);
      share(layer.attention_out.out / LANES, thread, num_threads, &first, &last);
      const Parts& own = tail > 0 ? last_parts : parts;
      product_of(attended, n, layer.attention_out, layer.attention_out_delta, own, first, last, wide, wide_stride, thread,
                 num_threads);
      add_columns(n, first * LANES, last * LANES);
      meet(num_threads);
      for (int64_t r = row0; r < row1; ++r) norm_row(stream + r * m.hidden, layer.norm2, r, layer.gate_up.in);
      meet(num_threads);
      share(layer.gate_up.out / (2 * LANES), thread, num_threads, &first, &last);
      product_of(inputs, n, layer.gate_up, layer.gate_up_delta, own, 2 * first, 2 * last, wide, wide_stride, thread, num_threads);
      for (int64_t r = 0; r < n; ++r)
        for (int64_t i = first; i < last; ++i) {
          const Floats gate = load(wide + r * wide_stride + 2 * i * LANES);
          const Floats up = load(wide + r * wide_stride + (2 * i + 1) * LANES);
          narrow<X>(acts + r * layer.down.in + i * LANES, gate / (all(1.0f) + exponential(-gate)) * up);
        }
      meet(num_threads);
      share(layer.down.out / LANES, thread, num_threads, &first, &last);
      product_of(acts, n, layer.down, layer.down_delta, own, first, last, wide, wide_stride, thread, num_threads);
      add_columns(n, first * LANES, last * LANES);
      meet(num_threads);
      if (layer.tap) {
        if (m.features == BFLOAT16)
          tap<uint16_t>(layer.tap, row0, row1);
        else
          tap<float>(layer.tap, row0, row1);
      }
    }
    if (b.num_logits) {
      share(b.num_logits, thread, num_threads, &first, &last);
      for (int64_t i = first; i < last; ++i)
        norm_row(stream + (b.logit_rows ? b.logit_rows[i] : i) * m.hidden, m.final_norm, i, m.head.in);
      meet(num_threads);
      share(m.head.out / LANES, thread, num_threads, &first, &last);
      product<W>(inputs, b.num_logits, m.head, first, last, b.logits, b.logit_stride, m.uses_tiles);
    }
  }

  static void start(void* self, int thread, int num_threads) { ((Run*)self)->work(thread, num_threads); }
};

template <class W>
void forward(const Model* model, const Batch* batch, void* scratch) {
  Run<W> run(*model, *batch, scratch);
  run.clear();
  run_on_threads(Run<W>::start, &run, (int)batch->num_threads);
}

}  // namespace

extern "C" int64_t JOIN(scratch_bytes, ISA)(const Model* model, const Batch* batch) {
  return model->weights == FLOAT32 ? Run<float>(*model, *batch, nullptr).size : Run<uint16_t>(*model, *batch, nullptr).size;
}

extern "C" void JOIN(forward, ISA)(const Model* model, const Batch* batch, void* scratch) {
  switch (model->weights) {
    case FLOAT32: return forward<float>(model, batch, scratch);
    case BFLOAT16: return forward<uint16_t>(model, batch, scratch);
    case INT8: return forward<int8_t>(model, batch, scratch);
  }
}

// The k largest of `scale` times each row's numbers, falling (ties: the first), and the logarithm of the sum of their exponentials.
extern "C" void JOIN(rank_rows, ISA)(const float* x, int64_t rows, int64_t size, int64_t stride, const float* scale, int64_t k,
                                     float* values, int64_t* ids, float* lse) {
  for (int64_t r = 0; r < rows; ++r, x += stride, values += k, ids += k) {
    const float factor = scale[r];
    for (int64_t i = 0; i < k; ++i) values[i] = -INFINITY, ids[i] = 0;
    const int64_t whole = size / LANES * LANES;
    auto offer = [&](float v, int64_t id) {
      if (!(v > values[k - 1])) return;
      int64_t at = k - 1;
      for (; at > 0 && v > values[at - 1]; --at) values[at] = values[at - 1], ids[at] = ids[at - 1];
      values[at] = v, ids[at] = id;
    };
    for (int64_t i = 0; i < whole; i += LANES) {
      const Floats v = load(x + i) * factor;
      if (max_lanes(v) > values[k - 1]) {
        float own[LANES];
        store(own, v);
        for (int j = 0; j < LANES; ++j) offer(own[j], i + j);
      }
    }
    for (int64_t i = whole; i < size; ++i) offer(x[i] * factor, i);
    const float top = values[0];
    Floats sum{};
    for (int64_t i = 0; i < whole; i += LANES) sum += exponential(load(x + i) * factor - all(top));
    float total = sum_lanes(sum);
    for (int64_t i = whole; i < size; ++i) total += expf(x[i] * factor - top);
    lse[r] = top + logf(total);
  }
}
