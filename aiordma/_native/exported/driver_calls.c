/*
 * Calls of libibverbs that refuse: what the device does not have, and what rdma-core's drivers use.
 *
 * perftest is linked to libmlx5 and libefa, which are drivers and need rdma-core's private symbols.
 * They find them here, register, and get no device.
 */
#include <errno.h>

#include "exported.h"

/* A call that returns an errno. Its parameters do not matter. */
#define REFUSES(name)        \
    EXPORTED int name(void); \
    EXPORTED int name(void)  \
    {                        \
        errno = EOPNOTSUPP;  \
        return EOPNOTSUPP;   \
    }
#define RETURNS_NULL(name)     \
    EXPORTED void *name(void); \
    EXPORTED void *name(void)  \
    {                          \
        errno = EOPNOTSUPP;    \
        return NULL;           \
    }
#define DOES_NOTHING(name)    \
    EXPORTED void name(void); \
    EXPORTED void name(void)  \
    {                         \
    }

/* -- public: ECE, and objects of another process ----------------------------------------------- */

REFUSES(ibv_query_ece)
REFUSES(ibv_set_ece)
REFUSES(ibv_resolve_eth_l2_from_gid)
RETURNS_NULL(ibv_import_device)
RETURNS_NULL(ibv_import_dm)
RETURNS_NULL(ibv_import_mr)
RETURNS_NULL(ibv_import_pd)
DOES_NOTHING(ibv_unimport_dm)
DOES_NOTHING(ibv_unimport_mr)
DOES_NOTHING(ibv_unimport_pd)

/* -- private: drivers register, and nobody uses them ------------------------------------------- */

DOES_NOTHING(ibv_register_driver)
DOES_NOTHING(verbs_register_driver_34)
DOES_NOTHING(verbs_init_cq)
DOES_NOTHING(verbs_set_ops)
DOES_NOTHING(verbs_uninit_context)
DOES_NOTHING(__verbs_log)
RETURNS_NULL(_verbs_init_and_alloc_context)
RETURNS_NULL(verbs_open_device)
REFUSES(__ioctl_final_num_attrs)
REFUSES(execute_ioctl)

EXPORTED char verbs_allow_disassociate_destroy;

EXPORTED int ibv_read_ibdev_sysfs_file(void);
EXPORTED int ibv_read_ibdev_sysfs_file(void)
{
    errno = EOPNOTSUPP;
    return -1;
}

REFUSES(ibv_cmd_advise_mr)
REFUSES(ibv_cmd_alloc_dm)
REFUSES(ibv_cmd_alloc_mw)
REFUSES(ibv_cmd_alloc_pd)
REFUSES(ibv_cmd_attach_mcast)
REFUSES(ibv_cmd_close_xrcd)
REFUSES(ibv_cmd_create_ah)
REFUSES(ibv_cmd_create_counters)
REFUSES(ibv_cmd_create_cq)
REFUSES(ibv_cmd_create_cq_ex)
REFUSES(ibv_cmd_create_cq_ex2)
REFUSES(ibv_cmd_create_flow)
REFUSES(ibv_cmd_create_flow_action_esp)
REFUSES(ibv_cmd_create_qp)
REFUSES(ibv_cmd_create_qp_ex)
REFUSES(ibv_cmd_create_qp_ex2)
REFUSES(ibv_cmd_create_rwq_ind_table)
REFUSES(ibv_cmd_create_srq)
REFUSES(ibv_cmd_create_srq_ex)
REFUSES(ibv_cmd_create_wq)
REFUSES(ibv_cmd_dealloc_mw)
REFUSES(ibv_cmd_dealloc_pd)
REFUSES(ibv_cmd_dereg_mr)
REFUSES(ibv_cmd_destroy_ah)
REFUSES(ibv_cmd_destroy_counters)
REFUSES(ibv_cmd_destroy_cq)
REFUSES(ibv_cmd_destroy_flow)
REFUSES(ibv_cmd_destroy_flow_action)
REFUSES(ibv_cmd_destroy_qp)
REFUSES(ibv_cmd_destroy_rwq_ind_table)
REFUSES(ibv_cmd_destroy_srq)
REFUSES(ibv_cmd_destroy_wq)
REFUSES(ibv_cmd_detach_mcast)
REFUSES(ibv_cmd_free_dm)
REFUSES(ibv_cmd_get_context)
REFUSES(ibv_cmd_modify_cq)
REFUSES(ibv_cmd_modify_flow_action_esp)
REFUSES(ibv_cmd_modify_qp)
REFUSES(ibv_cmd_modify_qp_ex)
REFUSES(ibv_cmd_modify_srq)
REFUSES(ibv_cmd_modify_wq)
REFUSES(ibv_cmd_open_qp)
REFUSES(ibv_cmd_open_xrcd)
REFUSES(ibv_cmd_poll_cq)
REFUSES(ibv_cmd_post_recv)
REFUSES(ibv_cmd_post_send)
REFUSES(ibv_cmd_post_srq_recv)
REFUSES(ibv_cmd_query_context)
REFUSES(ibv_cmd_query_device_any)
REFUSES(ibv_cmd_query_mr)
REFUSES(ibv_cmd_query_port)
REFUSES(ibv_cmd_query_qp)
REFUSES(ibv_cmd_query_srq)
REFUSES(ibv_cmd_read_counters)
REFUSES(ibv_cmd_reg_dm_mr)
REFUSES(ibv_cmd_reg_dmabuf_mr)
REFUSES(ibv_cmd_reg_mr)
REFUSES(ibv_cmd_req_notify_cq)
REFUSES(ibv_cmd_rereg_mr)
REFUSES(ibv_cmd_resize_cq)
