/* A rail over RDMA: a NIC's port, its memory registrations, and a reliable connection to the peer's. */
#ifndef HETERO_VERBS_H
#define HETERO_VERBS_H

#include "engine.h"
#include "ibverbs.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define VERBS_RECORDS 32
#define VERBS_DATA 16
#define VERBS_CREDITS 2
#define VERBS_SENDS (VERBS_RECORDS + VERBS_DATA + VERBS_CREDITS)

/* What the other end needs to connect to one end of a rail and to write to it (docs/wire.md). */
struct verbs_end {
    uint32_t qp;
    uint32_t psn;
    uint64_t receiving; /* the receiving ring, by the NIC's address */
    uint32_t receiving_key;
    uint64_t control;
    uint32_t control_key;
    bool reads_back;
};

/* How packets from a port reach another. */
struct verbs_route {
    uint32_t mtu;
    uint16_t lid;
    uint8_t gid[16];
    uint8_t gid_index; /* of this end */
    bool is_global;
};

struct verbs_rail {
    struct rail rail; /* first, so that a pointer to either is a pointer to both */
    const struct engine_options *options;
    uint8_t port;
    bool can_inline;
    struct verbs_end own, peer;
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_mr *rings;
    struct ibv_mr *control;
    struct ibv_mr *read_back_mr;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_qp *loopback_qp; /* connected to itself, for read-backs; NULL where none are needed */
    uint64_t rings_base;    /* the sending ring, by the NIC's address */
    uint8_t read_back_byte; /* target of a read-back; its value does not matter */
    double reading_since;
    double posted_at[VERBS_SENDS]; /* a ring: requests complete in order */
    int oldest;
    int posted;
};

/* A port's attributes. Its addresses are in sysfs. */
struct verbs_port {
    int32_t state;
    int32_t mtu; /* enum ibv_mtu: a larger number is a larger packet */
    uint32_t max_message;
    uint16_t lid;
    bool is_ethernet;
};

bool verbs_query_port(const char *device, uint8_t number, struct verbs_port *found, char *error);

extern const struct rail_operations verbs_operations;

/* Each returns false with the reason in `error`, of RAIL_TEXT_BYTES. */
bool verbs_open(struct verbs_rail *rail, const char *device, char *error);
/* `own` is the route from this end's port to itself. */
bool verbs_connect(struct verbs_rail *rail, const struct verbs_end *peer,
                   const struct verbs_route *route, const struct verbs_route *own, char *error);
int verbs_post_receive(struct verbs_rail *rail);
void verbs_close(struct rail *rail);

#endif
