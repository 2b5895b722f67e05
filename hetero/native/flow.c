#include "native.h"

#include <string.h>

#define WORD(address) ((uint32_t *)(uintptr_t)(address))

/* Where a message may go, and what of it is left. */
struct message {
    const uint8_t *header;
    uint64_t address;
    uint64_t nbytes;
    uint64_t offset;
    uint64_t event;
    bool is_marked;
    uint64_t caller;
    bool is_callers_turn;
};

/* A record, less the header before it. */
struct piece {
    uint64_t offset;
    uint64_t nbytes;
    uint64_t place;
};

static uint32_t load(uint64_t word)
{
    return __atomic_load_n(WORD(word), __ATOMIC_ACQUIRE);
}

static void store(uint64_t word, uint64_t value)
{
    __atomic_store_n(WORD(word), (uint32_t)value, __ATOMIC_RELEASE);
}

/* Whether a counter that wraps has come to a value. */
static bool reached(uint32_t counter, uint64_t value)
{
    return (int32_t)(counter - (uint32_t)value) >= 0;
}

static uint8_t *record_of(const struct flow *flow, uint64_t number)
{
    return (uint8_t *)(uintptr_t)(flow->records + number % flow->entries * flow->record_bytes);
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
    return message->is_callers_turn && message->nbytes <= flow->small_bytes &&
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
static failure move_aside(struct flow *flow, const struct message *message, const struct move *move,
                          bool settled)
{
    struct word so_far = {move->then.address, move->then.value - 1};
    bool is_part = move->nbytes < message->nbytes;
    failure failed = 0;

    if (flow->by_caller && !settled)
        failed = streams_wait_value(&flow->streams, so_far);
    flow->by_caller = false;
    if (!failed && message->offset == 0 && message->event)
        failed = streams_wait_event(&flow->streams, message->event);
    return failed ? failed : streams_move(&flow->streams, move, is_part || !settled);
}

/* Where the next entry's bytes may lie; false while the peer has to retire one first. */
static bool find_place(struct flow *flow, uint64_t nbytes, uint64_t *begin, uint64_t *end)
{
    const uint64_t *ends = (const uint64_t *)(uintptr_t)flow->ends;
    uint64_t size = flow->ring_bytes;
    uint64_t length = (nbytes + flow->checksum_bytes + flow->alignment - 1) / flow->alignment *
                      flow->alignment;

    *begin = flow->head;
    if (*begin % size + length > size)
        *begin += size - *begin % size;
    *end = *begin + length;
    while (*end - flow->tail > size || flow->in_flight >= flow->entries) {
        if (flow->in_flight == 0) {
            /* Only the gap at the end of the ring is in the way. */
            flow->tail = *begin;
            continue;
        }
        if (!reached(load(flow->retired), flow->freed + 1))
            return false;
        flow->tail = ends[flow->oldest % flow->entries];
        flow->oldest++;
        flow->in_flight--;
        flow->freed++;
    }
    return true;
}

static void take_place(struct flow *flow, uint64_t end)
{
    uint64_t *ends = (uint64_t *)(uintptr_t)flow->ends;

    ends[(flow->oldest + flow->in_flight) % flow->entries] = end;
    flow->in_flight++;
    flow->head = end;
}

static void post(struct flow *flow, const struct message *message, const struct piece *piece)
{
    uint8_t *record = record_of(flow, flow->count - 1);

    memcpy(record, message->header, flow->header_bytes);
    memcpy(record + flow->header_bytes, piece, sizeof *piece);
    store(flow->posted, flow->count);
}

static uint32_t put_piece(struct flow *flow, struct message *message)
{
    uint64_t left = message->nbytes - message->offset;
    uint64_t nbytes = left < flow->chunk_bytes ? left : flow->chunk_bytes;
    bool settled = reached(load(flow->produced), flow->count);
    uint64_t begin, end;
    bool must_wait, by_caller;
    failure failed;

    if (!find_place(flow, nbytes, &begin, &end))
        return WAITING;
    must_wait = !reached(load(flow->consumed), flow->freed);
    /* A caller's stream, which trains, is not held up until the peer has made room. */
    by_caller = !must_wait && fits_caller(flow, message, settled);
    if (!by_caller && !message->is_marked)
        return UNMARKED;
    take_place(flow, end);
    flow->awaited = (uint32_t)flow->freed;
    flow->count++;

    struct piece piece = {message->offset, nbytes, begin % flow->ring_bytes};
    struct move move = {
        .checksum = flow->checksum_bytes ? APPEND_BEHIND_TARGET : NO_CHECKSUM,
        .after = {must_wait ? flow->consumed_word : 0, (uint32_t)flow->freed},
        .target = flow->ring + piece.place,
        .source = message->address + message->offset,
        .nbytes = nbytes,
        .then = {flow->produced_word, (uint32_t)flow->count},
    };
    failed = by_caller ? move_with_caller(flow, message, &move)
                       : move_aside(flow, message, &move, settled);
    if (failed)
        return fail(flow, failed);
    post(flow, message, &piece);
    message->offset += nbytes;
    return is_last(message) ? WHOLE : WAITING;
}

/* Whether the next entry is the next part of this message. */
static bool is_expected(const struct flow *flow, const struct message *message, struct piece *piece)
{
    const uint8_t *record = record_of(flow, flow->count);

    memcpy(piece, record + flow->header_bytes, sizeof *piece);
    return memcmp(record, message->header, flow->header_bytes) == 0 &&
           piece->offset == message->offset &&
           piece->nbytes <= message->nbytes - message->offset &&
           piece->place <= flow->ring_bytes &&
           piece->nbytes + flow->checksum_bytes <= flow->ring_bytes - piece->place;
}

static uint32_t take_piece(struct flow *flow, struct message *message)
{
    bool settled = reached(load(flow->consumed), flow->count);
    struct piece piece;
    bool has_come, by_caller;
    failure failed;

    if (!reached(load(flow->posted), flow->count + 1))
        return WAITING;
    if (!is_expected(flow, message, &piece))
        return REFUSED;
    has_come = reached(load(flow->produced), flow->count + 1);
    by_caller = piece.nbytes == message->nbytes && (has_come || flow->streams.callers_wait) &&
                fits_caller(flow, message, settled);
    if (!by_caller && !message->is_marked)
        return UNMARKED;
    flow->count++;
    flow->awaited = (uint32_t)flow->count;

    struct move move = {
        .checksum = flow->checksum_bytes ? VERIFY_SOURCE : NO_CHECKSUM,
        .after = {has_come ? 0 : flow->produced_word, (uint32_t)flow->count},
        .target = message->address + message->offset,
        .source = flow->ring + piece.place,
        .nbytes = piece.nbytes,
        .then = {flow->consumed_word, (uint32_t)flow->count},
    };
    failed = by_caller ? move_with_caller(flow, message, &move)
                       : move_aside(flow, message, &move, settled);
    if (failed)
        return fail(flow, failed);
    store(flow->retired, flow->count);
    message->offset += piece.nbytes;
    return is_last(message) ? WHOLE : WAITING;
}

uint32_t native_bring_on(struct flow *flow, const uint8_t *header, uint64_t address,
                         uint64_t nbytes, uint64_t offset, uint64_t event, bool is_marked,
                         uint64_t caller, bool is_callers_turn)
{
    struct message message = {header, address,   nbytes, offset,
                              event,  is_marked, caller, is_callers_turn};
    uint64_t first = flow->count, before;
    uint32_t progress;

    do {
        before = flow->count;
        progress = flow->is_outgoing ? put_piece(flow, &message) : take_piece(flow, &message);
    } while (progress == WAITING && flow->count != before);
    flow->offset = message.offset;
    if (flow->doorbell && flow->count != first)
        host_ring(WORD(flow->doorbell));
    return progress;
}
