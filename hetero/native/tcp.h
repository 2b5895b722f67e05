/* A rail over TCP: one connection, with a thread that sends and one that receives.
 *
 * What the kernel has taken may never arrive, so nothing that this rail has sent counts as confirmed. */
#ifndef HETERO_TCP_H
#define HETERO_TCP_H

#include "rail.h"

#include <pthread.h>

struct carrier;
struct engine;

struct tcp_request {
    int32_t fd; /* connected, blocking; closed with the rail */
    uint64_t sending; /* address of the ring that is sent from, and of the one that is received into */
    uint64_t receiving;
    uint64_t ring_bytes;
    uint64_t control; /* address of the control segment */
};

/* What the threads of a rail ask of the carrier, with its lock. */
struct tcp_owner {
    struct engine *engine;
    pthread_mutex_t *lock;
    /* Called without the lock. */
    void (*progress)(struct carrier *carrier);
    /* Called with it, when something is on its way after a rest. */
    void (*awaits_answer)(struct carrier *carrier);
    struct carrier *carrier;
};

/* NULL, with an errno in `code`, where it cannot be made. */
struct rail *tcp_open(const struct tcp_request *request, const struct tcp_owner *owner, int *code);

#endif
