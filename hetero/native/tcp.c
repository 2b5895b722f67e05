#include "tcp.h"

#include "speed.h"

#include <errno.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

/* The least that a bandwidth sample covers: the kernel counts its busy time in ticks. */
#define MIN_SAMPLE_SECONDS 10e-3
#define MIN_SAMPLE_BYTES (64 << 10)
/* A rail above this is bound by the CPUs at its ends, which rails share: treat all such rails as equal, or
 * one would get everything. */
#define MAX_BYTES_PER_SECOND 1e9
/* Consecutive retransmissions by the kernel before a rail counts as late. */
#define MIN_RETRANSMITS 2
/* A rail on which less than so many of its largest packets has ever been acknowledged may carry short ones
 * only: those with which a link is opened do not fill one. */
#define PROVEN_PACKETS 4

static struct tcp_rail *rail_of(struct rail *rail)
{
    return (struct tcp_rail *)rail;
}

/* Bandwidth. */

/* Bytes in the kernel's send queue that the peer's kernel has not acknowledged. */
static uint64_t unacked_bytes(const struct tcp_rail *rail)
{
    int nbytes = 0;

    return ioctl(rail->fd, SIOCOUTQ, &nbytes) == 0 ? (uint64_t)nbytes : 0;
}

/* During a call of sendmsg the bytes that the kernel has taken count twice. */
static uint64_t bytes_in_flight(const struct rail *base)
{
    const struct tcp_rail *rail = (const struct tcp_rail *)base;

    return rail->queued_bytes + unacked_bytes(rail);
}

static bool get_tcp_info(const struct tcp_rail *rail, struct tcp_info *info)
{
    socklen_t nbytes = sizeof *info;

    memset(info, 0, sizeof *info);
    return getsockopt(rail->fd, IPPROTO_TCP, TCP_INFO, info, &nbytes) == 0;
}

static double last_ack(const struct rail *base)
{
    struct tcp_info info;

    return get_tcp_info((const struct tcp_rail *)base, &info)
               ? engine_now() - 1e-3 * info.tcpi_last_ack_recv
               : 0;
}

static void start_measurement(struct tcp_rail *rail, const struct tcp_info *info)
{
    rail->busy_at_start = info->tcpi_busy_time - info->tcpi_rwnd_limited;
    rail->acked_at_start = info->tcpi_bytes_acked;
}

/* Sample the bandwidth: acknowledged bytes, over the time in which something was in flight and the peer's
 * window was open. What the kernel has accepted says nothing about it. */
static void measure_bandwidth(struct tcp_rail *rail)
{
    struct tcp_info info;
    double now = engine_now(), seconds;

    if (now - rail->measured_at < MIN_SAMPLE_SECONDS || !get_tcp_info(rail, &info))
        return;
    rail->measured_at = now;
    uint64_t busy = info.tcpi_busy_time - info.tcpi_rwnd_limited - rail->busy_at_start;
    uint64_t acked = info.tcpi_bytes_acked - rail->acked_at_start;
    if (1e-6 * (double)busy < MIN_SAMPLE_SECONDS || acked < MIN_SAMPLE_BYTES)
        return;
    seconds = 1e-6 * (double)busy;
    if (seconds < (double)acked / MAX_BYTES_PER_SECOND)
        seconds = (double)acked / MAX_BYTES_PER_SECOND;
    speed_add_sample(&rail->rail, acked, seconds);
    start_measurement(rail, &info);
}

/* Sending. */

static int queue_message(struct rail *base, struct frame frame, const void *bytes)
{
    struct tcp_rail *rail = rail_of(base);

    if (rail->count == 0 && unacked_bytes(rail) == 0) {
        struct tcp_info info;

        rail->busy_since = engine_now();
        if (get_tcp_info(rail, &info))
            start_measurement(rail, &info);
    }
    rail->queued_bytes += sizeof frame + frame.nbytes;
    rail->queue[(rail->first + rail->count) % TCP_ROOM] = (struct queued_message){frame, bytes};
    if (rail->count++ == 0)
        pthread_cond_signal(&rail->has_messages);
    return 0;
}

static int post_record(struct rail *base, uint32_t number, uint64_t offset)
{
    struct frame frame = {MESSAGE_RECORD, number, 0, sizeof(struct ring_record)};
    uint64_t source = rail_of(base)->carrier->engine.options.control + offset;

    return queue_message(base, frame, (const void *)(uintptr_t)source);
}

static int post_data(struct rail *base, uint32_t number, uint64_t slot, uint64_t nbytes)
{
    struct frame frame = {MESSAGE_DATA, number, slot, nbytes};
    const struct engine *engine = &rail_of(base)->carrier->engine;
    uint64_t source = engine_source(engine, number);

    if (source == 0)
        source = engine->options.rings + slot;
    return queue_message(base, frame, (const void *)(uintptr_t)source);
}

static int post_credit(struct rail *base, uint32_t released)
{
    return queue_message(base, (struct frame){MESSAGE_CREDIT, released, 0, 0}, NULL);
}

static bool send_all(int fd, struct iovec *parts, int count)
{
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};

    while (message.msg_iovlen > 0) {
        ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);

        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0)
            return false;
        while (message.msg_iovlen > 0 && (size_t)sent >= message.msg_iov->iov_len) {
            sent -= (ssize_t)message.msg_iov->iov_len;
            message.msg_iov++;
            message.msg_iovlen--;
        }
        if (message.msg_iovlen > 0) {
            message.msg_iov->iov_base = (char *)message.msg_iov->iov_base + sent;
            message.msg_iov->iov_len -= (size_t)sent;
        }
    }
    return true;
}

void tcp_lose(struct tcp_rail *rail, const char *what, int code)
{
    char reason[RAIL_TEXT_BYTES];

    if (rail->rail.live)
        rail->rail.may_have_ended = true;
    if (code == 0)
        set_reason(reason, "%s", what);
    else
        set_reason(reason, "%s (%s)", what, strerror(code));
    engine_lose_rail(&rail->carrier->engine, &rail->rail, reason);
}

/* Gather queued messages for one sendmsg: all up to and including the first data. Call with the lock. */
static int gather_messages(const struct tcp_rail *rail, struct iovec *parts, int *count)
{
    int messages = 0;

    for (*count = 0; messages < rail->count; ) {
        const struct queued_message *queued = &rail->queue[(rail->first + messages++) % TCP_ROOM];

        parts[(*count)++] = (struct iovec){(void *)&queued->frame, sizeof queued->frame};
        if (queued->frame.nbytes > 0)
            parts[(*count)++] = (struct iovec){(void *)queued->bytes, queued->frame.nbytes};
        if (queued->frame.message == MESSAGE_DATA)
            break;
    }
    return messages;
}

static void complete_sends(struct tcp_rail *rail, int messages)
{
    for (; messages > 0; messages--) {
        const struct frame *frame = &rail->queue[rail->first].frame;

        rail->queued_bytes -= sizeof *frame + frame->nbytes;
        engine_send_completed(&rail->carrier->engine, &rail->rail, frame->message, frame->number);
        rail->first = (rail->first + 1) % TCP_ROOM;
        rail->count--;
    }
}

static void *send_loop(void *argument)
{
    struct tcp_rail *rail = argument;
    struct iovec parts[2 * TCP_ROOM];
    int messages, count;
    bool is_sent;

    prctl(PR_SET_NAME, "tcp-send");
    pthread_mutex_lock(&rail->carrier->lock);
    for (;;) {
        while (rail->rail.live && rail->count == 0)
            pthread_cond_wait(&rail->has_messages, &rail->carrier->lock);
        if (!rail->rail.live)
            break;
        messages = gather_messages(rail, parts, &count);
        pthread_mutex_unlock(&rail->carrier->lock);
        is_sent = send_all(rail->fd, parts, count);
        int code = errno;
        pthread_mutex_lock(&rail->carrier->lock);
        if (!is_sent)
            tcp_lose(rail, "its connection broke while sending", code);
        if (!rail->rail.live)
            break;
        complete_sends(rail, messages);
        engine_progress(&rail->carrier->engine);
    }
    pthread_mutex_unlock(&rail->carrier->lock);
    return NULL;
}

static double last_send(const struct rail *base)
{
    struct tcp_info info;

    return get_tcp_info((const struct tcp_rail *)base, &info)
               ? engine_now() - 1e-3 * info.tcpi_last_data_sent
               : 0;
}

/* Whether the kernel retransmits without an answer. A paused peer does not count: its window closes, and
 * its kernel goes on acknowledging. */
static bool is_late(const struct rail *base, double before, char *reason)
{
    const struct tcp_rail *rail = (const struct tcp_rail *)base;
    struct tcp_info info;

    if (unacked_bytes(rail) == 0 || rail->busy_since > before || last_ack(base) > before ||
        !get_tcp_info(rail, &info) || info.tcpi_retransmits + info.tcpi_probes < MIN_RETRANSMITS)
        return false;
    double silent = engine_now() - before;
    if (info.tcpi_bytes_acked >= (uint64_t)PROVEN_PACKETS * info.tcpi_pmtu)
        set_reason(reason, "nothing was answered for %.1f s", silent);
    else
        set_reason(reason,
                   "nothing was answered for %.1f s, and packets of %u bytes never were: see that the "
                   "MTUs of both NICs and of the switches between agree",
                   silent, info.tcpi_pmtu);
    return true;
}

/* Its threads report to the engine themselves. Measured here, or what the kernel sends on by itself after
 * the last call of sendmsg would not count. */
static bool poll_bandwidth(struct rail *base, struct engine *engine)
{
    (void)engine;
    measure_bandwidth(rail_of(base));
    return false;
}

static void stop(struct rail *base)
{
    shutdown(rail_of(base)->fd, SHUT_RDWR);
    pthread_cond_broadcast(&rail_of(base)->has_messages);
}

static void join(struct rail *base)
{
    struct tcp_rail *rail = rail_of(base);

    if (rail->has_sender)
        pthread_join(rail->sender, NULL);
    if (rail->has_receiver)
        pthread_join(rail->receiver, NULL);
    rail->has_sender = rail->has_receiver = false;
}

static void close_rail(struct rail *base)
{
    struct tcp_rail *rail = rail_of(base);

    pthread_cond_destroy(&rail->has_messages);
    free(rail->scratch);
    free(rail);
}

static int start(struct rail *base)
{
    struct tcp_rail *rail = rail_of(base);
    int code;

    /* Lock: the threads of rails started earlier already read `live`. */
    pthread_mutex_lock(&rail->carrier->lock);
    base->live = true;
    pthread_mutex_unlock(&rail->carrier->lock);
    code = pthread_create(&rail->sender, NULL, send_loop, rail);
    rail->has_sender = code == 0;
    if (code == 0)
        code = pthread_create(&rail->receiver, NULL, tcp_receive_loop, rail);
    rail->has_receiver = rail->has_sender && code == 0;
    return code;
}

static const struct rail_operations operations = {
    .limits = {TCP_RECORDS, TCP_DATA, TCP_CREDITS},
    .post_record = post_record,
    .post_data = post_data,
    .post_credit = post_credit,
    .bytes_in_flight = bytes_in_flight,
    .is_late = is_late,
    .last_ack = last_ack,
    .last_send = last_send,
    .poll = poll_bandwidth,
    .start = start,
    .stop = stop,
    .join = join,
    .close = close_rail,
};

struct rail *tcp_open(struct carrier *carrier, int fd, char *error)
{
    struct tcp_rail *rail = calloc(1, sizeof *rail);

    if (rail != NULL)
        rail->scratch = malloc(TCP_SCRATCH_BYTES);
    if (rail == NULL || rail->scratch == NULL) {
        free(rail);
        set_reason(error, "a rail cannot be made (%s)", strerror(ENOMEM));
        return NULL;
    }
    rail->rail.operations = &operations;
    rail->rail.event_fd = -1;
    rail->carrier = carrier;
    rail->fd = fd;
    pthread_cond_init(&rail->has_messages, NULL);
    return &rail->rail;
}
