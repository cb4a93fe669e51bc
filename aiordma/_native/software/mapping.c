/*
 * Finds memory that is mapped to a file, and copies memory without a SIGBUS if its pages are gone.
 *
 * The alternatives do not work. A handler of SIGBUS applies to the whole process, and a program, or
 * Python's faulthandler, may have its own. A check before the copy holds only for a moment. A
 * process may always read and write its own memory by process_vm_readv and process_vm_writev,
 * unless a sandbox forbids them. Then memory of a file is not registered.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* process_vm_readv */
#endif
#include "mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>

static const char MAPS[] = "/proc/self/maps";

/* The file of shared anonymous memory exists only inside the kernel: it cannot be truncated. */
static int is_nameless(const char *name)
{
    return !strcmp(name, "/dev/zero (deleted)") || !strcmp(name, "/anon_hugepage (deleted)");
}

/* In linux/fs.h since Linux 6.11. */
struct procmap_query {
    uint64_t size, query_flags, query_addr;
    uint64_t vma_start, vma_end, vma_flags, vma_page_size, vma_offset, inode;
    uint32_t dev_major, dev_minor, vma_name_size, build_id_size;
    uint64_t vma_name_addr, build_id_addr;
};
#define PROCMAP_QUERY _IOWR('f', 17, struct procmap_query)
enum { NAME = 128 };

/* Ask the kernel whether mapped memory has a file: 1, 0, or -1 if it cannot answer that. */
static int ask_kernel(int maps, uint64_t start, uint64_t end)
{
    while (start < end) {
        char name[NAME] = "";
        struct procmap_query query = {
            .size = sizeof(query),
            .query_addr = start,
            .vma_name_size = sizeof(name),
            .vma_name_addr = (uintptr_t)name,
        };
        /* Only the name of a file can be too long: all other names have at most 80 bytes. */
        if (ioctl(maps, PROCMAP_QUERY, &query))
            return errno == ENAMETOOLONG ? 1 : -1;
        if (query.inode && !is_nameless(name))
            return 1;
        start = query.vma_end;
    }
    return 0;
}

/* The same from the text of /proc/self/maps: 1 or 0. */
static int read_maps(FILE *maps, uint64_t start, uint64_t end)
{
    char *line = NULL;
    size_t size = 0;
    int found = 0;

    while (!found && getline(&line, &size, maps) > 0) {
        unsigned long long from = 0, to = 0, inode = 0;
        int name = 0;
        if (sscanf(line, "%llx-%llx %*s %*s %*s %llu %n", &from, &to, &inode, &name) < 3 || !name)
            found = 1; /* an unknown format */
        else if (from >= end)
            break;
        line[strcspn(line, "\n")] = '\0';
        found |= to > start && inode && !is_nameless(line + name);
    }
    found |= ferror(maps) != 0;
    free(line);
    return found;
}

int sw_is_of_file(const void *address, size_t length)
{
    const uint64_t start = (uintptr_t)address, end = start + length;
    int fd = open(MAPS, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return 1;
    int answer = ask_kernel(fd, start, end);
    if (answer >= 0) {
        close(fd);
        return answer;
    }
    FILE *maps = fdopen(fd, "r");
    if (!maps) {
        close(fd);
        return 1;
    }
    answer = read_maps(maps, start, end);
    fclose(maps);
    return answer;
}

/* The result of process_vm_readv or process_vm_writev: 0 if it copied everything. */
static int outcome(ssize_t moved, size_t size)
{
    if (moved < 0)
        return errno;
    return (size_t)moved == size ? 0 : EFAULT;
}

int sw_copy_to(struct sw_memory to, const void *from, size_t size)
{
    if (!to.is_of_file) {
        memcpy(to.at, from, size);
        return 0;
    }
    struct iovec here = {(void *)(uintptr_t)from, size}, there = {to.at, size};
    return outcome(process_vm_writev(getpid(), &here, 1, &there, 1, 0), size);
}

int sw_copy_from(void *to, struct sw_memory from, size_t size)
{
    if (!from.is_of_file) {
        memcpy(to, from.at, size);
        return 0;
    }
    struct iovec here = {to, size}, there = {from.at, size};
    return outcome(process_vm_readv(getpid(), &here, 1, &there, 1, 0), size);
}
