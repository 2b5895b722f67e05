/* Layout of a link's control segment: a doorbell and an error flag for each end, four counters and the
 * entries' records for each direction. docs/ring.md explains them. Two ends on one host map the same
 * segment; with a carrier each end has its own, and docs/wire.md says where in it the peer writes. */
#ifndef HETERO_RING_H
#define HETERO_RING_H

#include <stdint.h>

#define RING_ENTRIES 256
#define MESSAGE_DIMENSIONS 8
#define RING_FAULT_BYTES 1024
/* Every slot begins at a multiple of it. */
#define RING_ALIGNMENT 512

/* One cache line. */
struct ring_word {
    uint32_t value;
    uint32_t sleepers; /* host threads that sleep until it changes (host.h) */
    uint8_t unused[56];
};

/* A word that is incremented to wake an end, in one cache line. */
struct ring_doorbell {
    uint32_t value;
    uint32_t sleepers;
    uint32_t armed;   /* by the end: the next ring clears it and writes event_fd */
    int32_t event_fd; /* the end's eventfd, by its number in the process that rings */
    uint8_t unused[48];
};

/* How far one counter, which wraps, is ahead of another; negative when it is behind. */
static inline int32_t ring_ahead(uint32_t newer, uint32_t older)
{
    return (int32_t)(newer - older);
}

static inline uint32_t ring_load(const struct ring_word *word)
{
    return __atomic_load_n(&word->value, __ATOMIC_ACQUIRE);
}

/* What precedes a message's bytes. Sent as it is in memory: both ends are little-endian. */
struct message_header {
    char magic[4];
    uint16_t dtype; /* header.py has the numbers */
    uint16_t dimensions;
    uint64_t sequence; /* of the message in its direction */
    uint64_t nbytes;
    uint64_t shape[MESSAGE_DIMENSIONS]; /* 0 beyond `dimensions` */
    uint64_t tag;
};

/* The descriptor of an entry: which bytes of which message are in which slot. */
struct ring_record {
    struct message_header header;
    uint64_t offset; /* in the message */
    uint64_t nbytes;
    uint64_t slot; /* offset in the ring */
};

struct ring_direction {
    struct ring_word produced, consumed; /* written by the devices */
    struct ring_word posted, retired;    /* written by the CPUs */
    struct ring_record records[RING_ENTRIES];
};

/* Where one end has an entry's bytes: undecided, in its slot, or else at this address in a caller's
 * tensor (zero-copy), in a range of `nbytes`. */
enum { RING_UNDECIDED, RING_SLOT };

struct user_buffer {
    uint64_t address;
    uint64_t nbytes; /* written before the address */
};

struct ring_end {
    struct ring_doorbell doorbell;
    struct ring_word closed;
    uint32_t fault_bytes; /* the error flag: 0 while it has not failed; stored after the text */
    char fault[RING_FAULT_BYTES];
    uint8_t unused[60];
};

struct ring_control {
    struct ring_end ends[2];               /* the listener's, the caller's */
    struct ring_direction directions[2];   /* what the listener sends, what the caller sends */
    struct user_buffer user_buffers[2][RING_ENTRIES]; /* of each entry, for a carrier that does zero-copy */
};

#endif
