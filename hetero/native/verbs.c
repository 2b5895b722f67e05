#include "verbs.h"

#include "ibverbs.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define POLL_BATCH 32
#define VERBS_RECORDS 32
#define VERBS_DATA 16
#define VERBS_CREDITS 2
#define VERBS_SENDS (VERBS_RECORDS + VERBS_DATA + VERBS_CREDITS)

/* A record, data and a credit for each entry, and a retransmission of record and data. */
#define RECV_DEPTH (5 * RING_ENTRIES + VERBS_CREDITS)
/* 4.096 us * 2**14 before a packet is retransmitted. An RNR retry count of 7 would mean for ever. */
#define ACK_TIMEOUT 14
#define RETRY_COUNT 6
#define MIN_RNR_TIMER 12
#define RNR_RETRY_COUNT 6
#define HOP_LIMIT 64

struct verbs_rail {
    struct rail rail; /* first, so that a pointer to either is a pointer to both */
    const struct engine_options *options;
    uint8_t port;
    bool can_inline;
    struct verbs_end own, peer;
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_mr *rings;
    struct ibv_mr *control;
    struct ibv_mr *read_back_mr;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_qp *loopback_qp; /* connected to itself, for read-backs; NULL where none are needed */
    uint64_t rings_base;    /* the sending ring, by the NIC's address */
    uint8_t read_back_byte; /* target of a read-back; its value does not matter */
    double reading_since;
    double posted_at[VERBS_SENDS]; /* a ring: requests complete in order */
    int oldest;
    int posted;
};

static struct verbs_rail *rail_of(struct rail *rail)
{
    return (struct verbs_rail *)rail;
}

static int post(struct verbs_rail *rail, struct ibv_send_wr *request)
{
    struct ibv_send_wr *refused;

    request->send_flags |= IBV_SEND_SIGNALED;
    int code = rail->context->ops.post_send(rail->qp, request, &refused);
    if (code == 0)
        rail->posted_at[(rail->oldest + rail->posted++) % VERBS_SENDS] = engine_now();
    return code;
}

static uint64_t make_wr_id(enum message kind, uint32_t number)
{
    return (uint64_t)kind << 32 | number;
}

static int post_record(struct rail *base, uint32_t number, uint64_t offset)
{
    struct verbs_rail *rail = rail_of(base);
    struct ibv_sge element = {.addr = rail->options->control + offset,
                              .length = sizeof(struct ring_record),
                              .lkey = rail->control->lkey};
    struct ibv_send_wr request = {
        .wr_id = make_wr_id(MESSAGE_RECORD, number),
        .sg_list = &element,
        .num_sge = 1,
        .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
        .send_flags = rail->can_inline ? IBV_SEND_INLINE : 0,
        .imm_data = htonl(number & ENTRY_NUMBER_MASK),
        .wr.rdma = {.remote_addr = rail->peer.control + offset, .rkey = rail->peer.control_key},
    };

    return post(rail, &request);
}

static int post_data(struct rail *base, uint32_t number, uint64_t slot, uint64_t nbytes)
{
    struct verbs_rail *rail = rail_of(base);
    struct ibv_sge element = {
        .addr = rail->rings_base + slot, .length = (uint32_t)nbytes, .lkey = rail->rings->lkey};
    struct ibv_send_wr request = {
        .wr_id = make_wr_id(MESSAGE_DATA, number),
        .sg_list = &element,
        .num_sge = nbytes == 0 ? 0 : 1,
        .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
        .imm_data = htonl((number & ENTRY_NUMBER_MASK) | ~ENTRY_NUMBER_MASK),
        .wr.rdma = {.remote_addr = rail->peer.receiving + slot, .rkey = rail->peer.receiving_key},
    };
    return post(rail, &request);
}

static int post_credit(struct rail *base, uint32_t released)
{
    struct ibv_send_wr request = {
        .wr_id = make_wr_id(MESSAGE_CREDIT, released),
        .opcode = IBV_WR_SEND_WITH_IMM,
        .imm_data = htonl(released),
    };

    return post(rail_of(base), &request);
}

static int post_read(struct rail *base, uint64_t last_byte)
{
    struct verbs_rail *rail = rail_of(base);
    struct ibv_sge element = {.addr = (uintptr_t)&rail->read_back_byte,
                              .length = sizeof rail->read_back_byte,
                              .lkey = rail->read_back_mr->lkey};
    struct ibv_send_wr *refused, request = {
        .wr_id = make_wr_id(MESSAGE_READ, 0),
        .sg_list = &element,
        .num_sge = 1,
        .opcode = IBV_WR_RDMA_READ,
        .send_flags = IBV_SEND_SIGNALED,
        .wr.rdma = {.remote_addr = rail->own.receiving + last_byte,
                    .rkey = rail->rings->rkey},
    };
    int code = rail->context->ops.post_send(rail->loopback_qp, &request, &refused);

    if (code == 0)
        rail->reading_since = engine_now();
    return code;
}

static int post_receive(struct verbs_rail *rail)
{
    struct ibv_recv_wr *refused, request = {.wr_id = 0};

    return rail->context->ops.post_recv(rail->qp, &request, &refused);
}

/* Completions. */

static void handle_send_completion(struct verbs_rail *rail, struct engine *engine, uint64_t wr_id)
{
    enum message kind = (enum message)(wr_id >> 32);

    if (kind == MESSAGE_READ) {
        engine_read_back_completed(engine, &rail->rail);
        return;
    }
    rail->posted--;
    rail->oldest = (rail->oldest + 1) % VERBS_SENDS;
    engine_send_completed(engine, &rail->rail, kind, (uint32_t)wr_id);
}

static void handle_error_completion(struct verbs_rail *rail, struct engine *engine,
                                    const struct ibv_wc *wc)
{
    bool is_read = wc->wr_id >> 32 == MESSAGE_READ;
    char reason[RAIL_TEXT_BYTES];

    set_reason(reason, "%s: %s (completion status %d)",
         is_read ? "it cannot read its own ring back" : "a request failed",
         ibv.wc_status_str(wc->status), wc->status);
    if (rail->rail.live)
        rail->rail.may_have_ended = !is_read && wc->status == IBV_WC_RETRY_EXC_ERR;
    engine_lose_rail(engine, &rail->rail, reason);
}

static void handle_recv_completion(struct verbs_rail *rail, struct engine *engine,
                                   const struct ibv_wc *wc)
{
    uint32_t immediate = ntohl(wc->imm_data), number = immediate & ENTRY_NUMBER_MASK;

    if (wc->opcode == IBV_WC_RECV)
        engine_credit_arrived(engine, &rail->rail, immediate);
    else if (immediate == number)
        engine_record_arrived(engine, number);
    else
        engine_data_arrived(engine, &rail->rail, number);
    if (rail->rail.live)
        engine_check_post(engine, &rail->rail, post_receive(rail));
}

static bool poll_cq(struct rail *base, struct engine *engine)
{
    struct verbs_rail *rail = rail_of(base);
    struct ibv_wc found[POLL_BATCH];
    int count, total = 0;

    while ((count = rail->context->ops.poll_cq(rail->cq, POLL_BATCH, found)) > 0) {
        for (int index = 0; index < count; index++) {
            const struct ibv_wc *wc = &found[index];

            if (wc->status != IBV_WC_SUCCESS)
                handle_error_completion(rail, engine, wc);
            else if (wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM || wc->opcode == IBV_WC_RECV)
                handle_recv_completion(rail, engine, wc);
            else
                handle_send_completion(rail, engine, wc->wr_id);
        }
        total += count;
    }
    if (count < 0)
        engine_lose_rail(engine, base, "its completion queue cannot be polled");
    return total > 0;
}

static bool is_busy(const struct rail *base)
{
    const struct verbs_rail *rail = (const struct verbs_rail *)base;

    return (base->live && rail->posted > 0) || base->is_reading_back;
}

static bool is_late(const struct rail *base, double before, char *reason)
{
    const struct verbs_rail *rail = (const struct verbs_rail *)base;

    if (base->is_reading_back && rail->reading_since < before)
        return !set_reason(reason, "it has not read its own ring back in time");
    if (base->live && rail->posted > 0 && rail->posted_at[rail->oldest] < before)
        return !set_reason(reason, "nothing completed in time");
    return false;
}

static int request_notification(struct rail *base)
{
    return rail_of(base)->context->ops.req_notify_cq(rail_of(base)->cq, 0);
}

static bool acknowledge(struct rail *base)
{
    struct ibv_cq *cq;
    void *context;

    if (ibv.get_cq_event(rail_of(base)->channel, &cq, &context) != 0)
        return false;
    ibv.ack_cq_events(cq, 1);
    return true;
}

static void stop_qp(struct ibv_qp *qp)
{
    struct ibv_qp_attr wanted = {.qp_state = IBV_QPS_ERR};

    /* A NIC that was removed refuses; nothing goes over it any more either. */
    if (qp != NULL)
        (void)ibv.modify_qp(qp, &wanted, IBV_QP_STATE);
}

/* Flush what is in flight, and refuse what arrives from here on. */
static void stop(struct rail *base)
{
    stop_qp(rail_of(base)->qp);
    stop_qp(rail_of(base)->loopback_qp);
}

static void join(struct rail *base)
{
    (void)base;
}

/* Ignore errors: a NIC that was removed refuses, and has nothing left to free. */
static void close_rail(struct rail *base)
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

static const struct rail_operations operations = {
    .limits = {VERBS_RECORDS, VERBS_DATA, VERBS_CREDITS},
    .post_record = post_record,
    .post_data = post_data,
    .post_credit = post_credit,
    .post_read = post_read,
    .is_busy = is_busy,
    .is_late = is_late,
    .poll = poll_cq,
    .request_notification = request_notification,
    .acknowledge = acknowledge,
    .stop = stop,
    .join = join,
    .close = close_rail,
};

/* Opening and connecting. */

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

static bool open_rail(struct verbs_rail *rail, const char *device, char *error)
{
    rail->context = open_device(device, error);
    if (rail->context == NULL)
        return false;
    rail->pd = ibv.alloc_pd(rail->context);
    if (rail->pd == NULL)
        return set_reason(error, "it gives no protection domain (%s)", strerror(errno));
    return register_rings(rail, error) && register_control(rail, error) && make_queues(rail, error);
}

struct rail *verbs_open(const struct engine_options *options, const char *device, uint8_t port,
                        struct verbs_end *made, bool *by_dmabuf, char *error)
{
    struct verbs_rail *rail = calloc(1, sizeof *rail);

    if (rail == NULL) {
        set_reason(error, "a rail cannot be made (%s)", strerror(ENOMEM));
        return NULL;
    }
    rail->rail.operations = &operations;
    rail->rail.confirms_delivery = true;
    rail->rail.event_fd = -1;
    rail->options = options;
    rail->port = port;
    if (!open_rail(rail, device, error)) {
        close_rail(&rail->rail);
        return NULL;
    }
    rail->rail.event_fd = rail->channel->fd;
    rail->own = (struct verbs_end){
        .qp = rail->qp->qp_num,
        .psn = made->psn,
        .receiving = rail->rings_base + options->ring_bytes,
        .receiving_key = rail->rings->rkey,
        .control = options->control,
        .control_key = rail->control->rkey,
        .reads_back = options->reads_back,
    };
    *made = rail->own;
    *by_dmabuf = rail->rings_base != options->rings;
    return &rail->rail;
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

bool verbs_connect(struct rail *base, const struct verbs_end *peer, const struct verbs_route *route,
                   const struct verbs_route *own, char *error)
{
    struct verbs_rail *rail = rail_of(base);
    struct ibv_qp *loopback = rail->loopback_qp;
    int code =
        modify_to_init(rail->qp, rail->port, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);

    rail->peer = *peer;
    for (int count = 0; code == 0 && count < RECV_DEPTH; count++)
        code = post_receive(rail);
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
