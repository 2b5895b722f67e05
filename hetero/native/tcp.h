/* A rail over TCP: one connection, with a thread that sends (tcp.c) and one that receives (tcp_receive.c).
 *
 * A completion means that the kernel has taken the bytes, never that the peer has them. */
#ifndef HETERO_TCP_H
#define HETERO_TCP_H

#include "carrier.h"

/* Messages of each kind queued for the sending thread. Few data: another rail may be free sooner. More
 * than one, or the thread would idle between two. */
#define TCP_RECORDS 64
#define TCP_DATA 2
#define TCP_CREDITS 2
#define TCP_ROOM (TCP_RECORDS + TCP_DATA + TCP_CREDITS)
#define TCP_SCRATCH_BYTES (64 << 10)

/* Precedes a message's bytes. Sent as it is in memory: both ends are little-endian. */
struct frame {
    uint32_t message; /* enum message */
    uint32_t number;  /* of the entry; of a credit, the count */
    uint64_t slot;
    uint64_t nbytes;
};

struct queued_message {
    struct frame frame;
    const void *bytes;
};

struct tcp_rail {
    struct rail rail; /* first, so that a pointer to either is a pointer to both */
    struct carrier *carrier; /* whose lock guards all that its threads share */
    int fd;                  /* connected, blocking; the caller's */
    pthread_t sender, receiver;
    bool has_sender, has_receiver;
    /* Guarded by the carrier's lock, as is `rail`. */
    pthread_cond_t has_messages;
    struct queued_message queue[TCP_ROOM]; /* a ring; sendmsg has the first of them */
    int first, count;
    uint64_t queued_bytes; /* of all of them */
    /* Where the present bandwidth sample began: acknowledged bytes, and busy microseconds. */
    uint64_t acked_at_start, busy_at_start;
    double measured_at;
    double busy_since; /* when it was last idle */
    char *scratch;     /* the receiver's */
};

/* NULL, with the reason in `error`, on failure. */
struct rail *tcp_open(struct carrier *carrier, int fd, char *error);
/* Handle the end or failure of the connection; ignored once the rail is stopped. Call with the lock. */
void tcp_lose(struct tcp_rail *rail, const char *what, int code);
/* The receiving thread; it ends with the connection. */
void *tcp_receive_loop(void *rail);

#endif
