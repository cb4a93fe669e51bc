/* The limits of the software device, which ibv_query_device reports. */
#ifndef AIORDMA_SOFTWARE_LIMITS_H
#define AIORDMA_SOFTWARE_LIMITS_H

#define SW_NAME "software"
#define SW_ROCE_NAME "software_roce"

/* The build sets the package's version. */
#ifndef SW_VERSION
#define SW_VERSION "1.0"
#endif

enum {
    SW_VENDOR = 0x02a10d, /* a locally administered OUI: nobody's */
    SW_MOST_QUEUE_PAIRS = 65536,
    SW_MOST_WORK_REQUESTS = 32768,
    SW_MOST_PARTS = 32,
    SW_MOST_INLINE = 1024,
    SW_MOST_QUEUES = 65536,
    SW_MOST_COMPLETIONS = 4194304,
    SW_MOST_REGIONS = 1 << 22,
    SW_MOST_WINDOWS = 1 << 20,
    SW_MOST_DOMAINS = 65536,
    SW_MOST_DEPTH = 128, /* outstanding READs and atomics, in each direction */
    SW_MOST_SHARED_RECEIVES = 65536,
    SW_MOST_GROUPS = 1024,
    SW_MOST_GROUP_MEMBERS = 256,
    SW_MOST_ADDRESS_HANDLES = 1 << 20,
    SW_MOST_GIDS = 256,
    SW_MOST_MESSAGE = 1 << 30,
    SW_COMPLETION_VECTORS = 1,
    SW_DATAGRAM_MTU = 4096,
    SW_MOST_HELD = 256 << 20, /* bytes kept for messages without a receive; see software.h */
};

#define SW_LARGEST_REGION ((uint64_t)1 << 56)

#endif
