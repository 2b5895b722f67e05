#include "flow.h"

#include <sched.h>
#include <string.h>

#define STUCK UINT32_MAX
/* Of a large message, where that suits the limits. */
#define CHUNKS 16

static void store_counter(struct ring_word *word, uint64_t value)
{
    __atomic_store_n(&word->value, (uint32_t)value, __ATOMIC_RELEASE);
}

/* Whether a counter, which wraps, has come to a value. */
static bool reached(uint32_t counter, uint64_t value)
{
    return ring_ahead(counter, (uint32_t)value) >= 0;
}

static struct flow *flow_of(const struct transfer *transfer)
{
    return (struct flow *)(uintptr_t)transfer->flow;
}

static struct ring_direction *direction_of(const struct flow *flow)
{
    return (struct ring_direction *)(uintptr_t)flow->direction;
}

static struct ring_record *record_of(const struct flow *flow, uint64_t number)
{
    return &direction_of(flow)->records[number % RING_ENTRIES];
}

static struct user_buffer *user_buffer_of(const struct flow *flow, uint64_t number)
{
    return (struct user_buffer *)(uintptr_t)flow->user_buffers + number % RING_ENTRIES;
}

static bool is_zero_copy(const struct flow *flow, uint64_t nbytes)
{
    return flow->user_buffers != 0 && nbytes > flow->small_bytes;
}

static uint64_t least(uint64_t one, uint64_t other)
{
    return one < other ? one : other;
}

/* The size of a message's chunks, but for the last: as large as leaves enough of them for all rails. */
static uint64_t chunk_of(const struct flow *flow, uint64_t nbytes)
{
    uint64_t share = nbytes / CHUNKS / RING_ALIGNMENT * RING_ALIGNMENT;

    if (share < flow->least_chunk_bytes)
        return flow->least_chunk_bytes;
    return least(share, flow->chunk_bytes);
}

static uint64_t entries_of(const struct flow *flow, uint64_t nbytes)
{
    uint64_t chunk = chunk_of(flow, nbytes);

    return nbytes == 0 ? 1 : (nbytes + chunk - 1) / chunk;
}

/* The size of the next chunk. */
static uint64_t next_chunk(const struct flow *flow, const struct transfer *transfer)
{
    return least(transfer->nbytes - transfer->offset, chunk_of(flow, transfer->nbytes));
}

/* Have the carrier receive an entry into the tensor; false if it receives it into the ring already, or the
 * number is still in use for an earlier entry. */
static bool claim(struct user_buffer *buffer, uint64_t address, uint64_t nbytes)
{
    uint64_t undecided = RING_UNDECIDED;

    if (__atomic_load_n(&buffer->address, __ATOMIC_ACQUIRE) != RING_UNDECIDED)
        return false;
    buffer->nbytes = nbytes;
    return __atomic_compare_exchange_n(&buffer->address, &undecided, address, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}

/* Whether an entry whose record has come is received into the tensor. */
static bool is_received_there(const struct flow *flow, const struct transfer *transfer, uint64_t nbytes)
{
    struct user_buffer *buffer = user_buffer_of(flow, flow->count);
    uint64_t address = transfer->address + transfer->offset;

    return is_zero_copy(flow, transfer->nbytes) &&
           (claim(buffer, address, nbytes) ||
            __atomic_load_n(&buffer->address, __ATOMIC_ACQUIRE) == address);
}

/* Claim what a message that has begun has still to come: a carrier receives what it finds unclaimed into the
 * ring. */
static void claim_entries(const struct flow *flow, struct transfer *transfer)
{
    if (flow->is_outgoing || !is_zero_copy(flow, transfer->nbytes))
        return;

    uint64_t entries = entries_of(flow, transfer->nbytes), chunk = chunk_of(flow, transfer->nbytes);

    /* Their numbers may be in use again. */
    if (transfer->first + transfer->claimed < flow->count)
        transfer->claimed = flow->count - transfer->first;
    while (transfer->claimed < entries &&
           transfer->first + transfer->claimed < flow->count + RING_ENTRIES) {
        uint64_t offset = transfer->claimed * chunk;

        if (!claim(user_buffer_of(flow, transfer->first + transfer->claimed),
                   transfer->address + offset, least(chunk, transfer->nbytes - offset)))
            break;
        transfer->claimed++;
    }
}

static bool is_last(const struct transfer *transfer)
{
    return transfer->offset == transfer->nbytes;
}

/* Whether a message may go to its caller's stream as a whole, without overtaking earlier entries.
 * `is_idle`: the device has completed all of them. */
static bool can_use_caller_stream(const struct flow *flow, const struct transfer *transfer,
                                  bool is_idle)
{
    bool is_small = transfer->nbytes <= flow->small_bytes ||
                    (flow->is_outgoing && is_zero_copy(flow, transfer->nbytes));

    return is_small && (is_idle || (flow->on_caller_stream &&
                                    flow->caller_stream == transfer->caller_stream));
}

static failure enqueue_on_caller_stream(struct flow *flow, const struct transfer *transfer,
                                        const struct copy_step *step)
{
    struct streams callers = {.driver = flow->streams.driver, .copies = transfer->caller_stream};

    flow->caller_stream = transfer->caller_stream;
    flow->on_caller_stream = true;
    return streams_enqueue(&callers, step, false);
}

/* Wait for an earlier entry on a caller's stream, and for what the caller enqueued before the message. */
static failure enqueue_on_link_streams(struct flow *flow, const struct transfer *transfer,
                                       struct copy_step *step, bool is_idle)
{
    bool is_part = step->nbytes < transfer->nbytes, is_first = transfer->offset == 0;
    failure failed = 0;

    if (flow->on_caller_stream && !is_idle)
        failed = native_wait_value(&flow->streams.driver, flow->streams.copies, step->write.address,
                                   step->write.value - 1);
    flow->on_caller_stream = false;
    if (!failed && is_first && transfer->after_caller && caller_can_wait(&flow->streams))
        failed = streams_wait_stream(&flow->streams, flow->streams.copies, transfer->caller_stream);
    step->event = is_first ? transfer->event : 0;
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
    while (*end - flow->tail > size || flow->count - flow->freed >= RING_ENTRIES) {
        if (flow->count == flow->freed) {
            /* Only the unused gap at the end of the ring is in the way. */
            flow->tail = *begin;
            continue;
        }
        if (!reached(ring_load(&direction_of(flow)->retired), flow->freed + 1))
            return false;
        flow->tail = flow->ends[flow->freed++ % RING_ENTRIES];
    }
    return true;
}

static void post(struct flow *flow, const struct transfer *transfer, uint64_t nbytes, uint64_t slot)
{
    struct ring_record *record = record_of(flow, flow->count - 1);

    record->header = transfer->header;
    record->offset = transfer->offset;
    record->nbytes = nbytes;
    record->slot = slot;
    store_counter(&direction_of(flow)->posted, flow->count);
}

static enum progress send_chunk(struct flow *flow, struct transfer *transfer, bool by_caller)
{
    uint64_t nbytes = next_chunk(flow, transfer);
    const struct ring_direction *direction = direction_of(flow);
    bool is_idle = reached(ring_load(&direction->produced), flow->count);
    uint64_t begin, end;
    bool must_wait, on_caller_stream, zero_copy;
    uint64_t awaited;

    if (!find_slot(flow, nbytes, &begin, &end))
        return WAITING;
    must_wait = !reached(ring_load(&direction->consumed), flow->freed);
    /* Never make a caller's stream, which has compute to do, wait until the peer has made room. */
    on_caller_stream = by_caller && !must_wait && can_use_caller_stream(flow, transfer, is_idle);
    flow->head = flow->ends[flow->count % RING_ENTRIES] = end;
    zero_copy = is_zero_copy(flow, transfer->nbytes);
    if (flow->user_buffers)
        user_buffer_of(flow, flow->count)->address =
            zero_copy ? transfer->address + transfer->offset : RING_SLOT;
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
        .source = transfer->address + transfer->offset,
        .nbytes = zero_copy ? 0 : nbytes,
        .write = {flow->produced_word, (uint32_t)flow->count},
    };
    flow->failed = on_caller_stream ? enqueue_on_caller_stream(flow, transfer, &step)
                                    : enqueue_on_link_streams(flow, transfer, &step, is_idle);
    if (flow->failed)
        return FAILED;
    post(flow, transfer, nbytes, slot);
    transfer->offset += nbytes;
    return is_last(transfer) ? ENQUEUED : WAITING;
}

/* Whether an entry is the next chunk of this message. */
static bool is_expected(const struct flow *flow, const struct transfer *transfer,
                        const struct ring_record *record)
{
    return memcmp(&record->header, &transfer->header, sizeof record->header) == 0 &&
           record->offset == transfer->offset &&
           record->nbytes == next_chunk(flow, transfer) &&
           record->slot <= flow->ring_bytes &&
           record->nbytes + flow->checksum_bytes <= flow->ring_bytes - record->slot;
}

static enum progress recv_chunk(struct flow *flow, struct transfer *transfer, bool by_caller)
{
    struct ring_direction *direction = direction_of(flow);
    bool is_idle = reached(ring_load(&direction->consumed), flow->count);
    struct ring_record record;
    bool is_produced, on_caller_stream, zero_copy;

    if (!reached(ring_load(&direction->posted), flow->count + 1))
        return WAITING;
    /* Verify a copy: the peer can write to the original. */
    record = *record_of(flow, flow->count);
    if (!is_expected(flow, transfer, &record))
        return REFUSED;
    is_produced = reached(ring_load(&direction->produced), flow->count + 1);
    /* A carrier's threads come again when it is: no stream has to wait. */
    if (flow->is_driven && !is_produced)
        return WAITING;
    zero_copy = is_received_there(flow, transfer, record.nbytes);
    on_caller_stream = by_caller && (is_produced || caller_can_wait(&flow->streams)) &&
                       (zero_copy ? is_idle && is_produced
                                  : record.nbytes == transfer->nbytes &&
                                        can_use_caller_stream(flow, transfer, is_idle));
    flow->count++;
    flow->awaited = flow->count;

    struct copy_step step = {
        .checksum = flow->checksum_bytes ? VERIFY_SOURCE : NO_CHECKSUM,
        .wait = {is_produced ? 0 : flow->produced_word, (uint32_t)flow->count},
        .target = transfer->address + transfer->offset,
        .source = flow->ring + record.slot,
        .nbytes = zero_copy ? 0 : record.nbytes,
        .write = {flow->consumed_word, (uint32_t)flow->count},
    };
    flow->failed = on_caller_stream ? enqueue_on_caller_stream(flow, transfer, &step)
                                    : enqueue_on_link_streams(flow, transfer, &step, is_idle);
    if (flow->failed)
        return FAILED;
    store_counter(&direction->retired, flow->count);
    transfer->offset += record.nbytes;
    return is_last(transfer) ? ENQUEUED : WAITING;
}

static void wake_peer(const struct flow *flow)
{
    void (*wake)(void *) = (void (*)(void *))(uintptr_t)flow->wake_peer;

    wake((void *)(uintptr_t)flow->wake_argument);
}

/* The queue. Call with the lock, unless it says otherwise. */

static struct transfer *first_queued(const struct flow *flow)
{
    return (struct transfer *)(uintptr_t)flow->first_queued;
}

/* Give a message its number, and queue it. */
static void begin(struct flow *flow, struct transfer *transfer)
{
    if (transfer->header_state == HEADER_OF_BYTES) {
        transfer->header = flow->bytes_header;
        transfer->header.nbytes = transfer->header.shape[0] = transfer->nbytes;
    }
    transfer->header.sequence = flow->sequence++;
    transfer->header.tag = transfer->tag;
    transfer->header_state = HEADER_COMPLETE;
    transfer->first = flow->begun;
    flow->begun += entries_of(flow, transfer->nbytes);
    if (first_queued(flow) == NULL)
        flow->first_queued = (uintptr_t)transfer;
    else
        ((struct transfer *)(uintptr_t)flow->last_queued)->next_queued = (uintptr_t)transfer;
    flow->last_queued = (uintptr_t)transfer;
    claim_entries(flow, transfer);
}

/* Callers look at it without the lock. */
static enum progress store_progress(struct transfer *transfer, enum progress progress)
{
    __atomic_store_n(&transfer->progress, progress, __ATOMIC_RELEASE);
    return progress;
}

/* Take the first message, all of which is enqueued, out of the queue. Its memory may be gone afterwards. */
static void finish(struct flow *flow, struct transfer *transfer)
{
    bool zero_copy = is_zero_copy(flow, transfer->nbytes);

    /* Zero-copy: until the peer has consumed it, it may be retransmitted from the tensor. */
    transfer->completes_at_receiver = !flow->is_outgoing || zero_copy;
    transfer->on_caller_stream = flow->on_caller_stream && !(flow->is_outgoing && zero_copy);
    transfer->count = flow->count;
    flow->first_queued = transfer->next_queued;
    store_progress(transfer, ENQUEUED);
}

/* Progress the first message; set `has_moved` if there is something for the peer. */
static enum progress progress_first(struct flow *flow, bool by_caller, bool *has_moved)
{
    struct transfer *transfer = first_queued(flow);
    /* On the host any thread is the caller's stream. */
    bool may_use_stream = by_caller || (uintptr_t)HOST_CALLING_THREAD == transfer->caller_stream;
    uint64_t first = flow->count, before;
    enum progress progress;

    if (flow->failed)
        return store_progress(transfer, FAILED);
    do {
        claim_entries(flow, transfer);
        before = flow->count;
        progress = flow->is_outgoing ? send_chunk(flow, transfer, may_use_stream)
                                     : recv_chunk(flow, transfer, may_use_stream);
    } while (progress == WAITING && flow->count != before);
    if (progress == ENQUEUED)
        finish(flow, transfer);
    else
        store_progress(transfer, progress);
    *has_moved |= flow->count != first;
    return progress;
}

/* Wake the threads that wait for a message at this end, and the peer. Call without the lock: waking the peer makes
 * system calls, and may re-enter native_drive in this thread. */
static void tell(const struct flow *flow, bool has_news, bool has_moved)
{
    if (has_news && flow->is_driven)
        host_ring_doorbell((uint32_t *)(uintptr_t)flow->doorbell);
    if (has_moved)
        wake_peer(flow);
}

static void lock(struct flow *flow)
{
    pthread_mutex_lock(&flow->lock);
}

static void unlock(struct flow *flow)
{
    pthread_mutex_unlock(&flow->lock);
}

void native_init_flow(struct flow *flow)
{
    pthread_mutex_init(&flow->lock, NULL);
}

void native_begin(struct transfer *transfer)
{
    struct flow *flow = flow_of(transfer);

    lock(flow);
    begin(flow, transfer);
    unlock(flow);
}

uint32_t native_progress(struct transfer *transfer, bool by_caller)
{
    struct flow *flow = flow_of(transfer);
    enum progress progress = ENQUEUED;
    bool has_moved = false, has_news = false;

    lock(flow);
    if (transfer->header_state != HEADER_COMPLETE)
        begin(flow, transfer);
    /* Another thread may have enqueued it meanwhile. */
    while (transfer->progress != ENQUEUED && progress == ENQUEUED) {
        progress = first_queued(flow) == NULL
                       ? WAITING
                       : progress_first(flow, by_caller && first_queued(flow) == transfer, &has_moved);
        has_news |= progress == ENQUEUED;
    }
    unlock(flow);
    /* Another thread may wait for a message, and a carrier's threads find nothing left that they would ring for. */
    tell(flow, has_news, has_moved);
    return progress;
}

/* Have what has still to come go to the ring. What a rail is receiving already goes on. */
static void give_claims_up(const struct flow *flow, const struct transfer *transfer)
{
    for (uint64_t index = 0; index < transfer->claimed; index++) {
        struct user_buffer *buffer = user_buffer_of(flow, transfer->first + index);
        uint64_t claimed = transfer->address + index * chunk_of(flow, transfer->nbytes);

        if (transfer->first + index >= flow->count)
            __atomic_compare_exchange_n(&buffer->address, &claimed, RING_SLOT, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE);
    }
}

void native_abort(struct flow *flow)
{
    lock(flow);
    while (first_queued(flow) != NULL) {
        give_claims_up(flow, first_queued(flow));
        flow->first_queued = first_queued(flow)->next_queued;
    }
    unlock(flow);
}

/* Whether the first message may go on. */
static bool is_ready(const struct flow *flow)
{
    const struct ring_direction *direction = direction_of(flow);

    return flow->is_outgoing || (reached(ring_load(&direction->posted), flow->count + 1) &&
                                 reached(ring_load(&direction->produced), flow->count + 1));
}

/* Call with the lock; sets `has_news` if waiting threads have to be woken. A small message is left to the thread that
 * waits for it, which is faster: a carrier's thread has to wake the peer before it receives again. */
static void drive(struct flow *flow, bool *has_moved, bool *has_news)
{
    enum progress progress = ENQUEUED;

    while (first_queued(flow) != NULL && is_ready(flow) && progress == ENQUEUED) {
        if (first_queued(flow)->nbytes <= flow->small_bytes) {
            *has_news = true;
            return;
        }
        progress = progress_first(flow, false, has_moved);
        *has_news |= progress != WAITING;
    }
}

void native_drive(struct flow *flow)
{
    __atomic_store_n(&flow->is_requested, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&flow->is_requested, __ATOMIC_SEQ_CST) &&
           !__atomic_exchange_n(&flow->is_being_driven, 1, __ATOMIC_SEQ_CST)) {
        while (__atomic_exchange_n(&flow->is_requested, 0, __ATOMIC_SEQ_CST)) {
            bool has_moved = false, has_news = false;

            lock(flow);
            drive(flow, &has_moved, &has_news);
            unlock(flow);
            tell(flow, has_news, has_moved);
        }
        __atomic_store_n(&flow->is_being_driven, 0, __ATOMIC_SEQ_CST);
    }
}

/* How many messages are left; STUCK once one has failed or was refused. */
static uint32_t progress_transfers(struct transfer *const *transfers, uint32_t count)
{
    uint32_t left = 0;

    for (uint32_t index = 0; index < count; index++) {
        enum progress progress = ENQUEUED;

        if (__atomic_load_n(&transfers[index]->progress, __ATOMIC_ACQUIRE) != ENQUEUED)
            progress = native_progress(transfers[index], true);
        if (progress == FAILED || progress == REFUSED)
            return STUCK;
        left += progress != ENQUEUED;
    }
    return left;
}

/* Make the caller's stream wait for what went through the link's streams. */
static uint32_t make_caller_wait(struct transfer *const *transfers, uint32_t count)
{
    for (uint32_t index = 0; index < count; index++) {
        struct transfer *transfer = transfers[index];
        struct flow *flow = flow_of(transfer);

        if (transfer->on_caller_stream)
            continue;
        if (!caller_can_wait(&flow->streams))
            return WAITING;
        flow->failed = native_wait_value(
            &flow->streams.driver, transfer->caller_stream,
            transfer->completes_at_receiver ? flow->consumed_word : flow->produced_word,
            (uint32_t)transfer->count);
        if (flow->failed)
            return store_progress(transfer, FAILED);
    }
    return ENQUEUED;
}

uint32_t native_exchange(struct transfer *const *transfers, uint32_t count, uint32_t microseconds,
                         uint32_t waited)
{
    int64_t end = spin_clock() + (int64_t)microseconds * 1000;
    uint32_t left;

    for (uint32_t index = 0; index < count; index++)
        if (transfers[index]->header_state != HEADER_COMPLETE)
            native_begin(transfers[index]);
    do {
        for (int poll = 0; poll < SPIN_POLLS; poll++) {
            left = progress_transfers(transfers, count);
            if (left == 0)
                return make_caller_wait(transfers, waited);
            if (left == STUCK)
                return WAITING;
            spin_pause();
        }
        sched_yield();
    } while (spin_clock() < end);
    return WAITING;
}
