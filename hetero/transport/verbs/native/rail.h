/* One rail: a NIC's port at this end, its registrations, and a reliable connection to the peer's.
 * Nothing here waits. Not for several threads at once, but for what says so. */
#ifndef HETERO_RAIL_H
#define HETERO_RAIL_H

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RAIL_TEXT_BYTES 256
#define RAIL_RECORDS 32
#define RAIL_DATA 16
#define RAIL_CREDITS 2
#define RAIL_SENDS (RAIL_RECORDS + RAIL_DATA + RAIL_CREDITS)

/* What Python has found out about this end. Mirrored in forwarder.py, as are the two below. */
struct rail_request {
    const char *device;
    uint8_t port;
    bool reads_back;     /* whether this end reads its ring back before data count as arrived */
    int32_t dmabuf;      /* descriptor of the rings' memory; -1 where it has none */
    uint64_t dmabuf_offset;
    uint64_t rings;      /* address of the sending ring, which the receiving one follows */
    uint64_t ring_bytes; /* of each */
    uint64_t control;    /* address of the control segment */
    uint64_t control_bytes;
    uint32_t record_bytes;
    uint32_t psn;
};

/* What the peer has to know of this end. */
struct rail_ending {
    uint32_t pair;
    uint32_t loop_pair; /* joined with itself for read-backs; 0 where there is none */
    uint64_t receiving; /* the receiving ring, in the NIC's terms */
    uint32_t receiving_key;
    uint64_t control;
    uint32_t control_key;
    bool by_dmabuf;
};

/* How one queue pair finds another. */
struct rail_route {
    uint32_t pair;
    uint32_t psn;
    uint32_t mtu;
    uint16_t lid;
    uint8_t gid[16];
    uint8_t gid_index; /* of this end */
    bool is_global;
};

struct rail_peer {
    struct rail_route route;
    uint64_t receiving;
    uint32_t receiving_key;
    uint64_t control;
    uint32_t control_key;
    bool reads_back;
};

enum rail_kind { RAIL_RECORD, RAIL_DATUM, RAIL_CREDIT, RAIL_READ };

struct rail {
    uint8_t index;
    bool live;
    bool reads; /* whether it may read back; false once it has been stopped */
    bool is_reading;
    bool inlines;
    struct rail_request request;
    struct rail_peer peer;
    struct ibv_context *context;
    struct ibv_pd *domain;
    struct ibv_mr *rings;
    struct ibv_mr *control;
    struct ibv_mr *landing_region;
    struct ibv_comp_channel *channel;
    struct ibv_cq *queue;
    struct ibv_qp *pair;
    struct ibv_qp *loop;
    uint64_t rings_base; /* the sending ring in the NIC's terms */
    uint8_t landing;     /* where a read-back puts its byte, which nobody looks at */
    int under_way[4];    /* requests, by kind */
    uint64_t bytes_under_way;
    double reading_since;
    double posted_at[RAIL_SENDS]; /* a ring: requests complete in order */
    int oldest;
    int posted;
};

/* Each returns false with the reason in `error`, of RAIL_TEXT_BYTES. */
bool rail_open(struct rail *rail, const struct rail_request *request, struct rail_ending *ending,
               char *error);
bool rail_connect(struct rail *rail, const struct rail_peer *peer, const struct rail_route *loop,
                  char *error);

/* The offsets are those in either end's ring or control segment; each returns 0 or an errno. */
int rail_post_record(struct rail *rail, uint32_t number, uint64_t offset, double now);
int rail_post_data(struct rail *rail, uint32_t number, uint64_t place, uint64_t nbytes, double now);
int rail_post_credit(struct rail *rail, uint32_t released, double now);
int rail_post_read(struct rail *rail, uint64_t last_byte, double now);
int rail_post_receive(struct rail *rail);

/* A request has completed. */
void rail_completed(struct rail *rail, enum rail_kind kind, uint64_t nbytes);
bool rail_has_room(const struct rail *rail, enum rail_kind kind);
bool rail_is_busy(const struct rail *rail);
/* Whether a request has been under way since before this time; the reason is then in `reason`. */
bool rail_is_late(const struct rail *rail, double before, char *reason);

/* Nothing goes out or comes in from here on; what is under way is flushed. */
void rail_stop(struct rail *rail);
void rail_stop_reading(struct rail *rail);
/* Take one event of the device, which must be there; true, with the reason, if the rail is lost.
 * May be called beside all others. */
bool rail_news(struct rail *rail, char *reason);
void rail_close(struct rail *rail);

#endif
