/*
 * Texts and rates of libibverbs.
 */
#include "exported.h"

#define TEXT_OF(texts, value) \
    ((size_t)(value) < sizeof(texts) / sizeof(*(texts)) ? (texts)[value] : "unknown")

EXPORTED const char *ibv_wc_status_str(enum ibv_wc_status status)
{
    static const char *const texts[] = {
        [IBV_WC_SUCCESS] = "success",
        [IBV_WC_LOC_LEN_ERR] = "local length error",
        [IBV_WC_LOC_QP_OP_ERR] = "local QP operation error",
        [IBV_WC_LOC_EEC_OP_ERR] = "local EE context operation error",
        [IBV_WC_LOC_PROT_ERR] = "local protection error",
        [IBV_WC_WR_FLUSH_ERR] = "Work Request Flushed Error",
        [IBV_WC_MW_BIND_ERR] = "memory management operation error",
        [IBV_WC_BAD_RESP_ERR] = "bad response error",
        [IBV_WC_LOC_ACCESS_ERR] = "local access error",
        [IBV_WC_REM_INV_REQ_ERR] = "remote invalid request error",
        [IBV_WC_REM_ACCESS_ERR] = "remote access error",
        [IBV_WC_REM_OP_ERR] = "remote operation error",
        [IBV_WC_RETRY_EXC_ERR] = "transport retry counter exceeded",
        [IBV_WC_RNR_RETRY_EXC_ERR] = "RNR retry counter exceeded",
        [IBV_WC_LOC_RDD_VIOL_ERR] = "local RDD violation error",
        [IBV_WC_REM_INV_RD_REQ_ERR] = "remote invalid RD request",
        [IBV_WC_REM_ABORT_ERR] = "aborted error",
        [IBV_WC_INV_EECN_ERR] = "invalid EE context number",
        [IBV_WC_INV_EEC_STATE_ERR] = "invalid EE context state",
        [IBV_WC_FATAL_ERR] = "fatal error",
        [IBV_WC_RESP_TIMEOUT_ERR] = "response timeout error",
        [IBV_WC_GENERAL_ERR] = "general error",
        [IBV_WC_TM_ERR] = "TM error",
        [IBV_WC_TM_RNDV_INCOMPLETE] = "TM software rendezvous",
    };

    return TEXT_OF(texts, status);
}

/* Newer programs of rdma-core use this private call. */
EXPORTED const char *ibv_wr_opcode_str(enum ibv_wr_opcode opcode)
{
#define NAMED(name) [IBV_WR_##name] = "IBV_WR_" #name
    static const char *const texts[] = {
        NAMED(RDMA_WRITE),           NAMED(RDMA_WRITE_WITH_IMM), NAMED(SEND),
        NAMED(SEND_WITH_IMM),        NAMED(RDMA_READ),           NAMED(ATOMIC_CMP_AND_SWP),
        NAMED(ATOMIC_FETCH_AND_ADD), NAMED(LOCAL_INV),           NAMED(BIND_MW),
        NAMED(SEND_WITH_INV),
    };
#undef NAMED

    return TEXT_OF(texts, opcode);
}

EXPORTED const char *ibv_event_type_str(enum ibv_event_type event)
{
    static const char *const texts[] = {
        [IBV_EVENT_CQ_ERR] = "CQ error",
        [IBV_EVENT_QP_FATAL] = "local work queue catastrophic error",
        [IBV_EVENT_QP_REQ_ERR] = "invalid request local work queue error",
        [IBV_EVENT_QP_ACCESS_ERR] = "local access violation work queue error",
        [IBV_EVENT_COMM_EST] = "communication established",
        [IBV_EVENT_SQ_DRAINED] = "send queue drained",
        [IBV_EVENT_PATH_MIG] = "path migrated",
        [IBV_EVENT_PATH_MIG_ERR] = "path migration request error",
        [IBV_EVENT_DEVICE_FATAL] = "local catastrophic error",
        [IBV_EVENT_PORT_ACTIVE] = "port active",
        [IBV_EVENT_PORT_ERR] = "port error",
        [IBV_EVENT_LID_CHANGE] = "LID change",
        [IBV_EVENT_PKEY_CHANGE] = "P_Key change",
        [IBV_EVENT_SM_CHANGE] = "SM change",
        [IBV_EVENT_SRQ_ERR] = "SRQ catastrophic error",
        [IBV_EVENT_SRQ_LIMIT_REACHED] = "SRQ limit reached",
        [IBV_EVENT_QP_LAST_WQE_REACHED] = "last WQE reached",
        [IBV_EVENT_CLIENT_REREGISTER] = "client reregistration",
        [IBV_EVENT_GID_CHANGE] = "GID table change",
        [IBV_EVENT_WQ_FATAL] = "WQ fatal",
    };

    return TEXT_OF(texts, event);
}

EXPORTED const char *ibv_node_type_str(enum ibv_node_type type)
{
    if (type == IBV_NODE_RNIC)
        return "iWARP NIC";
    return type == IBV_NODE_CA ? "InfiniBand channel adapter" : "unknown";
}

EXPORTED const char *ibv_port_state_str(enum ibv_port_state state)
{
    static const char *const texts[] = {
        [IBV_PORT_NOP] = "no state change (NOP)",
        [IBV_PORT_DOWN] = "down",
        [IBV_PORT_INIT] = "init",
        [IBV_PORT_ARMED] = "armed",
        [IBV_PORT_ACTIVE] = "active",
        [IBV_PORT_ACTIVE_DEFER] = "active defer",
    };

    return TEXT_OF(texts, state);
}

/* -- rates: the enumeration, in units of 2.5 Gb/s (0: it has no such number), and in Mb/s -------- */

static const struct rate {
    int rate, multiple, mbps;
} rates[] = {
    {2, 1, 2500},      {5, 2, 5000},      {3, 4, 10000},      {6, 8, 20000},    {4, 12, 30000},
    {7, 16, 40000},    {8, 24, 60000},    {9, 32, 80000},     {10, 48, 120000}, {11, 0, 14062},
    {12, 0, 56250},    {13, 0, 112500},   {14, 0, 168750},    {15, 0, 25781},   {16, 0, 103125},
    {17, 0, 206250},   {18, 0, 309375},   {19, 11, 28125},    {20, 20, 53125},  {21, 160, 425000},
    {22, 240, 637500}, {23, 320, 850000}, {24, 480, 1275000},
};

/* Find the entry with a member at an offset. NULL: there is none. */
static const struct rate *find_rate(size_t member, int value)
{
    const size_t count = sizeof(rates) / sizeof(*rates);

    for (const struct rate *each = rates; each < rates + count; each++)
        if (*(const int *)(const void *)((const char *)each + member) == value)
            return each;
    return NULL;
}

EXPORTED int ibv_rate_to_mult(int rate)
{
    const struct rate *found = find_rate(offsetof(struct rate, rate), rate);

    return found && found->multiple ? found->multiple : -1;
}

EXPORTED int mult_to_ibv_rate(int multiple)
{
    const struct rate *found = find_rate(offsetof(struct rate, multiple), multiple);

    return found && multiple ? found->rate : 0;
}

EXPORTED int ibv_rate_to_mbps(int rate)
{
    const struct rate *found = find_rate(offsetof(struct rate, rate), rate);

    return found ? found->mbps : -1;
}

EXPORTED int mbps_to_ibv_rate(int mbps)
{
    const struct rate *found = find_rate(offsetof(struct rate, mbps), mbps);

    return found ? found->rate : 0;
}
