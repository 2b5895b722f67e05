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

/* Messages of each kind queued for the sending thread. Few data: another rail may be free sooner. More
 * than one, or the thread would idle between two. */
#define TCP_RECORDS 64
#define TCP_DATA 2
#define TCP_CREDITS 2
#define TCP_ROOM (TCP_RECORDS + TCP_DATA + TCP_CREDITS)
#define TCP_SCRATCH_BYTES (64 << 10)
/* On one rail a call of the kernel carries a message's record and data, and one thread at each end wakes for
 * them. Between two processes of one host a ping-pong of 4 to 192 KiB so takes 0.65 to 0.9 of the time. From
 * 256 KiB on there is nothing to gain: data is most of the time, and other rails may share it. */
#define TCP_SMALL_BYTES (256 << 10)

/* Precedes a message's bytes. Sent as it is in memory: both ends are little-endian. */
struct frame {
    uint32_t message; /* enum message */
    uint32_t number;  /* of the entry; of a credit, the count */
    uint64_t slot;
    uint64_t nbytes;
};

struct queued_message {
    struct frame frame;
    const void *bytes;
};

struct tcp_rail {
    struct rail rail; /* first, so that a pointer to either is a pointer to both */
    struct engine *engine; /* whose lock guards all that its threads share */
    int fd;                  /* connected, blocking; the caller's */
    pthread_t sender, receiver;
    bool has_sender, has_receiver;
    /* Guarded by the engine's lock, as is `rail`. */
    pthread_cond_t has_messages;
    struct queued_message queue[TCP_ROOM]; /* a ring; sendmsg has the first of them */
    int first, count;
    uint64_t queued_bytes; /* of all of them */
    /* Where the present bandwidth sample began: acknowledged bytes, and busy microseconds. */
    uint64_t acked_at_start, busy_at_start;
    double measured_at;
    double busy_since; /* when it was last idle */
    char *scratch;     /* the receiver's */
};

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
    uint64_t source = rail_of(base)->engine->options.control + offset;

    return queue_message(base, frame, (const void *)(uintptr_t)source);
}

static int post_data(struct rail *base, uint32_t number, uint64_t slot, uint64_t nbytes)
{
    struct frame frame = {MESSAGE_DATA, number, slot, nbytes};
    const struct engine *engine = rail_of(base)->engine;
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

/* Handle the end or failure of the connection; ignored once the rail is stopped. Call with the lock. */
static void lose(struct tcp_rail *rail, const char *what, int code)
{
    char reason[RAIL_TEXT_BYTES];

    if (rail->rail.live)
        rail->rail.may_have_ended = true;
    if (code == 0)
        set_reason(reason, "%s", what);
    else
        set_reason(reason, "%s (%s)", what, strerror(code));
    engine_lose_rail(rail->engine, &rail->rail, reason);
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
        engine_send_completed(rail->engine, &rail->rail, frame->message, frame->number);
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
    pthread_mutex_lock(&rail->engine->lock);
    for (;;) {
        while (rail->rail.live && rail->count == 0)
            pthread_cond_wait(&rail->has_messages, &rail->engine->lock);
        if (!rail->rail.live)
            break;
        messages = gather_messages(rail, parts, &count);
        pthread_mutex_unlock(&rail->engine->lock);
        is_sent = send_all(rail->fd, parts, count);
        int code = errno;
        pthread_mutex_lock(&rail->engine->lock);
        if (!is_sent)
            lose(rail, "its connection broke while sending", code);
        if (!rail->rail.live)
            break;
        complete_sends(rail, messages);
        engine_progress(rail->engine);
    }
    pthread_mutex_unlock(&rail->engine->lock);
    return NULL;
}

/* Receiving. */

/* Like every receive_* here: 1, 0 at the end of the connection, or -1 with errno. */
static int receive_all(int fd, void *bytes, size_t nbytes)
{
    size_t done = 0;

    while (done < nbytes) {
        ssize_t count = recv(fd, (char *)bytes + done, nbytes - done, MSG_WAITALL);

        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return (int)count;
        done += (size_t)count;
    }
    return 1;
}

/* Receive and drop what another rail has delivered. */
static int discard(struct tcp_rail *rail, uint64_t nbytes)
{
    int code = 1;

    while (nbytes > 0 && code > 0) {
        size_t part = nbytes < TCP_SCRATCH_BYTES ? nbytes : TCP_SCRATCH_BYTES;

        code = receive_all(rail->fd, rail->scratch, part);
        nbytes -= part;
    }
    return code;
}

static int receive_record(struct tcp_rail *rail, const struct frame *frame)
{
    struct engine *engine = rail->engine;
    int code = receive_all(rail->fd, rail->scratch, frame->nbytes);
    void *record;

    if (code <= 0)
        return code;
    pthread_mutex_lock(&rail->engine->lock);
    record = rail->rail.live ? engine_expect_record(engine, frame->number) : NULL;
    if (record != NULL) {
        memcpy(record, rail->scratch, frame->nbytes);
        engine_record_arrived(engine, frame->number);
    }
    pthread_mutex_unlock(&rail->engine->lock);
    return 1;
}

static int receive_data(struct tcp_rail *rail, const struct frame *frame)
{
    struct engine *engine = rail->engine;
    uint64_t target = 0;
    bool is_expected, is_valid_size;
    int code;

    pthread_mutex_lock(&rail->engine->lock);
    is_expected = engine_expect_data(engine, &rail->rail, frame->number);
    is_valid_size = !is_expected || engine_target(engine, frame->number, frame->nbytes, &target);
    pthread_mutex_unlock(&rail->engine->lock);
    if (!is_valid_size) {
        errno = EPROTO;
        return -1;
    }
    if (!is_expected)
        return discard(rail, frame->nbytes);
    if (target == 0)
        target = engine->options.rings + engine->options.ring_bytes + frame->slot;
    code = receive_all(rail->fd, (void *)(uintptr_t)target, frame->nbytes);
    if (code <= 0)
        return code;
    pthread_mutex_lock(&rail->engine->lock);
    engine_data_arrived(engine, &rail->rail, frame->number);
    pthread_mutex_unlock(&rail->engine->lock);
    return 1;
}

static bool is_valid(const struct tcp_rail *rail, const struct frame *frame)
{
    uint64_t ring_bytes = rail->engine->options.ring_bytes;

    if (frame->message == MESSAGE_RECORD)
        return frame->nbytes == sizeof(struct ring_record);
    if (frame->message == MESSAGE_DATA)
        return frame->slot <= ring_bytes &&
               frame->nbytes <= ring_bytes - frame->slot;
    return frame->message == MESSAGE_CREDIT && frame->nbytes == 0;
}

static int receive_one(struct tcp_rail *rail)
{
    struct frame frame;
    int code = receive_all(rail->fd, &frame, sizeof frame);

    if (code <= 0)
        return code;
    if (!is_valid(rail, &frame)) {
        errno = EPROTO;
        return -1;
    }
    if (frame.message == MESSAGE_RECORD)
        return receive_record(rail, &frame);
    if (frame.message == MESSAGE_DATA)
        return receive_data(rail, &frame);
    pthread_mutex_lock(&rail->engine->lock);
    engine_credit_arrived(rail->engine, &rail->rail, frame.number);
    pthread_mutex_unlock(&rail->engine->lock);
    return 1;
}

static void *receive_loop(void *argument)
{
    struct tcp_rail *rail = argument;
    int code;

    prctl(PR_SET_NAME, "tcp-receive");
    while ((code = receive_one(rail)) > 0) {
        pthread_mutex_lock(&rail->engine->lock);
        engine_progress(rail->engine);
        pthread_mutex_unlock(&rail->engine->lock);
    }
    int reason = errno;
    pthread_mutex_lock(&rail->engine->lock);
    /* Lose the rail even if the peer closed it in order: bytes that the peer's kernel had accepted may be
     * lost without any error. */
    lose(rail, code < 0 ? "its connection broke while receiving" : "its connection was closed",
             code < 0 ? reason : 0);
    pthread_mutex_unlock(&rail->engine->lock);
    engine_drive(rail->engine);
    return NULL;
}

/* The rail's operations. */

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
    pthread_mutex_lock(&rail->engine->lock);
    base->live = true;
    pthread_mutex_unlock(&rail->engine->lock);
    code = pthread_create(&rail->sender, NULL, send_loop, rail);
    rail->has_sender = code == 0;
    if (code == 0)
        code = pthread_create(&rail->receiver, NULL, receive_loop, rail);
    rail->has_receiver = rail->has_sender && code == 0;
    return code;
}

static const struct rail_operations operations = {
    .limits = {TCP_RECORDS, TCP_DATA, TCP_CREDITS},
    .small_bytes = TCP_SMALL_BYTES,
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

struct rail *tcp_open(struct engine *engine, int fd, char *error)
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
    rail->engine = engine;
    rail->fd = fd;
    pthread_cond_init(&rail->has_messages, NULL);
    return &rail->rail;
}
