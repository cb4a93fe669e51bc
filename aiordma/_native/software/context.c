/*
 * The device in the device list and its attributes; contexts and protection domains.
 */
#include "context.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gids.h"

enum { PORT = 1, PKEY = 0xffff };

/* -- attributes -------------------------------------------------------------------------------- */

/*
 * A hash of the machine's name, marked as locally administered: the same in all processes of a
 * machine, and different on other machines.
 */
static uint64_t guid(void)
{
    static const char *const names[] = {"/etc/machine-id", "/proc/sys/kernel/random/boot_id"};
    char name[128] = "";
    uint64_t hash = 0xcbf29ce484222325; /* FNV-1a */
    union {
        uint8_t bytes[8];
        uint64_t number;
    } made;

    for (size_t i = 0; i < sizeof(names) / sizeof(*names) && !name[0]; i++) {
        FILE *file = fopen(names[i], "re");
        if (!file)
            continue;
        if (!fgets(name, sizeof(name), file))
            name[0] = 0;
        fclose(file);
    }
    for (const char *at = name; *at; at++)
        hash = (hash ^ (uint8_t)*at) * 0x100000001b3;
    for (int i = 0; i < 8; i++)
        made.bytes[i] = (uint8_t)(hash >> (8 * i));
    made.bytes[0] = (uint8_t)((made.bytes[0] | 2) & ~1);
    return made.number;
}

static uint64_t get_device_guid(struct ibv_device *device)
{
    return device ? guid() : 0;
}

static int query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
    if (!context || !attr)
        return EINVAL;
    memset(attr, 0, sizeof(*attr));
    snprintf(attr->fw_ver, sizeof(attr->fw_ver), "%s", SW_VERSION);
    attr->node_guid = attr->sys_image_guid = guid();
    attr->max_mr_size = SW_LARGEST_REGION;
    attr->page_size_cap = (uint64_t)sysconf(_SC_PAGESIZE);
    attr->vendor_id = SW_VENDOR;
    attr->max_qp = SW_MOST_QUEUE_PAIRS;
    attr->max_qp_wr = SW_MOST_WORK_REQUESTS;
    attr->device_cap_flags = IBV_DEVICE_SYS_IMAGE_GUID | IBV_DEVICE_SRQ_RESIZE |
                             IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_MGT_EXTENSIONS |
                             IBV_DEVICE_MEM_WINDOW_TYPE_2B;
    attr->max_sge = attr->max_sge_rd = SW_MOST_PARTS;
    attr->max_cq = SW_MOST_QUEUES;
    attr->max_cqe = SW_MOST_COMPLETIONS;
    attr->max_mr = SW_MOST_REGIONS;
    attr->max_pd = SW_MOST_DOMAINS;
    attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = SW_MOST_DEPTH;
    attr->max_res_rd_atom = SW_MOST_QUEUE_PAIRS * SW_MOST_DEPTH;
    attr->atomic_cap = IBV_ATOMIC_HCA;
    attr->max_mw = SW_MOST_WINDOWS;
    attr->max_mcast_grp = SW_MOST_GROUPS;
    attr->max_mcast_qp_attach = SW_MOST_GROUP_MEMBERS;
    attr->max_total_mcast_qp_attach = SW_MOST_GROUPS * SW_MOST_GROUP_MEMBERS;
    attr->max_ah = SW_MOST_ADDRESS_HANDLES;
    attr->max_srq = SW_MOST_SHARED_RECEIVES;
    attr->max_srq_wr = SW_MOST_WORK_REQUESTS;
    attr->max_srq_sge = SW_MOST_PARTS;
    attr->max_pkeys = 1;
    attr->phys_port_cnt = 1;
    return 0;
}

static int query_device_ex(struct ibv_context *context,
                           const struct ibv_query_device_ex_input *input,
                           struct ibv_device_attr_ex *attr, size_t size)
{
    struct ibv_device_attr_ex full;

    if (!context || !attr || size < sizeof(attr->orig_attr) || (input && input->comp_mask))
        return EINVAL;
    memset(&full, 0, sizeof(full));
    query_device(context, &full.orig_attr);
    full.device_cap_flags_ex = full.orig_attr.device_cap_flags;
    full.phys_port_cnt_ex = 1;
    full.completion_timestamp_mask = UINT64_MAX;
    full.hca_core_clock = 1000000; /* kHz: the timestamps are nanoseconds */
    full.cq_mod_caps.max_cq_count = full.cq_mod_caps.max_cq_period = UINT16_MAX;
    memset(attr, 0, size);
    memcpy(attr, &full, size < sizeof(full) ? size : sizeof(full));
    return 0;
}

static int query_port_ex(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr,
                         size_t size)
{
    struct ibv_port_attr full;

    if (!context || !attr || port != PORT)
        return EINVAL;
    memset(&full, 0, sizeof(full));
    full.state = IBV_PORT_ACTIVE;
    full.max_mtu = full.active_mtu = IBV_MTU_4096;
    full.gid_tbl_len = SW_MOST_GIDS;
    full.port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS;
    full.max_msg_sz = SW_MOST_MESSAGE;
    full.pkey_tbl_len = 1;
    full.max_vl_num = 1;
    full.active_width = full.active_speed = 1; /* it has no speed: 1X of 2.5 Gb/s */
    full.phys_state = 5;                       /* LinkUp */
    full.link_layer = IBV_LINK_LAYER_ETHERNET;
    memset(attr, 0, size);
    memcpy(attr, &full, size < sizeof(full) ? size : sizeof(full));
    return 0;
}

static int query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr)
{
    /* This structure is older than port_cap_flags2, its later last field. */
    return query_port_ex(context, port, (struct ibv_port_attr *)(void *)attr,
                         offsetof(struct ibv_port_attr, port_cap_flags2));
}

static int query_pkey(struct ibv_context *context, uint8_t port, int index, uint16_t *pkey)
{
    if (!context || !pkey || port != PORT || index) {
        errno = EINVAL;
        return -1;
    }
    *pkey = PKEY; /* the same in either byte order */
    return 0;
}

/* -- the device list, and contexts ------------------------------------------------------------- */

static struct ibv_device **get_device_list(int *count)
{
    struct ibv_device **list = calloc(3, sizeof(*list));

    if (!list)
        return NULL;
    list[0] = &sw_device.ibv;
    list[1] = &sw_device.roce;
    if (count)
        *count = 2;
    return list;
}

static void free_device_list(struct ibv_device **list)
{
    free(list);
}

static const char *get_device_name(struct ibv_device *device)
{
    return device ? device->name : NULL;
}

int sw_is_roce(const struct ibv_context *context)
{
    return context->device == &sw_device.roce;
}

/* The caller holds the lock. */
static struct sw_context *new_context(struct ibv_device *device)
{
    struct sw_context *context = calloc(1, sizeof(*context));

    if (!context)
        return NULL;
    int fd = sw_new_signal();
    int error = fd < 0 ? errno : sw_watch_gids();
    if (error) {
        if (fd >= 0)
            sw_system->close(fd);
        free(context);
        errno = error;
        return NULL;
    }
    context->verbs = sw_device.operations;
    context->verbs.sz = sizeof(context->verbs);
    context->verbs.context.abi_compat = AIORDMA_EXTENDED;
    context->verbs.context.device = device;
    context->verbs.context.cmd_fd = -1;
    context->verbs.context.async_fd = fd;
    context->verbs.context.num_comp_vectors = SW_COMPLETION_VECTORS;
    pthread_mutex_init(&context->verbs.context.mutex, NULL);
    context->next = sw_device.own.contexts;
    sw_device.own.contexts = context;
    sw_device.counts.contexts++;
    return context;
}

static struct ibv_context *open_device(struct ibv_device *device)
{
    if (device != &sw_device.ibv && device != &sw_device.roce) {
        errno = EINVAL;
        return NULL;
    }
    sw_lock();
    struct sw_context *context = new_context(device);
    sw_unlock();
    return context ? &context->verbs.context : NULL;
}

static int close_device(struct ibv_context *public)
{
    if (!public)
        return EINVAL;
    struct sw_context *context = sw_context_of(public), **link = &sw_device.own.contexts;
    sw_lock();
    /* Those of the connection manager are shared. */
    if (context->objects || context == sw_device.own.manager || context == sw_device.own.roce) {
        sw_unlock();
        return EBUSY;
    }
    while (*link != context)
        link = &(*link)->next;
    *link = context->next;
    sw_device.counts.contexts--;
    sw_system->close(public->async_fd);
    sw_unlock();
    pthread_mutex_destroy(&public->mutex);
    free(context);
    return 0;
}

struct sw_context *sw_manager_context(int of_roce)
{
    struct sw_context **context = of_roce ? &sw_device.own.roce : &sw_device.own.manager;

    if (!*context)
        *context = new_context(of_roce ? &sw_device.roce : &sw_device.ibv);
    return *context;
}

static struct ibv_context **get_devices(int *count)
{
    struct ibv_context **list = calloc(3, sizeof(*list));

    if (!list)
        return NULL;
    sw_lock();
    struct sw_context *context = sw_manager_context(0);
    struct sw_context *other = context ? sw_manager_context(1) : NULL;
    sw_unlock();
    if (!context || !other) {
        int error = errno;
        free(list);
        errno = error;
        return NULL;
    }
    list[0] = &context->verbs.context;
    list[1] = &other->verbs.context;
    if (count)
        *count = 2;
    return list;
}

static void free_devices(struct ibv_context **list)
{
    free(list);
}

/* -- protection domains ------------------------------------------------------------------------ */

static struct ibv_pd *alloc_pd(struct ibv_context *context)
{
    if (!context) {
        errno = EINVAL;
        return NULL;
    }
    struct sw_domain *domain = calloc(1, sizeof(*domain));
    if (!domain)
        return NULL;
    domain->ibv.context = context;
    sw_lock();
    int is_room = sw_device.counts.domains < SW_MOST_DOMAINS;
    if (is_room) {
        sw_device.counts.domains++;
        sw_context_of(context)->objects++;
    }
    sw_unlock();
    if (!is_room) {
        free(domain);
        errno = ENOMEM;
        return NULL;
    }
    return &domain->ibv;
}

static int dealloc_pd(struct ibv_pd *public)
{
    struct sw_domain *domain = (struct sw_domain *)public;

    if (!domain)
        return EINVAL;
    sw_lock();
    int error = domain->objects ? EBUSY : 0;
    if (!error) {
        sw_context_of(public->context)->objects--;
        sw_device.counts.domains--;
    }
    sw_unlock();
    if (!error)
        free(domain);
    return error;
}

void sw_fill_context(struct aiordma_provider *table, struct verbs_context *operations)
{
    table->get_device_list = get_device_list;
    table->free_device_list = free_device_list;
    table->get_device_name = get_device_name;
    table->get_device_guid = get_device_guid;
    table->open_device = open_device;
    table->close_device = close_device;
    table->query_device = query_device;
    table->query_port = query_port;
    table->query_pkey = query_pkey;
    table->alloc_pd = alloc_pd;
    table->dealloc_pd = dealloc_pd;
    table->get_devices = get_devices;
    table->free_devices = free_devices;
    operations->query_device_ex = query_device_ex;
    operations->query_port = query_port_ex;
}
