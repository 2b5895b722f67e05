#include "native.h"

#include <sched.h>
#include <string.h>

#define STUCK UINT32_MAX

/* A message, how much of it has been enqueued, and what its first entry has to follow. */
struct message {
    const uint8_t *header;
    uint64_t address;
    uint64_t nbytes;
    uint64_t offset;
    uint64_t event;
    bool has_event;
    bool after_caller_stream; /* instead of an event: what caller_stream was given so far */
    uint64_t caller_stream;
    bool may_use_caller_stream;
};

static void store_counter(struct ring_word *word, uint64_t value)
{
    __atomic_store_n(&word->value, (uint32_t)value, __ATOMIC_RELEASE);
}

/* Whether a counter, which wraps, has come to a value. */
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

static uint64_t *user_buffer_of(const struct flow *flow, uint64_t number)
{
    return (uint64_t *)(uintptr_t)flow->user_buffers + number % RING_ENTRIES;
}

static bool is_zero_copy(const struct flow *flow, uint64_t nbytes)
{
    return flow->user_buffers != 0 && nbytes > flow->small_bytes;
}

/* Have the carrier receive an entry into the tensor, unless it has begun to receive it into the ring. */
static bool claim_for_zero_copy(const struct flow *flow, const struct message *message,
                                uint64_t number)
{
    uint64_t undecided = RING_UNDECIDED;

    return is_zero_copy(flow, message->nbytes) &&
           __atomic_compare_exchange_n(user_buffer_of(flow, number), &undecided,
                                       message->address + message->offset, false,
                                       __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static bool is_last(const struct message *message)
{
    return message->offset == message->nbytes;
}

/* Whether a message may go to its caller's stream as a whole, without overtaking earlier entries.
 * `is_idle`: the device has completed all of them. */
static bool can_use_caller_stream(const struct flow *flow, const struct message *message,
                                  bool is_idle)
{
    bool is_small = message->nbytes <= flow->small_bytes ||
                    (flow->is_outgoing && is_zero_copy(flow, message->nbytes));

    return message->may_use_caller_stream && is_small &&
           (is_idle ||
            (flow->on_caller_stream && flow->caller_stream == message->caller_stream));
}

static failure enqueue_on_caller_stream(struct flow *flow, const struct message *message,
                                        const struct copy_step *step)
{
    struct streams callers = {.driver = flow->streams.driver, .copies = message->caller_stream};

    flow->caller_stream = message->caller_stream;
    flow->on_caller_stream = true;
    return streams_enqueue(&callers, step, false);
}

/* Wait for an earlier entry on a caller's stream, and for what the caller enqueued before the message. */
static failure enqueue_on_link_streams(struct flow *flow, const struct message *message,
                                       const struct copy_step *step, bool is_idle)
{
    bool is_part = step->nbytes < message->nbytes;
    failure failed = 0;

    if (flow->on_caller_stream && !is_idle)
        failed = native_wait_value(&flow->streams.driver, flow->streams.copies, step->write.address,
                                   step->write.value - 1);
    flow->on_caller_stream = false;
    if (!failed && message->offset == 0 && message->after_caller_stream)
        failed = streams_wait_stream(&flow->streams, flow->streams.copies, message->caller_stream);
    else if (!failed && message->offset == 0 && message->event)
        failed = streams_wait_event(&flow->streams, flow->streams.copies, message->event);
    return failed ? failed : streams_enqueue(&flow->streams, step, is_part || !is_idle);
}

/* Find the next chunk's slot; false until the peer has retired an entry that is in the way. */
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
            /* Only the unused gap at the end of the ring is in the way. */
            flow->tail = *begin;
            continue;
        }
        if (!reached(ring_load(&direction_of(flow)->retired), flow->freed + 1))
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
    store_counter(&direction_of(flow)->posted, flow->count);
}

static uint32_t send_chunk(struct flow *flow, struct message *message)
{
    uint64_t left = message->nbytes - message->offset;
    uint64_t nbytes = left < flow->chunk_bytes ? left : flow->chunk_bytes;
    const struct ring_direction *direction = direction_of(flow);
    bool is_idle = reached(ring_load(&direction->produced), flow->count);
    uint64_t begin, end;
    bool must_wait, on_caller_stream, zero_copy;
    uint64_t awaited;

    if (!find_slot(flow, nbytes, &begin, &end))
        return WAITING;
    must_wait = !reached(ring_load(&direction->consumed), flow->freed);
    /* Never make a caller's stream, which has compute to do, wait until the peer has made room. */
    on_caller_stream = !must_wait && can_use_caller_stream(flow, message, is_idle);
    if (!on_caller_stream && !message->has_event)
        return NEEDS_EVENT;
    take_slot(flow, end);
    zero_copy = is_zero_copy(flow, message->nbytes);
    if (flow->user_buffers)
        *user_buffer_of(flow, flow->count) =
            zero_copy ? message->address + message->offset : RING_SLOT;
    flow->count++;
    /* Zero-copy: until the peer has consumed the entry it may be retransmitted from the tensor. */
    awaited = zero_copy ? flow->count : flow->freed;
    if (awaited > flow->awaited)
        flow->awaited = awaited;

    uint64_t slot = begin % flow->ring_bytes;
    struct copy_step step = {
        .checksum = flow->checksum_bytes ? APPEND_BEHIND_TARGET : NO_CHECKSUM,
        .wait = {must_wait ? flow->consumed_word : 0, (uint32_t)flow->freed},
        .target = flow->ring + slot,
        .source = message->address + message->offset,
        .nbytes = zero_copy ? 0 : nbytes,
        .write = {flow->produced_word, (uint32_t)flow->count},
    };
    flow->failed = on_caller_stream ? enqueue_on_caller_stream(flow, message, &step)
                                    : enqueue_on_link_streams(flow, message, &step, is_idle);
    if (flow->failed)
        return FAILED;
    post(flow, message, nbytes, slot);
    message->offset += nbytes;
    return is_last(message) ? ENQUEUED : WAITING;
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

static uint32_t recv_chunk(struct flow *flow, struct message *message)
{
    struct ring_direction *direction = direction_of(flow);
    bool is_idle = reached(ring_load(&direction->consumed), flow->count);
    struct ring_record record;
    bool is_produced, on_caller_stream, zero_copy;

    if (!reached(ring_load(&direction->posted), flow->count + 1))
        return WAITING;
    /* Verify a copy: the peer can write to the original. */
    record = *record_of(flow, flow->count);
    if (!is_expected(flow, message, &record))
        return REFUSED;
    is_produced = reached(ring_load(&direction->produced), flow->count + 1);
    on_caller_stream = record.nbytes == message->nbytes &&
                       (is_produced || flow->streams.caller_can_wait) &&
                       can_use_caller_stream(flow, message, is_idle);
    if (!on_caller_stream && !message->has_event)
        return NEEDS_EVENT;
    zero_copy = claim_for_zero_copy(flow, message, flow->count);
    flow->count++;
    flow->awaited = flow->count;

    struct copy_step step = {
        .checksum = flow->checksum_bytes ? VERIFY_SOURCE : NO_CHECKSUM,
        .wait = {is_produced ? 0 : flow->produced_word, (uint32_t)flow->count},
        .target = message->address + message->offset,
        .source = flow->ring + record.slot,
        .nbytes = zero_copy ? 0 : record.nbytes,
        .write = {flow->consumed_word, (uint32_t)flow->count},
    };
    flow->failed = on_caller_stream ? enqueue_on_caller_stream(flow, message, &step)
                                    : enqueue_on_link_streams(flow, message, &step, is_idle);
    if (flow->failed)
        return FAILED;
    store_counter(&direction->retired, flow->count);
    message->offset += record.nbytes;
    return is_last(message) ? ENQUEUED : WAITING;
}

static void wake_peer(const struct flow *flow)
{
    void (*wake)(void *) = (void (*)(void *))(uintptr_t)flow->wake_peer;

    wake((void *)(uintptr_t)flow->wake_argument);
}

/* Enqueue as many chunks as possible without the peer. */
static uint32_t progress_message(struct flow *flow, struct message *message)
{
    uint64_t first = flow->count, before;
    uint32_t progress;

    do {
        before = flow->count;
        progress = flow->is_outgoing ? send_chunk(flow, message) : recv_chunk(flow, message);
    } while (progress == WAITING && flow->count != before);
    if (flow->count != first)
        wake_peer(flow);
    return progress;
}

uint32_t native_progress(struct flow *flow, const uint8_t *header, uint64_t address,
                         uint64_t nbytes, uint64_t offset, uint64_t event, bool has_event,
                         uint64_t caller_stream, bool may_use_caller_stream)
{
    struct message message = {.header = header,
                              .address = address,
                              .nbytes = nbytes,
                              .offset = offset,
                              .event = event,
                              .has_event = has_event,
                              .caller_stream = caller_stream,
                              .may_use_caller_stream = may_use_caller_stream};
    uint32_t progress = progress_message(flow, &message);

    flow->offset = message.offset;
    return progress;
}

static struct flow *flow_of(const struct exchange_part *part)
{
    return (struct flow *)(uintptr_t)part->flow;
}

/* Give a new message its number, in the order of the parts. */
static void fill_header(struct exchange_part *part)
{
    struct flow *flow = flow_of(part);

    memcpy(part->header, flow->bytes_header, sizeof part->header);
    memcpy(part->header + RING_HEADER_SEQUENCE, &flow->sequence, sizeof flow->sequence);
    memcpy(part->header + RING_HEADER_NBYTES, &part->nbytes, sizeof part->nbytes);
    memcpy(part->header + RING_HEADER_FIRST_DIMENSION, &part->nbytes, sizeof part->nbytes);
    memcpy(part->header + RING_HEADER_TAG, &part->tag, sizeof part->tag);
    part->has_header = true;
    flow->sequence++;
}

static void progress_part(struct exchange_part *part, uint64_t caller_stream)
{
    struct flow *flow = flow_of(part);
    struct message message = {.header = part->header,
                              .address = part->address,
                              .nbytes = part->nbytes,
                              .offset = part->offset,
                              .event = part->event,
                              .has_event = true,
                              /* A calling thread's work is complete; only a stream's is not. */
                              .after_caller_stream = !part->event && flow->streams.caller_can_wait,
                              .caller_stream = caller_stream,
                              .may_use_caller_stream = true};

    part->progress = progress_message(flow, &message);
    part->offset = message.offset;
    part->count = flow->count;
    part->on_caller_stream = flow->on_caller_stream;
}

/* Whether a part of the same flow has to be enqueued first. */
static bool is_blocked(const struct exchange_part *parts, uint32_t index)
{
    for (uint32_t before = 0; before < index; before++)
        if (parts[before].flow == parts[index].flow && parts[before].progress != ENQUEUED)
            return true;
    return false;
}

/* How many parts are left; STUCK once one has failed or was refused. */
static uint32_t progress_parts(struct exchange_part *parts, uint32_t count, uint64_t caller_stream)
{
    uint32_t left = 0;

    for (uint32_t index = 0; index < count; index++) {
        if (parts[index].progress == ENQUEUED)
            continue;
        if (!is_blocked(parts, index))
            progress_part(&parts[index], caller_stream);
        if (parts[index].progress == FAILED || parts[index].progress == REFUSED)
            return STUCK;
        left += parts[index].progress != ENQUEUED;
    }
    return left;
}

/* Make the caller's stream wait for what went through the link's streams. */
static uint32_t make_caller_wait(struct exchange_part *parts, uint32_t count, uint64_t caller_stream)
{
    for (uint32_t index = 0; index < count; index++) {
        struct exchange_part *part = &parts[index];
        struct flow *flow = flow_of(part);
        uint64_t word = flow->is_outgoing ? flow->produced_word : flow->consumed_word;

        if (part->on_caller_stream && !(flow->is_outgoing && is_zero_copy(flow, part->nbytes)))
            continue;
        if (!flow->streams.caller_can_wait)
            return WAITING;
        flow->failed = native_wait_value(&flow->streams.driver, caller_stream, word,
                                         (uint32_t)part->count);
        if (flow->failed)
            return part->progress = FAILED;
    }
    return ENQUEUED;
}

uint32_t native_exchange(struct exchange_part *parts, uint32_t count, uint64_t caller_stream,
                         uint32_t microseconds, bool caller_waits)
{
    int64_t end = spin_clock() + (int64_t)microseconds * 1000;
    uint32_t left;

    for (uint32_t index = 0; index < count; index++)
        if (!parts[index].has_header)
            fill_header(&parts[index]);
    do {
        for (int poll = 0; poll < SPIN_POLLS; poll++) {
            left = progress_parts(parts, count, caller_stream);
            if (left == 0)
                return caller_waits ? make_caller_wait(parts, count, caller_stream) : ENQUEUED;
            if (left == STUCK)
                return WAITING;
            spin_pause();
        }
        sched_yield();
    } while (spin_clock() < end);
    return WAITING;
}
