/* A rail over RDMA: a NIC's port at this end, its registrations, and a reliable connection to the
 * peer's. */
#ifndef HETERO_VERBS_H
#define HETERO_VERBS_H

#include "rail.h"

#include "ibverbs.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define VERBS_RECORDS 32
#define VERBS_DATA 16
#define VERBS_CREDITS 2
#define VERBS_SENDS (VERBS_RECORDS + VERBS_DATA + VERBS_CREDITS)

/* What Python has found out about this end. Mirrored in structures.py, as are those below. */
struct verbs_request {
    const char *device;
    uint8_t port;
    bool reads_back;     /* whether this end reads its ring back before data count as arrived */
    int32_t dmabuf;      /* descriptor of the rings' memory; -1 where it has none */
    uint64_t dmabuf_offset;
    uint64_t rings;      /* address of the sending ring, which the receiving one follows */
    uint64_t ring_bytes; /* of each */
    uint64_t control;    /* address of the control segment */
    uint32_t psn;
};

/* What the peer has to know of this end. */
struct verbs_connection_info {
    uint32_t qp;
    uint64_t receiving; /* the receiving ring, in the NIC's terms */
    uint32_t receiving_key;
    uint64_t control;
    uint32_t control_key;
    bool by_dmabuf;
};

/* How one queue pair finds another. */
struct verbs_route {
    uint32_t qp;
    uint32_t psn;
    uint32_t mtu;
    uint16_t lid;
    uint8_t gid[16];
    uint8_t gid_index; /* of this end */
    bool is_global;
};

struct verbs_peer {
    struct verbs_route route;
    uint64_t receiving;
    uint32_t receiving_key;
    uint64_t control;
    uint32_t control_key;
    bool reads_back;
};

struct verbs_rail {
    struct rail rail; /* the first, so that either is the other */
    bool inlines;
    struct verbs_request request;
    struct verbs_peer peer;
    struct ibv_context *context;
    struct ibv_pd *domain;
    struct ibv_mr *rings;
    struct ibv_mr *control;
    struct ibv_mr *landing_region;
    struct ibv_comp_channel *channel;
    struct ibv_cq *queue;
    struct ibv_qp *qp;
    struct ibv_qp *loopback_qp; /* joined with itself for read-backs; NULL where there are none */
    uint64_t rings_base; /* the sending ring in the NIC's terms */
    uint8_t landing;     /* where a read-back puts its byte, which nobody looks at */
    int under_way[4];    /* requests, by what they carry */
    double reading_since;
    double posted_at[VERBS_SENDS]; /* a ring: requests complete in order */
    int oldest;
    int posted;
};

/* What a port says of itself, beside its addresses, which sysfs has. */
struct verbs_port {
    int32_t state;
    int32_t mtu; /* the number of its largest packet; a larger number is a larger packet */
    uint32_t max_message;
    uint16_t lid;
    bool is_ethernet;
};

bool verbs_query_port(const char *device, uint8_t number, struct verbs_port *found, char *error);

extern const struct rail_operations verbs_operations;

/* Each returns false with the reason in `error`, of RAIL_TEXT_BYTES. */
bool verbs_open(struct verbs_rail *rail, const struct verbs_request *request,
                struct verbs_connection_info *info, char *error);
/* `own` is the way to this end's port; its queue pair and packet number are found here. */
bool verbs_connect(struct verbs_rail *rail, const struct verbs_peer *peer,
                   const struct verbs_route *own, char *error);
int verbs_post_receive(struct verbs_rail *rail);
void verbs_close(struct rail *rail);

#endif
