/* What Python calls through ctypes (binding.py). Nothing here holds the GIL, and nothing blocks but the
 * GPU's driver.
 *
 * A flow is one direction of one end of a link over a ring: hetero/link/flow.py says what it does, ring.h
 * what lies where in memory. Python holds the link's lock around every call with a flow. */
#ifndef HETERO_NATIVE_H
#define HETERO_NATIVE_H

#include "host.h"
#include "ring.h"

#include <stdbool.h>
#include <stdint.h>

/* A checksum of the sources that the library was built from (setup.py). */
uint32_t native_version(void);

/* Return when either word is not what it was, or after so many microseconds. The core is given away
 * between looks, for another thread may have to run before a word can change. */
void native_spin(const uint32_t *word, uint32_t while_it_is, const uint32_t *other,
                 uint32_t while_other_is, uint32_t microseconds);

/* What loops that spin are made of: nanoseconds of a clock that never goes back, a rest between two looks,
 * and how many looks to take between two calls of the system. */
#define SPIN_LOOKS 32
int64_t spin_clock(void);
void spin_pause(void);

enum vendor { CUDA, HIP };

/* Where a GPU's driver has the functions that streams are given work with. */
struct entry_points {
    uint64_t vendor;
    /* The first value that its streams cannot be made to wait for. */
    uint64_t end_of_counter;
    uint64_t copy;
    uint64_t wait_value;
    uint64_t write_value;
    uint64_t record_event;
    uint64_t wait_event;
};

/* Which of them has failed in the upper half, its answer in the lower; 0 if none has. */
typedef uint64_t failure;

enum step {
    STEP_WAIT_VALUE = 1,
    STEP_COPY,
    STEP_WRITE_VALUE,
    STEP_RECORD_EVENT,
    STEP_WAIT_EVENT,
    STEP_PAST_COUNTER,
    STEP_CHECKSUM
};

/* Copies go into one stream. The waits and writes of many-part messages may go into two others, which
 * an event joins with it, so that one copy runs on into the next. All three may be one. */
struct streams {
    struct entry_points driver;
    uint64_t copies;
    uint64_t waits;
    uint64_t writes;
    uint64_t join;
    /* Whether a caller's stream may be made to wait for a word: not where it is the calling thread. */
    bool callers_wait;
    /* Whether the last write was made on_side_stream, so that one among the copies must follow it. */
    bool writes_lag;
};

/* A word of registered host memory, by the device's address, and a value; no word if that is 0. */
struct word {
    uint64_t address;
    uint32_t value;
};

enum checksums { NO_CHECKSUM, APPEND_BEHIND_TARGET, VERIFY_SOURCE };

/* `checksum` is for streams of the host alone. */
struct move {
    enum checksums checksum;
    struct word after;
    uint64_t target;
    uint64_t source;
    uint64_t nbytes;
    struct word then;
};

/* The driver's copy, which differs in what it takes; its own answer. */
int driver_copy(uint64_t vendor, uint64_t function, uint64_t target, uint64_t source, size_t nbytes,
                void *stream);

/* Have the streams wait for a word, copy, and write a word; `on_side_stream` if this is one part of many. */
failure streams_move(struct streams *streams, const struct move *move, bool on_side_stream);
/* The wait for a word to come to a value, and its write, for one stream of a driver. */
failure native_wait_value(const struct entry_points *driver, uint64_t stream, uint64_t address,
                          uint32_t value);
failure native_write_value(const struct entry_points *driver, uint64_t stream, uint64_t address,
                           uint32_t value);
/* Have a stream go on behind an event of another. */
failure streams_wait_event(const struct streams *streams, uint64_t stream, uint64_t event);
/* Have a stream go on behind what another was given so far. */
failure streams_join(const struct streams *streams, uint64_t first, uint64_t then);

/* Python makes it with all fields but those that say otherwise, and keeps it and what it points to. */
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
    uint64_t chunk_bytes;
    /* Up to this a message may go into the caller's stream. */
    uint64_t small_bytes;
    /* What follows an entry's bytes in the ring: HOST_CHECKSUM_BYTES, or none. */
    uint64_t checksum_bytes;
    /* The direction's places, where a carrier takes larger messages out of the callers' tensors and puts
     * them there; else 0. */
    uint64_t places;
    /* The peer's doorbell, which is rung when entries have been enqueued; 0 where Python rings it. */
    uint64_t doorbell;
    bool is_outgoing;

    /* Kept by C, 0 at first. */
    uint64_t count;   /* entries enqueued */
    uint64_t offset;  /* bytes enqueued of the message that was last brought on */
    uint64_t awaited; /* the last value of the peer's counter that an entry needs */
    failure failed;
    /* The sender's slots: where the next begins and the oldest that is not free, in bytes counted on
     * and on; entries freed, in flight and the number of the oldest of those; where each of them ends. */
    uint64_t head, tail, freed, in_flight, oldest;
    uint64_t ends[RING_ENTRIES];
    uint64_t caller; /* whose stream the last entry went into */
    bool by_caller;  /* whether it was a caller's */
};

enum progress { WAITING, WHOLE, NEEDS_EVENT, REFUSED, FAILED };

/* Enqueue what can be of one message, which the flow sends or receives. WHOLE when nothing of it is left,
 * WAITING while the peer has to move first, NEEDS_EVENT where it is for the link's streams and nobody has
 * said what it must follow, REFUSED where the next entry is no part of what is to be received.
 * `is_callers_turn` has it go into the stream `caller`, where the order allows; else `event`, unless 0,
 * is what it must follow. */
uint32_t native_progress(struct flow *flow, const uint8_t *header, uint64_t address,
                         uint64_t nbytes, uint64_t offset, uint64_t event, bool has_event,
                         uint64_t caller, bool is_callers_turn);

/* One message of several that a caller sends and receives together. Python makes it. */
struct exchange_part {
    uint64_t flow; /* a struct flow, in which nothing waits */
    uint64_t address;
    uint64_t nbytes;

    /* Kept by C, 0 at first. */
    uint64_t offset; /* bytes enqueued */
    uint64_t count;  /* entries that its flow has enqueued with it */
    uint32_t progress;
    uint32_t by_caller; /* whether it went into the caller's stream */

    uint8_t header[RING_HEADER_BYTES];
};

/* Enqueue messages of several flows, looking for so many microseconds whether the peers have moved. All
 * begin behind what the stream `caller`, which is that of the calling thread, was given before. WHOLE when
 * all are enqueued and that stream goes on behind them; else WAITING, and each part says how far it is, or
 * FAILED, where the driver has failed after that. */
uint32_t native_exchange(struct exchange_part *parts, uint32_t count, uint64_t caller,
                         uint32_t microseconds);

#endif
