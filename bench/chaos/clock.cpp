// Clock: what a program that loads this first sees as wall-clock time is the computer's plus the nanoseconds in a shared file.
//
// Clocks that only count from some start are left alone. Waits until a wall-clock time end when the shifted clock gets
// there, by the shift of the moment when they began.

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#undef clock_gettime
#undef gettimeofday

namespace {

constexpr int64_t kSecond = 1000000000;
constexpr int64_t kIsWall = 1000000000;  // seconds: more than a computer has run since it started

const volatile int64_t *shift = nullptr;

int64_t shift_ns() { return shift == nullptr ? 0 : *shift; }

void add(timespec *t, int64_t ns) {
  int64_t sum = int64_t(t->tv_nsec) + ns % kSecond;
  t->tv_sec += ns / kSecond;
  if (sum >= kSecond) sum -= kSecond, t->tv_sec++;
  if (sum < 0) sum += kSecond, t->tv_sec--;
  t->tv_nsec = sum;
}

// The computer's time for one that the program reckoned by the shifted clock
const timespec *real_time(const timespec *t, timespec *room) {
  if (t == nullptr || shift_ns() == 0) return t;
  *room = *t;
  add(room, -shift_ns());
  return room;
}

const timespec *real_deadline(const timespec *t, timespec *room) {
  return t != nullptr && t->tv_sec >= kIsWall ? real_time(t, room) : t;
}

template <typename F>
F next(F, const char *name, const char *version = nullptr) {
  void *found = version == nullptr ? nullptr : dlvsym(RTLD_NEXT, name, version);
  return reinterpret_cast<F>(found != nullptr ? found : dlsym(RTLD_NEXT, name));
}

__attribute__((constructor)) void open_shift() {
  const char *path = getenv("PACELINE_CHAOS_CLOCK");
  const int file = path == nullptr ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  void *found = mmap(nullptr, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (found != MAP_FAILED) shift = static_cast<const volatile int64_t *>(found);
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec *out) noexcept {
  static const auto real = next(&clock_gettime, "clock_gettime");
  const int result = real(clock, out);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) add(out, shift_ns());
  return result;
}

int gettimeofday(timeval *out, void *) noexcept {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  out->tv_sec = now.tv_sec, out->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) noexcept {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out != nullptr) *out = now.tv_sec;
  return now.tv_sec;
}

int timespec_get(timespec *out, int base) noexcept {
  if (base != TIME_UTC) return 0;
  clock_gettime(CLOCK_REALTIME, out);
  return base;
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const timespec *until) {
#if defined(__x86_64__)
  static const auto real = next(&pthread_cond_timedwait, "pthread_cond_timedwait", "GLIBC_2.3.2");
#else
  static const auto real = next(&pthread_cond_timedwait, "pthread_cond_timedwait");
#endif
  timespec room;
  return real(cond, mutex, real_deadline(until, &room));
}

int pthread_cond_clockwait(pthread_cond_t *cond, pthread_mutex_t *mutex, clockid_t clock, const timespec *until) {
  static const auto real = next(&pthread_cond_clockwait, "pthread_cond_clockwait");
  timespec room;
  return real(cond, mutex, clock, real_deadline(until, &room));
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const timespec *until) noexcept {
  static const auto real = next(&pthread_mutex_timedlock, "pthread_mutex_timedlock");
  timespec room;
  return real(mutex, real_deadline(until, &room));
}

int sem_timedwait(sem_t *sem, const timespec *until) {
  static const auto real = next(&sem_timedwait, "sem_timedwait");
  timespec room;
  return real(sem, real_deadline(until, &room));
}

int sem_clockwait(sem_t *sem, clockid_t clock, const timespec *until) {
  static const auto real = next(&sem_clockwait, "sem_clockwait");
  timespec room;
  return real(sem, clock, real_deadline(until, &room));
}

int clock_nanosleep(clockid_t clock, int flags, const timespec *request, timespec *left) {
  static const auto real = next(&clock_nanosleep, "clock_nanosleep");
  timespec room;
  const bool is_wall = clock == CLOCK_REALTIME && (flags & TIMER_ABSTIME) != 0;
  return real(clock, flags, is_wall ? real_time(request, &room) : request, left);
}

long syscall(long number, ...) noexcept {
  static const auto real = next(&syscall, "syscall");
  long a[6];
  va_list given;
  va_start(given, number);
  for (long &value : a) value = va_arg(given, long);
  va_end(given);
  timespec room;
  if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) != 0 && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET) {
    a[3] = reinterpret_cast<long>(real_deadline(reinterpret_cast<const timespec *>(a[3]), &room));
  }
  const long result = real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  if (number == SYS_clock_gettime && result == 0 && a[0] == CLOCK_REALTIME) add(reinterpret_cast<timespec *>(a[1]), shift_ns());
  return result;
}

}  // extern "C"
