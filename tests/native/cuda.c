/*
 * Stands in for CUDA's driver, libcuda.so.1: memory of a GPU at an address of its own, whose dma-buf
 * is a file. Compiled with OLD, it is a driver that exports no dma-bufs. Copies have to be made from
 * and to memory that is pinned, and with the context current in the calling thread.
 */
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, NOT_SUPPORTED = 801 };
enum { DMA_BUF_FD = 1, PAGE = 4096, DEVICE_ORDINAL = 9, ORDINAL = 3, DEVICE = 7, PORTABLE = 1 };

struct stand_in {
    unsigned long long address; /* of the memory */
    int fd;                     /* its file */
    int error;                  /* what the driver answers, if not 0 */
    unsigned long long asked_address;
    size_t asked_size;
    int copy_error;     /* what a copy answers, if not 0 */
    int retained;       /* contexts */
    const char *pinned; /* memory, or NULL */
    size_t pinned_size;
};

struct stand_in stand_in;
static _Thread_local void *current;

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

int cuPointerGetAttribute(void *data, int attribute, unsigned long long address)
{
    if (attribute != DEVICE_ORDINAL || address < stand_in.address)
        return INVALID_VALUE;
    *(int *)data = ORDINAL;
    return 0;
}

int cuDeviceGet(int *device, int ordinal)
{
    *device = DEVICE;
    return ordinal == ORDINAL ? 0 : INVALID_VALUE;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    if (device != DEVICE)
        return INVALID_VALUE;
    *context = &stand_in;
    stand_in.retained++;
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    stand_in.retained--;
    return device == DEVICE ? 0 : INVALID_VALUE;
}

int cuCtxPushCurrent_v2(void *context)
{
    if (current || context != &stand_in)
        return INVALID_VALUE;
    current = context;
    return 0;
}

int cuCtxPopCurrent_v2(void **context)
{
    *context = current;
    current = NULL;
    return *context ? 0 : INVALID_CONTEXT;
}

int cuMemHostRegister_v2(void *memory, size_t size, unsigned int flags)
{
    if (!current)
        return INVALID_CONTEXT;
    if (stand_in.pinned || (uintptr_t)memory % PAGE || flags != PORTABLE)
        return INVALID_VALUE;
    stand_in.pinned = memory;
    stand_in.pinned_size = size;
    return 0;
}

int cuMemHostUnregister(void *memory)
{
    if (!current)
        return INVALID_CONTEXT;
    if (stand_in.pinned != memory)
        return INVALID_VALUE;
    stand_in.pinned = NULL;
    return 0;
}

static int check_copy(const char *memory, unsigned long long address, size_t size)
{
    if (!current)
        return INVALID_CONTEXT;
    if (stand_in.copy_error)
        return stand_in.copy_error;
    return memory < stand_in.pinned || memory + size > stand_in.pinned + stand_in.pinned_size ||
                   address < stand_in.address
               ? INVALID_VALUE
               : 0;
}

int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t size)
{
    int error = check_copy(to, from, size);

    if (error)
        return error;
    return pread(stand_in.fd, to, size, (off_t)(from - stand_in.address)) == (ssize_t)size
               ? 0
               : INVALID_VALUE;
}

int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t size)
{
    int error = check_copy(from, to, size);

    if (error)
        return error;
    return pwrite(stand_in.fd, from, size, (off_t)(to - stand_in.address)) == (ssize_t)size
               ? 0
               : INVALID_VALUE;
}

int cuGetErrorName(int error, const char **name)
{
    *name = error == NOT_SUPPORTED ? "CUDA_ERROR_NOT_SUPPORTED" : NULL;
    return *name ? 0 : INVALID_VALUE;
}
