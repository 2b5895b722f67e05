#include "rail.h"

#include "flow.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MAX_INLINE 128
/* Of every entry a record and its data, a credit for each, and both again that another rail had. */
#define RECEIVES (5 * FLOW_ENTRIES + RAIL_CREDITS)
/* 4.096 us * 2**14 before a packet is sent again; 7 tries would mean for ever. */
#define ACK_TIMEOUT 14
#define TRIES 6
#define NOT_READY_TIMER 12
#define NOT_READY_TRIES 6
#define HOPS 64

static bool fail(char *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

static bool fail(char *error, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(error, RAIL_TEXT_BYTES, format, arguments);
    va_end(arguments);
    return false;
}

static bool open_device(struct rail *rail, const char *name, char *error)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);

    for (struct ibv_device **one = devices; one != NULL && *one != NULL; one++)
        if (strcmp(ibv_get_device_name(*one), name) == 0)
            rail->context = ibv_open_device(*one);
    int code = errno;
    if (devices != NULL)
        ibv_free_device_list(devices);
    if (rail->context == NULL)
        return fail(error, "the device cannot be opened (%s)", strerror(code));
    return true;
}

/* Without IBV_ACCESS_RELAXED_ORDERING: a read-back shows only what is strictly ordered. */
static int access_to_rings(const struct rail *rail)
{
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

    return rail->request.reads_back ? access | IBV_ACCESS_REMOTE_READ : access;
}

static bool register_rings(struct rail *rail, char *error)
{
    const struct rail_request *request = &rail->request;
    size_t nbytes = 2 * request->ring_bytes;
    int access = access_to_rings(rail), as_dmabuf = 0;

    if (request->dmabuf >= 0) {
        /* The NIC's addresses count from the beginning of the dma-buf. */
        rail->rings_base = request->dmabuf_offset;
        rail->rings = ibv_reg_dmabuf_mr(rail->domain, request->dmabuf_offset, nbytes,
                                        request->dmabuf_offset, request->dmabuf, access);
        as_dmabuf = errno;
    }
    if (rail->rings == NULL) {
        rail->rings_base = request->rings;
        rail->rings = ibv_reg_mr(rail->domain, (void *)(uintptr_t)request->rings, nbytes, access);
    }
    if (rail->rings == NULL && request->dmabuf >= 0)
        return fail(error, "it refused to register %zu bytes (as a dma-buf: %s; by address: %s)",
                    nbytes, strerror(as_dmabuf), strerror(errno));
    if (rail->rings == NULL)
        return fail(error, "it refused to register %zu bytes by address (%s)", nbytes,
                    strerror(errno));
    return true;
}

static bool register_control(struct rail *rail, char *error)
{
    rail->control = ibv_reg_mr(rail->domain, (void *)(uintptr_t)rail->request.control,
                               rail->request.control_bytes,
                               IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    rail->landing_region = ibv_reg_mr(rail->domain, &rail->landing, 1, IBV_ACCESS_LOCAL_WRITE);
    if (rail->control == NULL || rail->landing_region == NULL)
        return fail(error, "it refused to register the control segment (%s)", strerror(errno));
    return true;
}

static struct ibv_qp *make_pair(struct rail *rail, uint32_t sends, uint32_t receives,
                                uint32_t inline_bytes)
{
    struct ibv_qp_init_attr wanted = {
        .send_cq = rail->queue,
        .recv_cq = rail->queue,
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = sends,
                .max_recv_wr = receives,
                .max_send_sge = 1,
                .max_recv_sge = 1,
                .max_inline_data = inline_bytes},
    };

    return ibv_create_qp(rail->domain, &wanted);
}

static bool make_queues(struct rail *rail, char *error)
{
    struct ibv_device_attr limits;
    int code = ibv_query_device(rail->context, &limits);

    if (code != 0)
        return fail(error, "the device cannot be asked for its limits (%s)", strerror(code));
    if (limits.max_qp_wr < RECEIVES)
        return fail(error, "it takes %d requests at once and %d are needed, so name others with "
                    "--hetero-nics", limits.max_qp_wr, RECEIVES);
    rail->channel = ibv_create_comp_channel(rail->context);
    if (rail->channel == NULL)
        return fail(error, "it makes no completion channel (%s)", strerror(errno));
    rail->queue = ibv_create_cq(rail->context, RAIL_SENDS + RECEIVES + 1, NULL, rail->channel, 0);
    if (rail->queue == NULL)
        return fail(error, "it makes no completion queue (%s)", strerror(errno));
    rail->inlines = rail->request.record_bytes <= MAX_INLINE;
    if (rail->inlines)
        rail->pair = make_pair(rail, RAIL_SENDS, RECEIVES, rail->request.record_bytes);
    if (rail->pair == NULL) {
        rail->inlines = false;
        rail->pair = make_pair(rail, RAIL_SENDS, RECEIVES, 0);
    }
    /* The loop receives nothing, but some NICs make no queue pair without room for one receive. */
    if (rail->pair != NULL && rail->request.reads_back)
        rail->loop = make_pair(rail, 1, 1, 0);
    if (rail->pair == NULL || (rail->request.reads_back && rail->loop == NULL))
        return fail(error, "it makes no queue pair (%s)", strerror(errno));
    return true;
}

bool rail_open(struct rail *rail, const struct rail_request *request, struct rail_ending *ending,
               char *error)
{
    rail->request = *request;
    if (!open_device(rail, request->device, error))
        return false;
    rail->domain = ibv_alloc_pd(rail->context);
    if (rail->domain == NULL)
        return fail(error, "it gives no protection domain (%s)", strerror(errno));
    if (!register_rings(rail, error) || !register_control(rail, error) || !make_queues(rail, error))
        return false;
    *ending = (struct rail_ending){
        .pair = rail->pair->qp_num,
        .loop_pair = rail->loop == NULL ? 0 : rail->loop->qp_num,
        .receiving = rail->rings_base + request->ring_bytes,
        .receiving_key = rail->rings->rkey,
        .control = request->control,
        .control_key = rail->control->rkey,
        .by_dmabuf = rail->rings_base != request->rings,
    };
    return true;
}

static int to_init(struct ibv_qp *pair, uint8_t port, unsigned int access)
{
    struct ibv_qp_attr wanted = {
        .qp_state = IBV_QPS_INIT, .port_num = port, .qp_access_flags = access};

    return ibv_modify_qp(pair, &wanted,
                         IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

static int to_ready(struct ibv_qp *pair, uint8_t port, const struct rail_route *route, uint32_t psn)
{
    struct ibv_qp_attr wanted = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = (enum ibv_mtu)route->mtu,
        .dest_qp_num = route->pair,
        .rq_psn = route->psn,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = NOT_READY_TIMER,
        .ah_attr = {.dlid = route->lid, .port_num = port, .is_global = route->is_global},
    };
    if (route->is_global) {
        wanted.ah_attr.grh.sgid_index = route->gid_index;
        wanted.ah_attr.grh.hop_limit = HOPS;
        memcpy(&wanted.ah_attr.grh.dgid, route->gid, sizeof route->gid);
    }
    int code = ibv_modify_qp(pair, &wanted,
                             IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                 IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                                 IBV_QP_MIN_RNR_TIMER);
    if (code != 0)
        return code;
    wanted = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS,
                                  .sq_psn = psn,
                                  .timeout = ACK_TIMEOUT,
                                  .retry_cnt = TRIES,
                                  .rnr_retry = NOT_READY_TRIES,
                                  .max_rd_atomic = 1};
    return ibv_modify_qp(pair, &wanted,
                         IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                             IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
}

bool rail_connect(struct rail *rail, const struct rail_peer *peer, const struct rail_route *loop,
                  char *error)
{
    uint8_t port = rail->request.port;
    int code = to_init(rail->pair, port, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);

    rail->peer = *peer;
    for (int count = 0; code == 0 && count < RECEIVES; count++)
        code = rail_post_receive(rail);
    if (code == 0)
        code = to_ready(rail->pair, port, &peer->route, rail->request.psn);
    if (code == 0 && rail->loop != NULL)
        code = to_init(rail->loop, port, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
    if (code == 0 && rail->loop != NULL)
        code = to_ready(rail->loop, port, loop, loop->psn);
    if (code != 0)
        return fail(error, "its queue pair cannot be connected (%s)", strerror(code));
    rail->live = true;
    rail->reads = rail->loop != NULL;
    return true;
}

static void note_post(struct rail *rail, enum rail_kind kind, double now)
{
    rail->posted_at[(rail->oldest + rail->posted) % RAIL_SENDS] = now;
    rail->posted++;
    rail->under_way[kind]++;
}

static int post(struct rail *rail, struct ibv_send_wr *request, enum rail_kind kind, double now)
{
    struct ibv_send_wr *refused;

    request->send_flags |= IBV_SEND_SIGNALED;
    int code = ibv_post_send(rail->pair, request, &refused);
    if (code == 0)
        note_post(rail, kind, now);
    return code;
}

static uint64_t name_request(enum rail_kind kind, uint32_t number)
{
    return (uint64_t)kind << 32 | number;
}

int rail_post_record(struct rail *rail, uint32_t number, uint64_t offset, double now)
{
    struct ibv_sge element = {.addr = rail->request.control + offset,
                              .length = rail->request.record_bytes,
                              .lkey = rail->control->lkey};
    struct ibv_send_wr request = {
        .wr_id = name_request(RAIL_RECORD, number),
        .sg_list = &element,
        .num_sge = 1,
        .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
        .send_flags = rail->inlines ? IBV_SEND_INLINE : 0,
        .imm_data = htonl(number & FLOW_NUMBER_MASK),
        .wr.rdma = {.remote_addr = rail->peer.control + offset, .rkey = rail->peer.control_key},
    };

    return post(rail, &request, RAIL_RECORD, now);
}

int rail_post_data(struct rail *rail, uint32_t number, uint64_t place, uint64_t nbytes, double now)
{
    struct ibv_sge element = {
        .addr = rail->rings_base + place, .length = (uint32_t)nbytes, .lkey = rail->rings->lkey};
    struct ibv_send_wr request = {
        .wr_id = name_request(RAIL_DATUM, number),
        .sg_list = &element,
        .num_sge = nbytes == 0 ? 0 : 1,
        .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
        .imm_data = htonl((number & FLOW_NUMBER_MASK) | ~FLOW_NUMBER_MASK),
        .wr.rdma = {.remote_addr = rail->peer.receiving + place, .rkey = rail->peer.receiving_key},
    };
    int code = post(rail, &request, RAIL_DATUM, now);

    if (code == 0)
        rail->bytes_under_way += nbytes;
    return code;
}

int rail_post_credit(struct rail *rail, uint32_t released, double now)
{
    struct ibv_send_wr request = {
        .wr_id = name_request(RAIL_CREDIT, released),
        .opcode = IBV_WR_SEND_WITH_IMM,
        .imm_data = htonl(released),
    };

    return post(rail, &request, RAIL_CREDIT, now);
}

int rail_post_read(struct rail *rail, uint64_t last_byte, double now)
{
    struct ibv_sge element = {.addr = (uintptr_t)&rail->landing,
                              .length = sizeof rail->landing,
                              .lkey = rail->landing_region->lkey};
    struct ibv_send_wr *refused, request = {
        .wr_id = name_request(RAIL_READ, 0),
        .sg_list = &element,
        .num_sge = 1,
        .opcode = IBV_WR_RDMA_READ,
        .send_flags = IBV_SEND_SIGNALED,
        .wr.rdma = {.remote_addr = rail->rings_base + rail->request.ring_bytes + last_byte,
                    .rkey = rail->rings->rkey},
    };
    int code = ibv_post_send(rail->loop, &request, &refused);

    if (code == 0) {
        rail->is_reading = true;
        rail->reading_since = now;
    }
    return code;
}

int rail_post_receive(struct rail *rail)
{
    struct ibv_recv_wr *refused, request = {.wr_id = 0};

    return ibv_post_recv(rail->pair, &request, &refused);
}

void rail_completed(struct rail *rail, enum rail_kind kind, uint64_t nbytes)
{
    if (kind == RAIL_READ) {
        rail->is_reading = false;
        return;
    }
    rail->under_way[kind]--;
    rail->bytes_under_way -= nbytes;
    rail->posted--;
    rail->oldest = (rail->oldest + 1) % RAIL_SENDS;
}

bool rail_has_room(const struct rail *rail, enum rail_kind kind)
{
    static const int limits[] = {RAIL_RECORDS, RAIL_DATA, RAIL_CREDITS, 1};

    return rail->live && rail->under_way[kind] < limits[kind];
}

bool rail_is_busy(const struct rail *rail)
{
    return (rail->live && rail->posted > 0) || (rail->reads && rail->is_reading);
}

bool rail_is_late(const struct rail *rail, double before, char *reason)
{
    if (rail->reads && rail->is_reading && rail->reading_since < before)
        return !fail(reason, "it has not read its own ring back in time");
    if (rail->live && rail->posted > 0 && rail->posted_at[rail->oldest] < before)
        return !fail(reason, "nothing completed in time");
    return false;
}

static void stop_pair(struct ibv_qp *pair)
{
    struct ibv_qp_attr wanted = {.qp_state = IBV_QPS_ERR};

    /* A NIC that has been taken away refuses, and then carries nothing more either. */
    if (pair != NULL)
        (void)ibv_modify_qp(pair, &wanted, IBV_QP_STATE);
}

void rail_stop(struct rail *rail)
{
    if (rail->live) {
        rail->live = false;
        stop_pair(rail->pair);
    }
}

void rail_stop_reading(struct rail *rail)
{
    if (rail->reads) {
        rail->reads = rail->is_reading = false;
        stop_pair(rail->loop);
    }
}

bool rail_news(struct rail *rail, char *reason)
{
    struct ibv_async_event event;
    struct ibv_port_attr port;

    if (ibv_get_async_event(rail->context, &event) != 0)
        return false;
    ibv_ack_async_event(&event);
    switch (event.event_type) {
    case IBV_EVENT_PORT_ERR:
        if (ibv_query_port(rail->context, rail->request.port, &port) == 0 &&
            port.state == IBV_PORT_ACTIVE)
            return false;
        return !fail(reason, "its port has gone down");
    case IBV_EVENT_DEVICE_FATAL:
        return !fail(reason, "its device has failed");
    case IBV_EVENT_CQ_ERR:
        return !fail(reason, "its completion queue has failed");
    case IBV_EVENT_QP_FATAL:
        return !fail(reason, "its queue pair has failed");
    case IBV_EVENT_QP_REQ_ERR:
        return !fail(reason, "the peer's requests make no sense to it");
    case IBV_EVENT_QP_ACCESS_ERR:
        return !fail(reason, "the peer may not write where it tries to");
    default:
        return false;
    }
}

/* A NIC that has been taken away refuses, and has nothing left to give back. */
void rail_close(struct rail *rail)
{
    if (rail->loop != NULL)
        (void)ibv_destroy_qp(rail->loop);
    if (rail->pair != NULL)
        (void)ibv_destroy_qp(rail->pair);
    if (rail->queue != NULL)
        (void)ibv_destroy_cq(rail->queue);
    if (rail->channel != NULL)
        (void)ibv_destroy_comp_channel(rail->channel);
    if (rail->landing_region != NULL)
        (void)ibv_dereg_mr(rail->landing_region);
    if (rail->control != NULL)
        (void)ibv_dereg_mr(rail->control);
    if (rail->rings != NULL)
        (void)ibv_dereg_mr(rail->rings);
    if (rail->domain != NULL)
        (void)ibv_dealloc_pd(rail->domain);
    if (rail->context != NULL)
        (void)ibv_close_device(rail->context);
}
