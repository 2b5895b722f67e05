#include "verbs.h"

#include <arpa/inet.h>
#include <string.h>

#define POLL_BATCH 32

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

int verbs_post_receive(struct verbs_rail *rail)
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
        engine_check_post(engine, &rail->rail, verbs_post_receive(rail));
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

const struct rail_operations verbs_operations = {
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
    .close = verbs_close,
};
