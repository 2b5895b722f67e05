#include "tcp.h"

#include "speed.h"

#include <errno.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>
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

/* Messages of each kind queued. Few data: another rail may be free sooner. More than one, or the connection
 * would idle between two. */
#define TCP_RECORDS 64
#define TCP_DATA 2
#define TCP_CREDITS 2
#define TCP_ROOM (TCP_RECORDS + TCP_DATA + TCP_CREDITS)
/* What is received at once, if it has come: the frames and data of small messages. */
#define TCP_BUFFER_BYTES (8 << 10)
#define TCP_SCRATCH_BYTES (64 << 10)
/* Refills of the buffer before a receiver serves its next connection. */
#define TCP_REFILLS 16
/* The largest send in the posting thread, if the kernel has room: waking a sender takes longer. */
#define TCP_INLINE_BYTES (128 << 10)
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

/* Who sends over a connection: nobody, a sender, or a sender once the kernel has room again. */
enum sending { SENDING_NOTHING, SENDING, SENDING_LATER };

/* What the next bytes received belong to. */
enum receiving { RECEIVING_FRAME, RECEIVING_RECORD, RECEIVING_DATA, DISCARDING };

struct tcp_rail {
    struct rail rail; /* first, so that a pointer to either is a pointer to both */
    struct connection connection; /* `fd` is connected, blocking, the caller's */
    struct job job;
    struct engine *engine; /* whose lock guards all that several threads share */
    struct proxy *proxy;

    /* Guarded by the engine's lock, as is `rail`. */
    pthread_cond_t is_done;
    bool is_served; /* a receiver has it */
    enum sending sending;
    struct queued_message queue[TCP_ROOM]; /* a ring */
    int first, count;
    uint64_t queued_bytes; /* of all of them */
    size_t sent; /* bytes, of the first of them */
    /* Where the present bandwidth sample began: acknowledged bytes, and busy microseconds. */
    uint64_t acked_at_start, busy_at_start;
    bool is_full; /* there is one: the kernel has had unsent bytes ever since */
    double measured_at;
    double busy_since; /* when it was last idle */

    /* The receiver's. */
    enum receiving receiving;
    struct frame frame;
    size_t received; /* bytes, of the frame or of what follows it */
    char *target;    /* of what follows it, unless that is discarded */
    char *buffer;
    size_t buffered, taken; /* bytes in the buffer, and of those that have been taken */
    int refills;            /* of the buffer, in this turn */
    bool has_news; /* that the engine has not been driven for */
    char *scratch;
};

static struct tcp_rail *rail_at(struct connection *connection)
{
    return (struct tcp_rail *)((char *)connection - offsetof(struct tcp_rail, connection));
}

static struct tcp_rail *rail_of(struct rail *rail)
{
    return (struct tcp_rail *)rail;
}

/* Bandwidth. */

/* Bytes in the kernel's send queue that the peer's kernel has not acknowledged. */
static uint64_t unacked_bytes(const struct tcp_rail *rail)
{
    int nbytes = 0;

    return ioctl(rail->connection.fd, SIOCOUTQ, &nbytes) == 0 ? (uint64_t)nbytes : 0;
}

/* Of those, the bytes that it has not sent at all. */
static uint64_t unsent_bytes(const struct tcp_rail *rail)
{
    int nbytes = 0;

    return ioctl(rail->connection.fd, SIOCOUTQNSD, &nbytes) == 0 ? (uint64_t)nbytes : 0;
}

/* Until the call of sendmsg returns, or what it has left is sent, the bytes that the kernel has taken count
 * twice. */
static uint64_t bytes_in_flight(const struct rail *base)
{
    const struct tcp_rail *rail = (const struct tcp_rail *)base;

    return rail->queued_bytes + unacked_bytes(rail);
}

static bool get_tcp_info(const struct tcp_rail *rail, struct tcp_info *info)
{
    socklen_t nbytes = sizeof *info;

    memset(info, 0, sizeof *info);
    return getsockopt(rail->connection.fd, IPPROTO_TCP, TCP_INFO, info, &nbytes) == 0;
}

static double last_ack(const struct rail *base)
{
    struct tcp_info info;

    return get_tcp_info((const struct tcp_rail *)base, &info)
               ? engine_now() - 1e-3 * info.tcpi_last_ack_recv
               : 0;
}

/* Sample the bandwidth: acknowledged bytes, over the time in which something was in flight and the peer's window was
 * open, while the kernel always had more than it could send. What it has accepted says nothing about the bandwidth, nor
 * does the time of the last bytes that it has: that is latency, and the peer's kernel may acknowledge them only 40 ms
 * after they came. */
static void measure_bandwidth(struct tcp_rail *rail)
{
    bool was_full = rail->is_full;
    double now = engine_now();
    struct tcp_info info;

    if (now - rail->measured_at < MIN_SAMPLE_SECONDS)
        return;
    rail->measured_at = now;
    rail->is_full = unsent_bytes(rail) > 0 && get_tcp_info(rail, &info);
    if (!rail->is_full)
        return;
    uint64_t busy = info.tcpi_busy_time - info.tcpi_rwnd_limited;
    if (was_full) {
        uint64_t acked = info.tcpi_bytes_acked - rail->acked_at_start;
        double seconds = 1e-6 * (double)(busy - rail->busy_at_start);

        if (seconds < MIN_SAMPLE_SECONDS || acked < MIN_SAMPLE_BYTES)
            return;
        if (seconds < (double)acked / MAX_BYTES_PER_SECOND)
            seconds = (double)acked / MAX_BYTES_PER_SECOND;
        speed_add_sample(&rail->rail, acked, seconds);
    }
    rail->busy_at_start = busy;
    rail->acked_at_start = info.tcpi_bytes_acked;
}

/* Sending. */

static int queue_message(struct rail *base, struct frame frame, const void *bytes)
{
    struct tcp_rail *rail = rail_of(base);

    if (rail->count == 0 && unacked_bytes(rail) == 0)
        rail->busy_since = engine_now();
    rail->queued_bytes += sizeof frame + frame.nbytes;
    rail->queue[(rail->first + rail->count) % TCP_ROOM] = (struct queued_message){frame, bytes};
    rail->count++;
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

/* Messages for one sendmsg: all up to and including the first data. */
struct gathered {
    struct iovec parts[2 * TCP_ROOM];
    int count, messages;
    size_t nbytes;
};

static void add_part(struct gathered *gathered, const void *bytes, size_t nbytes, size_t *skipped)
{
    size_t skip = *skipped < nbytes ? *skipped : nbytes;

    *skipped -= skip;
    if (skip == nbytes)
        return;
    gathered->parts[gathered->count++] = (struct iovec){(char *)bytes + skip, nbytes - skip};
    gathered->nbytes += nbytes - skip;
}

/* Gather what is to be sent now: what is queued, without what was sent of it before. Call with the lock. */
static void gather(struct tcp_rail *rail, struct gathered *gathered)
{
    size_t skipped = rail->sent;

    /* It may have run dry, which a sample must not span. */
    rail->is_full = rail->is_full && unsent_bytes(rail) > 0;
    gathered->count = gathered->messages = 0;
    gathered->nbytes = 0;
    while (gathered->messages < rail->count) {
        const struct queued_message *queued = &rail->queue[(rail->first + gathered->messages++) % TCP_ROOM];

        add_part(gathered, &queued->frame, sizeof queued->frame, &skipped);
        add_part(gathered, queued->bytes, queued->frame.nbytes, &skipped);
        if (queued->frame.message == MESSAGE_DATA)
            break;
    }
}

/* How many bytes the kernel has taken: with `flags` 0 all of them, or what it could within a slice. -1 with
 * errno. */
static ssize_t send_gathered(int fd, struct gathered *gathered, int flags)
{
    struct msghdr message = {.msg_iov = gathered->parts, .msg_iovlen = (size_t)gathered->count};
    ssize_t sent = sendmsg(fd, &message, flags | MSG_NOSIGNAL);

    return sent < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : sent;
}

/* Account for what a call of sendmsg returned; false if the kernel had no room for the rest. Call with the
 * lock. */
static bool complete_sends(struct tcp_rail *rail, const struct gathered *gathered, ssize_t sent, int code)
{
    if (sent < 0) {
        lose(rail, "its connection broke while sending", code);
        return false;
    }
    if ((size_t)sent < gathered->nbytes) {
        rail->sent += (size_t)sent;
        return false;
    }
    rail->sent = 0;
    for (int message = 0; message < gathered->messages; message++) {
        const struct frame *frame = &rail->queue[rail->first].frame;

        rail->queued_bytes -= sizeof *frame + frame->nbytes;
        engine_send_completed(rail->engine, &rail->rail, frame->message, frame->number);
        rail->first = (rail->first + 1) % TCP_ROOM;
        rail->count--;
    }
    return true;
}

/* Send what is queued, here while it is little, else by a sender. */
static bool flush(struct rail *base)
{
    struct tcp_rail *rail = rail_of(base);
    struct gathered gathered;
    bool is_sent = false;

    while (base->live && rail->sending == SENDING_NOTHING && rail->count > 0) {
        gather(rail, &gathered);
        if (gathered.nbytes <= TCP_INLINE_BYTES) {
            ssize_t sent = send_gathered(rail->connection.fd, &gathered, MSG_DONTWAIT);

            if (complete_sends(rail, &gathered, sent, errno)) {
                is_sent = true;
                continue;
            }
        }
        if (base->live) {
            rail->sending = SENDING;
            pool_submit(proxy_senders(rail->proxy), &rail->job);
        }
    }
    return is_sent;
}

/* Call with the lock. */
static void stop_sending(struct tcp_rail *rail)
{
    rail->sending = SENDING_NOTHING;
    pthread_cond_broadcast(&rail->is_done);
}

/* Wait for room without keeping a sender. Call with the lock. */
static void send_later(struct tcp_rail *rail)
{
    int code;

    rail->sending = SENDING_LATER;
    code = proxy_await_room(rail->proxy, &rail->connection);
    if (code == 0)
        return;
    stop_sending(rail);
    lose(rail, "its connection cannot be waited for", code);
}

/* A sender's job. */
static void send_queued(struct job *job)
{
    struct tcp_rail *rail = (struct tcp_rail *)((char *)job - offsetof(struct tcp_rail, job));
    struct gathered gathered;

    pthread_mutex_lock(&rail->engine->lock);
    while (rail->rail.live && rail->count > 0) {
        gather(rail, &gathered);
        engine_unlock(rail->engine);
        ssize_t sent = send_gathered(rail->connection.fd, &gathered, 0);
        int code = errno;
        pthread_mutex_lock(&rail->engine->lock);
        /* Also of a rail that was lost meanwhile: the peer may have consumed all of it before it ended. */
        bool is_complete = complete_sends(rail, &gathered, sent, code);

        if (is_complete)
            engine_progress(rail->engine);
        if (!rail->rail.live || rail->count == 0)
            continue;
        if (sent == 0) {
            send_later(rail);
            goto unlock;
        }
        if (pool_has_jobs(proxy_senders(rail->proxy))) {
            pool_submit(proxy_senders(rail->proxy), job);
            goto unlock;
        }
    }
    stop_sending(rail);
unlock:
    engine_unlock(rail->engine);
}

static void has_room(struct connection *connection)
{
    struct tcp_rail *rail = rail_at(connection);

    engine_lock(rail->engine);
    rail->sending = SENDING;
    engine_unlock(rail->engine);
    pool_submit(proxy_senders(rail->proxy), &rail->job);
}

/* Receiving. */

/* What a receiver does next: go on, await more bytes, or, with errno (0 at the end of the connection), end. */
enum received { GO_ON, AWAIT, END };

static bool has_others(const struct tcp_rail *rail)
{
    return proxy_shares_receiver(&rail->connection);
}

/* Have the engine handle what has come: of all that one call of the kernel has brought at once. */
static void tell_news(struct tcp_rail *rail)
{
    if (!rail->has_news)
        return;
    rail->has_news = false;
    pthread_mutex_lock(&rail->engine->lock);
    engine_progress(rail->engine);
    engine_unlock(rail->engine);
}

/* Receive up to `nbytes` more: first what is in the buffer. Small pieces go through the buffer, so that one call
 * of the kernel brings several; of a large one the rest goes where it belongs. */
static enum received receive_some(struct tcp_rail *rail, char *target, size_t nbytes, size_t *count)
{
    bool is_buffered = nbytes < TCP_BUFFER_BYTES;
    ssize_t found;

    *count = 0;
    if (rail->taken == rail->buffered) {
        char *into = is_buffered ? rail->buffer : target;
        /* A frame may be long in coming; what it announces is on its way. */
        int flags = rail->receiving == RECEIVING_FRAME || is_buffered ? MSG_DONTWAIT : MSG_WAITALL;

        tell_news(rail);
        if (is_buffered && rail->refills++ >= TCP_REFILLS && has_others(rail))
            return AWAIT;
        found = recv(rail->connection.fd, into, is_buffered ? TCP_BUFFER_BYTES : nbytes, flags);
        if (found < 0)
            return errno == EAGAIN || errno == EINTR ? AWAIT : END;
        if (found == 0) {
            errno = 0;
            return END;
        }
        if (!is_buffered) {
            *count = (size_t)found;
            /* A slow connection must not keep a receiver from others. */
            return *count < nbytes && has_others(rail) ? AWAIT : GO_ON;
        }
        rail->buffered = (size_t)found;
        rail->taken = 0;
    }
    *count = rail->buffered - rail->taken < nbytes ? rail->buffered - rail->taken : nbytes;
    memcpy(target, rail->buffer + rail->taken, *count);
    rail->taken += *count;
    return GO_ON;
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

/* Where data go, or whether they are dropped because another rail has delivered them; false if they are not
 * what their record announced. Call with the lock. */
static bool expect_data(struct tcp_rail *rail, const struct frame *frame)
{
    struct engine *engine = rail->engine;
    uint64_t target = 0;

    rail->receiving = DISCARDING;
    if (!engine_expect_data(engine, &rail->rail, frame->number))
        return true;
    rail->receiving = RECEIVING_DATA;
    if (!engine_target(engine, frame->number, frame->nbytes, &target))
        return false;
    if (target == 0)
        target = engine->options.rings + engine->options.ring_bytes + frame->slot;
    rail->target = (char *)(uintptr_t)target;
    return true;
}

/* Handle what a frame has announced, all of which has come. Call with the lock. */
static void complete_receive(struct tcp_rail *rail)
{
    struct engine *engine = rail->engine;
    const struct frame *frame = &rail->frame;
    void *record;

    if (rail->receiving == RECEIVING_DATA) {
        engine_data_arrived(engine, &rail->rail, frame->number);
    } else if (rail->receiving == RECEIVING_RECORD) {
        record = rail->rail.live ? engine_expect_record(engine, frame->number) : NULL;
        if (record != NULL) {
            memcpy(record, rail->scratch, frame->nbytes);
            engine_record_arrived(engine, frame->number);
        }
    } else if (frame->message == MESSAGE_CREDIT) {
        engine_credit_arrived(engine, &rail->rail, frame->number);
    }
    rail->receiving = RECEIVING_FRAME;
    rail->received = 0;
    rail->has_news = true;
}

/* Handle a frame that has come, and all of what it announces where that is nothing. Call with the lock. */
static enum received begin_receive(struct tcp_rail *rail)
{
    const struct frame *frame = &rail->frame;

    if (!is_valid(rail, frame)) {
        errno = EPROTO;
        return END;
    }
    rail->received = 0;
    rail->receiving = DISCARDING;
    if (frame->message == MESSAGE_RECORD) {
        rail->receiving = RECEIVING_RECORD;
        rail->target = rail->scratch;
    } else if (frame->message == MESSAGE_DATA && !expect_data(rail, frame)) {
        errno = EPROTO;
        return END;
    }
    if (frame->nbytes == 0)
        complete_receive(rail);
    return GO_ON;
}

/* Receive the rest of a frame, or of what it announces. */
static enum received receive_piece(struct tcp_rail *rail, bool *is_whole)
{
    bool is_frame = rail->receiving == RECEIVING_FRAME;
    size_t all = is_frame ? sizeof rail->frame : rail->frame.nbytes, left = all - rail->received, count;
    char *target = is_frame ? (char *)&rail->frame + rail->received : rail->target + rail->received;

    if (rail->receiving == DISCARDING) {
        target = rail->scratch;
        left = left < TCP_SCRATCH_BYTES ? left : TCP_SCRATCH_BYTES;
    }
    enum received result = receive_some(rail, target, left, &count);
    rail->received += count;
    *is_whole = rail->received == all;
    return result;
}

static enum received receive_one(struct tcp_rail *rail)
{
    bool is_whole, is_data;
    enum received result = receive_piece(rail, &is_whole);

    if (result != GO_ON || !is_whole)
        return result;
    is_data = rail->receiving == RECEIVING_DATA;
    pthread_mutex_lock(&rail->engine->lock);
    if (rail->receiving == RECEIVING_FRAME)
        result = begin_receive(rail);
    else
        complete_receive(rail);
    engine_unlock(rail->engine);
    return result == GO_ON && is_data && rail->taken == rail->buffered && has_others(rail) ? AWAIT : result;
}

/* A receiver's call. */
static bool receive(struct connection *connection)
{
    struct tcp_rail *rail = rail_at(connection);
    enum received result;
    int code;

    rail->refills = 0;
    do
        result = receive_one(rail);
    while (result == GO_ON);
    code = errno;
    if (result == AWAIT) {
        tell_news(rail);
        return true;
    }
    pthread_mutex_lock(&rail->engine->lock);
    /* Lose the rail even if the peer closed it in order: bytes that the peer's kernel had accepted may be
     * lost without any error. */
    lose(rail, code != 0 ? "its connection broke while receiving" : "its connection was closed", code);
    engine_progress(rail->engine);
    engine_unlock(rail->engine);
    return false;
}

static void removed(struct connection *connection)
{
    struct tcp_rail *rail = rail_at(connection);

    pthread_mutex_lock(&rail->engine->lock);
    rail->is_served = false;
    pthread_cond_broadcast(&rail->is_done);
    engine_unlock(rail->engine);
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

/* Senders and receivers report to the engine themselves. Measured here, or what the kernel sends on by itself
 * after the last call of sendmsg would not count. */
static bool poll_bandwidth(struct rail *base, struct engine *engine)
{
    (void)engine;
    measure_bandwidth(rail_of(base));
    return false;
}

static void stop(struct rail *base)
{
    shutdown(rail_of(base)->connection.fd, SHUT_RDWR);
}

static void join(struct rail *base)
{
    struct tcp_rail *rail = rail_of(base);

    pthread_mutex_lock(&rail->engine->lock);
    while (rail->is_served || rail->sending != SENDING_NOTHING)
        pthread_cond_wait(&rail->is_done, &rail->engine->lock);
    engine_unlock(rail->engine);
}

static void close_rail(struct rail *base)
{
    struct tcp_rail *rail = rail_of(base);

    pthread_cond_destroy(&rail->is_done);
    free(rail->buffer);
    free(rail->scratch);
    free(rail);
}

static int start(struct rail *base)
{
    struct tcp_rail *rail = rail_of(base);
    struct timeval slice = {0, PROXY_SLICE_MICROSECONDS};
    int code;

    if (setsockopt(rail->connection.fd, SOL_SOCKET, SO_RCVTIMEO, &slice, sizeof slice) != 0 ||
        setsockopt(rail->connection.fd, SOL_SOCKET, SO_SNDTIMEO, &slice, sizeof slice) != 0)
        return errno;
    pthread_mutex_lock(&rail->engine->lock);
    base->live = rail->is_served = true;
    engine_unlock(rail->engine);
    code = proxy_add_connection(rail->proxy, &rail->connection);
    if (code == 0)
        return 0;
    pthread_mutex_lock(&rail->engine->lock);
    rail->is_served = false;
    engine_unlock(rail->engine);
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
    .flush = flush,
    .start = start,
    .stop = stop,
    .join = join,
    .close = close_rail,
};

struct rail *tcp_open(struct engine *engine, struct proxy *proxy, int fd, char *error)
{
    struct tcp_rail *rail = calloc(1, sizeof *rail);

    if (rail != NULL) {
        rail->scratch = malloc(TCP_SCRATCH_BYTES);
        rail->buffer = malloc(TCP_BUFFER_BYTES);
    }
    if (rail == NULL || rail->scratch == NULL || rail->buffer == NULL) {
        if (rail != NULL) {
            free(rail->scratch);
            free(rail->buffer);
        }
        free(rail);
        set_reason(error, "a rail cannot be made (%s)", strerror(ENOMEM));
        return NULL;
    }
    rail->rail.operations = &operations;
    rail->rail.event_fd = -1;
    rail->engine = engine;
    rail->proxy = proxy;
    rail->connection = (struct connection){.fd = fd, .receive = receive, .removed = removed, .has_room = has_room};
    rail->job.run = send_queued;
    pthread_cond_init(&rail->is_done, NULL);
    return &rail->rail;
}
