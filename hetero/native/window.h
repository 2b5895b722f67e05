/* The send and receive windows of a link's two directions: which entries are in flight, and on which rail.
 *
 * Pure state: it calls no verbs, reads no clock, and is guarded by the engine's lock. Entries are
 * numbered from 0 in 32 bits that wrap. At most RING_ENTRIES are in flight in one direction, from the
 * moment the sender posts one until the receiver's device has consumed it. An entry is sent as two
 * messages: its record, first, and its data. */
#ifndef HETERO_WINDOW_H
#define HETERO_WINDOW_H

#include "ring.h"

#include <stdbool.h>
#include <stdint.h>

/* On the wire a number has 31 bits; the top bit tells data from a record. */
#define ENTRY_NUMBER_MASK 0x7FFFFFFFu

enum send_state { UNSENT, POSTED, SENT };

struct send_status {
    uint8_t state; /* enum send_state */
    uint8_t rail;
};

/* The records, or the data, of one direction at its sender. */
struct sequence {
    uint32_t next;       /* all before it have been posted */
    uint32_t completed;  /* all before it have completed here */
    uint32_t posted_end; /* one past the highest number ever posted */
    struct send_status status[RING_ENTRIES];
};

struct outgoing {
    struct sequence records;
    struct sequence data;
    uint32_t released; /* the receiver's last credit: entries its device has consumed */
    uint32_t freed;    /* of those, entries that no NIC of this end uses any more */
};

enum recv_state { DATA_ABSENT, DATA_RECEIVING, DATA_ARRIVED, DATA_READING_BACK, DATA_VISIBLE };

struct recv_status {
    uint8_t state; /* enum recv_state */
    uint8_t rail;
    bool has_record;    /* its record is here, and some before it are not */
    uint64_t last_byte; /* offset in the receiving ring; NO_LAST_BYTE for an entry without data */
};

#define NO_LAST_BYTE UINT64_MAX

struct incoming {
    uint32_t posted;   /* records that are here without a gap */
    uint32_t produced; /* data that are visible without a gap */
    uint32_t credited; /* the last credit sent */
    bool credit_lost;  /* it may not have arrived: send it again */
    struct recv_status status[RING_ENTRIES];
};

/* The first message before `limit` that has to be posted; false if there is none. */
bool sequence_next_unsent(struct sequence *sequence, uint32_t limit, uint32_t *number);
void sequence_post(struct sequence *sequence, uint32_t number, uint8_t rail);
/* Handle a send completion of `rail`. Ignored if the message has since been posted to another rail. */
void sequence_complete(struct sequence *sequence, uint32_t number, uint8_t rail);

/* Handle a credit. An older one than the last is ignored; false if it counts data never posted. */
bool outgoing_credit(struct outgoing *outgoing, uint32_t released);
/* Free the entries that the receiver has released and no NIC uses; returns `freed`. */
uint32_t outgoing_free(struct outgoing *outgoing);
/* Mark what a lost rail has not completed as unsent; returns how many entries' data that are. With
 * `records_too` and `data_too` also what it has completed and the receiver has not released: it may not
 * have arrived, or not be visible. */
int outgoing_retransmit(struct outgoing *outgoing, uint8_t rail, bool records_too, bool data_too);

/* Whether an entry's record may come and is not here yet. `number` has all 32 bits, here and in the
 * next. */
bool incoming_expects_record(const struct incoming *incoming, uint32_t number);
/* Claim an entry's data for this rail before receiving them; false if they may not come, are here, or
 * are claimed. */
bool incoming_expect_data(struct incoming *incoming, uint32_t number, uint8_t rail);
/* Handle the arrival of a record, of data. A duplicate over another rail is ignored. */
void incoming_record(struct incoming *incoming, uint32_t wire_number, uint64_t last_byte);
void incoming_data(struct incoming *incoming, uint32_t wire_number, uint8_t rail,
                   bool needs_read_back);
/* Begin one read-back for all of a rail's data that wait for one; false if there are none. */
bool incoming_claim_read_back(struct incoming *incoming, uint8_t rail, uint64_t *last_byte);
void incoming_read_back_completed(struct incoming *incoming, uint8_t rail);
/* Discard a lost rail's data that are not visible yet: the sender retransmits them. */
void incoming_discard(struct incoming *incoming, uint8_t rail);
/* Whether data have arrived that are not visible yet. */
bool incoming_awaits_read_back(const struct incoming *incoming);

#endif
