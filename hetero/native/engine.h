/* Moves a link's entries between the words of the rings and the rails.
 *
 * Unless it says otherwise, call everything with the engine's lock, and release that by engine_unlock, which goes on
 * with the link's flows; nothing blocks. Callers of the link, and the threads of proxy.h, drive it. */
#ifndef HETERO_ENGINE_H
#define HETERO_ENGINE_H

#include "flow.h"
#include "rail.h"
#include "window.h"

#include <pthread.h>
#include <stdatomic.h>

#define ENGINE_RAILS 32

/* This end of the link, as Python describes it. */
struct engine_options {
    uint64_t control;    /* address of the control segment (struct ring_control) */
    uint64_t side;       /* 0 for the listener, 1 for the caller */
    uint64_t rings;      /* address of the sending ring, which the receiving one follows */
    uint64_t ring_bytes; /* of each */
    uint64_t checksum_bytes; /* behind each entry's, in the ring */
    double stall_seconds;
    /* Whether carrier_progress is called after each word that this end's device writes; else poll for it. */
    bool device_notifies;
    bool reads_back; /* whether what a NIC wrote is visible only after a read-back */
    int32_t dmabuf;  /* descriptor of the rings' memory; -1 where it has none */
    uint64_t dmabuf_offset;
};

struct engine {
    struct engine_options options;
    struct ring_control *control;
    struct ring_direction *out, *in; /* what this end sends, and what it receives */
    struct outgoing outgoing;
    struct incoming incoming;
    struct rail *rails[ENGINE_RAILS];
    int rail_count;
    int small_rail; /* index of the last rail that small messages went over */
    uint64_t retransmitted; /* entries of lost rails */
    double last_checked;            /* when late rails were looked for */
    double posted_at[RING_ENTRIES]; /* an outgoing entry's data */
    int wake_fd;                    /* eventfd, wakes the proxy thread */
    int loss_fd;                    /* eventfd, readable when a rail is lost */
    struct flow *flows[2]; /* out and in, if its threads drive them */
    bool has_news;         /* for them, since the lock was last released */
    atomic_int drivers;    /* threads that drive them */
    pthread_mutex_t lock;
    atomic_int lock_waiters; /* the proxy thread lets them go first: it would win every time */
};

double engine_now(void);
/* Start numbering entries at the counters' present values, which are equal within a direction. `engine` is
 * zeroed; destroy it also on failure, which is false with errno. Both without the lock. */
bool engine_init(struct engine *engine, const struct engine_options *options);
void engine_destroy(struct engine *engine);
/* Take the lock before the proxy thread does. */
void engine_lock(struct engine *engine);
/* Release the lock, then drive the flows if there is anything new for them. */
void engine_unlock(struct engine *engine);
/* Drive this end's flows too whenever the engine makes progress, until engine_leave_flows. Call both without the
 * lock. */
void engine_drive_flows(struct engine *engine, struct flow *out, struct flow *in);
/* Blocks until no thread uses the flows, which then may go, and the engine too. */
void engine_leave_flows(struct engine *engine);
/* Make progress in the calling thread, without the lock; wake the proxy thread if something is left to poll
 * for. */
void engine_drive(struct engine *engine);
/* Handle completions, arrivals and late rails, then post what can be posted; whether anything moved. */
bool engine_progress(struct engine *engine);
/* Whether to poll: a device may write a word, or a deadline pass, and nothing would wake the proxy thread. */
bool engine_needs_polling(struct engine *engine);
/* Whether everything that arrived before the peer ended has been handled. */
bool engine_is_drained(struct engine *engine);
/* Whether the peer has all credits, or there is no rail left to send them over. */
bool engine_has_sent_credits(struct engine *engine);
void engine_lose_rail(struct engine *engine, struct rail *rail, const char *reason);
/* Check what a post returned, 0 or an errno: on failure lose the rail and return false. */
bool engine_check_post(struct engine *engine, struct rail *rail, int code);
bool engine_post_credit(struct engine *engine, struct rail *rail, uint32_t released);
/* Request a notification of the next event from every rail. */
void engine_request_notifications(struct engine *engine);

/* What a rail reports. A number that was received may lack its top bit. */
void engine_send_completed(struct engine *engine, struct rail *rail, enum message message,
                           uint32_t number);
void engine_record_arrived(struct engine *engine, uint32_t number);
void engine_data_arrived(struct engine *engine, struct rail *rail, uint32_t number);
void engine_credit_arrived(struct engine *engine, struct rail *rail, uint32_t released);
void engine_read_back_completed(struct engine *engine, struct rail *rail);
/* Where to receive an entry's record; NULL if it is here already. */
void *engine_expect_record(struct engine *engine, uint32_t number);
/* Claim an entry's data for this rail before receiving them; false if they are here already, or another
 * rail is receiving them. */
bool engine_expect_data(struct engine *engine, struct rail *rail, uint32_t number);
/* Address of an outgoing entry's bytes in the caller's tensor (zero-copy); 0 if they are in its slot. */
uint64_t engine_source(const struct engine *engine, uint32_t number);
/* The same of an incoming entry that this rail has claimed; false if its record announced other than
 * `nbytes`. May be called before the record has arrived. */
bool engine_target(struct engine *engine, uint32_t number, uint64_t nbytes, uint64_t *target);

#endif
