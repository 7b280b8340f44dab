/* A long link between two network namespaces: `long_link NAMESPACE ADDRESS NAMESPACE ADDRESS RATE DELAY QUEUE`, in bits
   per second and milliseconds. It makes a device "long0" in each, and carries packets from one to the other, each way
   at that rate and that much later. Packets that would wait for more than QUEUE ms to leave are lost. It ends with its
   standard input. Segments of up to 64 KiB pass as they are, so that a relay of one machine keeps up with a fast link. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 1 << 14, MOST = 10 + 65536 };

struct way {
    int from, to;
    double bits_per_ns;
    long long delay, queue;
    pthread_mutex_t lock;
    pthread_cond_t filled;
    struct { long long due; int length; char *bytes; } slots[SLOTS];
    unsigned long first, behind;
};

static void must(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

static long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int device(const char *namespace, const char *address) {
    char text[256];
    snprintf(text, sizeof text, "/var/run/netns/%s", namespace);
    int space = open(text, O_RDONLY | O_CLOEXEC);
    must(space >= 0 && !setns(space, CLONE_NEWNET), namespace);
    int file = open("/dev/net/tun", O_RDWR | O_CLOEXEC);
    must(file >= 0, "/dev/net/tun");
    struct ifreq wanted = {.ifr_name = "long0", .ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    must(!ioctl(file, TUNSETIFF, &wanted), "TUNSETIFF");
    must(!ioctl(file, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4), "TUNSETOFFLOAD");
    snprintf(text, sizeof text, "ip address add %s/24 dev long0 && ip link set long0 mtu 1500 txqueuelen 20000 up", address);
    must(!system(text), text);
    close(space);
    return file;
}

static void *take(void *argument) {
    struct way *way = argument;
    char *buffer = malloc(MOST);
    long long free_at = 0;
    for (;;) {
        ssize_t length = read(way->from, buffer, MOST);
        must(length > 0, "read");
        long long time = now();
        if (free_at < time)
            free_at = time;
        pthread_mutex_lock(&way->lock);
        if (free_at - time <= way->queue && way->behind - way->first < SLOTS) {
            free_at += (long long)((double)(length - 10) * 8 / way->bits_per_ns);
            unsigned long slot = way->behind++ % SLOTS;
            way->slots[slot].due = free_at + way->delay;
            way->slots[slot].length = (int)length;
            way->slots[slot].bytes = memcpy(malloc((size_t)length), buffer, (size_t)length);
            pthread_cond_signal(&way->filled);
        }
        pthread_mutex_unlock(&way->lock);
    }
    return NULL;
}

static void *give(void *argument) {
    struct way *way = argument;
    for (;;) {
        pthread_mutex_lock(&way->lock);
        while (way->first == way->behind)
            pthread_cond_wait(&way->filled, &way->lock);
        unsigned long slot = way->first % SLOTS;
        pthread_mutex_unlock(&way->lock);
        struct timespec until = {way->slots[slot].due / 1000000000LL, way->slots[slot].due % 1000000000LL};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
        if (write(way->to, way->slots[slot].bytes, (size_t)way->slots[slot].length) < 0)
            perror("write");
        free(way->slots[slot].bytes);
        pthread_mutex_lock(&way->lock);
        way->first++;
        pthread_mutex_unlock(&way->lock);
    }
    return NULL;
}

int main(int count, char **words) {
    if (count != 8)
        return 2;
    int ends[2] = {device(words[1], words[2]), device(words[3], words[4])};
    struct way *ways = calloc(2, sizeof *ways);
    for (int i = 0; i < 2; i++) {
        pthread_t thread;
        ways[i].from = ends[i];
        ways[i].to = ends[1 - i];
        ways[i].bits_per_ns = atof(words[5]) / 1e9;
        ways[i].delay = (long long)(atof(words[6]) * 1e6);
        ways[i].queue = (long long)(atof(words[7]) * 1e6);
        pthread_mutex_init(&ways[i].lock, NULL);
        pthread_cond_init(&ways[i].filled, NULL);
        must(!pthread_create(&thread, NULL, take, &ways[i]) && !pthread_create(&thread, NULL, give, &ways[i]), "thread");
    }
    puts("ready");
    fflush(stdout);
    while (getchar() != EOF)
        ;
    return 0;
}
