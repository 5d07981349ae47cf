// Threads: a pool whose members wait for the next call, spinning briefly first, and a barrier for the stages of a call.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>

#include "round.h"

namespace {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int SPINS = 4000;  // some ten microseconds: longer than a stage of a small model, shorter than a scheduler's slice

struct Pool {
  std::mutex call, lock;  // call: one call at a time
  std::condition_variable wake;
  std::atomic<uint64_t> number{0};  // of the call that is running
  std::atomic<int> num_done{0};
  Work work = nullptr;
  void* argument = nullptr;
  int num_threads = 0;
  std::vector<std::thread> members;

  void serve(int thread, uint64_t seen) {
    for (;;) {
      for (int i = 0; i < SPINS && number.load(std::memory_order_acquire) == seen; ++i) pause_cpu();
      if (number.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> hold(lock);
        wake.wait(hold, [&] { return number.load(std::memory_order_acquire) != seen; });
      }
      seen = number.load(std::memory_order_acquire);
      if (thread < num_threads) {
        work(argument, thread, num_threads);
      }
      num_done.fetch_add(1, std::memory_order_acq_rel);
    }
  }
};

// Never destroyed: its threads outlive static destructors. A forked process has none of its parent's threads: it gets a new one.
Pool& pool() {
  static std::mutex making;
  static Pool* one = nullptr;
  static pid_t owner = 0;
  std::lock_guard<std::mutex> hold(making);
  if (one == nullptr || owner != getpid()) one = new Pool, owner = getpid();
  return *one;
}

std::atomic<int> arrived{0};
std::atomic<uint64_t> phase{0};

}  // namespace

void meet(int num_threads) {
  if (num_threads == 1) return;
  const uint64_t seen = phase.load(std::memory_order_acquire);
  if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
    arrived.store(0, std::memory_order_relaxed);
    phase.store(seen + 1, std::memory_order_release);
    return;
  }
  for (int i = 0; phase.load(std::memory_order_acquire) == seen; ++i) {
    if (i < SPINS) {
      pause_cpu();
    } else {
      std::this_thread::yield();  // a member lost its core: let it run
    }
  }
}

void run_on_threads(Work work, void* argument, int num_threads) {
  if (num_threads <= 1) {
    work(argument, 0, 1);
    return;
  }
  Pool& p = pool();
  std::lock_guard<std::mutex> one_call(p.call);
  while ((int)p.members.size() < num_threads - 1) {
    const int thread = (int)p.members.size() + 1;
    const uint64_t seen = p.number.load();
    p.members.emplace_back([&p, thread, seen] { p.serve(thread, seen); });
    p.members.back().detach();
  }
  p.num_done.store(0, std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> hold(p.lock);
    p.work = work, p.argument = argument, p.num_threads = num_threads;
    p.number.fetch_add(1, std::memory_order_acq_rel);
  }
  p.wake.notify_all();
  work(argument, 0, num_threads);
  // All members answer, also those that this call does not use: none may read the next call's fields half written.
  while (p.num_done.load(std::memory_order_acquire) != (int)p.members.size()) {
    for (int i = 0; i < SPINS && p.num_done.load(std::memory_order_acquire) != (int)p.members.size(); ++i) pause_cpu();
    if (p.num_done.load(std::memory_order_acquire) != (int)p.members.size()) std::this_thread::yield();
  }
}
