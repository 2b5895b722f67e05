/* The part of libibverbs that is used, declared here: its ABI of version 1.1, which rdma-core has kept.
 * The build needs neither its headers nor the library, which is loaded when a link first uses RDMA.
 * A test compares every size, offset and value with rdma-core's headers. */
#ifndef HETERO_IBVERBS_H
#define HETERO_IBVERBS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    IBV_ACCESS_LOCAL_WRITE = 1,
    IBV_ACCESS_REMOTE_WRITE = 2,
    IBV_ACCESS_REMOTE_READ = 4,
};
enum { IBV_QPT_RC = 2 };
enum { IBV_QPS_INIT = 1, IBV_QPS_RTR = 2, IBV_QPS_RTS = 3, IBV_QPS_ERR = 6 };
enum { IBV_LINK_LAYER_ETHERNET = 2 };
enum {
    IBV_QP_STATE = 1 << 0,
    IBV_QP_ACCESS_FLAGS = 1 << 3,
    IBV_QP_PKEY_INDEX = 1 << 4,
    IBV_QP_PORT = 1 << 5,
    IBV_QP_AV = 1 << 7,
    IBV_QP_PATH_MTU = 1 << 8,
    IBV_QP_TIMEOUT = 1 << 9,
    IBV_QP_RETRY_CNT = 1 << 10,
    IBV_QP_RNR_RETRY = 1 << 11,
    IBV_QP_RQ_PSN = 1 << 12,
    IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13,
    IBV_QP_MIN_RNR_TIMER = 1 << 15,
    IBV_QP_SQ_PSN = 1 << 16,
    IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
    IBV_QP_DEST_QPN = 1 << 20,
};
enum {
    IBV_WR_RDMA_WRITE_WITH_IMM = 1,
    IBV_WR_SEND_WITH_IMM = 3,
    IBV_WR_RDMA_READ = 4,
};
enum { IBV_SEND_SIGNALED = 2, IBV_SEND_INLINE = 8 };
enum { IBV_WC_SUCCESS = 0, IBV_WC_RETRY_EXC_ERR = 12 };
enum { IBV_WC_RECV = 128, IBV_WC_RECV_RDMA_WITH_IMM = 129 };

struct ibv_device;
struct ibv_pd;
struct ibv_context;
struct ibv_cq;
struct ibv_qp;
struct ibv_send_wr;
struct ibv_recv_wr;
struct ibv_wc;

/* The calls that go straight to a device's driver, at their offsets in the table. */
struct ibv_context_ops {
    void *others_before[11];
    int (*poll_cq)(struct ibv_cq *cq, int entries, struct ibv_wc *found);
    int (*req_notify_cq)(struct ibv_cq *cq, int solicited_only);
    void *others_between[12];
    int (*post_send)(struct ibv_qp *qp, struct ibv_send_wr *request, struct ibv_send_wr **refused);
    int (*post_recv)(struct ibv_qp *qp, struct ibv_recv_wr *request, struct ibv_recv_wr **refused);
    void *others_behind[5];
};

struct ibv_context {
    struct ibv_device *device;
    struct ibv_context_ops ops;
    int cmd_fd;
    int async_fd;
    int num_comp_vectors;
    pthread_mutex_t mutex;
    void *abi_compat;
};

struct ibv_comp_channel {
    struct ibv_context *context;
    int fd;
    int refcnt;
};

/* These four are prefixes: libibverbs has private fields after them. */
struct ibv_cq {
    struct ibv_context *context;
    struct ibv_comp_channel *channel;
    void *cq_context;
    uint32_t handle;
    int cqe;
};

struct ibv_qp {
    struct ibv_context *context;
    void *qp_context;
    struct ibv_pd *pd;
    struct ibv_cq *send_cq;
    struct ibv_cq *recv_cq;
    void *srq;
    uint32_t handle;
    uint32_t qp_num;
};

struct ibv_mr {
    struct ibv_context *context;
    struct ibv_pd *pd;
    void *addr;
    size_t length;
    uint32_t handle;
    uint32_t lkey;
    uint32_t rkey;
};

struct ibv_device_attr {
    char fw_ver[64];
    uint64_t guids[2];
    uint64_t max_mr_size;
    uint64_t page_size_cap;
    uint32_t vendor[3];
    int max_qp;
    int max_qp_wr;
    uint8_t others[116];
};

/* The fields that the library writes for callers of version 1.1. */
struct ibv_port_attr {
    int state;
    int max_mtu;
    int active_mtu;
    int gid_tbl_len;
    uint32_t port_cap_flags;
    uint32_t max_msg_sz;
    uint32_t counters[2];
    uint16_t pkey_tbl_len;
    uint16_t lid;
    uint16_t sm_lid;
    uint8_t others[8];
    uint8_t link_layer;
    uint8_t flags;
    uint16_t port_cap_flags2;
};

struct ibv_qp_cap {
    uint32_t max_send_wr;
    uint32_t max_recv_wr;
    uint32_t max_send_sge;
    uint32_t max_recv_sge;
    uint32_t max_inline_data;
};

struct ibv_qp_init_attr {
    void *qp_context;
    struct ibv_cq *send_cq;
    struct ibv_cq *recv_cq;
    void *srq;
    struct ibv_qp_cap cap;
    int qp_type;
    int sq_sig_all;
};

union ibv_gid {
    uint8_t raw[16];
    uint64_t halves[2];
};

struct ibv_global_route {
    union ibv_gid dgid;
    uint32_t flow_label;
    uint8_t sgid_index;
    uint8_t hop_limit;
    uint8_t traffic_class;
};

struct ibv_ah_attr {
    struct ibv_global_route grh;
    uint16_t dlid;
    uint8_t sl;
    uint8_t src_path_bits;
    uint8_t static_rate;
    uint8_t is_global;
    uint8_t port_num;
};

struct ibv_qp_attr {
    int qp_state;
    int cur_qp_state;
    int path_mtu;
    int path_mig_state;
    uint32_t qkey;
    uint32_t rq_psn;
    uint32_t sq_psn;
    uint32_t dest_qp_num;
    unsigned int qp_access_flags;
    struct ibv_qp_cap cap;
    struct ibv_ah_attr ah_attr;
    struct ibv_ah_attr alt_ah_attr;
    uint16_t pkey_index;
    uint16_t alt_pkey_index;
    uint8_t en_sqd_async_notify;
    uint8_t sq_draining;
    uint8_t max_rd_atomic;
    uint8_t max_dest_rd_atomic;
    uint8_t min_rnr_timer;
    uint8_t port_num;
    uint8_t timeout;
    uint8_t retry_cnt;
    uint8_t rnr_retry;
    uint8_t alt_port_num;
    uint8_t alt_timeout;
    uint32_t rate_limit;
};

struct ibv_sge {
    uint64_t addr;
    uint32_t length;
    uint32_t lkey;
};

struct ibv_send_wr {
    uint64_t wr_id;
    struct ibv_send_wr *next;
    struct ibv_sge *sg_list;
    int num_sge;
    int opcode;
    unsigned int send_flags;
    uint32_t imm_data; /* in network byte order */
    union {
        struct {
            uint64_t remote_addr;
            uint32_t rkey;
        } rdma;
        uint64_t largest[4];
    } wr;
    uint64_t others[7];
};

struct ibv_recv_wr {
    uint64_t wr_id;
    struct ibv_recv_wr *next;
    struct ibv_sge *sg_list;
    int num_sge;
};

struct ibv_wc {
    uint64_t wr_id;
    int status;
    int opcode;
    uint32_t vendor_err;
    uint32_t byte_len;
    uint32_t imm_data; /* in network byte order */
    uint32_t qp_num;
    uint32_t src_qp;
    unsigned int wc_flags;
    uint16_t pkey_index;
    uint16_t slid;
    uint8_t sl;
    uint8_t dlid_path_bits;
};

/* The library's functions, under their names. */
struct ibverbs {
    struct ibv_device **(*get_device_list)(int *count);
    void (*free_device_list)(struct ibv_device **list);
    const char *(*get_device_name)(struct ibv_device *device);
    struct ibv_context *(*open_device)(struct ibv_device *device);
    int (*close_device)(struct ibv_context *context);
    int (*query_device)(struct ibv_context *context, struct ibv_device_attr *attributes);
    int (*query_port)(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attributes);
    struct ibv_pd *(*alloc_pd)(struct ibv_context *context);
    int (*dealloc_pd)(struct ibv_pd *domain);
    struct ibv_mr *(*reg_mr)(struct ibv_pd *domain, void *address, size_t nbytes, int access);
    int (*dereg_mr)(struct ibv_mr *region);
    struct ibv_comp_channel *(*create_comp_channel)(struct ibv_context *context);
    int (*destroy_comp_channel)(struct ibv_comp_channel *channel);
    int (*get_cq_event)(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **context);
    void (*ack_cq_events)(struct ibv_cq *cq, unsigned int count);
    struct ibv_cq *(*create_cq)(struct ibv_context *context, int entries, void *owner,
                                struct ibv_comp_channel *channel, int vector);
    int (*destroy_cq)(struct ibv_cq *cq);
    struct ibv_qp *(*create_qp)(struct ibv_pd *domain, struct ibv_qp_init_attr *wanted);
    int (*modify_qp)(struct ibv_qp *qp, struct ibv_qp_attr *wanted, int mask);
    int (*destroy_qp)(struct ibv_qp *qp);
    const char *(*wc_status_str)(int status);
    /* NULL in releases before 34, which have no dma-buf support. */
    struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *domain, uint64_t offset, size_t nbytes,
                                    uint64_t address, int fd, int access);
};

/* Load the library at the first call; false with the reason in `error`, of RAIL_TEXT_BYTES. From any
 * thread. */
bool ibverbs_load(char *error);
/* Valid once ibverbs_load has returned true. */
extern struct ibverbs ibv;

#endif
