/* A library that is opened in the place of libibverbs, between both ends of a link in one process: a
 * write is a copy, and a request completes before it has been posted. For tests. */
#include "ibverbs.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

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
enum { IBV_WC_LOC_PROT_ERR = 4, IBV_WC_WR_FLUSH_ERR = 5, IBV_WC_RETRY_EXC_ERR = 12 };
enum { IBV_PORT_DOWN = 1, IBV_MTU_4096 = 5 };

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
    int async_fd;
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

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct nic nics[DEVICES];
struct settings loopback_settings[DEVICES];
static struct pair pairs[PAIRS];
/* By the region's number: what a NIC's address has to be raised by. A key is twice the number, and one
 * more where the region may be read back. */
static uint64_t raised_by[REGIONS];
static uint32_t region_count;
/* By its descriptor: where a dma-buf begins in memory; 0 for one that is refused. */
uint64_t loopback_dmabufs[DESCRIPTORS];
_Atomic long loopback_open_objects;
/* How bytes are copied where a GPU's memory may be among them; NULL for the CPU's own way. */
void (*loopback_copier)(uint64_t target, uint64_t source, uint64_t nbytes);
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_nics(void)
{
    static const char *const names[DEVICES] = {"a0", "a1", "b0", "b1"};

    for (int index = 0; index < DEVICES; index++) {
        strcpy(nics[index].device.name, names[index]);
        nics[index].settings = &loopback_settings[index];
    }
}

void loopback_break(int index, int fault)
{
    loopback_settings[index].fault = fault;
}

/* Carrying. Called with the lock. */

static void complete(struct queue *queue, struct ibv_wc completion)
{
    if (queue->tail - queue->head == COMPLETIONS)
        abort();
    queue->found[queue->tail++ % COMPLETIONS] = completion;
    if (queue->armed) {
        queue->armed = false;
        eventfd_write(queue->cq.channel->fd, 1);
    }
}

static void finish(struct pair *pair, const struct ibv_send_wr *request, int status)
{
    static const int opcodes[] = {
        [IBV_WR_RDMA_WRITE_WITH_IMM] = IBV_WC_RDMA_WRITE,
        [IBV_WR_SEND_WITH_IMM] = IBV_WC_SEND,
        [IBV_WR_RDMA_READ] = IBV_WC_RDMA_READ,
    };

    if (status == IBV_WC_SUCCESS && !(request->send_flags & IBV_SEND_SIGNALED))
        return;
    complete((struct queue *)pair->qp.send_cq, (struct ibv_wc){.wr_id = request->wr_id,
                                                               .status = status,
                                                               .opcode = opcodes[request->opcode]});
}

static void copy(void *target, const void *source, size_t nbytes)
{
    if (loopback_copier != NULL)
        loopback_copier((uintptr_t)target, (uintptr_t)source, nbytes);
    /* What is sent again may be there already and be read meanwhile: writing the same changes nothing,
     * but a sanitizer would take it for a race. */
    else if (memcmp(target, source, nbytes) != 0)
        memcpy(target, source, nbytes);
}

static void end_held(struct nic *nic, bool are_written)
{
    for (int index = 0; index < nic->held_count; index++) {
        if (are_written)
            copy(nic->held[index].target, nic->held[index].bytes, nic->held[index].nbytes);
        free(nic->held[index].bytes);
    }
    nic->held_count = 0;
}

static void write_to(struct nic *nic, const struct ibv_send_wr *request)
{
    const struct ibv_sge *element = request->sg_list;
    uint32_t key = request->wr.rdma.rkey;
    void *target = (void *)(uintptr_t)(request->wr.rdma.remote_addr + raised_by[key / 2]);

    if (request->num_sge == 0)
        return;
    const void *source = (const void *)(uintptr_t)(element->addr + raised_by[element->lkey / 2]);
    if (nic->settings->holds_writes && key % 2 == 1 && nic->held_count < HELD) {
        struct held *held = &nic->held[nic->held_count++];

        *held = (struct held){target, malloc(element->length), element->length};
        copy(held->bytes, source, element->length);
    } else {
        copy(target, source, element->length);
    }
}

static void deliver(struct pair *peer, const struct ibv_send_wr *request)
{
    bool is_write = request->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;

    if (peer->receives-- == 0)
        abort();
    if (is_write) {
        peer->nic->settings->writes++;
        write_to(peer->nic, request);
    }
    complete((struct queue *)peer->qp.recv_cq,
             (struct ibv_wc){.opcode = is_write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV,
                             .imm_data = request->imm_data});
}

static void flush(struct pair *pair)
{
    pair->state = IBV_QPS_ERR;
    for (int index = 0; index < pair->silent_count; index++)
        finish(pair, &pair->silent[index], IBV_WC_WR_FLUSH_ERR);
    pair->silent_count = 0;
}

static void carry(struct pair *pair, const struct ibv_send_wr *request)
{
    struct pair *peer = &pairs[pair->peer % PAIRS];
    int fault = pair->nic->settings->fault;

    if (fault == FINE && peer->nic != NULL)
        fault = peer->nic->settings->fault;

    if (pair->state == IBV_QPS_ERR) {
        finish(pair, request, IBV_WC_WR_FLUSH_ERR);
    } else if (fault == SILENT) {
        pair->silent[pair->silent_count++] = *request;
    } else if (fault == CUT || !peer->is_used || peer->state != IBV_QPS_RTS) {
        finish(pair, request, IBV_WC_RETRY_EXC_ERR);
        flush(pair);
    } else if (request->opcode == IBV_WR_RDMA_READ && pair->nic->settings->cannot_read) {
        finish(pair, request, IBV_WC_LOC_PROT_ERR);
        flush(pair);
    } else if (request->opcode == IBV_WR_RDMA_READ) {
        pair->nic->settings->reads++;
        end_held(pair->nic, true);
        finish(pair, request, IBV_WC_SUCCESS);
    } else {
        deliver(peer, request);
        finish(pair, request, IBV_WC_SUCCESS);
    }
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *request, struct ibv_send_wr **refused)
{
    (void)refused;
    pthread_mutex_lock(&lock);
    for (; request != NULL; request = request->next)
        carry((struct pair *)qp, request);
    pthread_mutex_unlock(&lock);
    return 0;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *request, struct ibv_recv_wr **refused)
{
    (void)request;
    (void)refused;
    pthread_mutex_lock(&lock);
    ((struct pair *)qp)->receives++;
    pthread_mutex_unlock(&lock);
    return 0;
}

static int poll_cq(struct ibv_cq *cq, int limit, struct ibv_wc *found)
{
    struct queue *queue = (struct queue *)cq;
    int count = 0;

    pthread_mutex_lock(&lock);
    while (count < limit && queue->head != queue->tail)
        found[count++] = queue->found[queue->head++ % COMPLETIONS];
    pthread_mutex_unlock(&lock);
    return count;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited)
{
    (void)solicited;
    pthread_mutex_lock(&lock);
    ((struct queue *)cq)->armed = true;
    pthread_mutex_unlock(&lock);
    return 0;
}

/* Objects. */

static void *make(size_t nbytes)
{
    loopback_open_objects++;
    return calloc(1, nbytes);
}

static int unmake(void *object)
{
    loopback_open_objects--;
    free(object);
    return 0;
}

struct ibv_device **ibv_get_device_list(int *count)
{
    struct ibv_device **list = calloc(DEVICES + 1, sizeof *list);

    pthread_once(&once, make_nics);
    for (int index = 0; index < DEVICES; index++)
        list[index] = &nics[index].device;
    if (count != NULL)
        *count = DEVICES;
    return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
    free(list);
}

const char *ibv_get_device_name(struct ibv_device *device)
{
    return device->name;
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
    struct ibv_context *context = make(sizeof *context);

    context->device = device;
    context->ops.post_send = post_send;
    context->ops.post_recv = post_recv;
    context->ops.poll_cq = poll_cq;
    context->ops.req_notify_cq = req_notify_cq;
    context->async_fd = eventfd(0, EFD_CLOEXEC);
    ((struct nic *)device)->settings->async_fd = context->async_fd;
    return context;
}

int ibv_close_device(struct ibv_context *context)
{
    /* The memory that they were meant for is gone. */
    pthread_mutex_lock(&lock);
    end_held((struct nic *)context->device, false);
    pthread_mutex_unlock(&lock);
    close(context->async_fd);
    return unmake(context);
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attributes)
{
    int limit = ((struct nic *)context->device)->settings->max_requests;

    *attributes = (struct ibv_device_attr){.max_qp_wr = limit ? limit : MAX_REQUESTS};
    return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *found)
{
    const struct settings *nic = ((const struct nic *)context->device)->settings;

    if (port != 1)
        return EINVAL;
    *found = (struct ibv_port_attr){.state = nic->is_down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE,
                                    .active_mtu = IBV_MTU_4096,
                                    .max_msg_sz = nic->max_message ? nic->max_message : MAX_MESSAGE,
                                    .link_layer = IBV_LINK_LAYER_ETHERNET};
    return 0;
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
    eventfd_t count;

    event->event_type = IBV_EVENT_PORT_ERR;
    return eventfd_read(context->async_fd, &count);
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
    (void)event;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    struct ibv_pd *domain = make(sizeof *domain);

    domain->context = context;
    return domain;
}

int ibv_dealloc_pd(struct ibv_pd *domain)
{
    return unmake(domain);
}

static struct ibv_mr *make_region(struct ibv_pd *domain, uint64_t raise_by, int access)
{
    struct ibv_mr *region = make(sizeof *region);
    uint32_t number;

    pthread_mutex_lock(&lock);
    number = region_count++ % REGIONS;
    raised_by[number] = raise_by;
    pthread_mutex_unlock(&lock);
    region->pd = domain;
    region->rkey = region->lkey = 2 * number + (access & IBV_ACCESS_REMOTE_READ ? 1 : 0);
    return region;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *domain, void *address, size_t nbytes, int access)
{
    (void)address;
    (void)nbytes;
    if (((struct nic *)domain->context->device)->settings->refuses_memory) {
        errno = ENOMEM;
        return NULL;
    }
    return make_region(domain, 0, access);
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *domain, uint64_t offset, size_t nbytes,
                                 uint64_t iova, int descriptor, int access)
{
    (void)nbytes;
    if (loopback_dmabufs[descriptor] == 0) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    return make_region(domain, loopback_dmabufs[descriptor] + offset - iova, access);
}

int ibv_dereg_mr(struct ibv_mr *region)
{
    return unmake(region);
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
    struct ibv_comp_channel *channel = make(sizeof(struct channel));

    channel->context = context;
    channel->fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    return channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
    close(channel->fd);
    return unmake(channel);
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **context)
{
    eventfd_t count;

    *cq = ((struct channel *)channel)->cq;
    *context = (*cq)->cq_context;
    return eventfd_read(channel->fd, &count);
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count)
{
    (void)cq;
    (void)count;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *owner,
                             struct ibv_comp_channel *channel, int vector)
{
    struct queue *queue = make(sizeof *queue);

    (void)entries;
    (void)vector;
    queue->cq.context = context;
    queue->cq.cq_context = owner;
    queue->cq.channel = channel;
    if (channel != NULL)
        ((struct channel *)channel)->cq = &queue->cq;
    return &queue->cq;
}

int ibv_destroy_cq(struct ibv_cq *cq)
{
    return unmake(cq);
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *domain, struct ibv_qp_init_attr *wanted)
{
    struct pair *pair = NULL;

    pthread_mutex_lock(&lock);
    for (uint32_t number = 1; number < PAIRS && pair == NULL; number++)
        if (!pairs[number].is_used) {
            pair = &pairs[number];
            *pair = (struct pair){.is_used = true, .nic = (struct nic *)domain->context->device};
            pair->qp.context = domain->context;
            pair->qp.send_cq = wanted->send_cq;
            pair->qp.recv_cq = wanted->recv_cq;
            pair->qp.qp_num = number;
        }
    loopback_open_objects++;
    pthread_mutex_unlock(&lock);
    return &pair->qp;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *wanted, int mask)
{
    struct pair *pair = (struct pair *)qp;

    pthread_mutex_lock(&lock);
    if (mask & IBV_QP_DEST_QPN)
        pair->peer = wanted->dest_qp_num;
    if (wanted->qp_state == IBV_QPS_ERR)
        flush(pair);
    pair->state = wanted->qp_state;
    /* Both ends exist by now; the other may hear before it may speak. */
    if (pair->state == IBV_QPS_RTR)
        pair->state = IBV_QPS_RTS;
    pthread_mutex_unlock(&lock);
    return 0;
}

int ibv_destroy_qp(struct ibv_qp *qp)
{
    pthread_mutex_lock(&lock);
    ((struct pair *)qp)->is_used = false;
    loopback_open_objects--;
    pthread_mutex_unlock(&lock);
    return 0;
}

const char *ibv_wc_status_str(int status)
{
    return status == IBV_WC_RETRY_EXC_ERR ? "transport retry counter exceeded" : "flushed";
}
