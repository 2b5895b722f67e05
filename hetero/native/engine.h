/* What moves a link's entries: the two rings' words on one side, the rails on the other.
 *
 * Everything is called with the lock of the carrier that owns the engine, and nothing waits. */
#ifndef HETERO_ENGINE_H
#define HETERO_ENGINE_H

#include "book.h"
#include "rail.h"

#define ENGINE_RAILS 32

/* This end of the link. Mirrored in structures.py. */
struct engine_options {
    uint64_t control; /* address of the control segment (struct ring_control) */
    uint64_t side;    /* 0 for the listener, 1 for the caller */
    uint64_t ring_bytes;
    uint64_t checksum_bytes; /* behind each entry's, in the ring */
    double stall_seconds;
};

struct loss {
    bool is_told;
    char reason[RAIL_TEXT_BYTES];
};

struct engine {
    struct engine_options options;
    struct ring_control *control;
    struct ring_direction *out, *in; /* what this end sends, and what it receives */
    struct outgoing outgoing;
    struct incoming incoming;
    struct rail *rails[ENGINE_RAILS];
    struct loss losses[ENGINE_RAILS];
    int rail_count;
    bool words_notify; /* whether the carrier is called after a device has written a word */
    double last_watched;
    double posted_at[RING_ENTRIES]; /* when the data of an outgoing entry were */
    int loss_fd; /* eventfd, written to when a rail is lost */
};

double engine_now(void);
/* Number entries from where the words stand, which are alike for each direction. */
void engine_begin(struct engine *engine, const struct engine_options *options);
/* See to all that has happened and to what is late, and post what can be posted by then; whether
 * anything moved. */
bool engine_progress(struct engine *engine);
/* Whether something may happen that wakes nobody: a device's write of a word, or a deadline. */
bool engine_is_under_way(struct engine *engine);
/* Whether all that has come before the peer's end has been taken in. */
bool engine_has_settled(struct engine *engine);
/* Whether the peer has all credits, or there is no rail left to bring them. */
bool engine_has_credited(struct engine *engine);
/* Called without the lock; 0 or an errno. */
int engine_start_rails(struct engine *engine);
void engine_lose(struct engine *engine, struct rail *rail, const char *reason);
/* Whether the rail took a message, which an errno or 0 says; it is lost if it did not. */
bool engine_took(struct engine *engine, struct rail *rail, int code);
/* Have every rail give notice of its next event. */
void engine_request_notifications(struct engine *engine);

/* What a rail has to tell in its `poll`. A number may have lost its upper bit on the way. */
void engine_sent(struct engine *engine, struct rail *rail, enum message message, uint32_t number);
void engine_record_arrived(struct engine *engine, uint32_t number);
void engine_data_arrived(struct engine *engine, struct rail *rail, uint32_t number);
void engine_credit_arrived(struct engine *engine, struct rail *rail, uint32_t released);
void engine_read_back(struct engine *engine, struct rail *rail);
/* Where the record of an entry lies in this end's incoming ones; NULL if it is here already. */
void *engine_expect_record(struct engine *engine, uint32_t number);
/* Whether an entry's data may be written to their place: they are not here, nor on their way over
 * another rail. They count as this rail's then. */
bool engine_expect_data(struct engine *engine, struct rail *rail, uint32_t number);
/* Of an entry to be sent, or whose data are expected: the address of its bytes in a caller's tensor; 0
 * where they lie in the ring at their slot. False where so many bytes are not what was announced. */
uint64_t engine_source(const struct engine *engine, uint32_t number);
bool engine_target(struct engine *engine, uint32_t number, uint64_t nbytes, uint64_t *target);

#endif
