/* One path of a link to its peer, behind one interface: a NIC's port with RDMA (verbs.h) or a TCP
 * connection (tcp.h).
 *
 * Unless an operation says otherwise, call it with the engine's lock; it does not block. */
#ifndef HETERO_RAIL_H
#define HETERO_RAIL_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#define RAIL_TEXT_BYTES 256

/* Write why something failed, into RAIL_TEXT_BYTES; returns false. */
__attribute__((format(printf, 2, 3))) static inline bool set_reason(char *reason, const char *format,
                                                                    ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(reason, RAIL_TEXT_BYTES, format, arguments);
    va_end(arguments);
    return false;
}

enum message { MESSAGE_RECORD, MESSAGE_DATA, MESSAGE_CREDIT, MESSAGE_READ };
/* Of those that are sent. */
#define RAIL_MESSAGES 3

struct engine;
struct rail;

struct rail_operations {
    int limits[RAIL_MESSAGES]; /* messages of each kind in flight */
    /* Records, data and credits of messages below this size stay on one rail while less than it is under
     * way there. 0 where each message costs the same on any rail. */
    uint64_t small_bytes;
    /* Post a message; 0 or an errno. `offset` is the record's in the control segment of either end,
     * `slot` the data's offset in the sending ring and in the peer's receiving one. */
    int (*post_record)(struct rail *rail, uint32_t number, uint64_t offset);
    int (*post_data)(struct rail *rail, uint32_t number, uint64_t slot, uint64_t nbytes);
    int (*post_credit)(struct rail *rail, uint32_t released);
    /* Send what has been posted; whether any of it has completed. NULL where posting sends. */
    bool (*flush)(struct rail *rail);
    /* Read a byte of this end's receiving ring back, which makes the writes before it visible to the
     * device. NULL where arrived data are visible. */
    int (*post_read)(struct rail *rail, uint64_t last_byte);
    /* Bytes posted and not acknowledged; the rail then measures its bandwidth itself
     * (speed_add_sample). NULL where a completion is an acknowledgement, and speed.c counts. */
    uint64_t (*bytes_in_flight)(const struct rail *rail);
    /* Whether the engine has to poll for a completion. NULL where an event always wakes it. */
    bool (*is_busy)(const struct rail *rail);
    /* Whether something posted before this time is unacknowledged; why, in `reason`. */
    bool (*is_late)(const struct rail *rail, double before, char *reason);
    /* When the peer's host last acknowledged something; when something was last sent to it,
     * retransmissions included. NULL where `is_late` alone means that the rail is lost. */
    double (*last_ack)(const struct rail *rail);
    double (*last_send)(const struct rail *rail);
    /* Report what has happened to the engine (engine_send_completed and so on); whether anything did. */
    bool (*poll)(struct rail *rail, struct engine *engine);
    /* Make event_fd readable at the next event, 0 or an errno; clear it, false if that fails. NULL without
     * event_fd. */
    int (*request_notification)(struct rail *rail);
    bool (*acknowledge)(struct rail *rail);
    /* Start sending and receiving; 0 or an errno, and then stop and join it. Without the lock. NULL where it
     * has started. */
    int (*start)(struct rail *rail);
    /* Send nothing more, and have what is in flight fail. */
    void (*stop)(struct rail *rail);
    /* Wait until nothing arrives any more. Without the lock, after `stop`. */
    void (*join)(struct rail *rail);
    /* Free everything. Without the lock, once all rails are stopped and joined. */
    void (*close)(struct rail *rail);
};

struct rail {
    const struct rail_operations *operations;
    uint8_t index;
    bool live;
    bool is_reading_back;
    bool confirms_delivery; /* a completion means that the bytes are in the peer's memory */
    bool peer_reads_back;
    int event_fd; /* -1 where nobody waits for it */
    int in_flight[RAIL_MESSAGES];
    /* Maintained by speed.c. */
    uint64_t bytes_in_flight;
    double bytes_per_second; /* 0 while unknown */
    double last_completion;
    uint64_t bytes_sent; /* of entries' data, retransmissions included */
    double suspected_since; /* kept by check_rails: late while another rail is acknowledged; else 0 */
    char loss[RAIL_TEXT_BYTES]; /* why it was lost, until that is reported */
    bool may_have_ended; /* its loss is what the end of the peer looks like */
};

#endif
