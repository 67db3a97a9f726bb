/* Heap for the load of a guest's state: a QEMU that is to take a guest does not give any back before it has.
 *
 * With every device that it loads QEMU makes its map of memory anew, and what was before comes free only when all is over (RCU):
 * 3.5 MiB in some 4 ms. It had as much while it made its devices, but gives what is free back to the kernel (malloc_trim in
 * QEMU's util/rcu.c, and free() by itself what is at the heap's end), and would get it page by page, some 870 faults, while the
 * guest stands still. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <stdlib.h>
#include <time.h>

#define KEEP_VARIABLE "HEARTH_KEEP_HEAP_S"
#define EXPORTED __attribute__((visibility("default")))

enum { KEPT_BYTES_MAX = 32 << 20 };

/* 0: it was given back all the time. */
static time_t kept_until;

static time_t now(void) {
    struct timespec time;
    return clock_gettime(CLOCK_MONOTONIC, &time) == 0 ? time.tv_sec : 0;
}

EXPORTED int malloc_trim(size_t pad) {
    if (now() < kept_until) {
        return 0;
    }
    int (*give_back)(size_t) = (int (*)(size_t))dlsym(RTLD_NEXT, "malloc_trim");
    return give_back != NULL ? give_back(pad) : 0;
}

__attribute__((constructor)) static void hearth_heap(void) {
    const char *seconds = getenv(KEEP_VARIABLE);
    if (seconds != NULL) {
        kept_until = now() + atoi(seconds);
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES_MAX);
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES_MAX);
    }
    unsetenv(KEEP_VARIABLE);
}
