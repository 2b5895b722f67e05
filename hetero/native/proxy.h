/* The threads that serve all links of a process, however many there are.
 *
 * One makes progress for carriers nobody drives. A fixed few copy: senders to TCP connections, receivers from
 * connections of their own, copiers within memory. They are apart because a connection that the peer does not read
 * must not keep this end from reading, nor from copying. None of them holds the GIL. */
#ifndef HETERO_PROXY_H
#define HETERO_PROXY_H

#include "engine.h"

#define POOL_THREADS 4
#define PROXY_RECEIVERS 4
/* The longest that a call of the kernel for one connection may keep a sender or receiver. */
#define PROXY_SLICE_MICROSECONDS 5000

struct proxy;

/* Something to do. One job is queued once at most; `run` may submit it again. */
struct job {
    void (*run)(struct job *job);
    struct job *next;
};

/* A queue of jobs, and the threads that run them. */
struct pool;

/* Start the threads, unless they are; 0 or an errno. */
int pool_start(struct pool *pool);
void pool_submit(struct pool *pool, struct job *job);
/* Whether jobs wait for a thread. */
bool pool_has_jobs(struct pool *pool);
/* Count a job that cannot go on. Whether it may wait in its thread rather than be submitted again, as none that is
 * queued could go on either. */
bool pool_count_stuck(struct pool *pool);
/* A job has gone on. */
void pool_has_moved(struct pool *pool);
/* For how many milliseconds at most a stuck job may wait; then pool_end_wait. */
uint32_t pool_begin_wait(struct pool *pool);
void pool_end_wait(struct pool *pool);

/* A connection. Keep it until it has been removed, by what `receive` returns. */
struct connection {
    int fd;
    /* Receives what has come, or the end, in a receiver; false once it wants no more. It is then removed, and
     * `removed` called. */
    bool (*receive)(struct connection *connection);
    void (*removed)(struct connection *connection);
    /* Of the proxy thread, once there is room or the connection has ended. Must not block. */
    void (*has_room)(struct connection *connection);
    struct receiver *receiver; /* kept by proxy.c */
};

/* NULL with the reason in `error` (RAIL_TEXT_BYTES) where the system refuses what it needs. */
struct proxy *proxy_new(char *error);
/* End the threads, after everything they serve has been removed. */
void proxy_free(struct proxy *proxy);

/* Serve a carrier's engine from here on; 0 or an errno. */
int proxy_add_engine(struct proxy *proxy, struct engine *engine);
/* Blocks until no thread uses it. Not in a process forked since. */
void proxy_remove_engine(struct proxy *proxy, struct engine *engine);

/* Have what comes, and the end of the connection, received; 0 or an errno. */
int proxy_add_connection(struct proxy *proxy, struct connection *connection);
/* Call `has_room` once; 0 or an errno. It must stay until then. */
int proxy_await_room(struct proxy *proxy, struct connection *connection);
/* Whether its receiver has others too. */
bool proxy_shares_receiver(const struct connection *connection);

/* Its senders, which start with the first connection, and its copiers. */
struct pool *proxy_senders(struct proxy *proxy);
struct pool *proxy_copiers(struct proxy *proxy);

#endif
