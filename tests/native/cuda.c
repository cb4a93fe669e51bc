/*
 * Stands in for CUDA's driver, libcuda.so.1: memory of a GPU at an address of its own, whose dma-buf
 * is a file. Compiled with OLD, it is a driver that exports no dma-bufs.
 */
#include <stddef.h>
#include <unistd.h>

enum { INVALID_VALUE = 1, NOT_SUPPORTED = 801, DMA_BUF_FD = 1, PAGE = 4096 };

struct stand_in {
    unsigned long long address; /* of the memory */
    int fd;                     /* its file */
    int error;                  /* what the driver answers, if not 0 */
    unsigned long long asked_address;
    size_t asked_size;
};

struct stand_in stand_in;

#ifndef OLD
int cuMemGetHandleForAddressRange(void *handle, unsigned long long address, size_t size, int type,
                                  unsigned long long flags)
{
    stand_in.asked_address = address;
    stand_in.asked_size = size;
    if (stand_in.error)
        return stand_in.error;
    if (address != stand_in.address || address % PAGE || size % PAGE || type != DMA_BUF_FD || flags)
        return INVALID_VALUE;
    int fd = dup(stand_in.fd);
    if (fd < 0)
        return INVALID_VALUE;
    *(int *)handle = fd;
    return 0;
}
#endif

int cuGetErrorName(int error, const char **name)
{
    *name = error == NOT_SUPPORTED ? "CUDA_ERROR_NOT_SUPPORTED" : NULL;
    return *name ? 0 : INVALID_VALUE;
}
