// Instruction sets that this processor and its operating system offer, as bits in the order of library.py's table.
#include <stdint.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <initializer_list>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__)
namespace {
bool may_use_amx() {
#if defined(__linux__)
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;  // for all threads of the process
#else
  return false;
#endif
}

struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Leaf(unsigned leaf, unsigned part) { __get_cpuid_count(leaf, part, &a, &b, &c, &d); }
};

bool all_of(unsigned bits, std::initializer_list<int> wanted) {
  for (int bit : wanted)
    if (!(bits >> bit & 1)) return false;
  return true;
}

// What the operating system saves of a thread: bits 1-2 registers of AVX, 5-7 those of AVX-512.
unsigned saved_state() {
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}
}  // namespace
#endif

extern "C" int64_t available_isas() {
  int64_t found = 1;
#if defined(__x86_64__)
  const Leaf first(1, 0), seventh(7, 0), more(7, 1);
  constexpr int OSXSAVE = 27, FMA = 12, AVX2 = 5, F = 16, DQ = 17, BW = 30, VL = 31, BF16 = 5, AMX_BF16 = 22, AMX_TILE = 24;
  const unsigned saved = all_of(first.c, {OSXSAVE}) ? saved_state() : 0;
  const bool is_avx2 = all_of(saved, {1, 2}) && all_of(first.c, {FMA}) && all_of(seventh.b, {AVX2});
  const bool is_avx512 = is_avx2 && all_of(saved, {5, 6, 7}) && all_of(seventh.b, {F, DQ, BW, VL});
  const bool is_bf16 = is_avx512 && all_of(more.a, {BF16});
  if (is_avx2) found |= 2;
  if (is_avx512) found |= 4;
  if (is_bf16) found |= 8;
  if (is_bf16 && all_of(seventh.d, {AMX_BF16, AMX_TILE}) && may_use_amx()) found |= 16;
#endif
  return found;
}

// Of which sources the library is made (build.py).
extern "C" int64_t source_version() { return SOURCE_VERSION; }
