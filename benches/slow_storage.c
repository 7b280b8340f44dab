/* Loaded before the C library (LD_PRELOAD): one file system on a network that several machines share, each of which
   finds nothing in its page cache. Reads of at least a page from files below SLOW_FOLDER wait until a line of
   SLOW_MIB_S MiB/s, which all processes share by the file SLOW_CLOCK, would have brought the bytes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096 };

/* When the line is free again, in nanoseconds of CLOCK_MONOTONIC. */
static _Atomic long long *line(void) {
    static _Atomic long long *mapped;
    if (!mapped) {
        int file = open(getenv("SLOW_CLOCK"), O_RDWR);
        void *found = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (found == MAP_FAILED)
            abort();
        close(file);
        mapped = found;
    }
    return mapped;
}

static int is_slow(int file) {
    char link[64], path[4096];
    const char *folder = getenv("SLOW_FOLDER");
    if (!folder)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    return length > 0 && (size_t)length > strlen(folder) && !strncmp(path, folder, strlen(folder));
}

static ssize_t late(int file, ssize_t got) {
    if (got < PAGE || !is_slow(file))
        return got;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    long long time = now.tv_sec * 1000000000LL + now.tv_nsec;
    long long takes = (long long)((double)got * 1e9 / (atof(getenv("SLOW_MIB_S")) * (1 << 20)));
    long long before = atomic_load(line()), end;
    do
        end = (before > time ? before : time) + takes;
    while (!atomic_compare_exchange_weak(line(), &before, end));
    struct timespec until = {end / 1000000000LL, end % 1000000000LL};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
        ;
    return got;
}

#define SLOW(name, declared, given)                                  \
    ssize_t name declared {                                          \
        static ssize_t(*real) declared;                              \
        if (!real)                                                   \
            real = (ssize_t(*) declared)dlsym(RTLD_NEXT, #name);     \
        return late(file, real given);                               \
    }

SLOW(read, (int file, void *bytes, size_t length), (file, bytes, length))
SLOW(pread, (int file, void *bytes, size_t length, off_t at), (file, bytes, length, at))
SLOW(pread64, (int file, void *bytes, size_t length, off64_t at), (file, bytes, length, at))

/* Nothing is in the page cache, and such file systems do not say so. */
#define UNCACHED(name, offset)                                                              \
    ssize_t name(int file, const struct iovec *parts, int count, offset at, int flags) {    \
        static ssize_t (*real)(int, const struct iovec *, int, offset, int);                \
        if (!real)                                                                          \
            real = (ssize_t(*)(int, const struct iovec *, int, offset, int))dlsym(RTLD_NEXT, #name); \
        if (is_slow(file)) {                                                                \
            errno = EOPNOTSUPP;                                                             \
            return -1;                                                                      \
        }                                                                                   \
        return real(file, parts, count, at, flags);                                         \
    }

UNCACHED(preadv2, off_t)
UNCACHED(preadv64v2, off64_t)
