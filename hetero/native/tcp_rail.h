/* What the two halves of a TCP rail share: tcp.c gives and sends, tcp_receive.c takes in. */
#ifndef HETERO_TCP_RAIL_H
#define HETERO_TCP_RAIL_H

#include "tcp.h"

#include <stdbool.h>
#include <stdint.h>

/* Messages of each kind that wait for the sending thread: few data, which another rail may bring
 * sooner, but never none. */
#define TCP_RECORDS 64
#define TCP_DATA 2
#define TCP_CREDITS 2
#define TCP_ROOM (TCP_RECORDS + TCP_DATA + TCP_CREDITS)
#define TCP_SCRATCH_BYTES (64 << 10)

/* What stands before a message's bytes, as it lies in memory: little-endian, as every processor is
 * that these GPUs are put beside. */
struct frame {
    uint32_t message; /* enum message */
    uint32_t number;  /* of the entry; of a credit, the count */
    uint64_t slot;
    uint64_t nbytes;
};

struct item {
    struct frame frame;
    const void *bytes;
};

struct tcp_rail {
    struct rail rail; /* the first, so that either is the other */
    struct tcp_request request;
    struct tcp_owner owner;
    pthread_t sender, receiver;
    bool is_started, is_joined;
    /* Guarded by the carrier's lock, as is the part in common. */
    pthread_cond_t has_items;
    struct item items[TCP_ROOM]; /* a ring: what is to be sent, the first of it under way */
    int first, count;
    int waiting[4]; /* by what they carry */
    uint64_t queued; /* bytes of the items */
    /* How many bytes the peer's kernel had confirmed, in how many microseconds, when its speed was taken. */
    uint64_t confirmed_by_then, busy_by_then;
    double measured_at;
    double waiting_since; /* when it was last idle */
    bool is_ended;  /* the peer sends nothing more */
    char *scratch;  /* the receiver's */
};

void tcp_lock(struct tcp_rail *rail);
void tcp_unlock(struct tcp_rail *rail);
/* The connection has ended or failed; nothing if the rail has been stopped. Called with the lock. */
void tcp_lose(struct tcp_rail *rail, const char *what, int code);
/* The thread that takes in what comes, until the connection ends. */
void *tcp_receive_loop(void *rail);

#endif
