/*
 * rsockets, which refuse: librdmacm implements them with parts of itself that the device lacks.
 * rpoll is also what programs of rdma-core wait with for event channels, as poll does.
 */
#include <errno.h>
#include <poll.h>

#include "exported.h"

#define REFUSES(name)        \
    EXPORTED int name(void); \
    EXPORTED int name(void)  \
    {                        \
        errno = EOPNOTSUPP;  \
        return -1;           \
    }
/* The same for calls that return a size or an offset. */
#define REFUSES_WIDE(name)       \
    EXPORTED ssize_t name(void); \
    EXPORTED ssize_t name(void)  \
    {                            \
        errno = EOPNOTSUPP;      \
        return -1;               \
    }

EXPORTED int rpoll(struct pollfd *descriptors, nfds_t count, int timeout_ms);
EXPORTED int rpoll(struct pollfd *descriptors, nfds_t count, int timeout_ms)
{
    return poll(descriptors, count, timeout_ms);
}

REFUSES(rsocket)
REFUSES(rbind)
REFUSES(rlisten)
REFUSES(raccept)
REFUSES(rconnect)
REFUSES(rshutdown)
REFUSES(rclose)
REFUSES(rselect)
REFUSES(rgetpeername)
REFUSES(rgetsockname)
REFUSES(rsetsockopt)
REFUSES(rgetsockopt)
REFUSES(rfcntl)
REFUSES(riounmap)
REFUSES_WIDE(rrecv)
REFUSES_WIDE(rrecvfrom)
REFUSES_WIDE(rrecvmsg)
REFUSES_WIDE(rsend)
REFUSES_WIDE(rsendto)
REFUSES_WIDE(rsendmsg)
REFUSES_WIDE(rread)
REFUSES_WIDE(rreadv)
REFUSES_WIDE(rwrite)
REFUSES_WIDE(rwritev)
REFUSES_WIDE(riomap)
REFUSES_WIDE(riowrite)
