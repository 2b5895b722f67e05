#include "native.h"

#include <sched.h>
#include <string.h>

#define STUCK UINT32_MAX

/* Where a message may go, and what of it is left. */
struct message {
    const uint8_t *header;
    uint64_t address;
    uint64_t nbytes;
    uint64_t offset;
    uint64_t event;
    bool has_event;
    bool follows_caller; /* instead of an event: what the caller's stream was given so far */
    uint64_t caller;
    bool is_callers_turn;
};

static uint32_t load(const struct ring_word *word)
{
    return __atomic_load_n(&word->value, __ATOMIC_ACQUIRE);
}

static void store(struct ring_word *word, uint64_t value)
{
    __atomic_store_n(&word->value, (uint32_t)value, __ATOMIC_RELEASE);
}

/* Whether a counter that wraps has come to a value. */
static bool reached(uint32_t counter, uint64_t value)
{
    return (int32_t)(counter - (uint32_t)value) >= 0;
}

static struct ring_direction *direction_of(const struct flow *flow)
{
    return (struct ring_direction *)(uintptr_t)flow->direction;
}

static struct ring_record *record_of(const struct flow *flow, uint64_t number)
{
    return &direction_of(flow)->records[number % RING_ENTRIES];
}

static uint64_t *place_of(const struct flow *flow, uint64_t number)
{
    return (uint64_t *)(uintptr_t)flow->places + number % RING_ENTRIES;
}

static bool is_in_place(const struct flow *flow, const struct message *message)
{
    return flow->places != 0 && message->nbytes > flow->small_bytes;
}

/* Whether the carrier puts an entry's bytes into the tensor: it has not begun to put them into the ring. */
static bool claim(const struct flow *flow, const struct message *message, uint64_t number)
{
    uint64_t undecided = RING_UNDECIDED;

    return is_in_place(flow, message) &&
           __atomic_compare_exchange_n(place_of(flow, number), &undecided,
                                       message->address + message->offset, false,
                                       __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static bool is_last(const struct message *message)
{
    return message->offset == message->nbytes;
}

static uint32_t fail(struct flow *flow, failure failed)
{
    flow->failed = failed;
    return FAILED;
}

/* Whether a whole message may go into its caller's stream, behind the entries before it. */
static bool fits_caller(const struct flow *flow, const struct message *message, bool settled)
{
    bool is_little = message->nbytes <= flow->small_bytes ||
                     (flow->is_outgoing && is_in_place(flow, message));

    return message->is_callers_turn && is_little &&
           ((flow->by_caller && flow->caller == message->caller) || settled);
}

static failure move_with_caller(struct flow *flow, const struct message *message,
                                const struct move *move)
{
    struct streams callers = {.driver = flow->streams.driver, .copies = message->caller};

    flow->caller = message->caller;
    flow->by_caller = true;
    return streams_move(&callers, move, false);
}

/* Through the link's streams: behind what a caller's was given, and what the caller had enqueued. */
static failure move_on_side_streams(struct flow *flow, const struct message *message, const struct move *move,
                          bool settled)
{
    bool is_part = move->nbytes < message->nbytes;
    failure failed = 0;

    if (flow->by_caller && !settled)
        failed = native_wait_value(&flow->streams.driver, flow->streams.copies, move->then.address,
                                   move->then.value - 1);
    flow->by_caller = false;
    if (!failed && message->offset == 0 && message->follows_caller)
        failed = streams_join(&flow->streams, message->caller, flow->streams.copies);
    else if (!failed && message->offset == 0 && message->event)
        failed = streams_wait_event(&flow->streams, flow->streams.copies, message->event);
    return failed ? failed : streams_move(&flow->streams, move, is_part || !settled);
}

/* Where the next chunk may lie; false while the peer has to retire one first. */
static bool find_slot(struct flow *flow, uint64_t nbytes, uint64_t *begin, uint64_t *end)
{
    uint64_t size = flow->ring_bytes;
    uint64_t length = (nbytes + flow->checksum_bytes + RING_ALIGNMENT - 1) / RING_ALIGNMENT *
                      RING_ALIGNMENT;

    *begin = flow->head;
    if (*begin % size + length > size)
        *begin += size - *begin % size;
    *end = *begin + length;
    while (*end - flow->tail > size || flow->in_flight >= RING_ENTRIES) {
        if (flow->in_flight == 0) {
            /* Only the gap at the end of the ring is in the way. */
            flow->tail = *begin;
            continue;
        }
        if (!reached(load(&direction_of(flow)->retired), flow->freed + 1))
            return false;
        flow->tail = flow->ends[flow->oldest % RING_ENTRIES];
        flow->oldest++;
        flow->in_flight--;
        flow->freed++;
    }
    return true;
}

static void take_slot(struct flow *flow, uint64_t end)
{
    flow->ends[(flow->oldest + flow->in_flight) % RING_ENTRIES] = end;
    flow->in_flight++;
    flow->head = end;
}

static void post(struct flow *flow, const struct message *message, uint64_t nbytes, uint64_t slot)
{
    struct ring_record *record = record_of(flow, flow->count - 1);

    memcpy(record->header, message->header, sizeof record->header);
    record->offset = message->offset;
    record->nbytes = nbytes;
    record->slot = slot;
    store(&direction_of(flow)->posted, flow->count);
}

static uint32_t put_chunk(struct flow *flow, struct message *message)
{
    uint64_t left = message->nbytes - message->offset;
    uint64_t nbytes = left < flow->chunk_bytes ? left : flow->chunk_bytes;
    const struct ring_direction *direction = direction_of(flow);
    bool settled = reached(load(&direction->produced), flow->count);
    uint64_t begin, end;
    bool must_wait, by_caller, in_place;
    uint64_t awaited;
    failure failed;

    if (!find_slot(flow, nbytes, &begin, &end))
        return WAITING;
    must_wait = !reached(load(&direction->consumed), flow->freed);
    /* A caller's stream, which trains, is not held up until the peer has made room. */
    by_caller = !must_wait && fits_caller(flow, message, settled);
    if (!by_caller && !message->has_event)
        return NEEDS_EVENT;
    take_slot(flow, end);
    in_place = is_in_place(flow, message);
    if (flow->places)
        *place_of(flow, flow->count) = in_place ? message->address + message->offset : RING_SLOT;
    flow->count++;
    /* What is sent out of a tensor is done when the peer has it, for until then it may be sent again. */
    awaited = in_place ? flow->count : flow->freed;
    if (awaited > flow->awaited)
        flow->awaited = awaited;

    uint64_t slot = begin % flow->ring_bytes;
    struct move move = {
        .checksum = flow->checksum_bytes ? APPEND_BEHIND_TARGET : NO_CHECKSUM,
        .after = {must_wait ? flow->consumed_word : 0, (uint32_t)flow->freed},
        .target = flow->ring + slot,
        .source = message->address + message->offset,
        .nbytes = in_place ? 0 : nbytes,
        .then = {flow->produced_word, (uint32_t)flow->count},
    };
    failed = by_caller ? move_with_caller(flow, message, &move)
                       : move_on_side_streams(flow, message, &move, settled);
    if (failed)
        return fail(flow, failed);
    post(flow, message, nbytes, slot);
    message->offset += nbytes;
    return is_last(message) ? WHOLE : WAITING;
}

/* Whether an entry is the next chunk of this message. */
static bool is_expected(const struct flow *flow, const struct message *message,
                        const struct ring_record *record)
{
    return memcmp(record->header, message->header, sizeof record->header) == 0 &&
           record->offset == message->offset &&
           record->nbytes <= message->nbytes - message->offset &&
           record->slot <= flow->ring_bytes &&
           record->nbytes + flow->checksum_bytes <= flow->ring_bytes - record->slot;
}

static uint32_t take_chunk(struct flow *flow, struct message *message)
{
    struct ring_direction *direction = direction_of(flow);
    bool settled = reached(load(&direction->consumed), flow->count);
    struct ring_record record;
    bool has_come, by_caller, in_place;
    failure failed;

    if (!reached(load(&direction->posted), flow->count + 1))
        return WAITING;
    /* A copy: the memory is the peer's too. */
    record = *record_of(flow, flow->count);
    if (!is_expected(flow, message, &record))
        return REFUSED;
    has_come = reached(load(&direction->produced), flow->count + 1);
    by_caller = record.nbytes == message->nbytes && (has_come || flow->streams.callers_wait) &&
                fits_caller(flow, message, settled);
    if (!by_caller && !message->has_event)
        return NEEDS_EVENT;
    in_place = claim(flow, message, flow->count);
    flow->count++;
    flow->awaited = flow->count;

    struct move move = {
        .checksum = flow->checksum_bytes ? VERIFY_SOURCE : NO_CHECKSUM,
        .after = {has_come ? 0 : flow->produced_word, (uint32_t)flow->count},
        .target = message->address + message->offset,
        .source = flow->ring + record.slot,
        .nbytes = in_place ? 0 : record.nbytes,
        .then = {flow->consumed_word, (uint32_t)flow->count},
    };
    failed = by_caller ? move_with_caller(flow, message, &move)
                       : move_on_side_streams(flow, message, &move, settled);
    if (failed)
        return fail(flow, failed);
    store(&direction->retired, flow->count);
    message->offset += record.nbytes;
    return is_last(message) ? WHOLE : WAITING;
}

/* Bring a message on as far as it goes without the peer. */
static uint32_t bring_on(struct flow *flow, struct message *message)
{
    uint64_t first = flow->count, before;
    uint32_t progress;

    do {
        before = flow->count;
        progress = flow->is_outgoing ? put_chunk(flow, message) : take_chunk(flow, message);
    } while (progress == WAITING && flow->count != before);
    if (flow->doorbell && flow->count != first)
        host_ring((uint32_t *)(uintptr_t)flow->doorbell);
    return progress;
}

uint32_t native_progress(struct flow *flow, const uint8_t *header, uint64_t address,
                         uint64_t nbytes, uint64_t offset, uint64_t event, bool has_event,
                         uint64_t caller, bool is_callers_turn)
{
    struct message message = {.header = header,
                              .address = address,
                              .nbytes = nbytes,
                              .offset = offset,
                              .event = event,
                              .has_event = has_event,
                              .caller = caller,
                              .is_callers_turn = is_callers_turn};
    uint32_t progress = bring_on(flow, &message);

    flow->offset = message.offset;
    return progress;
}

static struct flow *flow_of(const struct exchange_part *part)
{
    return (struct flow *)(uintptr_t)part->flow;
}

static void bring_on_part(struct exchange_part *part, uint64_t caller)
{
    struct flow *flow = flow_of(part);
    struct message message = {.header = part->header,
                              .address = part->address,
                              .nbytes = part->nbytes,
                              .offset = part->offset,
                              .has_event = true,
                              /* What a calling thread was given has been done. */
                              .follows_caller = flow->streams.callers_wait,
                              .caller = caller,
                              .is_callers_turn = true};

    part->progress = bring_on(flow, &message);
    part->offset = message.offset;
    part->count = flow->count;
    part->by_caller = flow->by_caller;
}

/* Whether a part of the same flow is before it. */
static bool has_to_follow(const struct exchange_part *parts, uint32_t place)
{
    for (uint32_t before = 0; before < place; before++)
        if (parts[before].flow == parts[place].flow && parts[before].progress != WHOLE)
            return true;
    return false;
}

/* How many are left; STUCK once one cannot go on. */
static uint32_t bring_on_parts(struct exchange_part *parts, uint32_t count, uint64_t caller)
{
    uint32_t left = 0;

    for (uint32_t place = 0; place < count; place++) {
        if (parts[place].progress == WHOLE)
            continue;
        if (!has_to_follow(parts, place))
            bring_on_part(&parts[place], caller);
        if (parts[place].progress == FAILED || parts[place].progress == REFUSED)
            return STUCK;
        left += parts[place].progress != WHOLE;
    }
    return left;
}

static bool goes_past_ring(const struct exchange_part *part)
{
    const struct flow *flow = flow_of(part);

    return flow->is_outgoing && flow->places != 0 && part->nbytes > flow->small_bytes;
}

/* Have the caller's stream go on behind what went through the link's. */
static uint32_t order_caller(struct exchange_part *parts, uint32_t count, uint64_t caller)
{
    for (uint32_t place = 0; place < count; place++) {
        struct exchange_part *part = &parts[place];
        struct flow *flow = flow_of(part);
        failure failed;

        if (part->by_caller && !goes_past_ring(part))
            continue;
        if (!flow->streams.callers_wait)
            return WAITING;
        failed = native_wait_value(&flow->streams.driver, caller,
                                   flow->is_outgoing ? flow->produced_word : flow->consumed_word,
                                   (uint32_t)part->count);
        if (failed) {
            part->progress = fail(flow, failed);
            return FAILED;
        }
    }
    return WHOLE;
}

uint32_t native_exchange(struct exchange_part *parts, uint32_t count, uint64_t caller, uint32_t microseconds)
{
    int64_t end = spin_clock() + (int64_t)microseconds * 1000;
    uint32_t left;

    do {
        for (int look = 0; look < SPIN_LOOKS; look++) {
            left = bring_on_parts(parts, count, caller);
            if (left == 0)
                return order_caller(parts, count, caller);
            if (left == STUCK)
                return WAITING;
            spin_pause();
        }
        sched_yield();
    } while (spin_clock() < end);
    return WAITING;
}
