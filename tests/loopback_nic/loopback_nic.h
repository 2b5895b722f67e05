/* NICs within one process: what loopback_carry.c and loopback_verbs.c share. */
#ifndef LOOPBACK_NIC_H
#define LOOPBACK_NIC_H

#include "ibverbs.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#define DEVICES 4
#define PAIRS 4096
#define COMPLETIONS 8192
#define HELD 1024
#define REGIONS 4096
#define DESCRIPTORS 1024
#define MAX_MESSAGE (1u << 30)
#define MAX_REQUESTS 16384

/* What the project itself has no use for. */
enum { IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_READ };
enum { IBV_WC_LOC_PROT_ERR = 4, IBV_WC_WR_FLUSH_ERR = 5 };
enum { IBV_PORT_DOWN = 1, IBV_PORT_ACTIVE = 4, IBV_MTU_4096 = 5 };

struct ibv_device {
    char name[8];
};

struct ibv_pd {
    struct ibv_context *context;
};

/* Numbers that tests use. CUT fails requests, SILENT never completes them. */
enum fault { FINE, CUT, SILENT };

struct held {
    void *target;
    void *bytes;
    size_t nbytes;
};

/* What tests set, and see of a NIC; in library.py too. Zero for one that is well. */
struct settings {
    _Atomic int fault; /* enum fault */
    int completions_fd;
    bool holds_writes; /* rings that may be read back are written only when they have been read */
    bool cannot_read;
    bool refuses_memory; /* by its address */
    bool is_down;
    uint32_t max_message;
    int max_requests;
    long reads;
    long writes; /* of records and data, to it */
};

struct nic {
    struct ibv_device device;
    struct settings *settings;
    struct held held[HELD];
    int held_count;
};

struct channel {
    struct ibv_comp_channel channel;
    struct ibv_cq *cq;
    int events_fd; /* to write one to */
};

struct queue {
    struct ibv_cq cq;
    struct ibv_wc found[COMPLETIONS];
    unsigned int head, tail;
    bool armed;
};

struct pair {
    struct ibv_qp qp;
    struct nic *nic;
    int state;
    uint32_t peer;
    int receives;
    struct ibv_send_wr silent[64];
    int silent_count;
    bool is_used;
};

/* Hold it to use any of these. */
extern pthread_mutex_t loopback_lock;
extern struct nic loopback_nics[DEVICES];
extern struct settings loopback_settings[DEVICES];
extern struct pair loopback_pairs[PAIRS];
/* By the region's number: what a NIC's address has to be raised by. A key is twice the number, and one
 * more where the region may be read back. */
extern uint64_t loopback_raised_by[REGIONS];
/* How bytes are copied where a GPU's memory may be among them; NULL for the CPU's own way. */
extern void (*loopback_copier)(uint64_t target, uint64_t source, uint64_t nbytes);

/* Called with the lock. */
void loopback_end_held(struct nic *nic, bool are_written);
void loopback_flush(struct pair *pair);

int loopback_post_send(struct ibv_qp *qp, struct ibv_send_wr *request, struct ibv_send_wr **refused);
int loopback_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *request, struct ibv_recv_wr **refused);
int loopback_poll_cq(struct ibv_cq *cq, int limit, struct ibv_wc *found);
int loopback_req_notify_cq(struct ibv_cq *cq, int solicited);

#endif
