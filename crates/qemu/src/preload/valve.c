/* Part of the preload library: valves (packet gates) that keep QEMU from its networks while another QEMU uses them.
 *
 * crates/qemu/src/packet_gate.rs describes the file and the reason. While a valve is shut, QEMU does not learn that a packet has
 * arrived (ppoll), and the packet waits in the kernel. A stream is shut between two packets: QEMU still reads the rest of a
 * packet that it has begun. QEMU's settings of a tap are delayed until its valve opens, because they apply to every process
 * that has the tap open. A QEMU that starts would reset them to values that no guest has agreed on.
 *
 * QEMU does not wait for a valve: the keeper wakes QEMU in another way after it opens one. On a stream QEMU never gets EAGAIN,
 * because it would abort (10.0: net_fill_rstate). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define VALVES_VARIABLE "HEARTH_VALVES"
#define EXPORTED __attribute__((visibility("default")))

enum { VALVES_MAX = 8, KIND_TAP = 1, KIND_STREAM = 2 };

struct valve {
    int32_t number;
    uint32_t kind;
    _Atomic uint32_t shut;
    /* Stream only: QEMU has read a part of a packet. */
    _Atomic uint32_t part;
};

struct valves {
    char magic[8];
    uint32_t version;
    uint32_t count;
    /* The library has found this file and obeys it. */
    _Atomic uint32_t worked;
    uint32_t unused[3];
    struct valve valve[VALVES_MAX];
};
_Static_assert(sizeof(struct valves) == 32 + 16 * VALVES_MAX, "the keeper writes 160 bytes");

/* Private to this process, and used only by the one thread of QEMU that reads from networks. */
struct network {
    /* Stream only: the packet that is being read. Its length comes first: four bytes, big-endian. */
    unsigned char length[4];
    uint32_t length_bytes;
    uint32_t left;
    /* Tap only: settings that are delayed. */
    int has_offload, has_header;
    unsigned long offload;
    int header;
};

static struct valves *valves;
static struct network networks[VALVES_MAX];

static int valve_of(int number) {
    if (valves != NULL) {
        for (uint32_t i = 0; i < valves->count; i++) {
            if (valves->valve[i].number == number) {
                return (int)i;
            }
        }
    }
    return -1;
}

static int is_shut(int i) {
    return atomic_load_explicit(&valves->valve[i].shut, memory_order_acquire) != 0;
}

static void find_valves(const char *path) {
    int file = open(path, O_RDWR | O_CLOEXEC);
    struct stat status;
    if (file >= 0 && fstat(file, &status) == 0 && status.st_size >= (off_t)sizeof(struct valves)) {
        struct valves *found = mmap(NULL, sizeof *found, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (found != MAP_FAILED) {
            if (memcmp(found->magic, "HRTHVALV", 8) == 0 && found->version == 1 && found->count <= VALVES_MAX) {
                valves = found;
                atomic_store(&valves->worked, 1);
            } else {
                munmap(found, sizeof *found);
            }
        }
    }
    if (file >= 0) {
        close(file);
    }
    if (valves == NULL) {
        fprintf(stderr, "hearth: no valves at %s\n", path);
    }
}

static void set_what_was_put_off(int i) {
    struct network *network = &networks[i];
    if (network->has_header) {
        network->has_header = 0;
        syscall(SYS_ioctl, valves->valve[i].number, TUNSETVNETHDRSZ, &network->header);
    }
    if (network->has_offload) {
        network->has_offload = 0;
        syscall(SYS_ioctl, valves->valve[i].number, TUNSETOFFLOAD, network->offload);
    }
}

EXPORTED ssize_t read(int number, void *buffer, size_t bytes) {
    int i = valve_of(number);
    if (i >= 0) {
        if (is_shut(i)) {
            errno = EAGAIN;
            return -1;
        }
        set_what_was_put_off(i);
    }
    return syscall(SYS_read, number, buffer, bytes);
}

EXPORTED int ioctl(int number, unsigned long request, ...) {
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    int i = valve_of(number);
    if (i >= 0 && valves->valve[i].kind == KIND_TAP && is_shut(i)) {
        if (request == TUNSETOFFLOAD) {
            networks[i].has_offload = 1;
            networks[i].offload = (unsigned long)argument;
            return 0;
        }
        if (request == TUNSETVNETHDRSZ) {
            networks[i].has_header = 1;
            networks[i].header = *(int *)argument;
            return 0;
        }
    }
    return (int)syscall(SYS_ioctl, number, request, argument);
}

/* Bytes that are missing of the packet that is being read. */
static size_t missing(const struct network *network) {
    return network->length_bytes != 0 ? 4 - network->length_bytes : network->left;
}

static void follow(int i, const unsigned char *bytes, size_t count) {
    struct network *network = &networks[i];
    while (count > 0) {
        size_t step;
        if (network->left != 0) {
            step = count < network->left ? count : network->left;
            network->left -= (uint32_t)step;
        } else {
            step = 1;
            network->length[network->length_bytes++] = *bytes;
            if (network->length_bytes == 4) {
                const unsigned char *length = network->length;
                network->left = (uint32_t)length[0] << 24 | (uint32_t)length[1] << 16 | (uint32_t)length[2] << 8 | length[3];
                network->length_bytes = 0;
            }
        }
        bytes += step;
        count -= step;
    }
    atomic_store_explicit(&valves->valve[i].part, missing(network) != 0, memory_order_release);
}

EXPORTED ssize_t recvmsg(int number, struct msghdr *message, int flags) {
    int i = valve_of(number);
    if (i < 0 || valves->valve[i].kind != KIND_STREAM || message->msg_iovlen == 0) {
        return syscall(SYS_recvmsg, number, message, flags);
    }
    struct iovec part = message->msg_iov[0];
    if (is_shut(i)) {
        /* QEMU saw data before the valve was shut: let it read one packet, beginning with its length. */
        size_t rest = missing(&networks[i]) != 0 ? missing(&networks[i]) : 4;
        part.iov_len = part.iov_len < rest ? part.iov_len : rest;
    }
    struct msghdr limited = *message;
    limited.msg_iov = &part;
    limited.msg_iovlen = 1;
    ssize_t received = syscall(SYS_recvmsg, number, &limited, flags);
    message->msg_namelen = limited.msg_namelen;
    message->msg_controllen = limited.msg_controllen;
    message->msg_flags = limited.msg_flags;
    if (received > 0) {
        follow(i, part.iov_base, (size_t)received);
    }
    return received;
}

struct hidden {
    nfds_t at;
    int number;
};

/* QEMU waits for each network once. If it waited more often, it would only learn of packets too early. */
static size_t hide(struct pollfd *waited, nfds_t count, struct hidden *hidden) {
    size_t found = 0;
    for (nfds_t at = 0; at < count && found < VALVES_MAX; at++) {
        int i = valve_of(waited[at].fd);
        if (i >= 0 && is_shut(i) && missing(&networks[i]) == 0) {
            hidden[found++] = (struct hidden){at, waited[at].fd};
            waited[at].fd = -1;
        }
    }
    return found;
}

static void show(struct pollfd *waited, const struct hidden *hidden, size_t found) {
    while (found-- > 0) {
        waited[hidden[found].at].fd = hidden[found].number;
        waited[hidden[found].at].revents = 0;
    }
}

EXPORTED int ppoll(struct pollfd *waited, nfds_t count, const struct timespec *timeout, const sigset_t *mask) {
    struct hidden hidden[VALVES_MAX];
    size_t found = valves != NULL ? hide(waited, count, hidden) : 0;
    /* The kernel changes it. */
    struct timespec left, *limit = NULL;
    if (timeout != NULL) {
        left = *timeout;
        limit = &left;
    }
    int ready = (int)syscall(SYS_ppoll, waited, count, limit, mask, _NSIG / 8);
    show(waited, hidden, found);
    return ready;
}

EXPORTED int poll(struct pollfd *waited, nfds_t count, int timeout_ms) {
    struct hidden hidden[VALVES_MAX];
    size_t found = valves != NULL ? hide(waited, count, hidden) : 0;
    int ready = (int)syscall(SYS_poll, waited, count, timeout_ms);
    show(waited, hidden, found);
    return ready;
}

/* Called instead of ppoll and poll by a compiler that checks array lengths (_FORTIFY_SOURCE). */
EXPORTED int __ppoll_chk(
    struct pollfd *waited, nfds_t count, const struct timespec *timeout, const sigset_t *mask, size_t bytes) {
    if (bytes / sizeof *waited < count) {
        abort();
    }
    return ppoll(waited, count, timeout, mask);
}

EXPORTED int __poll_chk(struct pollfd *waited, nfds_t count, int timeout_ms, size_t bytes) {
    if (bytes / sizeof *waited < count) {
        abort();
    }
    return poll(waited, count, timeout_ms);
}

/* A packet is sent to a stream completely; otherwise the next QEMU would begin inside a packet. */
#define SEND_PATIENCE_MS 100
#define PARTS_MAX 16

EXPORTED ssize_t sendmsg(int number, const struct msghdr *message, int flags) {
    ssize_t sent = syscall(SYS_sendmsg, number, message, flags);
    int i = valve_of(number);
    if (sent <= 0 || i < 0 || valves->valve[i].kind != KIND_STREAM || message->msg_iovlen > PARTS_MAX) {
        return sent;
    }
    for (;;) {
        struct iovec parts[PARTS_MAX];
        size_t count = 0, passed = (size_t)sent;
        for (size_t n = 0; n < message->msg_iovlen; n++) {
            struct iovec part = message->msg_iov[n];
            size_t skip = passed < part.iov_len ? passed : part.iov_len;
            passed -= skip;
            if (part.iov_len > skip) {
                parts[count++] = (struct iovec){(char *)part.iov_base + skip, part.iov_len - skip};
            }
        }
        struct pollfd room = {.fd = number, .events = POLLOUT};
        if (count == 0 || poll(&room, 1, SEND_PATIENCE_MS) <= 0) {
            return sent;
        }
        struct msghdr rest = {.msg_iov = parts, .msg_iovlen = count};
        ssize_t more = syscall(SYS_sendmsg, number, &rest, flags | MSG_NOSIGNAL);
        if (more < 0 && errno != EAGAIN && errno != EINTR) {
            return sent;
        }
        sent += more > 0 ? more : 0;
    }
}

__attribute__((constructor)) static void hearth_valves(void) {
    const char *path = getenv(VALVES_VARIABLE);
    if (path != NULL) {
        find_valves(path);
    }
    /* Programs that QEMU starts must not inherit this. */
    unsetenv(VALVES_VARIABLE);
}
