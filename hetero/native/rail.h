/* One way of a link to its peer, whatever it is made of: a NIC's port with RDMA (verbs.h) or a TCP
 * connection (tcp.h).
 *
 * All operations are called with the lock of the carrier, and none waits, but for those that say so. */
#ifndef HETERO_RAIL_H
#define HETERO_RAIL_H

#include <stdbool.h>
#include <stdint.h>

#define RAIL_TEXT_BYTES 256

enum message { MESSAGE_RECORD, MESSAGE_DATA, MESSAGE_CREDIT, MESSAGE_READ };

struct engine;
struct rail;

struct rail_operations {
    /* Give a message on its way; 0 or an errno. The offset is that of a record in either end's control
     * segment, the place that of data in the sending ring and in the peer's receiving one. */
    int (*post_record)(struct rail *rail, uint32_t number, uint64_t offset);
    int (*post_data)(struct rail *rail, uint32_t number, uint64_t slot, uint64_t nbytes);
    int (*post_credit)(struct rail *rail, uint32_t released);
    /* Read a byte of this end's receiving ring back, so that what came before it can be seen. NULL where
     * arriving makes it visible. */
    int (*post_read)(struct rail *rail, uint64_t last_byte);
    bool (*has_room)(const struct rail *rail, enum message message);
    /* How many bytes have been posted and not confirmed; it notes its speed (speed_note) by itself then.
     * NULL where what completes has been confirmed, and speed.c keeps the account. */
    uint64_t (*bytes_under_way)(const struct rail *rail);
    /* Whether something is under way whose end wakes nobody. NULL where nothing ever is. */
    bool (*is_busy)(const struct rail *rail);
    /* Whether something has been under way since before this time; the reason is then in `reason`. */
    bool (*is_late)(const struct rail *rail, double before, char *reason);
    /* When the peer's end last answered, and when it was last sent something, also again. NULL where
     * being late is proof enough of a loss. */
    double (*last_heard)(const struct rail *rail);
    double (*last_asked)(const struct rail *rail);
    /* Whether nothing more can come in, the peer having ended. NULL where what was confirmed to the peer has
     * arrived: nothing comes behind it. */
    bool (*is_drained)(const struct rail *rail);
    /* Tell the engine (engine_sent and so on) what has happened; whether anything has. */
    bool (*poll)(struct rail *rail, struct engine *engine);
    /* Have event_fd become readable with the next event, 0 or an errno; and take it. NULL where there is
     * no descriptor. */
    int (*request_notification)(struct rail *rail);
    void (*acknowledge)(struct rail *rail);
    /* Let it go both ways; 0 or an errno. Called without the lock. NULL where it does already. */
    int (*start)(struct rail *rail);
    /* Nothing goes out from here on. */
    void (*stop)(struct rail *rail);
    /* Wait until nothing comes in any more either. Called without the lock, after `stop`. */
    void (*join)(struct rail *rail);
    /* Take one event of the rail's device, which must be there; true, with the reason, if the rail is
     * lost. May be called beside all others. NULL where there is no device. */
    bool (*handle_async_event)(struct rail *rail, char *reason);
    /* Give back all it has. Called without the lock, once all rails are stopped and joined. */
    void (*close)(struct rail *rail);
};

struct rail {
    const struct rail_operations *operations;
    uint8_t index;
    bool live;
    bool reads;      /* whether data have to be read back, and can still be */
    bool is_reading;
    bool confirms;   /* whether what is sent has arrived, or at least can be proved to by a read-back */
    bool reads_back; /* whether this end has to */
    bool peer_reads_back;
    int event_fd; /* -1 where nobody has to wait for it */
    int async_fd; /* likewise, of its device */
    int credits_under_way; /* kept by the rail */
    /* Kept by speed.c. */
    uint64_t bytes_under_way;
    double bytes_per_second; /* 0 until it is known */
    double last_completion;
    double answered_elsewhere; /* kept by engine.c: since when others are answered and it is late; or 0 */
};

#endif
