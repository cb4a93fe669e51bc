/*
 * Memory regions and windows: their keys, and the checks of every access.
 */
#include "memory.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "guard.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

enum {
    REMOTE = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC,
    WRITING = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC,
    KNOWN = IBV_ACCESS_LOCAL_WRITE | REMOTE | IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED |
        IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB,
    KNOWN_FOR_DMABUF = IBV_ACCESS_LOCAL_WRITE | REMOTE | IBV_ACCESS_RELAXED_ORDERING,
    POPULATE_STEP = 4 << 20,   /* bytes */
    DMABUF_MAGIC = 0x444d4142, /* DMA_BUF_MAGIC of linux/magic.h: the file system of dma-bufs */
    FIRST_BUCKETS = 1024,
};

/* -- keys --------------------------------------------------------------------------------- */

static struct {
    struct sw_key **buckets;
    uint32_t bucket_count, count;
    struct sw_window *bound; /* windows of type 2 */
    /*
     * Freed regions and windows, to be used again. They are never returned to malloc: a request
     * that is still posted can point to one, and has to find out that it is gone.
     */
    struct sw_key *free_regions, *free_windows;
} keys;

const struct sw_state sw_memory_state = {&keys, sizeof(keys)};

/* The upper 24 bits identify a key. The low 8 bits are random, or set by a bind. */
static uint32_t index_of(uint32_t key)
{
    return key >> 8;
}

static struct sw_key **link_of(uint32_t key)
{
    struct sw_key **link = &keys.buckets[index_of(key) & (keys.bucket_count - 1)];

    while (*link && index_of((*link)->key) != index_of(key))
        link = &(*link)->next;
    return link;
}

static struct sw_key *find(uint32_t key)
{
    return keys.buckets ? *link_of(key) : NULL;
}

static struct sw_region *region_of(struct sw_key *key)
{
    return SW_CONTAINER(key, struct sw_region, key);
}

static struct sw_window *window_of(struct sw_key *key)
{
    return SW_CONTAINER(key, struct sw_window, key);
}

/* Double the number of buckets. Without memory for that, keep the present ones. */
static int grow(void)
{
    uint32_t count = keys.buckets ? 2 * keys.bucket_count : FIRST_BUCKETS;
    struct sw_key **buckets = calloc(count, sizeof(*buckets));

    if (!buckets)
        return keys.buckets ? 0 : ENOMEM;
    for (uint32_t i = 0; i < keys.bucket_count; i++) {
        struct sw_key *key = keys.buckets[i], *next;
        for (; key; key = next) {
            struct sw_key **to = &buckets[index_of(key->key) & (count - 1)];
            next = key->next;
            key->next = *to;
            *to = key;
        }
    }
    free(keys.buckets);
    keys.buckets = buckets;
    keys.bucket_count = count;
    return 0;
}

/* Add a random key. Its upper 24 bits differ from all other keys', and are never 0. */
static int add_key(struct sw_key *key)
{
    uint32_t number;

    if (keys.count >= keys.bucket_count) {
        int error = grow();
        if (error)
            return error;
    }
    do {
        number = sw_random();
    } while (!index_of(number) || find(number));
    key->key = number;
    key->next = NULL;
    *link_of(number) = key;
    keys.count++;
    return 0;
}

static void remove_key(struct sw_key *key)
{
    struct sw_key **link = link_of(key->key);

    *link = key->next;
    keys.count--;
}

static struct sw_key *recycle(struct sw_key **free_list)
{
    struct sw_key *key = *free_list;

    if (key)
        *free_list = key->next;
    return key;
}

/* Whether the object that a posted request points to still exists. */
static int is_alive(struct sw_key *key)
{
    return find(key->key) == key;
}

/* -- checks of a registration ------------------------------------------------------------- */

static int check_access(int access)
{
    access &= ~(int)IBV_ACCESS_OPTIONAL_RANGE; /* optional flags have no effect on this device */
    if (access & ~KNOWN)
        return EINVAL;
    if (access & WRITING && !(access & IBV_ACCESS_LOCAL_WRITE))
        return EINVAL;
    if (access & IBV_ACCESS_HUGETLB && !(access & IBV_ACCESS_ON_DEMAND))
        return EINVAL;
    return access & IBV_ACCESS_ON_DEMAND ? EOPNOTSUPP : 0;
}

static int check_range(const void *address, size_t length, uint64_t iova)
{
    const uint64_t start = (uintptr_t)address, in_page = (uint64_t)sysconf(_SC_PAGESIZE) - 1;

    if (!length || length > SW_LARGEST_REGION || length - 1 > UINTPTR_MAX - start ||
        length - 1 > UINT64_MAX - iova)
        return EINVAL;
    return (start ^ iova) & in_page ? EINVAL : 0;
}

/* Check that every page is mapped, if the kernel cannot populate memory (before Linux 5.14). */
static int check_mapped(char *start, size_t length, size_t page)
{
    unsigned char residence[256];
    const size_t step = sizeof(residence) * page;

    for (size_t at = 0; at < length; at += step) {
        size_t size = length - at < step ? length - at : step;
        if (mincore(start + at, size, residence))
            return EFAULT;
    }
    return 0;
}

/*
 * Populate the pages, as pinning does on other devices, with the access that the region has. So
 * memory that does not exist is refused here. Otherwise the engine's thread would end the process.
 */
static int populate(const void *address, size_t length, int access)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const int advice = access & IBV_ACCESS_LOCAL_WRITE ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
    char *start = (char *)((uintptr_t)address & ~(uintptr_t)(page - 1));
    int failed = 0;

    length += (size_t)((const char *)address - start);
    length = (length + page - 1) & ~(page - 1);
    /* In steps, between which other threads can change their mappings (mmap, malloc). */
    for (size_t done = 0, step = 0; done < length; done += step) {
        step = length - done < POPULATE_STEP ? length - done : POPULATE_STEP;
        do {
            failed = madvise(start + done, step, advice);
        } while (failed && (errno == EAGAIN || errno == EINTR));
        if (failed)
            break;
    }
    if (!failed)
        return 0;
    if (errno != EINVAL)
        return EFAULT;
    /* Either the memory does not allow this access, or the kernel does not know the advice. */
    char *own = (char *)((uintptr_t)&start & ~(uintptr_t)(page - 1));
    if (!madvise(own, page, advice))
        return EFAULT;
    return check_mapped(start, length, page);
}

/* is_of_file: set if there is no error. */
static int check_registration(const void *address, size_t length, uint64_t iova, int access,
                              int *is_of_file)
{
    int error = check_access(access);

    if (!error)
        error = check_range(address, length, iova);
    if (!error)
        error = populate(address, length, access);
    if (error)
        return error;
    *is_of_file = sw_is_of_file(address, length);
    /* If the kernel may not copy the process's memory, an access could end the process: refuse. */
    char byte;
    struct sw_memory first = {(char *)(uintptr_t)address, *is_of_file};
    return *is_of_file ? sw_copy_from(&byte, first, sizeof(byte)) : 0;
}

/* -- regions ------------------------------------------------------------------------------ */

/* A part of a descriptor, mapped from the beginning of its first page. */
struct mapped {
    void *start;
    size_t size;
    char *first; /* the first byte of the part */
    int is_dmabuf;
};

static uint64_t base_of(const void *address, int access)
{
    return access & IBV_ACCESS_ZERO_BASED ? 0 : (uintptr_t)address;
}

static struct sw_region *new_region(struct ibv_pd *domain)
{
    if (sw_device.counts.regions >= SW_MOST_REGIONS)
        return NULL;
    struct sw_key *key = recycle(&keys.free_regions);
    struct sw_region *region = key ? region_of(key) : malloc(sizeof(*region));
    if (!region)
        return NULL;
    memset(region, 0, sizeof(*region));
    if (add_key(&region->key)) {
        region->key.next = keys.free_regions;
        keys.free_regions = &region->key;
        return NULL;
    }
    region->ibv.context = domain->context;
    region->ibv.pd = domain;
    region->ibv.lkey = region->ibv.rkey = region->key.key;
    region->ibv.handle = index_of(region->key.key);
    ((struct sw_domain *)domain)->objects++;
    sw_device.counts.regions++;
    return region;
}

static struct ibv_mr *register_region(struct ibv_pd *domain, void *address, size_t length,
                                      uint64_t base, int access, int is_of_file)
{
    sw_lock();
    struct sw_region *region = new_region(domain);
    if (region) {
        region->ibv.addr = address;
        region->memory = sw_device_view(address, length);
        region->ibv.length = length;
        region->base = base;
        region->access = access;
        region->is_of_file = is_of_file;
    }
    sw_unlock();
    if (!region)
        errno = ENOMEM;
    return region ? &region->ibv : NULL;
}

static struct ibv_mr *reg_mr(struct ibv_pd *domain, void *address, size_t length, int access)
{
    int is_of_file = 0, error = EINVAL;

    if (domain)
        error = check_registration(address, length, (uintptr_t)address, access, &is_of_file);
    if (error) {
        errno = error;
        return NULL;
    }
    return register_region(domain, address, length, base_of(address, access), access, is_of_file);
}

static struct ibv_mr *reg_mr_iova2(struct ibv_pd *domain, void *address, size_t length,
                                   uint64_t iova, unsigned int access)
{
    /* ibv_reg_mr is a macro that calls this function with the address as its iova. */
    int zero_based = (access & IBV_ACCESS_ZERO_BASED) != 0;
    int is_of_file = 0, error = EINVAL;

    if (domain && !(zero_based && iova && iova != (uintptr_t)address)) {
        uint64_t checked = zero_based ? (uintptr_t)address : iova;
        error = check_registration(address, length, checked, (int)access, &is_of_file);
    }
    if (error) {
        errno = error;
        return NULL;
    }
    return register_region(domain, address, length, zero_based ? 0 : iova, (int)access, is_of_file);
}

static struct ibv_mr *reg_mr_iova(struct ibv_pd *domain, void *address, size_t length,
                                  uint64_t iova, int access)
{
    return reg_mr_iova2(domain, address, length, iova, (unsigned int)access);
}

/*
 * Map the part of a descriptor that is to be registered. The errors are those of the kernel's
 * ibv_reg_dmabuf_mr: EBADF, EINVAL for what is no dma-buf, or ends before the part, and EOPNOTSUPP
 * for memory that the device cannot reach. A file in memory (memfd) is taken as a dma-buf, too.
 */
static int map_part(int fd, uint64_t offset, size_t length, int access, struct mapped *mapped)
{
    const uint64_t before = offset & ((uint64_t)sysconf(_SC_PAGESIZE) - 1);
    const int protection = PROT_READ | (access & IBV_ACCESS_LOCAL_WRITE ? PROT_WRITE : 0);
    struct statfs system;
    struct stat file;

    if (fstat(fd, &file) || fstatfs(fd, &system))
        return errno;
    mapped->is_dmabuf = system.f_type == DMABUF_MAGIC;
    if (!mapped->is_dmabuf && !S_ISREG(file.st_mode))
        return EINVAL;
    const uint64_t size = (uint64_t)file.st_size;
    if (!length || offset > size || length > size - offset)
        return EINVAL;
    mapped->size = before + length;
    mapped->start = mmap(NULL, mapped->size, protection, MAP_SHARED, fd, (off_t)(offset - before));
    if (mapped->start != MAP_FAILED) {
        mapped->first = (char *)mapped->start + before;
        return 0;
    }
    return errno == ENODEV || errno == EINVAL ? EOPNOTSUPP : errno;
}

static struct ibv_mr *reg_dmabuf_mr(struct ibv_pd *domain, uint64_t offset, size_t length,
                                    uint64_t iova, int fd, int access)
{
    struct ibv_mr *public = NULL;
    struct mapped mapped = {0};
    int is_of_file = 0, error = EINVAL;

    if (domain && !(access & ~KNOWN_FOR_DMABUF))
        error = check_access(access);
    if (!error)
        error = map_part(fd, offset, length, access, &mapped);
    if (error) {
        errno = error;
        return NULL;
    }
    /* The size of a dma-buf does not change, and the kernel refuses to populate or copy some. */
    if (mapped.is_dmabuf)
        error = check_range(mapped.first, length, iova);
    else
        error = check_registration(mapped.first, length, iova, access, &is_of_file);
    if (!error) {
        public = register_region(domain, mapped.first, length, iova, access, is_of_file);
        error = errno;
    }
    if (!public) {
        munmap(mapped.start, mapped.size);
        errno = error;
        return NULL;
    }
    struct sw_region *region = (struct sw_region *)public;
    region->mapping = mapped.start; /* without the lock: only dereg_mr and rereg_mr read it */
    region->mapping_size = mapped.size;
    return public;
}

/* Check what a region is to become, before anything is changed. */
static int check_change(const struct sw_region *region, int flags, const struct ibv_pd *domain,
                        const void *address, size_t length, int access, int *is_of_file)
{
    if (region->mapping)
        return EOPNOTSUPP; /* a dma-buf */
    if (!flags || flags & ~IBV_REREG_MR_FLAGS_SUPPORTED)
        return EINVAL;
    if (flags & IBV_REREG_MR_CHANGE_PD && (!domain || domain->context != region->ibv.context))
        return EINVAL;
    if (!(flags & IBV_REREG_MR_CHANGE_ACCESS))
        access = region->access;
    if (!(flags & IBV_REREG_MR_CHANGE_TRANSLATION)) {
        address = region->ibv.addr;
        length = region->ibv.length;
    }
    return check_registration(address, length, (uintptr_t)address, access, is_of_file);
}

static int rereg_mr(struct ibv_mr *public, int flags, struct ibv_pd *domain, void *address,
                    size_t length, int access)
{
    struct sw_region *region = (struct sw_region *)public;
    int is_of_file = 0, error = EINVAL;

    if (region)
        error = check_change(region, flags, domain, address, length, access, &is_of_file);
    if (!error) {
        sw_lock();
        /* Windows refer to a part of the present memory. */
        if (region->windows)
            error = EBUSY;
        if (!error && flags & IBV_REREG_MR_CHANGE_PD) {
            ((struct sw_domain *)public->pd)->objects--;
            ((struct sw_domain *)domain)->objects++;
            public->pd = domain;
        }
        if (!error && flags & IBV_REREG_MR_CHANGE_TRANSLATION) {
            public->addr = address;
            region->memory = sw_device_view(address, length);
            public->length = length;
        }
        int was_zero_based = region->access & IBV_ACCESS_ZERO_BASED;
        if (!error && flags & IBV_REREG_MR_CHANGE_ACCESS)
            region->access = access;
        /* An iova is valid as long as the memory that it was given for. */
        if (!error && (flags & IBV_REREG_MR_CHANGE_TRANSLATION ||
                       was_zero_based != (region->access & IBV_ACCESS_ZERO_BASED)))
            region->base = base_of(public->addr, region->access);
        if (!error)
            region->is_of_file = is_of_file;
        sw_unlock();
    }
    if (error)
        errno = error;
    return error ? IBV_REREG_MR_ERR_INPUT : 0;
}

static int dereg_mr(struct ibv_mr *public)
{
    struct sw_region *region = (struct sw_region *)public;
    void *mapping = NULL;
    size_t size = 0;
    int error = 0;

    if (!region)
        return EINVAL;
    sw_lock();
    if (region->windows) {
        error = EBUSY;
    } else {
        mapping = region->mapping;
        size = region->mapping_size;
        remove_key(&region->key);
        ((struct sw_domain *)public->pd)->objects--;
        sw_device.counts.regions--;
        region->key.next = keys.free_regions;
        keys.free_regions = &region->key;
    }
    sw_unlock();
    if (mapping)
        munmap(mapping, size); /* each access has to find the key first */
    return error;
}

/* -- windows ------------------------------------------------------------------------------ */

static struct sw_window *new_window(struct ibv_pd *domain, enum ibv_mw_type type)
{
    if (sw_device.counts.windows >= SW_MOST_WINDOWS)
        return NULL;
    struct sw_key *key = recycle(&keys.free_windows);
    struct sw_window *window = key ? window_of(key) : malloc(sizeof(*window));
    if (!window)
        return NULL;
    memset(window, 0, sizeof(*window));
    window->key.is_window = 1;
    if (add_key(&window->key)) {
        window->key.next = keys.free_windows;
        keys.free_windows = &window->key;
        return NULL;
    }
    window->ibv.context = domain->context;
    window->ibv.pd = domain;
    window->ibv.type = type;
    window->ibv.rkey = window->key.key;
    window->ibv.handle = index_of(window->key.key);
    ((struct sw_domain *)domain)->objects++;
    sw_device.counts.windows++;
    return window;
}

static struct ibv_mw *alloc_mw(struct ibv_pd *domain, enum ibv_mw_type type)
{
    if (!domain || (type != IBV_MW_TYPE_1 && type != IBV_MW_TYPE_2)) {
        errno = EINVAL;
        return NULL;
    }
    sw_lock();
    struct sw_window *window = new_window(domain, type);
    sw_unlock();
    if (!window)
        errno = ENOMEM;
    return window ? &window->ibv : NULL;
}

static void unbind(struct sw_window *window)
{
    if (!window->region)
        return;
    window->region->windows--;
    window->region = NULL;
    if (!window->queue_pair)
        return;
    window->queue_pair = NULL;
    if (window->previous_bound)
        window->previous_bound->next_bound = window->next_bound;
    else
        keys.bound = window->next_bound;
    if (window->next_bound)
        window->next_bound->previous_bound = window->previous_bound;
    window->next_bound = window->previous_bound = NULL;
}

static int dealloc_mw(struct ibv_mw *public)
{
    struct sw_window *window = (struct sw_window *)public;

    if (!window)
        return EINVAL;
    sw_lock();
    unbind(window);
    remove_key(&window->key);
    ((struct sw_domain *)public->pd)->objects--;
    sw_device.counts.windows--;
    window->key.next = keys.free_windows;
    keys.free_windows = &window->key;
    sw_unlock();
    return 0;
}

static int check_bind(const struct ibv_pd *domain, const struct sw_window *window,
                      const struct sw_region *region, const struct ibv_mw_bind_info *info)
{
    const unsigned int access = info->mw_access_flags;

    if (region->ibv.pd != domain || !(region->access & IBV_ACCESS_MW_BIND))
        return EINVAL;
    /* Programs pass LOCAL_WRITE, too, and other devices take it: it permits a peer nothing. */
    if (access & ~(unsigned int)(REMOTE | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_LOCAL_WRITE))
        return EINVAL;
    if (access & WRITING && !(region->access & IBV_ACCESS_LOCAL_WRITE))
        return EINVAL;
    if (window->ibv.type == IBV_MW_TYPE_2 && window->region)
        return EINVAL; /* it has to be invalidated first */
    if (info->addr < region->base || info->addr - region->base > region->ibv.length)
        return EINVAL;
    return info->length > region->ibv.length - (info->addr - region->base) ? EINVAL : 0;
}

static void bind_to(struct sw_window *window, struct sw_region *region, struct ibv_qp *queue_pair,
                    const struct ibv_mw_bind_info *info)
{
    window->region = region;
    region->windows++;
    window->memory = region->memory + (info->addr - region->base);
    window->base = info->mw_access_flags & IBV_ACCESS_ZERO_BASED ? 0 : info->addr;
    window->length = info->length;
    window->access = (int)info->mw_access_flags;
    if (window->ibv.type != IBV_MW_TYPE_2)
        return;
    window->queue_pair = queue_pair;
    window->previous_bound = NULL;
    window->next_bound = keys.bound;
    if (keys.bound)
        keys.bound->previous_bound = window;
    keys.bound = window;
}

int sw_bind(struct ibv_qp *queue_pair, struct ibv_mw *public, uint32_t new_key,
            const struct ibv_mw_bind_info *info)
{
    struct sw_window *window = (struct sw_window *)public;
    struct sw_region *region = (struct sw_region *)info->mr;

    if (!is_alive(&window->key) || public->pd != queue_pair->pd ||
        index_of(new_key) != index_of(window->key.key))
        return EINVAL;
    int unbinds = public->type == IBV_MW_TYPE_1 && !info->length;
    if (!unbinds) {
        if (!region || !info->length || !is_alive(&region->key))
            return EINVAL;
        int error = check_bind(queue_pair->pd, window, region, info);
        if (error)
            return error;
    }
    unbind(window);
    window->key.key = new_key;
    public->rkey = new_key;
    if (!unbinds)
        bind_to(window, region, queue_pair, info);
    return 0;
}

enum sw_refusal sw_invalidate(struct ibv_qp *queue_pair, uint32_t number, int is_remote)
{
    struct sw_key *key = find(number);

    (void)is_remote; /* both sides may do the same */
    if (!key || key->key != number)
        return SW_NO_KEY;
    if (!key->is_window)
        return region_of(key)->ibv.pd == queue_pair->pd ? SW_ACCESS : SW_DOMAIN;
    struct sw_window *window = window_of(key);
    if (window->ibv.pd != queue_pair->pd)
        return SW_DOMAIN;
    if (window->ibv.type != IBV_MW_TYPE_2)
        return SW_ACCESS;
    if (!window->region)
        return SW_NO_KEY;
    if (window->queue_pair != queue_pair)
        return SW_DOMAIN;
    unbind(window);
    return SW_REACHED;
}

void sw_unbind_all(struct ibv_qp *queue_pair)
{
    struct sw_window *window = keys.bound, *next;

    for (; window; window = next) {
        next = window->next_bound;
        if (window->queue_pair == queue_pair)
            unbind(window);
    }
}

/* -- accesses ----------------------------------------------------------------------------- */

/* length is not 0. */
static enum sw_refusal place(char *start, uint64_t base, uint64_t size, uint64_t address,
                             uint64_t length, char **at)
{
    if (length - 1 > UINT64_MAX - address)
        return SW_WRAP;
    if (address < base || address - base > size || length > size - (address - base))
        return SW_BOUNDS;
    *at = start + (address - base);
    return SW_REACHED;
}

/* The address of an access to no bytes, because memcpy requires a pointer. */
static char nothing[1];

static enum sw_refusal reach_window(struct ibv_qp *queue_pair, struct sw_window *window,
                                    uint64_t address, uint64_t length, int access,
                                    struct sw_memory *memory)
{
    if (!window->region)
        return SW_NO_KEY;
    if (window->ibv.pd != queue_pair->pd ||
        (window->ibv.type == IBV_MW_TYPE_2 && window->queue_pair != queue_pair))
        return SW_DOMAIN;
    if ((window->access & access) != access)
        return SW_ACCESS;
    memory->is_of_file = window->region->is_of_file;
    return place(window->memory, window->base, window->length, address, length, &memory->at);
}

/* queue_pair: NULL for the program's own request, which cannot use a window. */
static enum sw_refusal reach(const struct ibv_pd *domain, struct ibv_qp *queue_pair,
                             uint32_t number, uint64_t address, uint64_t length, int access,
                             struct sw_memory *memory)
{
    *memory = (struct sw_memory){.at = nothing};
    if (!length)
        return SW_REACHED;
    struct sw_key *key = find(number);
    if (!key || key->key != number)
        return SW_NO_KEY;
    if (key->is_window)
        return queue_pair
                   ? reach_window(queue_pair, window_of(key), address, length, access, memory)
                   : SW_NO_KEY;
    struct sw_region *region = region_of(key);
    if (region->ibv.pd != domain)
        return SW_DOMAIN;
    if ((region->access & access) != access)
        return SW_ACCESS;
    memory->is_of_file = region->is_of_file;
    return place(region->memory, region->base, region->ibv.length, address, length, &memory->at);
}

enum sw_refusal sw_reach_local(struct ibv_pd *domain, const struct ibv_sge *part, int access,
                               struct sw_memory *memory)
{
    return reach(domain, NULL, part->lkey, part->addr, part->length, access, memory);
}

enum sw_refusal sw_reach_remote(struct ibv_qp *queue_pair, uint32_t number, uint64_t address,
                                uint64_t length, int access, struct sw_memory *memory)
{
    return reach(queue_pair->pd, queue_pair, number, address, length, access, memory);
}

enum ibv_wc_status sw_next_piece(struct sw_span *span, int access, struct sw_piece *piece)
{
    for (; span->count && span->offset >= span->part->length; span->count--)
        span->offset -= span->part++->length;
    if (!span->count)
        return IBV_WC_LOC_LEN_ERR;
    uint32_t room = span->part->length - span->offset;
    piece->size = span->size < room ? span->size : room;
    if (sw_reach_local(span->domain, span->part, access, &piece->memory))
        return IBV_WC_LOC_PROT_ERR;
    piece->memory.at += span->offset;
    span->offset += piece->size;
    span->size -= piece->size;
    return IBV_WC_SUCCESS;
}

/* No effect: a registration populates its pages, and accesses may fault. Only errors are found. */
static int advise_mr(struct ibv_pd *domain, enum ib_uverbs_advise_mr_advice advice, uint32_t flags,
                     struct ibv_sge *parts, uint32_t count)
{
    const int access =
        advice == IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE ? IBV_ACCESS_LOCAL_WRITE : 0;
    enum sw_refusal refusal = SW_REACHED;
    struct sw_memory memory;

    if (!domain || !parts || !count || advice > IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT ||
        flags & ~(uint32_t)IB_UVERBS_ADVISE_MR_FLAG_FLUSH)
        return EINVAL;
    sw_lock();
    for (uint32_t i = 0; i < count && refusal == SW_REACHED; i++)
        refusal = sw_reach_local(domain, &parts[i], access, &memory);
    sw_unlock();
    switch (refusal) { /* as the man page has them */
    case SW_REACHED:
        return 0;
    case SW_NO_KEY:
    case SW_BOUNDS:
        return EFAULT;
    case SW_ACCESS:
    case SW_DOMAIN:
        return EPERM;
    default:
        return EINVAL;
    }
}

void sw_memory_forked(void)
{
    /* The parent's objects stay in memory, unused. */
    free(keys.buckets);
    memset(&keys, 0, sizeof(keys));
}

void sw_fill_memory(struct aiordma_provider *table, struct verbs_context *operations)
{
    table->reg_mr = reg_mr;
    table->reg_mr_iova = reg_mr_iova;
    table->reg_mr_iova2 = reg_mr_iova2;
    table->reg_dmabuf_mr = reg_dmabuf_mr;
    table->rereg_mr = rereg_mr;
    table->dereg_mr = dereg_mr;
    operations->advise_mr = advise_mr;
    operations->context.ops.alloc_mw = alloc_mw;
    operations->context.ops.dealloc_mw = dealloc_mw;
}
