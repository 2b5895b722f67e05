/* What is enqueued on streams of a device: copies, waits for words and writes of words.
 *
 * Nothing here holds the GIL, and nothing blocks but the GPU's driver. */
#ifndef HETERO_STREAMS_H
#define HETERO_STREAMS_H

#include "host.h"

/* Upper half: the enum step that failed; lower half: what the driver returned. 0 for success. */
typedef uint64_t failure;

enum step {
    STEP_WAIT_VALUE = 1,
    STEP_COPY,
    STEP_WRITE_VALUE,
    STEP_RECORD_EVENT,
    STEP_WAIT_EVENT,
    STEP_COUNTER_LIMIT
};

/* Where copies go and, joined with it by an event, the waits and writes of messages of several chunks. All
 * three may be one. */
struct streams {
    struct entry_points driver;
    uint64_t copies;
    uint64_t waits;
    uint64_t writes;
    uint64_t join_event;
    /* Whether the last write went to the side stream: one among the copies must then follow it. */
    bool last_write_on_side;
};

/* A GPU's asynchronous copy; returns the driver's code. */
int driver_copy(const struct entry_points *driver, uint64_t stream, const struct copy_step *step);

/* Whether a caller's stream can wait for a word: not where it is the calling thread, whose work is complete
 * when a call returns. */
static inline bool caller_can_wait(const struct streams *streams)
{
    return streams->driver.vendor != HOST;
}

/* `on_side_stream` for an entry that others of its message precede or follow. */
failure streams_enqueue(struct streams *streams, const struct copy_step *step, bool on_side_stream);
/* Make one stream of a driver wait until a word has come to a value, or write it. */
failure native_wait_value(const struct entry_points *driver, uint64_t stream, uint64_t address,
                          uint32_t value);
failure native_write_value(const struct entry_points *driver, uint64_t stream, uint64_t address,
                           uint32_t value);
/* Make a stream wait for all work enqueued on another so far. */
failure streams_wait_stream(const struct streams *streams, uint64_t stream, uint64_t other);

#endif
