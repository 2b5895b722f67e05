/* Sends a link's entries over its rails and receives the peer's.
 *
 * Python opens the rails, has the process's threads (proxy.h) serve them, and handles the rare events: a
 * rail that is lost, a peer that ends. Any thread may make any call but carrier_free at any time; none holds the GIL. */
#ifndef HETERO_CARRIER_H
#define HETERO_CARRIER_H

#include "proxy.h"
#include "verbs.h"

struct carrier {
    struct engine engine;
    struct proxy *proxy;
    bool is_served;
};

/* What a rail has done since the link was opened. */
struct rail_counters {
    uint64_t bytes_sent;     /* of entries' data, retransmissions and checksums included */
    double bytes_per_second; /* as measured when data were last sent; 0 while unknown */
};

/* `proxy` must outlive it. */
struct carrier *carrier_new(struct proxy *proxy, const struct engine_options *options,
                            char *error);
/* As verbs_open and verbs_connect; the peer's rail has the same index. */
bool carrier_add_verbs(struct carrier *carrier, const char *device, uint8_t port,
                       struct verbs_end *made, bool *by_dmabuf, char *error);
bool carrier_connect_verbs(struct carrier *carrier, int index, const struct verbs_end *peer,
                           const struct verbs_route *route, const struct verbs_route *own,
                           char *error);
/* `fd` is connected and blocking. Close it after carrier_free. */
bool carrier_add_tcp(struct carrier *carrier, int fd, char *error);
bool carrier_start(struct carrier *carrier, char *error);
/* Put a new connection in the place of a rail that both ends have stopped, after carrier_retransmit, and
 * start it. The counter of its bytes goes on. `fd` as before; the lost one may be closed after the call. If
 * it fails the rail is as it was before, or lost again without a report. */
bool carrier_reopen_tcp(struct carrier *carrier, int index, int fd, char *error);

/* engine_drive_flows. */
void carrier_drive_flows(struct carrier *carrier, struct flow *out, struct flow *in);
/* engine_drive, as a function that a device calls. */
void carrier_progress(struct carrier *carrier);
/* eventfd, readable when a rail has been lost. */
int carrier_loss_fd(const struct carrier *carrier);

/* The next lost rail that was not reported yet, with the reason, and whether that is what the end of the
 * peer looks like; -1 if there is none. */
int carrier_next_loss(struct carrier *carrier, char *reason, bool *may_have_ended);
/* Stop a rail and wait until nothing arrives over it any more. */
void carrier_stop_rail(struct carrier *carrier, int index);
/* Retransmit a rail's unfinished entries over the others. Only after both ends have stopped it. */
int carrier_retransmit(struct carrier *carrier, int index);
/* Copy the counters of at most `count` rails, in the order in which they were added. Returns how many
 * entries have been retransmitted. */
uint64_t carrier_rail_counters(struct carrier *carrier, struct rail_counters *counters, int count);
/* Handle everything that has arrived, up to `seconds`; false if some may be missing. */
bool carrier_drain(struct carrier *carrier, double seconds);
/* Wait up to `seconds` until the peer has all credits. */
bool carrier_flush_credits(struct carrier *carrier, double seconds);
/* Close the rails. */
void carrier_free(struct carrier *carrier);

#endif
