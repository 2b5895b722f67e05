#include "window.h"

static uint32_t earlier(uint32_t one, uint32_t other)
{
    return ring_ahead(one, other) < 0 ? one : other;
}

static struct send_status *status_of(struct sequence *sequence, uint32_t number)
{
    return &sequence->status[number % RING_ENTRIES];
}

bool sequence_next_unsent(struct sequence *sequence, uint32_t limit, uint32_t *number)
{
    while (ring_ahead(limit, sequence->next) > 0) {
        if (status_of(sequence, sequence->next)->state == UNSENT) {
            *number = sequence->next;
            return true;
        }
        sequence->next++;
    }
    return false;
}

void sequence_post(struct sequence *sequence, uint32_t number, uint8_t rail)
{
    *status_of(sequence, number) = (struct send_status){POSTED, rail};
    if (sequence->next == number)
        sequence->next++;
    if (ring_ahead(number + 1, sequence->posted_end) > 0)
        sequence->posted_end = number + 1;
}

void sequence_complete(struct sequence *sequence, uint32_t number, uint8_t rail)
{
    struct send_status *status = status_of(sequence, number);

    if (status->state == POSTED && status->rail == rail)
        status->state = SENT;
}

static uint32_t advance_completed(struct sequence *sequence)
{
    while (ring_ahead(sequence->next, sequence->completed) > 0 &&
           status_of(sequence, sequence->completed)->state == SENT)
        sequence->completed++;
    return sequence->completed;
}

bool outgoing_credit(struct outgoing *outgoing, uint32_t released)
{
    if (ring_ahead(released, outgoing->data.posted_end) > 0)
        return false;
    if (ring_ahead(released, outgoing->released) > 0)
        outgoing->released = released;
    return true;
}

uint32_t outgoing_free(struct outgoing *outgoing)
{
    uint32_t records = advance_completed(&outgoing->records);
    uint32_t completed = earlier(records, advance_completed(&outgoing->data));
    uint32_t free = earlier(outgoing->released, completed);

    for (; ring_ahead(free, outgoing->freed) > 0; outgoing->freed++) {
        status_of(&outgoing->records, outgoing->freed)->state = UNSENT;
        status_of(&outgoing->data, outgoing->freed)->state = UNSENT;
    }
    return outgoing->freed;
}

static int retransmit(struct outgoing *outgoing, struct sequence *sequence, uint8_t rail,
                      bool completed_too)
{
    int count = 0;

    for (uint32_t step = 0; step < RING_ENTRIES; step++) {
        uint32_t number = outgoing->freed + step;
        struct send_status *status = status_of(sequence, number);
        bool is_released = ring_ahead(outgoing->released, number) > 0;

        if (status->rail != rail || status->state == UNSENT)
            continue;
        if (is_released) {
            /* The receiver has consumed it: it arrived, whether or not the rail completed it. */
            status->state = SENT;
        } else if (status->state == POSTED || completed_too) {
            status->state = UNSENT;
            sequence->next = earlier(sequence->next, number);
            sequence->completed = earlier(sequence->completed, number);
            count++;
        }
    }
    return count;
}

int outgoing_retransmit(struct outgoing *outgoing, uint8_t rail, bool records_too, bool data_too)
{
    retransmit(outgoing, &outgoing->records, rail, records_too);
    return retransmit(outgoing, &outgoing->data, rail, data_too);
}

static struct recv_status *recv_status_of(struct incoming *incoming, uint32_t number)
{
    return &incoming->status[number % RING_ENTRIES];
}

/* Restore the 32 bits of a number from the wire, which is `base` or later; false for a duplicate. */
static bool unwrap_number(uint32_t base, uint32_t wire_number, uint32_t *number)
{
    uint32_t ahead = (wire_number - base) & ENTRY_NUMBER_MASK;

    *number = base + ahead;
    return ahead < RING_ENTRIES;
}

void incoming_record(struct incoming *incoming, uint32_t wire_number, uint64_t last_byte)
{
    uint32_t number;

    if (!unwrap_number(incoming->posted, wire_number, &number) ||
        recv_status_of(incoming, number)->has_record)
        return;
    recv_status_of(incoming, number)->has_record = true;
    recv_status_of(incoming, number)->last_byte = last_byte;
    while (recv_status_of(incoming, incoming->posted)->has_record) {
        recv_status_of(incoming, incoming->posted)->has_record = false;
        incoming->posted++;
    }
}

static void advance_produced(struct incoming *incoming)
{
    while (recv_status_of(incoming, incoming->produced)->state == DATA_VISIBLE) {
        recv_status_of(incoming, incoming->produced)->state = DATA_ABSENT;
        incoming->produced++;
    }
}

void incoming_data(struct incoming *incoming, uint32_t wire_number, uint8_t rail,
                   bool needs_read_back)
{
    uint32_t number;

    if (!unwrap_number(incoming->produced, wire_number, &number))
        return;
    struct recv_status *status = recv_status_of(incoming, number);
    if (status->state != DATA_ABSENT &&
        (status->state != DATA_RECEIVING || status->rail != rail))
        return;
    status->state = needs_read_back ? DATA_ARRIVED : DATA_VISIBLE;
    status->rail = rail;
    advance_produced(incoming);
}

/* Whether a number is `base` or later, and its place is free: no entry without credit has it. A peer that
 * reused a place too early could change the size of an entry after it was verified. */
static bool is_in_window(const struct incoming *incoming, uint32_t base, uint32_t number)
{
    return ring_ahead(number, base) >= 0 &&
           ring_ahead(number, incoming->credited) < RING_ENTRIES;
}

bool incoming_expects_record(const struct incoming *incoming, uint32_t number)
{
    return is_in_window(incoming, incoming->posted, number) &&
           !incoming->status[number % RING_ENTRIES].has_record;
}

bool incoming_expect_data(struct incoming *incoming, uint32_t number, uint8_t rail)
{
    struct recv_status *status = recv_status_of(incoming, number);

    if (!is_in_window(incoming, incoming->produced, number) || status->state != DATA_ABSENT)
        return false;
    status->state = DATA_RECEIVING;
    status->rail = rail;
    return true;
}

bool incoming_claim_read_back(struct incoming *incoming, uint8_t rail, uint64_t *last_byte)
{
    bool found = false;

    for (uint32_t step = 0; step < RING_ENTRIES; step++) {
        uint32_t number = incoming->produced + step;
        struct recv_status *status = recv_status_of(incoming, number);
        bool has_record = status->has_record || ring_ahead(incoming->posted, number) > 0;

        if (status->state != DATA_ARRIVED || status->rail != rail || !has_record)
            continue;
        if (status->last_byte == NO_LAST_BYTE) {
            status->state = DATA_VISIBLE;
            continue;
        }
        status->state = DATA_READING_BACK;
        *last_byte = status->last_byte;
        found = true;
    }
    advance_produced(incoming);
    return found;
}

static void set_state(struct incoming *incoming, uint8_t rail, uint8_t from, uint8_t to)
{
    for (uint32_t slot = 0; slot < RING_ENTRIES; slot++) {
        struct recv_status *status = &incoming->status[slot];

        if (status->state == from && status->rail == rail)
            status->state = to;
    }
}

void incoming_read_back_completed(struct incoming *incoming, uint8_t rail)
{
    set_state(incoming, rail, DATA_READING_BACK, DATA_VISIBLE);
    advance_produced(incoming);
}

void incoming_discard(struct incoming *incoming, uint8_t rail)
{
    set_state(incoming, rail, DATA_RECEIVING, DATA_ABSENT);
    set_state(incoming, rail, DATA_READING_BACK, DATA_ABSENT);
    set_state(incoming, rail, DATA_ARRIVED, DATA_ABSENT);
}

bool incoming_awaits_read_back(const struct incoming *incoming)
{
    for (uint32_t slot = 0; slot < RING_ENTRIES; slot++)
        if (incoming->status[slot].state == DATA_READING_BACK ||
            incoming->status[slot].state == DATA_ARRIVED)
            return true;
    return false;
}
