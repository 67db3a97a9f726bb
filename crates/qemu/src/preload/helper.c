/* Part of the preload library: a thread that drops QEMU's page tables of a memory range on request. So the keeper can see
 * which pages QEMU touches from then on (crates/memory/src/faults/access.rs).
 *
 * The memory stays: it belongs to a file, mapped shared, and a page that is touched is mapped again. Only the process itself
 * can do this. What another process can do (MADV_PAGEOUT) writes the memory to swap, if there is any.
 *
 * Request, 24 bytes: u64 sequence, address, bytes. Answer, 16 bytes: u64 sequence, i32 errno or 0, i32 0. Host byte order.
 * QEMU keeps both ends of the channel: the next keeper fetches the keeper's end after its predecessor has died. */
#define _GNU_SOURCE
#include "helper.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum { STACK_BYTES = 64 << 10 };

struct request {
    uint64_t sequence, address, bytes;
};
_Static_assert(sizeof(struct request) == 24, "the keeper sends 24 bytes");

struct answer {
    uint64_t sequence;
    int32_t error, zero;
};
_Static_assert(sizeof(struct answer) == 16, "the keeper reads 16 bytes");

static int channel[2];

static void *help(void *unused) {
    (void)unused;
    for (;;) {
        struct request request;
        ssize_t got = recv(channel[0], &request, sizeof request, 0);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return NULL;
        }
        struct answer answer = {.error = EBADMSG};
        if (got == sizeof request) {
            void *address = (void *)(uintptr_t)request.address;
            answer.sequence = request.sequence;
            answer.error = madvise(address, request.bytes, MADV_DONTNEED) == 0 ? 0 : errno;
        }
        send(channel[0], &answer, sizeof answer, MSG_NOSIGNAL);
    }
}

int hearth_start_helper(void) {
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, channel) != 0) {
        return -1;
    }
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    /* QEMU blocks some signals in all of its threads and reads them elsewhere. In this thread, one would end the process. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    int failed = pthread_create(&thread, &attributes, help, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (failed != 0) {
        close(channel[0]);
        close(channel[1]);
        return -1;
    }
    return channel[1];
}
