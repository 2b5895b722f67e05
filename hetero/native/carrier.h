/* The thread that sends a link's entries over its rails and receives the peer's.
 *
 * Python opens the rails, starts the thread, and handles the rare events: a rail that is lost, a peer that
 * ends. Any thread may make any call but carrier_free at any time; none holds the GIL. */
#ifndef HETERO_CARRIER_H
#define HETERO_CARRIER_H

#include "engine.h"
#include "tcp.h"
#include "verbs.h"

struct carrier;

struct carrier *carrier_new(const struct engine_options *options, char *error);
bool carrier_add_verbs(struct carrier *carrier, const struct verbs_request *request,
                       struct verbs_connection_info *info, char *error);
bool carrier_connect_verbs(struct carrier *carrier, int index, const struct verbs_peer *peer,
                           const struct verbs_route *own, char *error);
/* Owns the descriptor from here on, also on failure. */
bool carrier_add_tcp(struct carrier *carrier, const struct tcp_request *request, char *error);
bool carrier_start(struct carrier *carrier, char *error);

/* Declare that carrier_progress is called after each word that this end's device writes, so that the
 * thread need not poll for them. */
void carrier_set_device_notifies(struct carrier *carrier);
/* Make progress in the calling thread; wake the carrier's if something is left to poll for. */
void carrier_progress(struct carrier *carrier);
/* eventfd, readable when a rail has been lost. */
int carrier_loss_fd(const struct carrier *carrier);
/* Readable when a rail's device has an asynchronous event; -1 where it has none. */
int carrier_async_fd(const struct carrier *carrier, int index);
bool carrier_handle_async_event(struct carrier *carrier, int index, char *reason);

/* The next lost rail that was not reported yet, with the reason; -1 if there is none. */
int carrier_next_loss(struct carrier *carrier, char *reason);
/* Stop a rail and wait until nothing arrives over it any more. */
void carrier_stop_rail(struct carrier *carrier, int index);
/* Retransmit a rail's unfinished entries over the others. Only after both ends have stopped it. */
int carrier_retransmit(struct carrier *carrier, int index);
/* Handle everything that has arrived, for so many seconds at most; false if some may be missing. */
bool carrier_drain(struct carrier *carrier, double seconds);
/* Wait until the peer has all credits, for so many seconds at most. */
bool carrier_flush_credits(struct carrier *carrier, double seconds);
/* End the thread and close the rails. */
void carrier_free(struct carrier *carrier);

#endif
