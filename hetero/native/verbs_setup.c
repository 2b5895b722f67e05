#include "verbs.h"

#include "window.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* A record, data and a credit for each entry, and a retransmission of record and data. */
#define RECV_DEPTH (5 * RING_ENTRIES + VERBS_CREDITS)
/* 4.096 us * 2**14 before a packet is retransmitted. An RNR retry count of 7 would mean for ever. */
#define ACK_TIMEOUT 14
#define RETRY_COUNT 6
#define MIN_RNR_TIMER 12
#define RNR_RETRY_COUNT 6
#define HOP_LIMIT 64

static struct ibv_context *open_device(const char *name, char *error)
{
    struct ibv_device **devices;
    struct ibv_context *context = NULL;
    int code;

    if (!ibverbs_load(error))
        return NULL;
    devices = ibv.get_device_list(NULL);
    for (struct ibv_device **one = devices; one != NULL && *one != NULL; one++)
        if (strcmp(ibv.get_device_name(*one), name) == 0)
            context = ibv.open_device(*one);
    code = errno;
    if (devices != NULL)
        ibv.free_device_list(devices);
    if (context == NULL)
        set_reason(error, "the device cannot be opened (%s)", strerror(code));
    return context;
}

bool verbs_query_port(const char *device, uint8_t number, struct verbs_port *found, char *error)
{
    struct ibv_context *context = open_device(device, error);
    struct ibv_port_attr port = {0};
    int code;

    if (context == NULL)
        return false;
    code = ibv.query_port(context, number, &port);
    ibv.close_device(context);
    if (code != 0)
        return set_reason(error, "it cannot be asked (%s)", strerror(code));
    *found = (struct verbs_port){.state = port.state,
                                 .mtu = port.active_mtu,
                                 .max_message = port.max_msg_sz,
                                 .lid = port.lid,
                                 .is_ethernet = port.link_layer == IBV_LINK_LAYER_ETHERNET};
    return true;
}

/* Never IBV_ACCESS_RELAXED_ORDERING: a read-back flushes only writes that are strictly ordered. */
static int ring_access_flags(const struct verbs_rail *rail)
{
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

    return rail->options->reads_back ? access | IBV_ACCESS_REMOTE_READ : access;
}

static bool register_rings(struct verbs_rail *rail, char *error)
{
    const struct engine_options *options = rail->options;
    size_t nbytes = 2 * options->ring_bytes;
    int access = ring_access_flags(rail), as_dmabuf = 0;

    if (options->dmabuf >= 0 && ibv.reg_dmabuf_mr != NULL) {
        /* Registered by dma-buf, the memory's addresses are offsets in the dma-buf. */
        rail->rings_base = options->dmabuf_offset;
        rail->rings = ibv.reg_dmabuf_mr(rail->pd, options->dmabuf_offset, nbytes,
                                        options->dmabuf_offset, options->dmabuf, access);
        as_dmabuf = errno;
    }
    if (rail->rings == NULL) {
        rail->rings_base = options->rings;
        rail->rings = ibv.reg_mr(rail->pd, (void *)(uintptr_t)options->rings, nbytes, access);
    }
    if (rail->rings == NULL && options->dmabuf >= 0)
        return set_reason(error, "it refused to register %zu bytes (as a dma-buf: %s; by address: %s)",
                    nbytes, strerror(as_dmabuf), strerror(errno));
    if (rail->rings == NULL)
        return set_reason(error, "it refused to register %zu bytes by address (%s)", nbytes,
                    strerror(errno));
    return true;
}

static bool register_control(struct verbs_rail *rail, char *error)
{
    rail->control = ibv.reg_mr(rail->pd, (void *)(uintptr_t)rail->options->control,
                               sizeof(struct ring_control),
                               IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    rail->read_back_mr = ibv.reg_mr(rail->pd, &rail->read_back_byte, 1, IBV_ACCESS_LOCAL_WRITE);
    if (rail->control == NULL || rail->read_back_mr == NULL)
        return set_reason(error, "it refused to register the control segment (%s)", strerror(errno));
    return true;
}

static struct ibv_qp *make_qp(struct verbs_rail *rail, uint32_t sends, uint32_t receives,
                              uint32_t inline_bytes)
{
    struct ibv_qp_init_attr wanted = {
        .send_cq = rail->cq,
        .recv_cq = rail->cq,
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = sends,
                .max_recv_wr = receives,
                .max_send_sge = 1,
                .max_recv_sge = 1,
                .max_inline_data = inline_bytes},
    };

    return ibv.create_qp(rail->pd, &wanted);
}

static bool make_queues(struct verbs_rail *rail, char *error)
{
    struct ibv_device_attr limits;
    int code = ibv.query_device(rail->context, &limits);

    if (code != 0)
        return set_reason(error, "the device cannot be asked for its limits (%s)", strerror(code));
    if (limits.max_qp_wr < RECV_DEPTH)
        return set_reason(error, "it takes %d requests at once and %d are needed, so name others with "
                    "--hetero-nics", limits.max_qp_wr, RECV_DEPTH);
    rail->channel = ibv.create_comp_channel(rail->context);
    if (rail->channel == NULL)
        return set_reason(error, "it makes no completion channel (%s)", strerror(errno));
    rail->cq = ibv.create_cq(rail->context, VERBS_SENDS + RECV_DEPTH + 1, NULL, rail->channel, 0);
    if (rail->cq == NULL)
        return set_reason(error, "it makes no completion queue (%s)", strerror(errno));
    rail->qp = make_qp(rail, VERBS_SENDS, RECV_DEPTH, sizeof(struct ring_record));
    rail->can_inline = rail->qp != NULL;
    if (rail->qp == NULL)
        rail->qp = make_qp(rail, VERBS_SENDS, RECV_DEPTH, 0);
    /* The loopback receives nothing, but some NICs make no queue pair without room for one receive. */
    if (rail->qp != NULL && rail->options->reads_back)
        rail->loopback_qp = make_qp(rail, 1, 1, 0);
    if (rail->qp == NULL || (rail->options->reads_back && rail->loopback_qp == NULL))
        return set_reason(error, "it makes no queue pair (%s)", strerror(errno));
    return true;
}

bool verbs_open(struct verbs_rail *rail, const char *device, char *error)
{
    const struct engine_options *options = rail->options;

    rail->rail.operations = &verbs_operations;
    rail->rail.confirms_delivery = true;
    rail->rail.event_fd = -1;
    rail->context = open_device(device, error);
    if (rail->context == NULL)
        return false;
    rail->pd = ibv.alloc_pd(rail->context);
    if (rail->pd == NULL)
        return set_reason(error, "it gives no protection domain (%s)", strerror(errno));
    if (!register_rings(rail, error) || !register_control(rail, error) || !make_queues(rail, error))
        return false;
    rail->rail.event_fd = rail->channel->fd;
    rail->own = (struct verbs_end){
        .qp = rail->qp->qp_num,
        .psn = rail->own.psn,
        .receiving = rail->rings_base + options->ring_bytes,
        .receiving_key = rail->rings->rkey,
        .control = options->control,
        .control_key = rail->control->rkey,
        .reads_back = options->reads_back,
    };
    return true;
}

static int modify_to_init(struct ibv_qp *qp, uint8_t port, unsigned int access)
{
    struct ibv_qp_attr wanted = {
        .qp_state = IBV_QPS_INIT, .port_num = port, .qp_access_flags = access};

    return ibv.modify_qp(qp, &wanted,
                         IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

/* Connect a queue pair of this rail with that of an end. */
static int modify_to_rts(const struct verbs_rail *rail, struct ibv_qp *qp,
                         const struct verbs_route *route, uint32_t peer_qp, uint32_t peer_psn)
{
    struct ibv_qp_attr wanted = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = (int)route->mtu,
        .dest_qp_num = peer_qp,
        .rq_psn = peer_psn,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = MIN_RNR_TIMER,
        .ah_attr = {.dlid = route->lid, .port_num = rail->port, .is_global = route->is_global},
    };
    if (route->is_global) {
        wanted.ah_attr.grh.sgid_index = route->gid_index;
        wanted.ah_attr.grh.hop_limit = HOP_LIMIT;
        memcpy(&wanted.ah_attr.grh.dgid, route->gid, sizeof route->gid);
    }
    int code = ibv.modify_qp(qp, &wanted,
                             IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                 IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                                 IBV_QP_MIN_RNR_TIMER);
    if (code != 0)
        return code;
    wanted = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS,
                                  .sq_psn = rail->own.psn,
                                  .timeout = ACK_TIMEOUT,
                                  .retry_cnt = RETRY_COUNT,
                                  .rnr_retry = RNR_RETRY_COUNT,
                                  .max_rd_atomic = 1};
    return ibv.modify_qp(qp, &wanted,
                         IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                             IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
}

bool verbs_connect(struct verbs_rail *rail, const struct verbs_end *peer,
                   const struct verbs_route *route, const struct verbs_route *own, char *error)
{
    struct ibv_qp *loopback = rail->loopback_qp;
    int code =
        modify_to_init(rail->qp, rail->port, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);

    rail->peer = *peer;
    for (int count = 0; code == 0 && count < RECV_DEPTH; count++)
        code = verbs_post_receive(rail);
    if (code == 0)
        code = modify_to_rts(rail, rail->qp, route, peer->qp, peer->psn);
    if (code == 0 && loopback != NULL)
        code = modify_to_init(loopback, rail->port, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
    if (code == 0 && loopback != NULL)
        code = modify_to_rts(rail, loopback, own, loopback->qp_num, rail->own.psn);
    if (code != 0)
        return set_reason(error, "its queue pair cannot be connected (%s)", strerror(code));
    rail->rail.live = true;
    rail->rail.peer_reads_back = peer->reads_back;
    return true;
}

/* Ignore errors: a NIC that was removed refuses, and has nothing left to free. */
void verbs_close(struct rail *base)
{
    struct verbs_rail *rail = (struct verbs_rail *)base;

    if (rail->loopback_qp != NULL)
        (void)ibv.destroy_qp(rail->loopback_qp);
    if (rail->qp != NULL)
        (void)ibv.destroy_qp(rail->qp);
    if (rail->cq != NULL)
        (void)ibv.destroy_cq(rail->cq);
    if (rail->channel != NULL)
        (void)ibv.destroy_comp_channel(rail->channel);
    if (rail->read_back_mr != NULL)
        (void)ibv.dereg_mr(rail->read_back_mr);
    if (rail->control != NULL)
        (void)ibv.dereg_mr(rail->control);
    if (rail->rings != NULL)
        (void)ibv.dereg_mr(rail->rings);
    if (rail->pd != NULL)
        (void)ibv.dealloc_pd(rail->pd);
    if (rail->context != NULL)
        (void)ibv.close_device(rail->context);
    free(rail);
}
