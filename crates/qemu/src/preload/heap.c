/* Heap: a QEMU that is about to receive a guest returns no heap memory to the kernel until it has the guest.
 *
 * For each device that it loads, QEMU rebuilds its memory map, and the old maps are freed only at the end (RCU): 3.5 MiB in
 * about 4 ms. QEMU needed as much while it created its devices, but has returned it to the kernel: by malloc_trim in QEMU's
 * util/rcu.c, and by free() at the heap's end. It would get that memory back page by page, with about 870 faults, while the
 * guest stands still. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <stdlib.h>
#include <time.h>

#define KEEP_VARIABLE "HEARTH_KEEP_HEAP_S"
#define EXPORTED __attribute__((visibility("default")))

enum { KEPT_BYTES_MAX = 32 << 20 };

/* Until then no memory is returned, in seconds of CLOCK_MONOTONIC. 0: memory is always returned. */
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
