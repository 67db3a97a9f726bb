/* Preload library for stock QEMU: makes a userfaultfd inside QEMU and hands it to the keeper.
 *
 * A userfaultfd acts on the memory of the process that made it, so QEMU must make it. QEMU keeps a copy: if the keeper held
 * the only one and died, the kernel would unregister the memory and the guest would silently read pages of zeroes.
 * The keeper's end of the helper's channel comes with it (helper.c).
 *
 * Message (128 bytes, host byte order; see crates/memory/src/faults/handover.rs):
 *   magic "HRTHUFFD" | u32 version | i32 number of the descriptor here, or -1 | i32 errno | i32 number of the channel's end
 *   here, or -1 | 104 bytes: why there is no descriptor
 * Answer: one byte. QEMU starts even if any step fails: the machine then runs without the features that need page faults. */
#define _GNU_SOURCE
#include "helper.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#define SOCKET_VARIABLE "HEARTH_USERFAULT_SOCKET"
/* From linux/userfaultfd.h; missing in the headers of older distributions. */
#define HEARTH_USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#define ANSWER_PATIENCE_S 2

struct message {
    char magic[8];
    uint32_t version;
    int32_t number;
    int32_t error;
    int32_t helper;
    char why[104];
};
_Static_assert(sizeof(struct message) == 128, "the keeper reads 128 bytes");

static int make_userfaultfd(struct message *message) {
    int flags = O_CLOEXEC | O_NONBLOCK;
    int userfault = (int)syscall(SYS_userfaultfd, flags);
    if (userfault >= 0) {
        return userfault;
    }
    message->error = errno;
    snprintf(message->why, sizeof message->why, "userfaultfd: %s", strerror(errno));
    int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
    if (device < 0) {
        return -1;
    }
    userfault = ioctl(device, HEARTH_USERFAULTFD_IOC_NEW, flags);
    if (userfault < 0) {
        message->error = errno;
        snprintf(message->why, sizeof message->why, "/dev/userfaultfd: %s", strerror(errno));
    }
    close(device);
    return userfault;
}

static int connect_to_keeper(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(address.sun_path, path, strlen(path) + 1);
    int keeper = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (keeper < 0) {
        return -1;
    }
    /* A stopped keeper must not keep QEMU from starting: each step has a time limit, connecting included. */
    struct timeval patience = {.tv_sec = ANSWER_PATIENCE_S};
    setsockopt(keeper, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(keeper, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (connect(keeper, (struct sockaddr *)&address, sizeof address) != 0) {
        int error = errno;
        close(keeper);
        errno = error;
        return -1;
    }
    return keeper;
}

static void hand_over(int keeper, int userfault, struct message *message) {
    int numbers[] = {userfault, message->helper};
    size_t bytes = message->helper >= 0 ? sizeof numbers : sizeof *numbers;
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof numbers)];
    } control;
    memset(&control, 0, sizeof control);
    struct iovec part = {.iov_base = message, .iov_len = sizeof *message};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    if (userfault >= 0) {
        header.msg_control = &control;
        header.msg_controllen = CMSG_SPACE(bytes);
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(bytes);
        memcpy(CMSG_DATA(rights), numbers, bytes);
    }
    char answer;
    if (sendmsg(keeper, &header, MSG_NOSIGNAL) != sizeof *message || read(keeper, &answer, 1) != 1) {
        fprintf(stderr, "hearth: the keeper did not take the userfaultfd\n");
    }
}

__attribute__((constructor)) static void hearth_preload(void) {
    const char *path = getenv(SOCKET_VARIABLE);
    if (path != NULL) {
        struct message message = {.magic = {'H', 'R', 'T', 'H', 'U', 'F', 'F', 'D'}, .version = 2, .number = -1, .helper = -1};
        int keeper = connect_to_keeper(path);
        if (keeper >= 0) {
            int userfault = make_userfaultfd(&message);
            if (userfault >= 0) {
                message.number = userfault;
                message.error = 0;
                message.helper = hearth_start_helper();
                memset(message.why, 0, sizeof message.why);
            }
            hand_over(keeper, userfault, &message);
            close(keeper);
        } else {
            fprintf(stderr, "hearth: no keeper at %s: %s\n", path, strerror(errno));
        }
    }
    /* Programs that QEMU starts must not inherit these. */
    unsetenv("LD_PRELOAD");
    unsetenv(SOCKET_VARIABLE);
}
