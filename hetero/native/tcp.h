/* A rail over TCP: one connection, with a thread that sends and one that receives.
 *
 * A completion means that the kernel has taken the bytes, never that the peer has them. */
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

/* What a rail's threads use of its carrier. */
struct tcp_owner {
    struct engine *engine;
    pthread_mutex_t *lock;
    /* Call without the lock. */
    void (*progress)(struct carrier *carrier);
    /* Call with the lock when an idle rail begins to send. */
    void (*expect_acks)(struct carrier *carrier);
    struct carrier *carrier;
};

/* NULL, with an errno in `code`, on failure. */
struct rail *tcp_open(const struct tcp_request *request, const struct tcp_owner *owner, int *code);

#endif
