#include "engine.h"

#include "host.h"
#include "speed.h"

#include <inttypes.h>
#include <sched.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define CHECKS_PER_STALL 16
/* Without an acknowledgement for so many stall times a rail is lost whatever other rails do. */
#define STALLS_ALONE 6

double engine_now(void)
{
    return 1e-9 * (double)spin_clock();
}

/* Words and records. */

/* Advance a counter, never move it back: a link that has failed advances words itself, to unblock its
 * streams. */
static bool advance(struct ring_word *word, uint32_t count)
{
    uint32_t current = ring_load(word);

    while (ring_ahead(count, current) > 0)
        if (__atomic_compare_exchange_n(&word->value, &current, count, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST)) {
            host_wake_word(&word->value);
            return true;
        }
    return false;
}

bool engine_init(struct engine *engine, const struct engine_options *options)
{
    uint32_t sent, received;

    pthread_mutex_init(&engine->lock, NULL);
    engine->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    engine->loss_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    engine->options = *options;
    engine->control = (struct ring_control *)(uintptr_t)options->control;
    engine->out = &engine->control->directions[options->side];
    engine->in = &engine->control->directions[1 - options->side];
    sent = ring_load(&engine->out->posted);
    received = ring_load(&engine->in->posted);

    engine->outgoing.records.next = engine->outgoing.records.completed = sent;
    engine->outgoing.data.next = engine->outgoing.data.completed = sent;
    engine->outgoing.records.posted_end = engine->outgoing.data.posted_end = sent;
    engine->outgoing.released = engine->outgoing.freed = sent;
    engine->incoming.posted = engine->incoming.produced = engine->incoming.credited = received;
    return engine->wake_fd >= 0 && engine->loss_fd >= 0;
}

void engine_destroy(struct engine *engine)
{
    if (engine->wake_fd >= 0)
        close(engine->wake_fd);
    if (engine->loss_fd >= 0)
        close(engine->loss_fd);
    pthread_mutex_destroy(&engine->lock);
}

void engine_lock(struct engine *engine)
{
    atomic_fetch_add(&engine->lock_waiters, 1);
    pthread_mutex_lock(&engine->lock);
    atomic_fetch_sub(&engine->lock_waiters, 1);
}

void engine_unlock(struct engine *engine)
{
    bool has_news = engine->has_news;
    struct flow *out = engine->flows[0], *in = engine->flows[1];

    engine->has_news = false;
    has_news &= out != NULL;
    if (has_news)
        atomic_fetch_add(&engine->drivers, 1);
    pthread_mutex_unlock(&engine->lock);
    if (!has_news)
        return;
    native_drive(out);
    native_drive(in);
    atomic_fetch_sub(&engine->drivers, 1);
}

void engine_drive_flows(struct engine *engine, struct flow *out, struct flow *in)
{
    out->is_driven = in->is_driven = true;
    engine_lock(engine);
    engine->flows[0] = out;
    engine->flows[1] = in;
    engine->has_news = true;
    engine_unlock(engine);
}

void engine_leave_flows(struct engine *engine)
{
    engine_lock(engine);
    engine->flows[0] = engine->flows[1] = NULL;
    engine_unlock(engine);
    while (atomic_load(&engine->drivers) > 0)
        sched_yield();
}

static struct ring_record *record_of(struct ring_direction *direction, uint32_t number)
{
    return &direction->records[number % RING_ENTRIES];
}

/* An entry's bytes in the ring, checksum included, and their slot. 0 for a record that is out of
 * bounds: the receiving CPU verifies records and reports it. */
static uint64_t entry_span(struct engine *engine, struct ring_direction *direction, uint32_t number,
                     uint64_t *slot)
{
    const struct ring_record *record = record_of(direction, number);
    uint64_t nbytes = record->nbytes + engine->options.checksum_bytes;

    *slot = record->slot;
    if (*slot > engine->options.ring_bytes || nbytes > engine->options.ring_bytes - *slot)
        return 0;
    return nbytes;
}

/* Losing rails. */

void engine_lose_rail(struct engine *engine, struct rail *rail, const char *reason)
{
    if (!rail->live)
        return;
    rail->live = false;
    rail->operations->stop(rail);
    rail->is_reading_back = false;
    incoming_discard(&engine->incoming, rail->index);
    set_reason(rail->loss, "%s", reason);
    eventfd_write(engine->loss_fd, 1);
}

bool engine_check_post(struct engine *engine, struct rail *rail, int code)
{
    char reason[RAIL_TEXT_BYTES];

    if (code == 0)
        return true;
    set_reason(reason, "it takes no requests (%s)", strerror(code));
    engine_lose_rail(engine, rail, reason);
    return false;
}

/* The same of a message, which is in flight until engine_send_completed. */
static bool count_post(struct engine *engine, struct rail *rail, enum message message, int code)
{
    rail->in_flight[message] += code == 0;
    return engine_check_post(engine, rail, code);
}

bool engine_post_credit(struct engine *engine, struct rail *rail, uint32_t released)
{
    int code = rail->operations->post_credit(rail, released);

    return count_post(engine, rail, MESSAGE_CREDIT, code);
}

/* Events of rails. */

void engine_send_completed(struct engine *engine, struct rail *rail, enum message message,
                           uint32_t number)
{
    uint64_t slot, nbytes;

    rail->in_flight[message]--;
    if (message == MESSAGE_RECORD)
        sequence_complete(&engine->outgoing.records, number, rail->index);
    if (message != MESSAGE_DATA)
        return;
    nbytes = entry_span(engine, engine->out, number, &slot);
    rail->bytes_sent += nbytes;
    speed_completed(rail, nbytes, engine->posted_at[number % RING_ENTRIES], engine_now());
    sequence_complete(&engine->outgoing.data, number, rail->index);
}

void engine_record_arrived(struct engine *engine, uint32_t number)
{
    uint64_t slot, nbytes = entry_span(engine, engine->in, number, &slot);

    incoming_record(&engine->incoming, number, nbytes == 0 ? NO_LAST_BYTE : slot + nbytes - 1);
}

void engine_data_arrived(struct engine *engine, struct rail *rail, uint32_t number)
{
    bool reads_back = engine->options.reads_back;

    /* A lost rail cannot read back, and so make data visible: the peer retransmits them. */
    if (rail->live || !reads_back)
        incoming_data(&engine->incoming, number, rail->index, reads_back);
}

void engine_credit_arrived(struct engine *engine, struct rail *rail, uint32_t released)
{
    char reason[RAIL_TEXT_BYTES];

    if (outgoing_credit(&engine->outgoing, released))
        return;
    set_reason(reason, "it was credited with %" PRIu32 " entries and had sent %" PRIu32, released,
         engine->outgoing.data.posted_end);
    engine_lose_rail(engine, rail, reason);
}

void engine_read_back_completed(struct engine *engine, struct rail *rail)
{
    rail->is_reading_back = false;
    if (rail->live)
        incoming_read_back_completed(&engine->incoming, rail->index);
}

void *engine_expect_record(struct engine *engine, uint32_t number)
{
    if (!incoming_expects_record(&engine->incoming, number))
        return NULL;
    return record_of(engine->in, number);
}

bool engine_expect_data(struct engine *engine, struct rail *rail, uint32_t number)
{
    return rail->live && incoming_expect_data(&engine->incoming, number, rail->index);
}

/* Where this end has the bytes of an entry that `side` sends. */
static struct user_buffer *user_buffer_of(const struct engine *engine, uint64_t side, uint32_t number)
{
    return &engine->control->user_buffers[side][number % RING_ENTRIES];
}

static uint64_t user_address(uint64_t buffer)
{
    return buffer == RING_UNDECIDED || buffer == RING_SLOT ? 0 : buffer;
}

uint64_t engine_source(const struct engine *engine, uint32_t number)
{
    return user_address(user_buffer_of(engine, engine->options.side, number)->address);
}

bool engine_target(struct engine *engine, uint32_t number, uint64_t nbytes, uint64_t *target)
{
    struct user_buffer *buffer = user_buffer_of(engine, 1 - engine->options.side, number);
    uint64_t address = RING_UNDECIDED;

    /* The first to decide, rail or receiving CPU, decides for good: also for a retransmission. */
    __atomic_compare_exchange_n(&buffer->address, &address, RING_SLOT, false, __ATOMIC_ACQ_REL,
                                __ATOMIC_ACQUIRE);
    *target = user_address(address);
    if (*target == 0 || buffer->nbytes == nbytes)
        return true;
    if (!incoming_expects_record(&engine->incoming, number) &&
        record_of(engine->in, number)->nbytes != nbytes)
        return false;
    /* Of another message than the one expected, which the receiving CPU refuses when it comes to the record. */
    __atomic_compare_exchange_n(&buffer->address, &address, RING_SLOT, false, __ATOMIC_ACQ_REL,
                                __ATOMIC_ACQUIRE);
    *target = 0;
    return true;
}

/* Moving entries. */

/* A rail for `nbytes` that belong to a message of `message_bytes` in all. */
static struct rail *choose_rail(struct engine *engine, enum message message, uint64_t nbytes,
                                uint64_t message_bytes)
{
    if (engine->rail_count == 0)
        return NULL;
    if (message_bytes >= engine->rails[engine->small_rail]->operations->small_bytes)
        return speed_choose(engine->rails, engine->rail_count, message, nbytes);
    return speed_choose_small(engine->rails, engine->rail_count, message, nbytes,
                              &engine->small_rail);
}

static bool send_records(struct engine *engine, uint32_t limit)
{
    struct sequence *records = &engine->outgoing.records;
    struct rail *rail;
    uint32_t number;
    bool moved = false;

    while (sequence_next_unsent(records, limit, &number) &&
           (rail = choose_rail(engine, MESSAGE_RECORD, sizeof(struct ring_record),
                               record_of(engine->out, number)->header.nbytes)) != NULL) {
        const char *record = (const char *)record_of(engine->out, number);
        uint64_t offset = (uint64_t)(record - (const char *)engine->control);
        int code = rail->operations->post_record(rail, number, offset);

        if (count_post(engine, rail, MESSAGE_RECORD, code))
            sequence_post(records, number, rail->index);
        moved = true;
    }
    return moved;
}

static bool send_entry_data(struct engine *engine, uint32_t number)
{
    uint64_t slot, nbytes = entry_span(engine, engine->out, number, &slot);
    struct rail *rail = choose_rail(engine, MESSAGE_DATA, nbytes,
                                    record_of(engine->out, number)->header.nbytes);
    double now = engine_now();

    if (rail == NULL)
        return false;
    int code = rail->operations->post_data(rail, number, slot, nbytes);
    if (count_post(engine, rail, MESSAGE_DATA, code)) {
        sequence_post(&engine->outgoing.data, number, rail->index);
        engine->posted_at[number % RING_ENTRIES] = now;
        rail->bytes_in_flight += nbytes;
    }
    return true;
}

/* Post data only after their record. */
static bool send_data(struct engine *engine, uint32_t limit)
{
    uint32_t number;
    bool moved = false;

    while (sequence_next_unsent(&engine->outgoing.data, limit, &number) &&
           send_entry_data(engine, number))
        moved = true;
    return moved;
}

static bool send_credit(struct engine *engine)
{
    struct incoming *incoming = &engine->incoming;
    uint32_t consumed = ring_load(&engine->in->consumed);
    struct rail *rail;

    /* A link that has failed advances the word beyond what has arrived. */
    if (ring_ahead(consumed, incoming->produced) > 0)
        consumed = incoming->produced;
    if (consumed == incoming->credited && !incoming->credit_lost)
        return false;
    rail = choose_rail(engine, MESSAGE_CREDIT, 0, 0);
    /* Reset before the credit lets the sender reuse these numbers. */
    for (uint32_t number = incoming->credited; rail != NULL && number != consumed; number++)
        __atomic_store_n(&user_buffer_of(engine, 1 - engine->options.side, number)->address,
                         RING_UNDECIDED, __ATOMIC_RELEASE);
    if (rail == NULL || !engine_post_credit(engine, rail, consumed))
        return false;
    incoming->credited = consumed;
    incoming->credit_lost = false;
    return true;
}

static void read_back(struct engine *engine, struct rail *rail)
{
    uint64_t last_byte;

    if (engine->options.reads_back && rail->live && !rail->is_reading_back &&
        incoming_claim_read_back(&engine->incoming, rail->index, &last_byte) &&
        engine_check_post(engine, rail, rail->operations->post_read(rail, last_byte)))
        rail->is_reading_back = true;
}

/* Advance the words that this end's streams and CPU wait for. Advance the device's first, so that a CPU
 * woken by `posted` or `retired` finds them set. */
static bool publish(struct engine *engine)
{
    uint32_t freed = outgoing_free(&engine->outgoing);
    bool moved = advance(&engine->in->produced, engine->incoming.produced);
    bool concerns_cpu = advance(&engine->in->posted, engine->incoming.posted);

    concerns_cpu |= advance(&engine->out->consumed, freed);
    concerns_cpu |= advance(&engine->out->retired, freed);
    moved |= concerns_cpu;
    engine->has_news |= moved;
    if (concerns_cpu && engine->flows[0] == NULL)
        host_ring_doorbell(&engine->control->ends[engine->options.side].doorbell.value);
    return moved;
}

/* Late rails. */

static bool another_rail_acked(const struct engine *engine, const struct rail *late, double since)
{
    for (int index = 0; index < engine->rail_count; index++) {
        const struct rail *rail = engine->rails[index];

        if (rail != late && rail->live && rail->operations->last_ack(rail) > since)
            return true;
    }
    return false;
}

/* Send the last credit again, which has no effect, over idle rails: whether they are acknowledged tells a
 * lost rail from a peer that is paused. */
static void probe_idle_rails(struct engine *engine)
{
    for (int index = 0; index < engine->rail_count; index++) {
        struct rail *rail = engine->rails[index];

        if (rail->live && rail->operations->last_ack != NULL &&
            rail->operations->bytes_in_flight(rail) == 0)
            engine_post_credit(engine, rail, engine->incoming.credited);
    }
}

/* Where acknowledgements are the kernel's (`last_ack`), a paused peer stalls all rails and none is lost:
 * its kernel acknowledges what probes its window, however rare that becomes. So suspect a late rail once
 * another is acknowledged, and lose it if it does not acknowledge what was sent after that. */
static bool is_lost(const struct engine *engine, struct rail *rail, double time, char *reason)
{
    const struct rail_operations *operations = rail->operations;
    double stall = engine->options.stall_seconds, tick = stall / CHECKS_PER_STALL;

    if (operations->last_ack == NULL)
        return operations->is_late(rail, time - stall, reason);
    if (rail->suspected_since == 0 && another_rail_acked(engine, rail, time - 4 * tick))
        rail->suspected_since = time;
    double last_send = operations->last_send(rail);
    if (last_send > time - tick)
        return false;
    if (last_send > operations->last_ack(rail) &&
        operations->is_late(rail, time - STALLS_ALONE * stall, reason))
        return true;
    return rail->suspected_since != 0 && last_send > rail->suspected_since &&
           operations->is_late(rail, time - stall, reason);
}

/* Lose rails on which something in flight completes too late: several checks in a stall timeout. */
static void check_rails(struct engine *engine)
{
    char reason[RAIL_TEXT_BYTES];
    double time = engine_now(), stall = engine->options.stall_seconds;
    bool is_suspected = false;

    if (time - engine->last_checked < stall / CHECKS_PER_STALL)
        return;
    engine->last_checked = time;
    for (int index = 0; index < engine->rail_count; index++) {
        struct rail *rail = engine->rails[index];

        /* If this thread was descheduled there may be completions that it has not polled. */
        if (rail->live && rail->operations->is_late(rail, time - stall / 2, reason))
            rail->operations->poll(rail, engine);
        if (!rail->live || !rail->operations->is_late(rail, time - stall / 2, reason)) {
            rail->suspected_since = 0;
            continue;
        }
        is_suspected |= rail->operations->last_ack != NULL;
        if (is_lost(engine, rail, time, reason))
            engine_lose_rail(engine, rail, reason);
    }
    if (is_suspected)
        probe_idle_rails(engine);
    speed_raise_idle(engine->rails, engine->rail_count);
}

/* Progress. */

static bool flush(struct engine *engine)
{
    bool moved = false;

    for (int index = 0; index < engine->rail_count; index++)
        if (engine->rails[index]->operations->flush != NULL)
            moved |= engine->rails[index]->operations->flush(engine->rails[index]);
    return moved;
}

/* Post what can be posted; whether anything was. */
static bool post(struct engine *engine)
{
    uint32_t posted = ring_load(&engine->out->posted), produced = ring_load(&engine->out->produced);
    bool moved = send_records(engine, posted);

    /* Hold data back behind the first record that has no room. */
    if (ring_ahead(produced, engine->outgoing.records.next) > 0)
        produced = engine->outgoing.records.next;
    moved |= send_data(engine, produced);
    return moved | send_credit(engine);
}

bool engine_progress(struct engine *engine)
{
    bool moved = false;

    check_rails(engine);
    for (int index = 0; index < engine->rail_count; index++) {
        struct rail *rail = engine->rails[index];

        moved |= rail->operations->poll(rail, engine);
        read_back(engine, rail);
    }
    moved |= publish(engine);
    moved |= post(engine);
    /* What has completed at once makes room for more. */
    while (flush(engine) && post(engine))
        moved = true;
    return moved;
}

bool engine_needs_polling(struct engine *engine)
{
    bool has_rail = false;

    for (int index = 0; index < engine->rail_count; index++) {
        const struct rail *rail = engine->rails[index];

        if (rail->operations->is_busy != NULL && rail->operations->is_busy(rail))
            return true;
        has_rail |= rail->live;
    }
    if (!has_rail || engine->options.device_notifies)
        return false;
    /* What is left to send, not what the device has left to write: that may have been written since the last pass. */
    return ring_load(&engine->out->posted) != engine->outgoing.data.next ||
           ring_load(&engine->in->retired) != engine->incoming.credited;
}

bool engine_is_drained(struct engine *engine)
{
    for (int index = 0; index < engine->rail_count; index++) {
        const struct rail *rail = engine->rails[index];

        /* Its connection ends, and with it the rail, behind all that the peer sent. */
        if (rail->live && !rail->confirms_delivery)
            return false;
    }
    return !engine_progress(engine) && !incoming_awaits_read_back(&engine->incoming);
}

bool engine_has_sent_credits(struct engine *engine)
{
    uint32_t consumed = ring_load(&engine->in->consumed);
    bool has_rail = false;

    for (int index = 0; index < engine->rail_count; index++) {
        struct rail *rail = engine->rails[index];

        if (rail->live && rail->in_flight[MESSAGE_CREDIT] > 0)
            return false;
        has_rail |= rail->live;
    }
    return !has_rail || (!engine->incoming.credit_lost &&
                         ring_ahead(consumed, engine->incoming.credited) <= 0);
}

void engine_request_notifications(struct engine *engine)
{
    for (int index = 0; index < engine->rail_count; index++) {
        struct rail *rail = engine->rails[index];

        if (rail->live && rail->event_fd >= 0)
            engine_check_post(engine, rail, rail->operations->request_notification(rail));
    }
}

void engine_drive(struct engine *engine)
{
    bool needs_polling;

    engine_lock(engine);
    engine_progress(engine);
    needs_polling = engine_needs_polling(engine);
    engine_unlock(engine);
    if (needs_polling)
        eventfd_write(engine->wake_fd, 1);
}
