/* Which entries of a link's two rings have gone where. Numbers only: no verbs, no clock.
 *
 * Entries are numbered from 0 on and counted in 32 bits, round. At most RING_ENTRIES are under way in
 * one direction, from the sender's first mention of one until the receiver's device has consumed it.
 * Of every entry two parts travel: its record, ahead, and its data. */
#ifndef HETERO_BOOK_H
#define HETERO_BOOK_H

#include "ring.h"

#include <stdbool.h>
#include <stdint.h>

/* A number travels beside one bit that tells a record from data. */
#define BOOK_NUMBER_MASK 0x7FFFFFFFu

enum delivery { UNSENT, POSTED, SENT };

struct part {
    uint8_t state;
    uint8_t rail;
};

/* The records, or the data, of one direction as its sender sees them. */
struct sequence {
    uint32_t next; /* none before it waits */
    uint32_t done; /* all before it have completed here */
    uint32_t most; /* none from here on was ever posted */
    struct part parts[RING_ENTRIES];
};

struct outgoing {
    struct sequence records;
    struct sequence data;
    uint32_t released; /* so many the receiver's device has consumed, as far as it has credited */
    uint32_t freed;    /* of those, the ones that no NIC of this side needs any more */
};

enum arrival_state { DATA_ABSENT, DATA_COMING, DATA_LANDED, DATA_BEING_READ, DATA_VISIBLE };

struct arrival {
    uint8_t state;
    uint8_t rail;
    bool has_record;    /* its record is here, and some before it are not */
    uint64_t last_byte; /* offset in the receiving ring; BOOK_NO_BYTE for an entry without data */
};

#define BOOK_NO_BYTE UINT64_MAX

struct incoming {
    uint32_t posted;   /* so many records are here without a gap */
    uint32_t produced; /* so many data are visible without a gap */
    uint32_t credited;     /* the count that the sender was credited last */
    bool credit_lost; /* what was credited may never have arrived */
    struct arrival arrivals[RING_ENTRIES];
};

/* How far one counter is ahead of another; negative when it is behind. */
int32_t book_ahead(uint32_t newer, uint32_t older);

/* The first part before `limit` that waits to be posted. */
bool sequence_waiting(struct sequence *sequence, uint32_t limit, uint32_t *number);
void sequence_post(struct sequence *sequence, uint32_t number, uint8_t rail);
/* A part has arrived, says the rail; nothing changes if another rail has it by now. */
void sequence_complete(struct sequence *sequence, uint32_t number, uint8_t rail);

/* The receiver's count. One that a later one has overtaken changes nothing; false where it counts data
 * that were never posted. */
bool outgoing_credit(struct outgoing *outgoing, uint32_t released);
/* Give back what the receiver has released and no NIC needs; returns how many entries are free. */
uint32_t outgoing_free(struct outgoing *outgoing);
/* Have what a lost rail may not have carried sent again; returns how many entries' data are. Records or
 * data that it has sent and the receiver has not released are sent again if asked for: they may not have
 * arrived, or not be seen. */
int outgoing_retransmit(struct outgoing *outgoing, uint8_t rail, bool records_too, bool data_too);

/* Whether an entry's record, by its whole number, is not here yet. */
bool incoming_expects_record(const struct incoming *incoming, uint32_t number);
/* The same of its data, which count as coming over this rail from here on. */
bool incoming_expect_data(struct incoming *incoming, uint32_t number, uint8_t rail);
/* What arrives a second time, over another rail, changes nothing. */
void incoming_record(struct incoming *incoming, uint32_t number, uint64_t last_byte);
void incoming_data(struct incoming *incoming, uint32_t number, uint8_t rail, bool needs_reading);
/* Claim all data of a rail that wait for a read-back; false if there are none. */
bool incoming_claim(struct incoming *incoming, uint8_t rail, uint64_t *last_byte);
/* The read-back has been answered. */
void incoming_seen(struct incoming *incoming, uint8_t rail);
/* Forget what a rail has brought and nobody has seen: it comes again over another. */
void incoming_forget(struct incoming *incoming, uint8_t rail);
bool incoming_reads(const struct incoming *incoming, uint8_t rail);

#endif
