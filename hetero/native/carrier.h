/* The thread that carries a link's entries over its rails, and what Python asks of it.
 *
 * Python opens the rails, starts the thread, and sees to what is slow: rails that are lost and a peer
 * that ends. Every call but carrier_free may be made beside the thread; none holds the GIL. */
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
/* Takes over the descriptor, also if it fails. */
bool carrier_add_tcp(struct carrier *carrier, const struct tcp_request *request, char *error);
bool carrier_start(struct carrier *carrier, char *error);

/* Say that the carrier is called (carrier_progress) after each word that this end's device writes. */
void carrier_words_notify(struct carrier *carrier);
/* Have the entries that have been posted go on their way, and look after those that the devices are to
 * write to. */
void carrier_progress(struct carrier *carrier);
/* Readable (eventfd) when a rail has been lost. */
int carrier_loss_fd(const struct carrier *carrier);
/* Readable when a rail's device has an event; -1 where it has none. */
int carrier_async_fd(const struct carrier *carrier, int index);
bool carrier_handle_async_event(struct carrier *carrier, int index, char *reason);

/* The next rail that has been lost, with the reason; -1 when there is none. */
int carrier_next_loss(struct carrier *carrier, char *reason);
/* Stop a rail, whoever found it lost, and wait until nothing comes in over it. */
void carrier_stop_rail(struct carrier *carrier, int index);
/* Both ends have stopped the rail: have its unfinished entries go over the others. */
int carrier_retransmit(struct carrier *carrier, int index);
/* Take in what has arrived by now, for so many seconds at most; false if some may be missing. */
bool carrier_settle(struct carrier *carrier, double seconds);
/* See that the peer hears what was consumed, for so many seconds at most. */
bool carrier_settle_credits(struct carrier *carrier, double seconds);
/* End the thread and close the rails. */
void carrier_free(struct carrier *carrier);

#endif
