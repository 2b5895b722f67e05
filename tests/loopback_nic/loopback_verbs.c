/* A library that is opened in the place of libibverbs, between both ends of a link in one process. For
 * tests. */
#include "loopback_nic.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

struct nic loopback_nics[DEVICES];
struct settings loopback_settings[DEVICES];
/* By its descriptor: where a dma-buf begins in memory; 0 for one that is refused. */
uint64_t loopback_dmabufs[DESCRIPTORS];
_Atomic long loopback_open_objects;
static uint32_t region_count;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_nics(void)
{
    static const char *const names[DEVICES] = {"a0", "a1", "b0", "b1"};

    for (int index = 0; index < DEVICES; index++) {
        strcpy(loopback_nics[index].device.name, names[index]);
        loopback_nics[index].settings = &loopback_settings[index];
    }
}

void loopback_break(int index, int fault)
{
    loopback_settings[index].fault = fault;
}

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
        list[index] = &loopback_nics[index].device;
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
    context->ops.post_send = loopback_post_send;
    context->ops.post_recv = loopback_post_recv;
    context->ops.poll_cq = loopback_poll_cq;
    context->ops.req_notify_cq = loopback_req_notify_cq;
    return context;
}

int ibv_close_device(struct ibv_context *context)
{
    /* The memory that they were meant for is gone. */
    pthread_mutex_lock(&loopback_lock);
    loopback_end_held((struct nic *)context->device, false);
    pthread_mutex_unlock(&loopback_lock);
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

    pthread_mutex_lock(&loopback_lock);
    number = region_count++ % REGIONS;
    loopback_raised_by[number] = raise_by;
    pthread_mutex_unlock(&loopback_lock);
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

    int ends[2];

    /* A pipe, of which an end that is closed is an error at the other. */
    if (pipe2(ends, O_CLOEXEC) != 0)
        abort();
    channel->context = context;
    channel->fd = ends[0];
    ((struct channel *)channel)->events_fd = ends[1];
    ((struct nic *)context->device)->settings->completions_fd = ends[1];
    return channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
    close(channel->fd);
    close(((struct channel *)channel)->events_fd);
    return unmake(channel);
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **context)
{
    char event;

    *cq = ((struct channel *)channel)->cq;
    *context = (*cq)->cq_context;
    return read(channel->fd, &event, 1) == 1 ? 0 : -1;
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

    pthread_mutex_lock(&loopback_lock);
    for (uint32_t number = 1; number < PAIRS && pair == NULL; number++)
        if (!loopback_pairs[number].is_used) {
            pair = &loopback_pairs[number];
            *pair = (struct pair){.is_used = true, .nic = (struct nic *)domain->context->device};
            pair->qp.context = domain->context;
            pair->qp.send_cq = wanted->send_cq;
            pair->qp.recv_cq = wanted->recv_cq;
            pair->qp.qp_num = number;
        }
    loopback_open_objects++;
    pthread_mutex_unlock(&loopback_lock);
    return &pair->qp;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *wanted, int mask)
{
    struct pair *pair = (struct pair *)qp;

    pthread_mutex_lock(&loopback_lock);
    if (mask & IBV_QP_DEST_QPN)
        pair->peer = wanted->dest_qp_num;
    if (wanted->qp_state == IBV_QPS_ERR)
        loopback_flush(pair);
    pair->state = wanted->qp_state;
    /* Both ends exist by now; the other may hear before it may speak. */
    if (pair->state == IBV_QPS_RTR)
        pair->state = IBV_QPS_RTS;
    pthread_mutex_unlock(&loopback_lock);
    return 0;
}

int ibv_destroy_qp(struct ibv_qp *qp)
{
    pthread_mutex_lock(&loopback_lock);
    ((struct pair *)qp)->is_used = false;
    loopback_open_objects--;
    pthread_mutex_unlock(&loopback_lock);
    return 0;
}

const char *ibv_wc_status_str(int status)
{
    return status == IBV_WC_RETRY_EXC_ERR ? "transport retry counter exceeded" : "flushed";
}
