#include "book.h"

int32_t book_ahead(uint32_t newer, uint32_t older)
{
    return (int32_t)(newer - older);
}

static uint32_t earlier(uint32_t one, uint32_t other)
{
    return book_ahead(one, other) < 0 ? one : other;
}

static struct part *part_of(struct sequence *sequence, uint32_t number)
{
    return &sequence->parts[number % RING_ENTRIES];
}

bool sequence_waiting(struct sequence *sequence, uint32_t limit, uint32_t *number)
{
    while (book_ahead(limit, sequence->next) > 0) {
        if (part_of(sequence, sequence->next)->state == UNSENT) {
            *number = sequence->next;
            return true;
        }
        sequence->next++;
    }
    return false;
}

void sequence_post(struct sequence *sequence, uint32_t number, uint8_t rail)
{
    *part_of(sequence, number) = (struct part){POSTED, rail};
    if (sequence->next == number)
        sequence->next++;
    if (book_ahead(number + 1, sequence->most) > 0)
        sequence->most = number + 1;
}

void sequence_complete(struct sequence *sequence, uint32_t number, uint8_t rail)
{
    struct part *part = part_of(sequence, number);

    if (part->state == POSTED && part->rail == rail)
        part->state = SENT;
}

static uint32_t pass_done(struct sequence *sequence)
{
    while (book_ahead(sequence->next, sequence->done) > 0 &&
           part_of(sequence, sequence->done)->state == SENT)
        sequence->done++;
    return sequence->done;
}

bool outgoing_credit(struct outgoing *outgoing, uint32_t released)
{
    if (book_ahead(released, outgoing->data.most) > 0)
        return false;
    if (book_ahead(released, outgoing->released) > 0)
        outgoing->released = released;
    return true;
}

uint32_t outgoing_free(struct outgoing *outgoing)
{
    uint32_t done = earlier(pass_done(&outgoing->records), pass_done(&outgoing->data));
    uint32_t free = earlier(outgoing->released, done);

    for (; book_ahead(free, outgoing->freed) > 0; outgoing->freed++) {
        part_of(&outgoing->records, outgoing->freed)->state = UNSENT;
        part_of(&outgoing->data, outgoing->freed)->state = UNSENT;
    }
    return outgoing->freed;
}

static int retransmit(struct outgoing *outgoing, struct sequence *sequence, uint8_t rail,
                      bool landed)
{
    int count = 0;

    for (uint32_t step = 0; step < RING_ENTRIES; step++) {
        uint32_t number = outgoing->freed + step;
        struct part *part = part_of(sequence, number);
        bool is_released = book_ahead(outgoing->released, number) > 0;

        if (part->rail != rail || part->state == UNSENT)
            continue;
        if (is_released) {
            /* What the receiver has consumed it has had, whatever the rail said. */
            part->state = SENT;
        } else if (part->state == POSTED || landed) {
            part->state = UNSENT;
            sequence->next = earlier(sequence->next, number);
            sequence->done = earlier(sequence->done, number);
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

static struct arrival *arrival_of(struct incoming *incoming, uint32_t number)
{
    return &incoming->arrivals[number % RING_ENTRIES];
}

/* The whole number behind one that has travelled; false if it came before. */
static bool place(uint32_t base, uint32_t travelled, uint32_t *number)
{
    uint32_t ahead = (travelled - base) & BOOK_NUMBER_MASK;

    *number = base + ahead;
    return ahead < RING_ENTRIES;
}

void incoming_record(struct incoming *incoming, uint32_t travelled, uint64_t last_byte)
{
    uint32_t number;

    if (!place(incoming->posted, travelled, &number) || arrival_of(incoming, number)->has_record)
        return;
    arrival_of(incoming, number)->has_record = true;
    arrival_of(incoming, number)->last_byte = last_byte;
    while (arrival_of(incoming, incoming->posted)->has_record) {
        arrival_of(incoming, incoming->posted)->has_record = false;
        incoming->posted++;
    }
}

static void pass_visible(struct incoming *incoming)
{
    while (arrival_of(incoming, incoming->produced)->state == DATA_VISIBLE) {
        arrival_of(incoming, incoming->produced)->state = DATA_ABSENT;
        incoming->produced++;
    }
}

void incoming_data(struct incoming *incoming, uint32_t travelled, uint8_t rail, bool needs_reading)
{
    uint32_t number;

    if (!place(incoming->produced, travelled, &number))
        return;
    struct arrival *arrival = arrival_of(incoming, number);
    if (arrival->state != DATA_ABSENT && (arrival->state != DATA_COMING || arrival->rail != rail))
        return;
    arrival->state = needs_reading ? DATA_LANDED : DATA_VISIBLE;
    arrival->rail = rail;
    pass_visible(incoming);
}

bool incoming_expects_record(const struct incoming *incoming, uint32_t number)
{
    int32_t ahead = book_ahead(number, incoming->posted);

    return ahead >= 0 && ahead < RING_ENTRIES &&
           !incoming->arrivals[number % RING_ENTRIES].has_record;
}

bool incoming_expect_data(struct incoming *incoming, uint32_t number, uint8_t rail)
{
    struct arrival *arrival = arrival_of(incoming, number);
    int32_t ahead = book_ahead(number, incoming->produced);

    if (ahead < 0 || ahead >= RING_ENTRIES || arrival->state != DATA_ABSENT)
        return false;
    arrival->state = DATA_COMING;
    arrival->rail = rail;
    return true;
}

bool incoming_claim(struct incoming *incoming, uint8_t rail, uint64_t *last_byte)
{
    bool found = false;

    for (uint32_t step = 0; step < RING_ENTRIES; step++) {
        uint32_t number = incoming->produced + step;
        struct arrival *arrival = arrival_of(incoming, number);
        bool has_record = arrival->has_record || book_ahead(incoming->posted, number) > 0;

        if (arrival->state != DATA_LANDED || arrival->rail != rail || !has_record)
            continue;
        if (arrival->last_byte == BOOK_NO_BYTE) {
            arrival->state = DATA_VISIBLE;
            continue;
        }
        arrival->state = DATA_BEING_READ;
        *last_byte = arrival->last_byte;
        found = true;
    }
    pass_visible(incoming);
    return found;
}

static void change(struct incoming *incoming, uint8_t rail, uint8_t from, uint8_t to)
{
    for (uint32_t slot = 0; slot < RING_ENTRIES; slot++) {
        struct arrival *arrival = &incoming->arrivals[slot];

        if (arrival->state == from && arrival->rail == rail)
            arrival->state = to;
    }
}

void incoming_seen(struct incoming *incoming, uint8_t rail)
{
    change(incoming, rail, DATA_BEING_READ, DATA_VISIBLE);
    pass_visible(incoming);
}

void incoming_forget(struct incoming *incoming, uint8_t rail)
{
    change(incoming, rail, DATA_COMING, DATA_ABSENT);
    change(incoming, rail, DATA_BEING_READ, DATA_ABSENT);
    change(incoming, rail, DATA_LANDED, DATA_ABSENT);
}

bool incoming_reads(const struct incoming *incoming, uint8_t rail)
{
    for (uint32_t slot = 0; slot < RING_ENTRIES; slot++) {
        const struct arrival *arrival = &incoming->arrivals[slot];

        if ((arrival->state == DATA_BEING_READ || arrival->state == DATA_LANDED) &&
            arrival->rail == rail)
            return true;
    }
    return false;
}
