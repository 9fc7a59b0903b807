/* Preloaded: the wall clock of a process is RLFLOW_TEST_SKEW seconds ahead of the kernel's, and so are the absolute
   times that it waits for. Monotonic clocks and the times of files are not touched, as on a host with a wrong clock and
   a shared volume. libfaketime cannot do this: under it Python's sleep raises EINVAL. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) real_##name
#define FIND(name) if (REAL(name) == NULL) REAL(name) = dlsym(RTLD_NEXT, #name)
#define WALL_FROM 1000000000 /* seconds; an absolute time below it is one of a monotonic clock */

static long skew(void) {
  static long seconds;
  static int known;
  if (!known) {
    const char *text = getenv("RLFLOW_TEST_SKEW");
    seconds = text ? atol(text) : 0;
    known = 1;
  }
  return seconds;
}

static const struct timespec *kernels(const struct timespec *at, struct timespec *into) {
  if (at == NULL || at->tv_sec < WALL_FROM) return at;
  *into = *at;
  into->tv_sec -= skew();
  return into;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
  static int (*real_clock_gettime)(clockid_t, struct timespec *);
  FIND(clock_gettime);
  int result = REAL(clock_gettime)(clock, at);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += skew();
  return result;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
  static int (*real_gettimeofday)(struct timeval *, void *);
  FIND(gettimeofday);
  int result = REAL(gettimeofday)(at, zone);
  if (result == 0) at->tv_sec += skew();
  return result;
}

time_t time(time_t *into) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (into != NULL) *into = now.tv_sec;
  return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *at) {
  static int (*real_pthread_cond_timedwait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  struct timespec until;
  if (real_pthread_cond_timedwait == NULL) /* without a version dlsym finds the oldest one, of another layout */
    real_pthread_cond_timedwait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  FIND(pthread_cond_timedwait);
  return REAL(pthread_cond_timedwait)(condition, mutex, kernels(at, &until));
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *at) {
  static int (*real_pthread_mutex_timedlock)(pthread_mutex_t *, const struct timespec *);
  struct timespec until;
  FIND(pthread_mutex_timedlock);
  return REAL(pthread_mutex_timedlock)(mutex, kernels(at, &until));
}

int sem_timedwait(sem_t *semaphore, const struct timespec *at) {
  static int (*real_sem_timedwait)(sem_t *, const struct timespec *);
  struct timespec until;
  FIND(sem_timedwait);
  return REAL(sem_timedwait)(semaphore, kernels(at, &until));
}

long syscall(long number, ...) {
  static long (*real_syscall)(long, ...);
  long words[6];
  struct timespec until;
  va_list rest;
  va_start(rest, number);
  for (int i = 0; i < 6; i++) words[i] = va_arg(rest, long);
  va_end(rest);
  if (number == SYS_futex && (words[1] & FUTEX_CLOCK_REALTIME))
    words[3] = (long)kernels((const struct timespec *)words[3], &until);
  FIND(syscall);
  return REAL(syscall)(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}
