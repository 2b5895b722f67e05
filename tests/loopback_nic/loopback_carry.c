/* How the NICs of one process carry: a write is a copy, and a request completes before it has been
 * posted. */
#include "loopback_nic.h"

#include <string.h>
#include <unistd.h>

pthread_mutex_t loopback_lock = PTHREAD_MUTEX_INITIALIZER;
struct pair loopback_pairs[PAIRS];
uint64_t loopback_raised_by[REGIONS];
void (*loopback_copier)(uint64_t target, uint64_t source, uint64_t nbytes);

static void complete(struct queue *queue, struct ibv_wc completion)
{
    if (queue->tail - queue->head == COMPLETIONS)
        abort();
    queue->found[queue->tail++ % COMPLETIONS] = completion;
    if (queue->armed) {
        queue->armed = false;
        if (write(((struct channel *)queue->cq.channel)->events_fd, "", 1) != 1)
            abort();
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

void loopback_end_held(struct nic *nic, bool are_written)
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
    void *target = (void *)(uintptr_t)(request->wr.rdma.remote_addr + loopback_raised_by[key / 2]);

    if (request->num_sge == 0)
        return;
    const void *source = (const void *)(uintptr_t)(element->addr + loopback_raised_by[element->lkey / 2]);
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

void loopback_flush(struct pair *pair)
{
    pair->state = IBV_QPS_ERR;
    for (int index = 0; index < pair->silent_count; index++)
        finish(pair, &pair->silent[index], IBV_WC_WR_FLUSH_ERR);
    pair->silent_count = 0;
}

static void carry(struct pair *pair, const struct ibv_send_wr *request)
{
    struct pair *peer = &loopback_pairs[pair->peer % PAIRS];
    int fault = pair->nic->settings->fault;

    if (fault == FINE && peer->nic != NULL)
        fault = peer->nic->settings->fault;

    if (pair->state == IBV_QPS_ERR) {
        finish(pair, request, IBV_WC_WR_FLUSH_ERR);
    } else if (fault == SILENT) {
        pair->silent[pair->silent_count++] = *request;
    } else if (fault == CUT || !peer->is_used || peer->state != IBV_QPS_RTS) {
        finish(pair, request, IBV_WC_RETRY_EXC_ERR);
        loopback_flush(pair);
    } else if (request->opcode == IBV_WR_RDMA_READ && pair->nic->settings->cannot_read) {
        finish(pair, request, IBV_WC_LOC_PROT_ERR);
        loopback_flush(pair);
    } else if (request->opcode == IBV_WR_RDMA_READ) {
        pair->nic->settings->reads++;
        loopback_end_held(pair->nic, true);
        finish(pair, request, IBV_WC_SUCCESS);
    } else {
        deliver(peer, request);
        finish(pair, request, IBV_WC_SUCCESS);
    }
}

int loopback_post_send(struct ibv_qp *qp, struct ibv_send_wr *request, struct ibv_send_wr **refused)
{
    (void)refused;
    pthread_mutex_lock(&loopback_lock);
    for (; request != NULL; request = request->next)
        carry((struct pair *)qp, request);
    pthread_mutex_unlock(&loopback_lock);
    return 0;
}

int loopback_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *request, struct ibv_recv_wr **refused)
{
    (void)request;
    (void)refused;
    pthread_mutex_lock(&loopback_lock);
    ((struct pair *)qp)->receives++;
    pthread_mutex_unlock(&loopback_lock);
    return 0;
}

int loopback_poll_cq(struct ibv_cq *cq, int limit, struct ibv_wc *found)
{
    struct queue *queue = (struct queue *)cq;
    int count = 0;

    pthread_mutex_lock(&loopback_lock);
    while (count < limit && queue->head != queue->tail)
        found[count++] = queue->found[queue->head++ % COMPLETIONS];
    pthread_mutex_unlock(&loopback_lock);
    return count;
}

int loopback_req_notify_cq(struct ibv_cq *cq, int solicited)
{
    (void)solicited;
    pthread_mutex_lock(&loopback_lock);
    ((struct queue *)cq)->armed = true;
    pthread_mutex_unlock(&loopback_lock);
    return 0;
}
