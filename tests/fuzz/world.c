/* The device, opened once, and how an input is read. */
#include "world.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

const struct aiordma_provider *aiordma_software(void);

struct world *the_world(void)
{
    static struct world world;

    if (world.table)
        return &world;
    world.table = aiordma_software();
    PROMISE(world.table);
    int count = 0;
    struct ibv_device **devices = world.table->get_device_list(&count);
    PROMISE(devices && count == 1);
    world.context = world.table->open_device(devices[0]);
    PROMISE(world.context);
    world.table->free_device_list(devices);
    return &world;
}

uint32_t take(struct input *input, int bytes)
{
    uint32_t value = 0;

    for (int i = 0; i < bytes; i++) {
        value <<= 8;
        if (input->left) {
            value |= *input->at++;
            input->left--;
        }
    }
    return value;
}

const uint8_t *take_bytes(struct input *input, size_t *size)
{
    const uint8_t *at = input->at;

    if (*size > input->left)
        *size = input->left;
    input->at += *size;
    input->left -= *size;
    return at;
}

/*
 * The kernel does not die of an address that is not there, it says EFAULT; and what is there and
 * poisoned it takes. (recv and its like are looked at by the address sanitizer.)
 */
ssize_t __real_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __real_recvmsg(int fd, struct msghdr *message, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags);
ssize_t __real_recv(int fd, void *bytes, size_t size, int flags);
ssize_t __wrap_recv(int fd, void *bytes, size_t size, int flags);

ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags)
{
    ssize_t size = __real_sendmsg(fd, message, flags);

    PROMISE(size >= 0 || (errno != EFAULT && errno != EBADF && errno != EINVAL));
    return size;
}

ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags)
{
    ssize_t size = __real_recvmsg(fd, message, flags);

    PROMISE(size >= 0 || (errno != EFAULT && errno != EBADF && errno != EINVAL));
    return size;
}

ssize_t __wrap_recv(int fd, void *bytes, size_t size, int flags)
{
    ssize_t received = __real_recv(fd, bytes, size, flags);

    PROMISE(received >= 0 || (errno != EFAULT && errno != EBADF));
    return received;
}
