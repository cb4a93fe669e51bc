/*
 * Tests whether memory is recognized as mapped to a file, by the kernel's query and by
 * /proc/self/maps, and copies of memory whose file was truncated. Prints nothing and returns 0, or
 * prints the error and returns 1.
 */
#define _GNU_SOURCE /* memfd_create */
#include "software/mapping.c"

#include <sys/mman.h>

enum { SIZE = 8192, LARGE = 1 << 20, LONG_NAME = 200 };

static void check(int is_well, const char *what)
{
    if (is_well)
        return;
    printf("%s\n", what);
    exit(1);
}

static char *map(size_t size, int flags, int fd, void *at)
{
    char *memory = mmap(at, size, PROT_READ | PROT_WRITE, flags, fd, 0);

    check(memory != MAP_FAILED, "mmap failed");
    return memory;
}

static void expect(const char *memory, size_t size, int expected, const char *what)
{
    const uint64_t start = (uintptr_t)memory;
    FILE *maps = fopen(MAPS, "re");

    check(maps != NULL, MAPS);
    check(read_maps(maps, start, start + size) == expected, what);
    int answer = ask_kernel(fileno(maps), start, start + size);
    check(answer == expected || answer == -1, what);
    check(sw_is_of_file(memory, size) == expected, what);
    fclose(maps);
}

static int make_file(const char *folder)
{
    char name[LONG_NAME + 64];

    snprintf(name, sizeof(name), "%s/%0*d", folder, LONG_NAME, getpid());
    int fd = open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    check(fd >= 0 && !ftruncate(fd, SIZE), name);
    check(!unlink(name), name);
    return fd;
}

static void check_copies(int fd)
{
    char bytes[SIZE] = "here";
    struct sw_memory memory = {map(SIZE, MAP_SHARED, fd, NULL), 1};

    check(!sw_copy_to(memory, bytes, SIZE) && !strcmp(memory.at, "here"), "a copy to a file");
    memset(bytes, 0, SIZE);
    check(!sw_copy_from(bytes, memory, SIZE) && !strcmp(bytes, "here"), "a copy from a file");
    check(!ftruncate(fd, SIZE / 2), "ftruncate failed");
    check(sw_copy_to(memory, bytes, SIZE) == EFAULT, "a copy to what is gone");
    check(sw_copy_from(bytes, memory, SIZE) == EFAULT, "a copy from what is gone");
    check(!sw_copy_from(bytes, memory, SIZE / 2), "a copy from what is left");
    memory.at += SIZE / 2;
    check(sw_copy_to(memory, bytes, 1) == EFAULT, "a byte to what is gone");
    check(!ftruncate(fd, SIZE), "ftruncate failed");
    check(!sw_copy_to(memory, bytes, 1), "a byte to what is there again");
}

int main(void)
{
    const int anonymous = MAP_PRIVATE | MAP_ANONYMOUS, shared = MAP_SHARED | MAP_ANONYMOUS;
    int fd = make_file("/tmp"), memory_fd = memfd_create("anonymous", MFD_CLOEXEC);
    char on_stack[64] = "", *allocated = malloc(LARGE);

    check(allocated && memory_fd >= 0 && !ftruncate(memory_fd, SIZE), "no memory");
    expect(on_stack, sizeof(on_stack), 0, "the stack");
    expect(allocated, LARGE, 0, "allocated memory");
    expect(map(SIZE, anonymous, -1, NULL), SIZE, 0, "anonymous memory");
    expect(map(SIZE, shared, -1, NULL), SIZE, 0, "shared anonymous memory");
    expect(map(SIZE, MAP_SHARED, fd, NULL), SIZE, 1, "a file that has no name any more");
    expect(map(SIZE, MAP_PRIVATE, fd, NULL), SIZE, 1, "a private mapping of a file");
    expect(map(SIZE, MAP_SHARED, memory_fd, NULL), SIZE, 1, "a file of memfd_create");
    char *both = map(2 * SIZE, anonymous, -1, NULL);
    map(SIZE, MAP_SHARED | MAP_FIXED, fd, both + SIZE);
    expect(both, SIZE, 0, "anonymous memory before a file");
    expect(both + SIZE / 2, SIZE, 1, "anonymous memory with a file behind it");
    check_copies(fd);
    free(allocated);
    return 0;
}
