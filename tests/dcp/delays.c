/* Loaded before the C library (LD_PRELOAD): the calls that a save makes take a random time, so that what others do in
   between happens in each of them. DELAY_US is the longest. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static void wait_a_while(void) {
    const char *most = getenv("DELAY_US");
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    unsigned seed = (unsigned)now.tv_nsec ^ (unsigned)getpid();
    if (most && rand_r(&seed) % 2)
        usleep((useconds_t)(rand_r(&seed) % (unsigned)(atoi(most) + 1)));
}

#define DELAYED(result, name, declared, given)                       \
    result name declared {                                           \
        static result(*real) declared;                               \
        if (!real)                                                   \
            real = (result(*) declared)dlsym(RTLD_NEXT, #name);      \
        wait_a_while();                                              \
        return real given;                                           \
    }

DELAYED(int, rename, (const char *from, const char *to), (from, to))
DELAYED(int, unlink, (const char *path), (path))
DELAYED(int, fsync, (int file), (file))
DELAYED(int, flock, (int file, int operation), (file, operation))
DELAYED(ssize_t, pwrite64, (int file, const void *bytes, size_t length, off64_t at), (file, bytes, length, at))
