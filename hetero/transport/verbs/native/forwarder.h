/* The thread that carries a link's entries over its rails, and what Python asks of it.
 *
 * Python opens the rails, starts the thread, and sees to what is slow: rails that are lost and a peer
 * that ends. Every call but forwarder_free may be made beside the thread; none holds the GIL. */
#ifndef HETERO_FORWARDER_H
#define HETERO_FORWARDER_H

#include "engine.h"

#define FORWARDER_VERSION 1

struct forwarder;

uint32_t forwarder_version(void);
struct forwarder *forwarder_new(const struct engine_layout *layout, char *error);
bool forwarder_add_rail(struct forwarder *forwarder, const struct rail_request *request,
                        struct rail_ending *ending, char *error);
bool forwarder_connect_rail(struct forwarder *forwarder, int index, const struct rail_peer *peer,
                            const struct rail_route *loop, char *error);
bool forwarder_start(struct forwarder *forwarder, char *error);

/* Write to it (eventfd) when a word has changed that the thread may sleep on. */
int forwarder_bell(const struct forwarder *forwarder);
/* Readable (eventfd) when the thread has lost a rail. */
int forwarder_losses(const struct forwarder *forwarder);
/* Readable when a rail's device has news of itself. */
int forwarder_news(const struct forwarder *forwarder, int index);
bool forwarder_hear_news(struct forwarder *forwarder, int index, char *reason);

/* The next rail that the thread has lost, with the reason; -1 when there is none. */
int forwarder_next_loss(struct forwarder *forwarder, char *reason);
/* Stop a rail, whoever found it lost. */
void forwarder_drop_rail(struct forwarder *forwarder, int index);
/* Both ends have stopped the rail: have its unfinished entries go over the others. */
int forwarder_repeat(struct forwarder *forwarder, int index);
/* Take in what has arrived by now, for so many seconds at most; false if some may be missing. */
bool forwarder_settle(struct forwarder *forwarder, double seconds);
/* See that the peer hears what was consumed, for so many seconds at most. */
bool forwarder_settle_credits(struct forwarder *forwarder, double seconds);
/* Wake whoever sleeps on this end's doorbell. */
void forwarder_ring(struct forwarder *forwarder);
/* Seconds of CPU that the thread has used. */
double forwarder_cpu_seconds(struct forwarder *forwarder);
/* End the thread and close the rails. */
void forwarder_free(struct forwarder *forwarder);

#endif
