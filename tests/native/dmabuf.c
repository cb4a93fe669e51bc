/*
 * Preloaded: every file appears as a dma-buf, of a kind whose pages the kernel does not copy for a
 * program (VM_PFNMAP).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

int fstatfs(int fd, struct statfs *system)
{
    int result = (int)syscall(SYS_fstatfs, fd, system);

    system->f_type = 0x444d4142; /* DMA_BUF_MAGIC */
    return result;
}

static ssize_t refuse(void)
{
    errno = EFAULT;
    return -1;
}

ssize_t process_vm_readv(pid_t process, const struct iovec *to, unsigned long to_count,
                         const struct iovec *from, unsigned long from_count, unsigned long flags)
{
    (void)process, (void)to, (void)to_count, (void)from, (void)from_count, (void)flags;
    return refuse();
}

ssize_t process_vm_writev(pid_t process, const struct iovec *from, unsigned long from_count,
                          const struct iovec *to, unsigned long to_count, unsigned long flags)
{
    (void)process, (void)to, (void)to_count, (void)from, (void)from_count, (void)flags;
    return refuse();
}
