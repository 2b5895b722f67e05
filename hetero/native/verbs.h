/* A rail over RDMA: a NIC's port, its memory registrations, and a reliable connection to the peer's. */
#ifndef HETERO_VERBS_H
#define HETERO_VERBS_H

#include "engine.h"

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

/* A port's attributes. Its addresses are in sysfs. */
struct verbs_port {
    int32_t state;
    int32_t mtu; /* enum ibv_mtu: a larger number is a larger packet */
    uint32_t max_message;
    uint16_t lid;
    bool is_ethernet;
};

/* On failure these return false, or NULL, with the reason in `error`, of RAIL_TEXT_BYTES. */
bool verbs_query_port(const char *device, uint8_t number, struct verbs_port *found, char *error);
/* Of `made` the packet number is given; `by_dmabuf` is how the NIC addresses the rings. `options` must
 * outlive the rail. */
struct rail *verbs_open(const struct engine_options *options, const char *device, uint8_t port,
                        struct verbs_end *made, bool *by_dmabuf, char *error);
/* The routes lead from this rail's port to the peer's, and to itself. */
bool verbs_connect(struct rail *rail, const struct verbs_end *peer, const struct verbs_route *route,
                   const struct verbs_route *own, char *error);

#endif
