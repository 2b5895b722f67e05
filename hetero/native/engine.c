#include "engine.h"

#include "native.h"
#include "speed.h"
#include "watch.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>

double engine_now(void)
{
    return 1e-9 * (double)spin_clock();
}

/* Words and records. */

static uint32_t load(const struct ring_word *word)
{
    return __atomic_load_n(&word->value, __ATOMIC_ACQUIRE);
}

/* Never back: a link that has failed moves words ahead itself, to release its streams. */
static bool advance(struct ring_word *word, uint32_t count)
{
    uint32_t current = load(word);

    while (book_ahead(count, current) > 0)
        if (__atomic_compare_exchange_n(&word->value, &current, count, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST)) {
            host_wake_word(&word->value);
            return true;
        }
    return false;
}

void engine_begin(struct engine *engine, const struct engine_options *options)
{
    uint32_t sent, received;

    engine->options = *options;
    engine->control = (struct ring_control *)(uintptr_t)options->control;
    engine->out = &engine->control->directions[options->side];
    engine->in = &engine->control->directions[1 - options->side];
    sent = load(&engine->out->posted);
    received = load(&engine->in->posted);

    engine->outgoing.records.next = engine->outgoing.records.done = sent;
    engine->outgoing.data.next = engine->outgoing.data.done = sent;
    engine->outgoing.records.most = engine->outgoing.data.most = sent;
    engine->outgoing.released = engine->outgoing.freed = sent;
    engine->incoming.posted = engine->incoming.produced = engine->incoming.credited = received;
}

static struct ring_record *record_of(struct ring_direction *direction, uint32_t number)
{
    return &direction->records[number % RING_ENTRIES];
}

/* How many of an entry's bytes lie where in the ring. A record that makes no sense names none: the
 * receiving CPU, which verifies it, finds the difference. */
static uint64_t span(struct engine *engine, struct ring_direction *direction, uint32_t number,
                     uint64_t *slot)
{
    const struct ring_record *record = record_of(direction, number);
    uint64_t nbytes = record->nbytes + engine->options.checksum_bytes;

    *slot = record->slot;
    if (*slot > engine->options.ring_bytes || nbytes > engine->options.ring_bytes - *slot)
        return 0;
    return nbytes;
}

/* Starting and losing rails. */

int engine_start_rails(struct engine *engine)
{
    int code = 0;

    for (int index = 0; index < engine->rail_count && code == 0; index++)
        if (engine->rails[index]->operations->start != NULL)
            code = engine->rails[index]->operations->start(engine->rails[index]);
    return code;
}

void engine_lose(struct engine *engine, struct rail *rail, const char *reason)
{
    struct loss *loss = &engine->losses[rail->index];

    if (!rail->live)
        return;
    rail->live = false;
    rail->operations->stop(rail);
    rail->reads = rail->is_reading = false;
    incoming_forget(&engine->incoming, rail->index);
    loss->is_told = false;
    snprintf(loss->reason, sizeof loss->reason, "%s", reason);
    eventfd_write(engine->loss_fd, 1);
}

bool engine_took(struct engine *engine, struct rail *rail, int code)
{
    char reason[RAIL_TEXT_BYTES];

    if (code == 0)
        return true;
    snprintf(reason, sizeof reason, "it takes no requests (%s)", strerror(code));
    engine_lose(engine, rail, reason);
    return false;
}

/* What rails tell. */

void engine_sent(struct engine *engine, struct rail *rail, enum message message, uint32_t number)
{
    uint64_t slot, nbytes;

    if (message == MESSAGE_RECORD)
        sequence_complete(&engine->outgoing.records, number, rail->index);
    if (message != MESSAGE_DATA)
        return;
    nbytes = span(engine, engine->out, number, &slot);
    speed_completed(rail, nbytes, engine->posted_at[number % RING_ENTRIES], engine_now());
    sequence_complete(&engine->outgoing.data, number, rail->index);
}

void engine_record_arrived(struct engine *engine, uint32_t number)
{
    uint64_t slot, nbytes = span(engine, engine->in, number, &slot);

    incoming_record(&engine->incoming, number, nbytes == 0 ? BOOK_NO_BYTE : slot + nbytes - 1);
}

void engine_data_arrived(struct engine *engine, struct rail *rail, uint32_t number)
{
    /* Without its read-back a rail brings nothing that counts: the peer sends it again. */
    if (rail->reads == rail->reads_back)
        incoming_data(&engine->incoming, number, rail->index, rail->reads);
}

void engine_credit_arrived(struct engine *engine, struct rail *rail, uint32_t released)
{
    char reason[RAIL_TEXT_BYTES];

    if (outgoing_credit(&engine->outgoing, released))
        return;
    snprintf(reason, sizeof reason, "it was credited with %" PRIu32 " entries and had sent %" PRIu32,
             released, engine->outgoing.data.most);
    engine_lose(engine, rail, reason);
}

void engine_read_back(struct engine *engine, struct rail *rail)
{
    rail->is_reading = false;
    if (rail->reads)
        incoming_seen(&engine->incoming, rail->index);
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

/* Where the bytes of what one side sends lie at this end. */
static uint64_t *place_of(const struct engine *engine, uint64_t side, uint32_t number)
{
    return &engine->control->places[side][number % RING_ENTRIES];
}

static uint64_t in_tensor(uint64_t place)
{
    return place == RING_UNDECIDED || place == RING_SLOT ? 0 : place;
}

uint64_t engine_source(const struct engine *engine, uint32_t number)
{
    return in_tensor(*place_of(engine, engine->options.side, number));
}

bool engine_target(struct engine *engine, uint32_t number, uint64_t nbytes, uint64_t *target)
{
    uint64_t place = RING_UNDECIDED;

    /* Decided for good, also where another rail brings it again. */
    __atomic_compare_exchange_n(place_of(engine, 1 - engine->options.side, number), &place, RING_SLOT,
                                false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    *target = in_tensor(place);
    return *target == 0 || record_of(engine->in, number)->nbytes == nbytes;
}

/* Moving entries. */

static struct rail *choose(struct engine *engine, enum message message, uint64_t nbytes)
{
    return speed_choose(engine->rails, engine->rail_count, message, nbytes);
}

static bool send_records(struct engine *engine, uint32_t limit)
{
    struct sequence *records = &engine->outgoing.records;
    struct rail *rail;
    uint32_t number;
    bool moved = false;

    while (sequence_waiting(records, limit, &number) &&
           (rail = choose(engine, MESSAGE_RECORD, sizeof(struct ring_record))) != NULL) {
        const char *record = (const char *)record_of(engine->out, number);
        uint64_t offset = (uint64_t)(record - (const char *)engine->control);

        if (engine_took(engine, rail, rail->operations->post_record(rail, number, offset)))
            sequence_post(records, number, rail->index);
        moved = true;
    }
    return moved;
}

static bool send_one(struct engine *engine, uint32_t number)
{
    uint64_t slot, nbytes = span(engine, engine->out, number, &slot);
    struct rail *rail = choose(engine, MESSAGE_DATA, nbytes);
    double now = engine_now();

    if (rail == NULL)
        return false;
    if (engine_took(engine, rail, rail->operations->post_data(rail, number, slot, nbytes))) {
        sequence_post(&engine->outgoing.data, number, rail->index);
        engine->posted_at[number % RING_ENTRIES] = now;
        rail->bytes_under_way += nbytes;
    }
    return true;
}

/* Data follow their record: it has been posted when they are. */
static bool send_data(struct engine *engine, uint32_t limit)
{
    uint32_t number;
    bool moved = false;

    while (sequence_waiting(&engine->outgoing.data, limit, &number) && send_one(engine, number))
        moved = true;
    return moved;
}

static bool send_credit(struct engine *engine)
{
    struct incoming *incoming = &engine->incoming;
    uint32_t consumed = load(&engine->in->consumed);
    struct rail *rail;

    /* A link that has failed moves the word ahead of what has arrived. */
    if (book_ahead(consumed, incoming->produced) > 0)
        consumed = incoming->produced;
    if (consumed == incoming->credited && !incoming->credit_lost)
        return false;
    rail = choose(engine, MESSAGE_CREDIT, 0);
    /* Before the sender hears that it may use their records again. */
    for (uint32_t number = incoming->credited; rail != NULL && number != consumed; number++)
        __atomic_store_n(place_of(engine, 1 - engine->options.side, number), RING_UNDECIDED,
                         __ATOMIC_RELEASE);
    if (rail == NULL || !engine_took(engine, rail, rail->operations->post_credit(rail, consumed)))
        return false;
    incoming->credited = consumed;
    incoming->credit_lost = false;
    return true;
}

static void read_back(struct engine *engine, struct rail *rail)
{
    uint64_t last_byte;

    if (rail->reads && !rail->is_reading &&
        incoming_claim(&engine->incoming, rail->index, &last_byte) &&
        engine_took(engine, rail, rail->operations->post_read(rail, last_byte)))
        rail->is_reading = true;
}

/* The words that this side's streams and CPU wait for. The device's come first: a CPU that is woken
 * finds them. */
static bool publish(struct engine *engine)
{
    uint32_t freed = outgoing_free(&engine->outgoing);
    bool moved = advance(&engine->in->produced, engine->incoming.produced);
    bool concerns_cpu = advance(&engine->in->posted, engine->incoming.posted);

    concerns_cpu |= advance(&engine->out->consumed, freed);
    concerns_cpu |= advance(&engine->out->retired, freed);
    if (concerns_cpu)
        host_ring(&engine->control->ends[engine->options.side].doorbell.value);
    return moved || concerns_cpu;
}

bool engine_progress(struct engine *engine)
{
    uint32_t posted, produced;
    bool moved = false;

    watch_rails(engine);
    for (int index = 0; index < engine->rail_count; index++) {
        struct rail *rail = engine->rails[index];

        moved |= rail->operations->poll(rail, engine);
        read_back(engine, rail);
    }
    moved |= publish(engine);
    posted = load(&engine->out->posted);
    produced = load(&engine->out->produced);
    moved |= send_records(engine, posted);
    /* A record that waits for room keeps its data, and those behind it, waiting too. */
    if (book_ahead(produced, engine->outgoing.records.next) > 0)
        produced = engine->outgoing.records.next;
    moved |= send_data(engine, produced);
    return moved | send_credit(engine);
}

bool engine_is_under_way(struct engine *engine)
{
    bool has_rail = false;

    for (int index = 0; index < engine->rail_count; index++) {
        const struct rail *rail = engine->rails[index];

        if (rail->operations->is_busy != NULL && rail->operations->is_busy(rail))
            return true;
        has_rail |= rail->live;
    }
    if (!has_rail || engine->words_notify)
        return false;
    return load(&engine->out->posted) != load(&engine->out->produced) ||
           load(&engine->in->retired) != load(&engine->in->consumed);
}

static bool is_reading(const struct engine *engine)
{
    for (int index = 0; index < engine->rail_count; index++)
        if (incoming_reads(&engine->incoming, (uint8_t)index))
            return true;
    return false;
}

bool engine_has_settled(struct engine *engine)
{
    for (int index = 0; index < engine->rail_count; index++) {
        const struct rail *rail = engine->rails[index];

        if (rail->operations->is_drained != NULL && !rail->operations->is_drained(rail))
            return false;
    }
    return !engine_progress(engine) && !is_reading(engine);
}

bool engine_has_credited(struct engine *engine)
{
    uint32_t consumed = load(&engine->in->consumed);
    bool has_rail = false;

    for (int index = 0; index < engine->rail_count; index++) {
        struct rail *rail = engine->rails[index];

        if (rail->live && rail->credits_under_way > 0)
            return false;
        has_rail |= rail->live;
    }
    return !has_rail || (!engine->incoming.credit_lost &&
                         book_ahead(consumed, engine->incoming.credited) <= 0);
}

void engine_request_notifications(struct engine *engine)
{
    for (int index = 0; index < engine->rail_count; index++) {
        struct rail *rail = engine->rails[index];

        if (rail->live && rail->event_fd >= 0)
            engine_took(engine, rail, rail->operations->request_notification(rail));
    }
}
