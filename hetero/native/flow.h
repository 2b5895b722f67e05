/* One direction of one end of a link over a ring (hetero/link/ring_link.py; ring.h has the memory layout).
 *
 * Messages are queued in the order in which they begin. Call native_begin, native_progress, native_exchange and
 * native_abort with the link's lock, which Python holds. native_drive is for the threads of a carrier. */
#ifndef HETERO_FLOW_H
#define HETERO_FLOW_H

#include "ring.h"
#include "streams.h"

#include <pthread.h>

/* Python sets all fields before those that C maintains, and owns it and what it points to. */
struct flow {
    struct streams streams;
    /* A struct ring_direction. */
    uint64_t direction;
    /* The words that devices write, by the device's addresses. */
    uint64_t produced_word;
    uint64_t consumed_word;
    /* The data, by the device's address. */
    uint64_t ring;
    uint64_t ring_bytes;
    /* The largest chunk, and the least of a message that has several. */
    uint64_t chunk_bytes;
    uint64_t least_chunk_bytes;
    /* The largest message that may go to the caller's stream. */
    uint64_t small_bytes;
    /* After an entry's bytes in the ring: HOST_CHECKSUM_BYTES, or 0. */
    uint64_t checksum_bytes;
    /* The direction's user_buffers (ring.h) where larger messages are zero-copy; else 0. */
    uint64_t user_buffers;
    /* A function and its argument, called when entries have been enqueued: it wakes the peer. */
    uint64_t wake_peer;
    uint64_t wake_argument;
    /* Address of this end's doorbell, rung when a message of a driven flow is enqueued. */
    uint64_t doorbell;
    /* A message of bytes; its numbers are filled in for each. */
    struct message_header bytes_header;
    bool is_outgoing;

    /* Maintained by C, 0 at first. */
    bool is_driven; /* by a carrier's threads */
    uint32_t is_being_driven; /* one thread is in native_drive */
    uint32_t is_requested;    /* it has to look once more */
    uint64_t first_queued, last_queued; /* messages that are not enqueued */
    /* Guards the queue, its messages and what follows. Whoever holds it takes no other lock but a stream's. */
    pthread_mutex_t lock;
    uint64_t sequence; /* messages begun */
    uint64_t begun;    /* entries of all of them */
    uint64_t count;    /* entries enqueued */
    uint64_t awaited;  /* the highest value of the peer's counter that an entry depends on */
    failure failed;
    /* Of the sender, slots as byte counts that never wrap: where the next begins, where the oldest in
     * use begins, where each ends. And the entries whose slots are free again. */
    uint64_t head, tail, ends[RING_ENTRIES], freed;
    uint64_t caller_stream; /* of the last entry, if it went to a caller's */
    bool on_caller_stream;
};

/* How far a message is. WAITING while the peer has to move first; ENQUEUED once all its entries are; REFUSED
 * if the next entry is not its own; FAILED if the driver was. */
enum progress { WAITING, ENQUEUED, REFUSED, FAILED };

/* What Python has filled in of a message's header: C completes it when the message is begun. */
enum header_state { HEADER_OF_BYTES, HEADER_WITHOUT_NUMBERS, HEADER_COMPLETE };

/* One message that a flow sends or receives. Python makes it; it stays where it is until it is enqueued, or its
 * flow was aborted. */
struct transfer {
    uint64_t flow;
    uint64_t address;
    uint64_t nbytes;
    uint64_t caller_stream;
    uint64_t event; /* what it has to follow, unless 0 */
    uint32_t tag;
    /* It follows what the caller's stream was given so far. Only its caller, then, may begin it. */
    uint32_t after_caller;
    uint32_t header_state; /* enum header_state */

    /* Maintained by C, 0 at first. */
    uint32_t progress;
    uint32_t on_caller_stream;      /* all of it went there */
    uint32_t completes_at_receiver; /* when the receiver's device has consumed it, not the sender's */
    uint64_t offset;                /* bytes enqueued */
    uint64_t count;                 /* entries that its flow has enqueued with it */
    uint64_t first;                 /* number of its first entry */
    uint64_t claimed;               /* of its entries, those that a carrier may receive into the tensor */
    uint64_t next_queued;
    struct message_header header;
};

/* Before all else, once its fields are set. */
void native_init_flow(struct flow *flow);

/* Queue a message. A carrier may from then on write to the tensor of one that is received. */
void native_begin(struct transfer *transfer);

/* Enqueue as many entries as possible of a message and of those before it, and begin it unless it has been: an
 * exception in Python may have come before native_begin. Returns its progress, or that of the one before it that
 * failed or was refused. `by_caller`: in a thread that may enqueue on the message's `caller_stream`, where order
 * allows. */
uint32_t native_progress(struct transfer *transfer, bool by_caller);

/* Empty the queue; no thread uses its messages any more. */
void native_abort(struct flow *flow);

/* Enqueue as many entries as possible, of host memory, without any lock and without blocking; ring the doorbell if
 * a message is then enqueued or refused, or is small and may go on. If a thread is at it, maybe this one, that does
 * so. */
void native_drive(struct flow *flow);

/* Queue messages of several flows, unless they are, and progress them as native_progress does. Polls the peers for
 * up to `microseconds`. All have one `caller_stream`, the calling thread's. Returns ENQUEUED once all messages are
 * enqueued and that stream waits for the first `waited`; otherwise see the progress of each. */
uint32_t native_exchange(struct transfer *const *transfers, uint32_t count, uint32_t microseconds,
                         uint32_t waited);

#endif
