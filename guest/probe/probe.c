/* The probe: small measurements and pattern files inside a guest, one static binary so that any image can hold it.
 *
 *   probe read FILE [BLOCK]            read in order with read(), BLOCK bytes each (default 1 MiB)
 *   probe read-all FILE...             every file in order with 1 MiB read()s, timed together
 *   probe randread FILE COUNT          COUNT reads of 4 KiB at random places, through the page cache
 *   probe direct-randread FILE COUNT   the same with O_DIRECT
 *   probe fill FILE BYTES SEED         write a pattern file and fsync it
 *   probe verify FILE SEED             check it; the first bad offset is printed and the status is 1
 *   probe cached FILE...               how many pages of the files are in the page cache, and how many there are
 *   probe drop-caches                  sync, then drop clean pages, dentries and inodes
 *   probe hog MIB                      allocate and dirty memory, print `hogging`, hold it until killed
 *   probe kexec KERNEL INITRD CMDLINE  go on with another kernel at once, as `kexec -l` and `kexec -e` do
 *
 * Results are `key=value` lines. The pattern depends on the file's name, the offset and the seed: each 8-byte word is
 * mix(seed ^ mix(hash(base name)) ^ mix(offset / 8)). A block of another file, another place or another seed is seen as
 * wrong wherever it turns up. vmtest/src/pattern.rs makes the same bytes on the host. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 4096, CHUNK = 1 << 20 };
enum { REBOOT_KEXEC = 0x45584543 }; /* LINUX_REBOOT_CMD_KEXEC of linux/reboot.h */

static void die(const char *what, const char *name)
{
    fprintf(stderr, "probe: %s %s: %s\n", what, name, strerror(errno));
    exit(2);
}

static uint64_t number(const char *text)
{
    char *end;
    errno = 0;
    uint64_t value = strtoull(text, &end, 0);
    if (errno || end == text || *end) {
        fprintf(stderr, "probe: not a number: %s\n", text);
        exit(2);
    }
    return value;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* The finaliser of splitmix64: every input bit reaches every output bit. */
static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* FNV-1a of the name without its folder. */
static uint64_t name_hash(const char *path)
{
    const char *slash = strrchr(path, '/');
    uint64_t hash = 0xcbf29ce484222325u;
    for (const char *c = slash ? slash + 1 : path; *c; c++)
        hash = (hash ^ (unsigned char)*c) * 0x100000001b3u;
    return hash;
}

static uint64_t pattern_word(uint64_t file_key, uint64_t offset)
{
    return mix(file_key ^ mix(offset / 8));
}

static void *buffer(size_t bytes)
{
    void *memory;
    if (posix_memalign(&memory, BLOCK, bytes))
        die("allocate", "buffer");
    return memory;
}

static int open_or_die(const char *path, int flags)
{
    int fd = open(path, flags, 0644);
    if (fd < 0)
        die("open", path);
    return fd;
}

static uint64_t size_of(int fd, const char *path)
{
    off_t end = lseek(fd, 0, SEEK_END); /* not fstat: block devices too */
    if (end < 0 || lseek(fd, 0, SEEK_SET) < 0)
        die("find the size of", path);
    return end;
}

/* One process for many files: under TCG starting a process for each would cost more than reading it. */
static int read_sequential(char **paths, int count, size_t block)
{
    char *data = buffer(block);
    uint64_t total = 0;
    double start = now();
    for (int i = 0; i < count; i++) {
        int fd = open_or_die(paths[i], O_RDONLY);
        ssize_t got;
        while ((got = read(fd, data, block)) > 0)
            total += got;
        if (got < 0)
            die("read", paths[i]);
        close(fd);
    }
    double seconds = now() - start;
    printf("bytes=%" PRIu64 "\nseconds=%.6f\nmib_per_second=%.2f\n", total, seconds, total / 1048576.0 / seconds);
    return 0;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int read_random(const char *path, uint64_t count, int flags)
{
    int fd = open_or_die(path, O_RDONLY | flags);
    uint64_t blocks = size_of(fd, path) / BLOCK;
    if (!blocks || !count) {
        fprintf(stderr, "probe: %s holds no whole block, or a count of 0\n", path);
        return 2;
    }
    double *microseconds = calloc(count, sizeof *microseconds);
    if (!microseconds)
        die("allocate", "latencies");
    char *data = buffer(BLOCK);
    double start = now();
    for (uint64_t i = 0; i < count; i++) {
        off_t offset = mix(i) % blocks * BLOCK; /* the same places in every run: runs can be compared */
        double before = now();
        if (pread(fd, data, BLOCK, offset) != BLOCK)
            die("read", path);
        microseconds[i] = (now() - before) * 1e6;
    }
    double seconds = now() - start;
    qsort(microseconds, count, sizeof *microseconds, by_value);
    printf("count=%" PRIu64 "\nseconds=%.6f\np50_us=%.1f\np99_us=%.1f\nmax_us=%.1f\n", count, seconds,
           microseconds[count / 2], microseconds[count * 99 / 100], microseconds[count - 1]);
    return 0;
}

static int fill(const char *path, uint64_t bytes, uint64_t seed)
{
    int fd = open_or_die(path, O_WRONLY | O_CREAT);
    uint64_t key = seed ^ mix(name_hash(path)), *words = buffer(CHUNK);
    for (uint64_t offset = 0; offset < bytes; offset += CHUNK) {
        size_t length = bytes - offset < CHUNK ? bytes - offset : CHUNK;
        for (size_t i = 0; i < (length + 7) / 8; i++)
            words[i] = pattern_word(key, offset + i * 8);
        for (size_t done = 0; done < length;) {
            ssize_t put = write(fd, (char *)words + done, length - done);
            if (put < 0)
                die("write", path);
            done += put;
        }
    }
    struct stat status;
    if (fstat(fd, &status) || (S_ISREG(status.st_mode) && ftruncate(fd, bytes)) || fsync(fd) || close(fd))
        die("finish", path);
    printf("bytes=%" PRIu64 "\n", bytes);
    return 0;
}

static int verify(const char *path, uint64_t seed)
{
    int fd = open_or_die(path, O_RDONLY);
    uint64_t key = seed ^ mix(name_hash(path)), offset = 0;
    unsigned char *data = buffer(CHUNK);
    for (;;) {
        size_t length = 0;
        ssize_t got = 1;
        while (length < CHUNK && (got = read(fd, data + length, CHUNK - length)) > 0)
            length += got;
        if (got < 0)
            die("read", path);
        for (size_t i = 0; i < length; i += 8) {
            uint64_t expected = pattern_word(key, offset + i);
            size_t compare = length - i < 8 ? length - i : 8;
            if (memcmp(data + i, &expected, compare)) {
                printf("bad_offset=%" PRIu64 "\n", offset + i);
                return 1;
            }
        }
        offset += length;
        if (length < CHUNK)
            break;
    }
    printf("verified=%" PRIu64 "\n", offset);
    return 0;
}

static int count_cached(char **files, int count)
{
    uint64_t cached = 0, all = 0;
    for (int i = 0; i < count; i++) {
        int fd = open(files[i], O_RDONLY);
        struct stat file;
        if (fd < 0 || fstat(fd, &file))
            die("open", files[i]);
        size_t pages = (file.st_size + BLOCK - 1) / BLOCK;
        if (pages) {
            void *map = mmap(NULL, file.st_size, PROT_READ, MAP_SHARED, fd, 0);
            unsigned char *there = malloc(pages);
            if (map == MAP_FAILED || !there || mincore(map, file.st_size, there))
                die("look into", files[i]);
            for (size_t page = 0; page < pages; page++)
                cached += there[page] & 1;
            free(there);
            munmap(map, file.st_size);
        }
        all += pages;
        close(fd);
    }
    printf("cached_pages=%" PRIu64 "\nall_pages=%" PRIu64 "\n", cached, all);
    return 0;
}

static int drop_caches(void)
{
    sync();
    int fd = open_or_die("/proc/sys/vm/drop_caches", O_WRONLY);
    if (write(fd, "3\n", 2) != 2)
        die("write", "/proc/sys/vm/drop_caches");
    return 0;
}

static int hog(uint64_t mib)
{
    uint64_t bytes = mib << 20;
    unsigned char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        die("map", "memory");
    for (uint64_t i = 0; i < bytes; i += 8)
        *(uint64_t *)(memory + i) = mix(i); /* nothing that could be merged or compressed away */
    printf("hogging=%" PRIu64 "\n", mib);
    fflush(stdout);
    return pause(); /* no signal is handled, so this never returns: only a kill ends it */
}

static int boot_kernel(const char *kernel, const char *initrd, const char *cmdline)
{
    int kernel_fd = open_or_die(kernel, O_RDONLY), initrd_fd = open_or_die(initrd, O_RDONLY);
    if (syscall(SYS_kexec_file_load, kernel_fd, initrd_fd, strlen(cmdline) + 1, cmdline, 0L))
        die("load", kernel);
    sync();
    reboot(REBOOT_KEXEC);
    die("start", kernel);
    return 2;
}

static int usage(void)
{
    fprintf(stderr, "probe: read FILE [BLOCK] | read-all FILE... | randread FILE COUNT | direct-randread FILE COUNT | fill FILE BYTES SEED\n"
                    "       verify FILE SEED | cached FILE... | drop-caches | hog MIB | kexec KERNEL INITRD CMDLINE\n");
    return 2;
}

int main(int argc, char **argv)
{
    const char *verb = argc > 1 ? argv[1] : "";
    if (!strcmp(verb, "read") && (argc == 3 || argc == 4))
        return read_sequential(argv + 2, 1, argc == 4 ? number(argv[3]) : CHUNK);
    if (!strcmp(verb, "read-all") && argc >= 3)
        return read_sequential(argv + 2, argc - 2, CHUNK);
    if (!strcmp(verb, "randread") && argc == 4)
        return read_random(argv[2], number(argv[3]), 0);
    if (!strcmp(verb, "direct-randread") && argc == 4)
        return read_random(argv[2], number(argv[3]), O_DIRECT);
    if (!strcmp(verb, "fill") && argc == 5)
        return fill(argv[2], number(argv[3]), number(argv[4]));
    if (!strcmp(verb, "verify") && argc == 4)
        return verify(argv[2], number(argv[3]));
    if (!strcmp(verb, "cached") && argc >= 3)
        return count_cached(argv + 2, argc - 2);
    if (!strcmp(verb, "drop-caches") && argc == 2)
        return drop_caches();
    if (!strcmp(verb, "hog") && argc == 3)
        return hog(number(argv[2]));
    if (!strcmp(verb, "kexec") && argc == 5)
        return boot_kernel(argv[2], argv[3], argv[4]);
    return usage();
}
