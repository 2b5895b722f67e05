#include "engine.h"

#include <arpa/inet.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define POLLED_AT_ONCE 32

double engine_now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Words and records. */

static _Atomic uint32_t *word(struct engine *engine, uint64_t offset)
{
    return (_Atomic uint32_t *)(uintptr_t)(engine->layout.control + offset);
}

static uint32_t load(struct engine *engine, uint64_t offset)
{
    return atomic_load_explicit(word(engine, offset), memory_order_acquire);
}

/* Never back: a link that has failed moves words ahead itself, to release its streams. */
static bool advance(struct engine *engine, uint64_t offset, uint32_t count)
{
    uint32_t current = load(engine, offset);

    while (flow_ahead(count, current) > 0)
        if (atomic_compare_exchange_weak(word(engine, offset), &current, count))
            return true;
    return false;
}

void engine_ring(struct engine *engine)
{
    _Atomic uint32_t *doorbell = word(engine, engine->layout.doorbell);

    atomic_fetch_add(doorbell, 1);
    syscall(SYS_futex, doorbell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static uint64_t record_offset(struct engine *engine, uint64_t records, uint32_t number)
{
    return records + number % FLOW_ENTRIES * engine->layout.record_bytes;
}

static uint64_t field(struct engine *engine, uint64_t record, uint64_t offset)
{
    uint64_t value;

    memcpy(&value, (const void *)(uintptr_t)(engine->layout.control + record + offset),
           sizeof value);
    return value;
}

/* How many of an entry's bytes lie where in the ring. A record that makes no sense names none: the
 * receiving CPU, which verifies it, finds the difference. */
static uint64_t span(struct engine *engine, uint64_t records, uint32_t number, uint64_t *place)
{
    const struct engine_layout *layout = &engine->layout;
    uint64_t record = record_offset(engine, records, number);
    uint64_t nbytes = field(engine, record, layout->record_nbytes);

    *place = field(engine, record, layout->record_place);
    if (*place > layout->ring_bytes || nbytes > layout->ring_bytes - *place)
        return 0;
    return nbytes;
}

/* Losing rails. */

void engine_lose(struct engine *engine, struct rail *rail, const char *reason)
{
    struct loss *loss = &engine->losses[rail->index];

    if (!rail->live)
        return;
    rail_stop(rail);
    incoming_forget(&engine->incoming, rail->index);
    rail_stop_reading(rail);
    loss->is_told = false;
    snprintf(loss->reason, sizeof loss->reason, "%s", reason);
    eventfd_write(engine->losses_bell, 1);
}

/* Post, and lose the rail if the NIC does not take it. */
static bool took(struct engine *engine, struct rail *rail, int code)
{
    char reason[RAIL_TEXT_BYTES];

    if (code == 0)
        return true;
    snprintf(reason, sizeof reason, "it takes no requests (%s)", strerror(code));
    engine_lose(engine, rail, reason);
    return false;
}

void engine_watch(struct engine *engine, double time)
{
    char reason[RAIL_TEXT_BYTES];

    for (int index = 0; index < engine->rail_count; index++)
        if (rail_is_late(&engine->rails[index], time - engine->layout.stall_seconds, reason))
            engine_lose(engine, &engine->rails[index], reason);
}

/* Completions. */

static void arrive(struct engine *engine, struct rail *rail, uint32_t travelled)
{
    const struct engine_layout *layout = &engine->layout;
    uint32_t number = travelled & FLOW_NUMBER_MASK;
    uint64_t place, nbytes;

    if (travelled != number) {
        /* Without its read-back a rail brings nothing that counts: the peer sends it again. */
        if (rail->reads == rail->request.reads_back)
            incoming_data(&engine->incoming, number, rail->index, rail->reads);
        return;
    }
    nbytes = span(engine, layout->in_records, number, &place);
    incoming_record(&engine->incoming, number,
                    nbytes == 0 ? FLOW_NO_BYTE : place + nbytes - 1);
}

static void complete_request(struct engine *engine, struct rail *rail, uint64_t request)
{
    enum rail_kind kind = (enum rail_kind)(request >> 32);
    uint32_t number = (uint32_t)request;
    uint64_t place, nbytes = 0;

    if (kind == RAIL_RECORD)
        sequence_complete(&engine->outgoing.records, number, rail->index);
    if (kind == RAIL_DATUM) {
        nbytes = span(engine, engine->layout.out_records, number, &place);
        sequence_complete(&engine->outgoing.data, number, rail->index);
    }
    if (kind == RAIL_READ && rail->reads)
        incoming_seen(&engine->incoming, rail->index);
    rail_completed(rail, kind, nbytes);
}

static void complete(struct engine *engine, struct rail *rail, const struct ibv_wc *done)
{
    char reason[RAIL_TEXT_BYTES];

    if (done->status != IBV_WC_SUCCESS) {
        bool is_read = done->wr_id >> 32 == RAIL_READ;

        snprintf(reason, sizeof reason, "%s: %s (completion status %d)",
                 is_read ? "it cannot read its own ring back" : "a request failed",
                 ibv_wc_status_str(done->status), done->status);
        engine_lose(engine, rail, reason);
        return;
    }
    switch (done->opcode) {
    case IBV_WC_RECV_RDMA_WITH_IMM:
        arrive(engine, rail, ntohl(done->imm_data));
        break;
    case IBV_WC_RECV:
        outgoing_credit(&engine->outgoing, ntohl(done->imm_data));
        break;
    default:
        complete_request(engine, rail, done->wr_id);
        return;
    }
    if (rail->live)
        took(engine, rail, rail_post_receive(rail));
}

bool engine_poll_rail(struct engine *engine, struct rail *rail)
{
    struct ibv_wc found[POLLED_AT_ONCE];
    int count, total = 0;

    while ((count = ibv_poll_cq(rail->queue, POLLED_AT_ONCE, found)) > 0) {
        for (int index = 0; index < count; index++)
            complete(engine, rail, &found[index]);
        total += count;
    }
    if (count < 0)
        engine_lose(engine, rail, "its completion queue cannot be polled");
    return total > 0;
}

/* Moving entries. */

/* The least loaded rail that has room: a faster one is so more often. NULL if none has. */
static struct rail *choose(struct engine *engine, enum rail_kind kind)
{
    struct rail *best = NULL;

    for (int index = 0; index < engine->rail_count; index++) {
        struct rail *rail = &engine->rails[index];

        if (rail_has_room(rail, kind) &&
            (best == NULL || rail->bytes_under_way < best->bytes_under_way))
            best = rail;
    }
    return best;
}

static bool send_records(struct engine *engine, uint32_t limit)
{
    struct sequence *records = &engine->outgoing.records;
    struct rail *rail;
    uint32_t number;
    bool moved = false;

    while (sequence_waiting(records, limit, &number) &&
           (rail = choose(engine, RAIL_RECORD)) != NULL) {
        uint64_t offset = record_offset(engine, engine->layout.out_records, number);

        if (took(engine, rail, rail_post_record(rail, number, offset, engine_now())))
            sequence_post(records, number, rail->index);
        moved = true;
    }
    return moved;
}

/* Data follow their record: it has been posted when they are. */
static bool send_data(struct engine *engine, uint32_t limit)
{
    struct sequence *data = &engine->outgoing.data;
    struct rail *rail;
    uint32_t number;
    bool moved = false;

    while (sequence_waiting(data, limit, &number) &&
           (rail = choose(engine, RAIL_DATUM)) != NULL) {
        uint64_t place, nbytes;

        nbytes = span(engine, engine->layout.out_records, number, &place);
        if (took(engine, rail, rail_post_data(rail, number, place, nbytes, engine_now())))
            sequence_post(data, number, rail->index);
        moved = true;
    }
    return moved;
}

static bool send_credit(struct engine *engine)
{
    struct incoming *incoming = &engine->incoming;
    uint32_t consumed = load(engine, engine->layout.in_consumed);
    struct rail *rail;

    /* A link that has failed moves the word ahead of what has arrived. */
    if (flow_ahead(consumed, incoming->produced) > 0)
        consumed = incoming->produced;
    if (consumed == incoming->told && !incoming->telling_lost)
        return false;
    rail = choose(engine, RAIL_CREDIT);
    if (rail == NULL || !took(engine, rail, rail_post_credit(rail, consumed, engine_now())))
        return false;
    incoming->told = consumed;
    incoming->telling_lost = false;
    return true;
}

static void read_back(struct engine *engine, struct rail *rail)
{
    uint64_t last_byte;

    if (rail->reads && !rail->is_reading &&
        incoming_claim(&engine->incoming, rail->index, &last_byte))
        took(engine, rail, rail_post_read(rail, last_byte, engine_now()));
}

/* The words that this side's streams and CPU wait for. The device's come first: a CPU that is woken
 * finds them. */
static bool publish(struct engine *engine)
{
    const struct engine_layout *layout = &engine->layout;
    uint32_t freed = outgoing_free(&engine->outgoing);
    bool moved = advance(engine, layout->in_produced, engine->incoming.produced);
    bool concerns_cpu = advance(engine, layout->in_posted, engine->incoming.posted);

    concerns_cpu |= advance(engine, layout->out_consumed, freed);
    concerns_cpu |= advance(engine, layout->out_retired, freed);
    if (concerns_cpu)
        engine_ring(engine);
    return moved || concerns_cpu;
}

/* See to all that has happened, and post what can be posted by then. Called with the lock. */
bool engine_progress(struct engine *engine)
{
    const struct engine_layout *layout = &engine->layout;
    uint32_t posted, produced;
    bool moved = false;

    for (int index = 0; index < engine->rail_count; index++) {
        moved |= engine_poll_rail(engine, &engine->rails[index]);
        read_back(engine, &engine->rails[index]);
    }
    moved |= publish(engine);
    posted = load(engine, layout->out_posted);
    produced = load(engine, layout->out_produced);
    moved |= send_records(engine, posted);
    /* A record that waits for room keeps its data, and those behind it, waiting too. */
    if (flow_ahead(produced, engine->outgoing.records.next) > 0)
        produced = engine->outgoing.records.next;
    moved |= send_data(engine, produced);
    return moved | send_credit(engine);
}

/* Whether something may happen that wakes nobody: a device's write of a word, or a deadline. */
bool engine_is_under_way(struct engine *engine)
{
    const struct engine_layout *layout = &engine->layout;
    bool has_rail = false;

    for (int index = 0; index < engine->rail_count; index++) {
        if (rail_is_busy(&engine->rails[index]))
            return true;
        has_rail |= engine->rails[index].live;
    }
    if (!has_rail)
        return false;
    return load(engine, layout->out_posted) != load(engine, layout->out_produced) ||
           load(engine, layout->in_retired) != load(engine, layout->in_consumed);
}

bool engine_reads(const struct engine *engine)
{
    for (int index = 0; index < engine->rail_count; index++)
        if (incoming_reads(&engine->incoming, (uint8_t)index))
            return true;
    return false;
}

bool engine_has_told(struct engine *engine)
{
    uint32_t consumed = load(engine, engine->layout.in_consumed);
    bool has_rail = false;

    for (int index = 0; index < engine->rail_count; index++) {
        if (engine->rails[index].live && engine->rails[index].under_way[RAIL_CREDIT] > 0)
            return false;
        has_rail |= engine->rails[index].live;
    }
    return !has_rail ||
           (!engine->incoming.telling_lost && flow_ahead(consumed, engine->incoming.told) <= 0);
}

void engine_ask_for_notice(struct engine *engine)
{
    for (int index = 0; index < engine->rail_count; index++) {
        struct rail *rail = &engine->rails[index];
        int code = rail->live ? ibv_req_notify_cq(rail->queue, 0) : 0;

        took(engine, rail, code);
    }
}
