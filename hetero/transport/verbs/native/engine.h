/* What moves a link's entries: the two rings' words on one side, the rails on the other.
 *
 * Everything is called with the lock of whoever owns the engine, and nothing waits. */
#ifndef HETERO_ENGINE_H
#define HETERO_ENGINE_H

#include "flow.h"
#include "rail.h"

#define ENGINE_RAILS 32

/* Where the words and records of both directions lie: offsets in the control segment, which are the
 * same at both ends. Mirrored in forwarder.py. */
struct engine_layout {
    uint64_t control; /* address */
    uint64_t doorbell;
    uint64_t out_posted, out_retired, out_produced, out_consumed, out_records;
    uint64_t in_posted, in_retired, in_produced, in_consumed, in_records;
    uint64_t record_bytes, record_nbytes, record_place; /* size of a record, and fields in it */
    uint64_t entries;
    uint64_t ring_bytes;
    double stall_seconds;
};

struct loss {
    bool is_told;
    char reason[RAIL_TEXT_BYTES];
};

struct engine {
    struct engine_layout layout;
    struct outgoing outgoing;
    struct incoming incoming;
    struct rail rails[ENGINE_RAILS];
    struct loss losses[ENGINE_RAILS];
    int rail_count;
    int losses_bell; /* eventfd, written to when a rail is lost */
};

double engine_now(void);
/* Wake whoever sleeps on this end's doorbell. */
void engine_ring(struct engine *engine);
/* See to all that has happened, and post what can be posted by then; whether anything moved. */
bool engine_progress(struct engine *engine);
/* See to the completions of one rail alone. */
bool engine_poll_rail(struct engine *engine, struct rail *rail);
/* Whether something may happen that wakes nobody: a device's write of a word, or a deadline. */
bool engine_is_under_way(struct engine *engine);
/* Whether data have arrived that only a read-back is waited for. */
bool engine_reads(const struct engine *engine);
/* Whether the peer has all credits, or there is no rail left to bring them. */
bool engine_has_told(struct engine *engine);
/* Lose the rails on which a request has been under way for too long. */
void engine_watch(struct engine *engine, double time);
void engine_lose(struct engine *engine, struct rail *rail, const char *reason);
/* Have every rail's queue give notice of its next completion. */
void engine_ask_for_notice(struct engine *engine);

#endif
