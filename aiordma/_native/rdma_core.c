/*
 * The provider table of the system's libibverbs and librdmacm.
 *
 * Both are opened with dlopen at the first use, so that importing aiordma requires neither. They
 * stay open for the life of the process: librdmacm keeps devices open and has no shutdown. A
 * function that an older library lacks leaves its slot NULL.
 */
#define _GNU_SOURCE /* dlvsym */
#include "provider.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct aiordma_provider table;
static char failure[512];

/*
 * Find the version of a function that fits its declaration, as a program gets it that links against
 * the library. libibverbs also has the functions of its first ABI (IBVERBS_1.0).
 */
static void *find(void *library, const char *symbol, const char *version)
{
#ifdef __GLIBC__
    return dlvsym(library, symbol, version);
#else
    (void)version; /* the dynamic loader of musl knows the newest one only */
    return dlsym(library, symbol);
#endif
}

static void load(void)
{
    void *verbs = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!verbs) {
        snprintf(failure, sizeof(failure), "%s", dlerror());
        return;
    }
    void *cm = dlopen("librdmacm.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!cm) {
        snprintf(failure, sizeof(failure), "%s", dlerror());
        dlclose(verbs);
        return;
    }

/* ISO C has no conversion from void * to a function pointer. POSIX allows copying the bits. */
#define LOAD(library, slot, symbol, version)               \
    do {                                                   \
        void *address = find(library, symbol, version);    \
        memcpy(&table.slot, &address, sizeof(table.slot)); \
    } while (0)
    LOAD(verbs, get_device_list, "ibv_get_device_list", "IBVERBS_1.1");
    LOAD(verbs, free_device_list, "ibv_free_device_list", "IBVERBS_1.1");
    LOAD(verbs, get_device_name, "ibv_get_device_name", "IBVERBS_1.1");
    LOAD(verbs, open_device, "ibv_open_device", "IBVERBS_1.1");
    LOAD(verbs, close_device, "ibv_close_device", "IBVERBS_1.1");
    LOAD(verbs, query_device, "ibv_query_device", "IBVERBS_1.1");
    LOAD(verbs, query_port, "ibv_query_port", "IBVERBS_1.1");
    LOAD(verbs, query_gid, "ibv_query_gid", "IBVERBS_1.1");
    LOAD(verbs, query_gid_ex, "_ibv_query_gid_ex", "IBVERBS_1.11");
    LOAD(verbs, query_gid_table, "_ibv_query_gid_table", "IBVERBS_1.11");
    LOAD(verbs, query_pkey, "ibv_query_pkey", "IBVERBS_1.1");
    LOAD(verbs, get_device_guid, "ibv_get_device_guid", "IBVERBS_1.1");
    LOAD(verbs, get_async_event, "ibv_get_async_event", "IBVERBS_1.1");
    LOAD(verbs, ack_async_event, "ibv_ack_async_event", "IBVERBS_1.1");
    LOAD(verbs, alloc_pd, "ibv_alloc_pd", "IBVERBS_1.1");
    LOAD(verbs, dealloc_pd, "ibv_dealloc_pd", "IBVERBS_1.1");
    LOAD(verbs, reg_mr, "ibv_reg_mr", "IBVERBS_1.1");
    LOAD(verbs, reg_mr_iova, "ibv_reg_mr_iova", "IBVERBS_1.7");
    LOAD(verbs, reg_mr_iova2, "ibv_reg_mr_iova2", "IBVERBS_1.8");
    LOAD(verbs, reg_dmabuf_mr, "ibv_reg_dmabuf_mr", "IBVERBS_1.12");
    LOAD(verbs, rereg_mr, "ibv_rereg_mr", "IBVERBS_1.1");
    LOAD(verbs, dereg_mr, "ibv_dereg_mr", "IBVERBS_1.1");
    LOAD(verbs, create_comp_channel, "ibv_create_comp_channel", "IBVERBS_1.0");
    LOAD(verbs, destroy_comp_channel, "ibv_destroy_comp_channel", "IBVERBS_1.0");
    LOAD(verbs, create_cq, "ibv_create_cq", "IBVERBS_1.1");
    LOAD(verbs, resize_cq, "ibv_resize_cq", "IBVERBS_1.1");
    LOAD(verbs, destroy_cq, "ibv_destroy_cq", "IBVERBS_1.1");
    LOAD(verbs, get_cq_event, "ibv_get_cq_event", "IBVERBS_1.1");
    LOAD(verbs, ack_cq_events, "ibv_ack_cq_events", "IBVERBS_1.1");
    LOAD(verbs, create_qp, "ibv_create_qp", "IBVERBS_1.1");
    LOAD(verbs, modify_qp, "ibv_modify_qp", "IBVERBS_1.1");
    LOAD(verbs, query_qp, "ibv_query_qp", "IBVERBS_1.1");
    LOAD(verbs, query_qp_data_in_order, "ibv_query_qp_data_in_order", "IBVERBS_1.14");
    LOAD(verbs, destroy_qp, "ibv_destroy_qp", "IBVERBS_1.1");
    LOAD(verbs, create_srq, "ibv_create_srq", "IBVERBS_1.1");
    LOAD(verbs, modify_srq, "ibv_modify_srq", "IBVERBS_1.1");
    LOAD(verbs, query_srq, "ibv_query_srq", "IBVERBS_1.1");
    LOAD(verbs, destroy_srq, "ibv_destroy_srq", "IBVERBS_1.1");
    LOAD(verbs, create_ah, "ibv_create_ah", "IBVERBS_1.1");
    LOAD(verbs, init_ah_from_wc, "ibv_init_ah_from_wc", "IBVERBS_1.1");
    LOAD(verbs, destroy_ah, "ibv_destroy_ah", "IBVERBS_1.1");
    LOAD(verbs, attach_mcast, "ibv_attach_mcast", "IBVERBS_1.1");
    LOAD(verbs, detach_mcast, "ibv_detach_mcast", "IBVERBS_1.1");

    LOAD(cm, create_event_channel, "rdma_create_event_channel", "RDMACM_1.0");
    LOAD(cm, destroy_event_channel, "rdma_destroy_event_channel", "RDMACM_1.0");
    LOAD(cm, get_cm_event, "rdma_get_cm_event", "RDMACM_1.0");
    LOAD(cm, ack_cm_event, "rdma_ack_cm_event", "RDMACM_1.0");
    LOAD(cm, create_id, "rdma_create_id", "RDMACM_1.0");
    LOAD(cm, destroy_id, "rdma_destroy_id", "RDMACM_1.0");
    LOAD(cm, bind_addr, "rdma_bind_addr", "RDMACM_1.0");
    LOAD(cm, resolve_addr, "rdma_resolve_addr", "RDMACM_1.0");
    LOAD(cm, resolve_route, "rdma_resolve_route", "RDMACM_1.0");
    LOAD(cm, cm_create_qp, "rdma_create_qp", "RDMACM_1.0");
    LOAD(cm, cm_create_qp_ex, "rdma_create_qp_ex", "RDMACM_1.0");
    LOAD(cm, cm_destroy_qp, "rdma_destroy_qp", "RDMACM_1.0");
    LOAD(cm, connect, "rdma_connect", "RDMACM_1.0");
    LOAD(cm, listen, "rdma_listen", "RDMACM_1.0");
    LOAD(cm, accept, "rdma_accept", "RDMACM_1.0");
    LOAD(cm, reject, "rdma_reject", "RDMACM_1.0");
    LOAD(cm, disconnect, "rdma_disconnect", "RDMACM_1.0");
    LOAD(cm, establish, "rdma_establish", "RDMACM_1.2");
    LOAD(cm, notify, "rdma_notify", "RDMACM_1.0");
    LOAD(cm, migrate_id, "rdma_migrate_id", "RDMACM_1.0");
    LOAD(cm, init_qp_attr, "rdma_init_qp_attr", "RDMACM_1.2");
    LOAD(cm, join_multicast, "rdma_join_multicast", "RDMACM_1.0");
    LOAD(cm, join_multicast_ex, "rdma_join_multicast_ex", "RDMACM_1.1");
    LOAD(cm, leave_multicast, "rdma_leave_multicast", "RDMACM_1.0");
    LOAD(cm, get_devices, "rdma_get_devices", "RDMACM_1.0");
    LOAD(cm, free_devices, "rdma_free_devices", "RDMACM_1.0");
    LOAD(cm, cm_getaddrinfo, "rdma_getaddrinfo", "RDMACM_1.0");
    LOAD(cm, cm_freeaddrinfo, "rdma_freeaddrinfo", "RDMACM_1.0");
    LOAD(cm, set_local_ece, "rdma_set_local_ece", "RDMACM_1.3");
    LOAD(cm, get_remote_ece, "rdma_get_remote_ece", "RDMACM_1.3");
    LOAD(cm, reject_ece, "rdma_reject_ece", "RDMACM_1.3");
    LOAD(cm, set_option, "rdma_set_option", "RDMACM_1.0");
#undef LOAD
}

const struct aiordma_provider *aiordma_rdma_core(char *message, size_t size)
{
    pthread_once(&once, load);
    if (failure[0]) {
        snprintf(message, size, "%s", failure);
        return NULL;
    }
    return &table;
}
