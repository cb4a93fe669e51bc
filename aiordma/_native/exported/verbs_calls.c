/*
 * The calls of libibverbs that work on the device: each one is the device's own.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "one_device.h"

enum { FORK_NEEDS_NOTHING = 2, SYSFS_NOT_ROCE_2 = 0, SYSFS_ROCE_2 = 1 };

/* For a program that has an object of the device: the table is filled then. */
static const struct aiordma_provider *calls(void)
{
    return aiordma_exported_calls();
}

/* -- devices ----------------------------------------------------------------------------------- */

/*
 * Programs without an option for the device take the first one. AIORDMA_DEVICE makes that the one of
 * this name; with another value, or none, both are listed.
 */
static void keep_the_wanted(struct ibv_device **list, int *count)
{
    const char *wanted = getenv("AIORDMA_DEVICE");

    for (int i = 0; wanted && list[i]; i++)
        if (!strcmp(calls()->get_device_name(list[i]), wanted)) {
            list[0] = list[i];
            list[1] = NULL;
            if (count)
                *count = 1;
            return;
        }
}

EXPORTED struct ibv_device **ibv_get_device_list(int *count)
{
    const struct aiordma_provider *table = aiordma_exported_calls();

    if (count)
        *count = 0;
    struct ibv_device **list = table ? table->get_device_list(count) : NULL;
    if (list)
        keep_the_wanted(list, count);
    return list;
}

EXPORTED void ibv_free_device_list(struct ibv_device **list)
{
    calls()->free_device_list(list);
}

EXPORTED const char *ibv_get_device_name(struct ibv_device *device)
{
    return calls()->get_device_name(device);
}

EXPORTED uint64_t ibv_get_device_guid(struct ibv_device *device)
{
    return calls()->get_device_guid(device);
}

/* The index of the kernel's device. */
EXPORTED int ibv_get_device_index(struct ibv_device *device)
{
    (void)device;
    return -1;
}

EXPORTED struct ibv_context *ibv_open_device(struct ibv_device *device)
{
    return calls()->open_device(device);
}

EXPORTED int ibv_close_device(struct ibv_context *context)
{
    int error = calls()->close_device(context);

    /* With objects left, the kernel's devices are closed, too: man ibv_close_device. Here they and the
     * context stay until the process ends, as the engine serves them. */
    return error == EBUSY ? 0 : error;
}

EXPORTED int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
    return calls()->query_device(context, attr);
}

EXPORTED int ibv_query_port(struct ibv_context *context, uint8_t port_num,
                            struct _compat_ibv_port_attr *attr)
{
    return calls()->query_port(context, port_num, attr);
}

EXPORTED int ibv_query_gid(struct ibv_context *context, uint8_t port_num, int index,
                           union ibv_gid *gid)
{
    return calls()->query_gid(context, port_num, index, gid);
}

EXPORTED int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port_num, uint32_t index,
                               struct ibv_gid_entry *entry, uint32_t flags, size_t entry_size)
{
    return calls()->query_gid_ex(context, port_num, index, entry, flags, entry_size);
}

EXPORTED ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries,
                                      size_t most, uint32_t flags, size_t entry_size)
{
    return calls()->query_gid_table(context, entries, most, flags, entry_size);
}

/* ibv_devinfo uses this private call. */
EXPORTED int ibv_query_gid_type(struct ibv_context *context, uint8_t port_num, unsigned int index,
                                int *type)
{
    struct ibv_gid_entry entry;
    int error = calls()->query_gid_ex(context, port_num, index, &entry, 0, sizeof(entry));

    if (error) {
        errno = error;
        return -1;
    }
    *type = entry.gid_type == IBV_GID_TYPE_ROCE_V2 ? SYSFS_ROCE_2 : SYSFS_NOT_ROCE_2;
    return 0;
}

EXPORTED int ibv_query_pkey(struct ibv_context *context, uint8_t port_num, int index,
                            uint16_t *pkey)
{
    return calls()->query_pkey(context, port_num, index, pkey);
}

EXPORTED int ibv_get_pkey_index(struct ibv_context *context, uint8_t port_num, uint16_t pkey)
{
    uint16_t found;

    for (int index = 0; !calls()->query_pkey(context, port_num, index, &found); index++)
        if (found == pkey)
            return index;
    return -1;
}

EXPORTED int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
    return calls()->get_async_event(context, event);
}

EXPORTED void ibv_ack_async_event(struct ibv_async_event *event)
{
    calls()->ack_async_event(event);
}

EXPORTED const char *ibv_get_sysfs_path(void)
{
    return "/sys";
}

/* Read a line of a file. The device has no folder, so a program that looks into its own finds none. */
EXPORTED int ibv_read_sysfs_file(const char *folder, const char *name, char *to, size_t size)
{
    char path[1024];
    ssize_t length = -1;

    if (!folder[0] || !size || snprintf(path, sizeof(path), "%s/%s", folder, name) >= 1024)
        return -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        length = read(fd, to, size);
        close(fd);
    }
    if (length <= 0)
        return -1;
    if (to[length - 1] == '\n')
        to[--length] = 0;
    else if ((size_t)length < size)
        to[length] = 0;
    else
        return -1;
    return (int)length;
}

/* -- forks: the device writes to the memory of its own process, so that nothing is needed ------- */

EXPORTED int ibv_fork_init(void)
{
    return 0;
}

EXPORTED int ibv_is_fork_initialized(void)
{
    return FORK_NEEDS_NOTHING;
}

EXPORTED int ibv_dontfork_range(void *base, size_t size)
{
    (void)base;
    (void)size;
    return 0;
}

EXPORTED int ibv_dofork_range(void *base, size_t size)
{
    (void)base;
    (void)size;
    return 0;
}

/* -- memory ------------------------------------------------------------------------------------ */

EXPORTED struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    return calls()->alloc_pd(context);
}

EXPORTED int ibv_dealloc_pd(struct ibv_pd *domain)
{
    return calls()->dealloc_pd(domain);
}

EXPORTED struct ibv_mr *ibv_reg_mr(struct ibv_pd *domain, void *address, size_t length, int access)
{
    return calls()->reg_mr(domain, address, length, access);
}

EXPORTED struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *domain, void *address, size_t length,
                                        uint64_t iova, int access)
{
    return calls()->reg_mr_iova(domain, address, length, iova, access);
}

EXPORTED struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *domain, void *address, size_t length,
                                         uint64_t iova, unsigned int access)
{
    return calls()->reg_mr_iova2(domain, address, length, iova, access);
}

EXPORTED struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *domain, uint64_t offset, size_t length,
                                          uint64_t iova, int fd, int access)
{
    return calls()->reg_dmabuf_mr(domain, offset, length, iova, fd, access);
}

EXPORTED int ibv_rereg_mr(struct ibv_mr *region, int flags, struct ibv_pd *domain, void *address,
                          size_t length, int access)
{
    return calls()->rereg_mr(region, flags, domain, address, length, access);
}

EXPORTED int ibv_dereg_mr(struct ibv_mr *region)
{
    return calls()->dereg_mr(region);
}

/* -- queues ------------------------------------------------------------------------------------ */

EXPORTED struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
    return calls()->create_comp_channel(context);
}

EXPORTED int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
    return calls()->destroy_comp_channel(channel);
}

EXPORTED struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *cq_context,
                                      struct ibv_comp_channel *channel, int vector)
{
    return calls()->create_cq(context, entries, cq_context, channel, vector);
}

EXPORTED int ibv_resize_cq(struct ibv_cq *queue, int entries)
{
    return calls()->resize_cq(queue, entries);
}

EXPORTED int ibv_destroy_cq(struct ibv_cq *queue)
{
    return calls()->destroy_cq(queue);
}

EXPORTED int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **queue,
                              void **cq_context)
{
    return calls()->get_cq_event(channel, queue, cq_context);
}

EXPORTED void ibv_ack_cq_events(struct ibv_cq *queue, unsigned int count)
{
    calls()->ack_cq_events(queue, count);
}

EXPORTED struct ibv_srq *ibv_create_srq(struct ibv_pd *domain, struct ibv_srq_init_attr *attr)
{
    return calls()->create_srq(domain, attr);
}

EXPORTED int ibv_modify_srq(struct ibv_srq *queue, struct ibv_srq_attr *attr, int mask)
{
    return calls()->modify_srq(queue, attr, mask);
}

EXPORTED int ibv_query_srq(struct ibv_srq *queue, struct ibv_srq_attr *attr)
{
    return calls()->query_srq(queue, attr);
}

EXPORTED int ibv_destroy_srq(struct ibv_srq *queue)
{
    return calls()->destroy_srq(queue);
}

/* -- queue pairs ------------------------------------------------------------------------------- */

EXPORTED struct ibv_qp *ibv_create_qp(struct ibv_pd *domain, struct ibv_qp_init_attr *attr)
{
    return calls()->create_qp(domain, attr);
}

EXPORTED int ibv_modify_qp(struct ibv_qp *queue_pair, struct ibv_qp_attr *attr, int mask)
{
    return calls()->modify_qp(queue_pair, attr, mask);
}

EXPORTED int ibv_query_qp(struct ibv_qp *queue_pair, struct ibv_qp_attr *attr, int mask,
                          struct ibv_qp_init_attr *init_attr)
{
    return calls()->query_qp(queue_pair, attr, mask, init_attr);
}

EXPORTED int ibv_query_qp_data_in_order(struct ibv_qp *queue_pair, enum ibv_wr_opcode opcode,
                                        uint32_t flags)
{
    return calls()->query_qp_data_in_order(queue_pair, opcode, flags);
}

EXPORTED int ibv_destroy_qp(struct ibv_qp *queue_pair)
{
    return calls()->destroy_qp(queue_pair);
}

/* NULL: the queue pair was not created with IBV_QP_INIT_ATTR_SEND_OPS_FLAGS. */
EXPORTED struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *queue_pair)
{
    struct ibv_qp_ex *extended = (struct ibv_qp_ex *)queue_pair;

    return extended->wr_start ? extended : NULL;
}

EXPORTED int ibv_attach_mcast(struct ibv_qp *queue_pair, const union ibv_gid *gid, uint16_t lid)
{
    return calls()->attach_mcast(queue_pair, gid, lid);
}

EXPORTED int ibv_detach_mcast(struct ibv_qp *queue_pair, const union ibv_gid *gid, uint16_t lid)
{
    return calls()->detach_mcast(queue_pair, gid, lid);
}

EXPORTED struct ibv_ah *ibv_create_ah(struct ibv_pd *domain, struct ibv_ah_attr *attr)
{
    return calls()->create_ah(domain, attr);
}

EXPORTED int ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port_num, struct ibv_wc *wc,
                                 struct ibv_grh *grh, struct ibv_ah_attr *attr)
{
    return calls()->init_ah_from_wc(context, port_num, wc, grh, attr);
}

EXPORTED struct ibv_ah *ibv_create_ah_from_wc(struct ibv_pd *domain, struct ibv_wc *wc,
                                              struct ibv_grh *grh, uint8_t port_num)
{
    struct ibv_ah_attr attr;

    if (!domain) {
        errno = EINVAL;
        return NULL;
    }
    if (calls()->init_ah_from_wc(domain->context, port_num, wc, grh, &attr))
        return NULL;
    return calls()->create_ah(domain, &attr);
}

EXPORTED int ibv_destroy_ah(struct ibv_ah *handle)
{
    return calls()->destroy_ah(handle);
}
