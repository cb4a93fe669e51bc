/*
 * The provider table of the system's libibverbs and librdmacm.
 *
 * Both are opened with dlopen at the first use, so that importing aiordma requires neither. They
 * stay open for the life of the process: librdmacm keeps devices open and has no shutdown. A
 * function that an older library lacks leaves its slot NULL.
 */
#include "provider.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct aiordma_provider table;
static char failure[512];

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
#define LOAD(library, slot, symbol)                        \
    do {                                                   \
        void *address = dlsym(library, symbol);            \
        memcpy(&table.slot, &address, sizeof(table.slot)); \
    } while (0)
    LOAD(verbs, get_device_list, "ibv_get_device_list");
    LOAD(verbs, free_device_list, "ibv_free_device_list");
    LOAD(verbs, get_device_name, "ibv_get_device_name");
    LOAD(verbs, open_device, "ibv_open_device");
    LOAD(verbs, close_device, "ibv_close_device");
    LOAD(verbs, query_device, "ibv_query_device");
    LOAD(verbs, query_port, "ibv_query_port");
    LOAD(verbs, query_gid, "ibv_query_gid");
    LOAD(verbs, query_gid_ex, "_ibv_query_gid_ex");
    LOAD(verbs, query_gid_table, "_ibv_query_gid_table");
    LOAD(verbs, query_pkey, "ibv_query_pkey");
    LOAD(verbs, get_device_guid, "ibv_get_device_guid");
    LOAD(verbs, get_async_event, "ibv_get_async_event");
    LOAD(verbs, ack_async_event, "ibv_ack_async_event");
    LOAD(verbs, alloc_pd, "ibv_alloc_pd");
    LOAD(verbs, dealloc_pd, "ibv_dealloc_pd");
    LOAD(verbs, reg_mr, "ibv_reg_mr");
    LOAD(verbs, reg_mr_iova, "ibv_reg_mr_iova");
    LOAD(verbs, reg_mr_iova2, "ibv_reg_mr_iova2");
    LOAD(verbs, rereg_mr, "ibv_rereg_mr");
    LOAD(verbs, dereg_mr, "ibv_dereg_mr");
    LOAD(verbs, create_comp_channel, "ibv_create_comp_channel");
    LOAD(verbs, destroy_comp_channel, "ibv_destroy_comp_channel");
    LOAD(verbs, create_cq, "ibv_create_cq");
    LOAD(verbs, resize_cq, "ibv_resize_cq");
    LOAD(verbs, destroy_cq, "ibv_destroy_cq");
    LOAD(verbs, get_cq_event, "ibv_get_cq_event");
    LOAD(verbs, ack_cq_events, "ibv_ack_cq_events");
    LOAD(verbs, create_qp, "ibv_create_qp");
    LOAD(verbs, modify_qp, "ibv_modify_qp");
    LOAD(verbs, query_qp, "ibv_query_qp");
    LOAD(verbs, destroy_qp, "ibv_destroy_qp");
    LOAD(verbs, create_srq, "ibv_create_srq");
    LOAD(verbs, modify_srq, "ibv_modify_srq");
    LOAD(verbs, query_srq, "ibv_query_srq");
    LOAD(verbs, destroy_srq, "ibv_destroy_srq");
    LOAD(verbs, create_ah, "ibv_create_ah");
    LOAD(verbs, init_ah_from_wc, "ibv_init_ah_from_wc");
    LOAD(verbs, destroy_ah, "ibv_destroy_ah");
    LOAD(verbs, attach_mcast, "ibv_attach_mcast");
    LOAD(verbs, detach_mcast, "ibv_detach_mcast");

    LOAD(cm, create_event_channel, "rdma_create_event_channel");
    LOAD(cm, destroy_event_channel, "rdma_destroy_event_channel");
    LOAD(cm, get_cm_event, "rdma_get_cm_event");
    LOAD(cm, ack_cm_event, "rdma_ack_cm_event");
    LOAD(cm, create_id, "rdma_create_id");
    LOAD(cm, destroy_id, "rdma_destroy_id");
    LOAD(cm, bind_addr, "rdma_bind_addr");
    LOAD(cm, resolve_addr, "rdma_resolve_addr");
    LOAD(cm, resolve_route, "rdma_resolve_route");
    LOAD(cm, cm_create_qp, "rdma_create_qp");
    LOAD(cm, cm_destroy_qp, "rdma_destroy_qp");
    LOAD(cm, connect, "rdma_connect");
    LOAD(cm, listen, "rdma_listen");
    LOAD(cm, accept, "rdma_accept");
    LOAD(cm, reject, "rdma_reject");
    LOAD(cm, disconnect, "rdma_disconnect");
    LOAD(cm, establish, "rdma_establish");
    LOAD(cm, notify, "rdma_notify");
    LOAD(cm, migrate_id, "rdma_migrate_id");
    LOAD(cm, init_qp_attr, "rdma_init_qp_attr");
    LOAD(cm, join_multicast, "rdma_join_multicast");
    LOAD(cm, join_multicast_ex, "rdma_join_multicast_ex");
    LOAD(cm, leave_multicast, "rdma_leave_multicast");
    LOAD(cm, get_devices, "rdma_get_devices");
    LOAD(cm, free_devices, "rdma_free_devices");
    LOAD(cm, cm_getaddrinfo, "rdma_getaddrinfo");
    LOAD(cm, cm_freeaddrinfo, "rdma_freeaddrinfo");
    LOAD(cm, set_local_ece, "rdma_set_local_ece");
    LOAD(cm, get_remote_ece, "rdma_get_remote_ece");
    LOAD(cm, reject_ece, "rdma_reject_ece");
    LOAD(cm, set_option, "rdma_set_option");
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
