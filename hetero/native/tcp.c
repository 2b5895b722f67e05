#include "tcp_rail.h"

#include "engine.h"
#include "speed.h"

#include <errno.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

/* Over which a speed is taken, at least: the kernel counts in its ticks how long it was busy. */
#define LEAST_SECONDS 10e-3
#define LEAST_BYTES (64 << 10)
/* What is faster is bound by the CPUs at its ends, which rails share: told apart, one would take all. */
#define MOST_BYTES_PER_SECOND 1e9
/* How often in a row the kernel has to have sent something again, before a rail counts as late. */
#define LEAST_REPEATED 2

static struct tcp_rail *rail_of(struct rail *rail)
{
    return (struct tcp_rail *)rail;
}

void tcp_lock(struct tcp_rail *rail)
{
    pthread_mutex_lock(rail->owner.lock);
}

void tcp_unlock(struct tcp_rail *rail)
{
    pthread_mutex_unlock(rail->owner.lock);
}

/* How fast it is. */

/* Bytes that the kernel has taken and the peer's has not confirmed. */
static uint64_t unconfirmed(const struct tcp_rail *rail)
{
    int nbytes = 0;

    return ioctl(rail->request.fd, SIOCOUTQ, &nbytes) == 0 ? (uint64_t)nbytes : 0;
}

/* While a call is under way, what of it the kernel has taken counts twice. */
static uint64_t bytes_under_way(const struct rail *base)
{
    const struct tcp_rail *rail = (const struct tcp_rail *)base;

    return rail->queued + unconfirmed(rail);
}

static bool ask_kernel(const struct tcp_rail *rail, struct tcp_info *info)
{
    socklen_t nbytes = sizeof *info;

    memset(info, 0, sizeof *info);
    return getsockopt(rail->request.fd, IPPROTO_TCP, TCP_INFO, info, &nbytes) == 0;
}

static double last_heard(const struct rail *base)
{
    struct tcp_info info;

    return ask_kernel((const struct tcp_rail *)base, &info)
               ? engine_now() - 1e-3 * info.tcpi_last_ack_recv
               : 0;
}

/* After a rest, or with what is too small to tell a rail's speed from how far the peer is. */
static void measure_from_here(struct tcp_rail *rail, const struct tcp_info *info)
{
    rail->busy_by_then = info->tcpi_busy_time - info->tcpi_rwnd_limited;
    rail->confirmed_by_then = info->tcpi_bytes_acked;
}

/* What the kernel takes at once may take long to arrive: only what was confirmed says how fast a rail
 * is, over the time in which something was on its way and the peer had room for it. */
static void measure(struct tcp_rail *rail)
{
    struct tcp_info info;
    double now = engine_now(), seconds;

    if (now - rail->measured_at < LEAST_SECONDS || !ask_kernel(rail, &info))
        return;
    rail->measured_at = now;
    uint64_t busy = info.tcpi_busy_time - info.tcpi_rwnd_limited - rail->busy_by_then;
    uint64_t confirmed = info.tcpi_bytes_acked - rail->confirmed_by_then;
    if (1e-6 * (double)busy < LEAST_SECONDS || confirmed < LEAST_BYTES)
        return;
    seconds = 1e-6 * (double)busy;
    if (seconds < (double)confirmed / MOST_BYTES_PER_SECOND)
        seconds = (double)confirmed / MOST_BYTES_PER_SECOND;
    speed_note(&rail->rail, confirmed, seconds);
    measure_from_here(rail, &info);
}

/* Sending. */

static int give(struct rail *base, struct frame frame, const void *bytes)
{
    struct tcp_rail *rail = rail_of(base);

    if (rail->count == 0 && unconfirmed(rail) == 0) {
        struct tcp_info info;

        rail->waiting_since = engine_now();
        if (ask_kernel(rail, &info))
            measure_from_here(rail, &info);
        rail->owner.awaits_answer(rail->owner.carrier);
    }
    rail->queued += sizeof frame + frame.nbytes;
    rail->items[(rail->first + rail->count) % TCP_ROOM] = (struct item){frame, bytes};
    rail->waiting[frame.message]++;
    base->credits_under_way += frame.message == MESSAGE_CREDIT;
    if (rail->count++ == 0)
        pthread_cond_signal(&rail->has_items);
    return 0;
}

static int post_record(struct rail *base, uint32_t number, uint64_t offset)
{
    struct frame frame = {MESSAGE_RECORD, number, 0, sizeof(struct ring_record)};

    return give(base, frame, (const void *)(uintptr_t)(rail_of(base)->request.control + offset));
}

static int post_data(struct rail *base, uint32_t number, uint64_t slot, uint64_t nbytes)
{
    struct frame frame = {MESSAGE_DATA, number, slot, nbytes};
    uint64_t source = engine_source(rail_of(base)->owner.engine, number);

    if (source == 0)
        source = rail_of(base)->request.sending + slot;
    return give(base, frame, (const void *)(uintptr_t)source);
}

static int post_credit(struct rail *base, uint32_t released)
{
    return give(base, (struct frame){MESSAGE_CREDIT, released, 0, 0}, NULL);
}

static bool has_room(const struct rail *base, enum message message)
{
    static const int limits[] = {TCP_RECORDS, TCP_DATA, TCP_CREDITS, 0};

    return ((const struct tcp_rail *)base)->waiting[message] < limits[message];
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

    snprintf(reason, sizeof reason, code == 0 ? "%s" : "%s (%s)", what, strerror(code));
    engine_lose(rail->owner.engine, &rail->rail, reason);
}

/* As many of the first messages as go out in one call: all up to, and with, the first data. Called with
 * the lock. */
static int collect(const struct tcp_rail *rail, struct iovec *parts, int *count)
{
    int items = 0;

    for (*count = 0; items < rail->count; ) {
        const struct item *item = &rail->items[(rail->first + items++) % TCP_ROOM];

        parts[(*count)++] = (struct iovec){(void *)&item->frame, sizeof item->frame};
        if (item->frame.nbytes > 0)
            parts[(*count)++] = (struct iovec){(void *)item->bytes, item->frame.nbytes};
        if (item->frame.message == MESSAGE_DATA)
            break;
    }
    return items;
}

static void sent(struct tcp_rail *rail, int items)
{
    for (; items > 0; items--) {
        const struct frame *frame = &rail->items[rail->first].frame;

        rail->waiting[frame->message]--;
        rail->queued -= sizeof *frame + frame->nbytes;
        rail->rail.credits_under_way -= frame->message == MESSAGE_CREDIT;
        engine_sent(rail->owner.engine, &rail->rail, frame->message, frame->number);
        rail->first = (rail->first + 1) % TCP_ROOM;
        rail->count--;
    }
}

static void *send_loop(void *argument)
{
    struct tcp_rail *rail = argument;
    struct iovec parts[2 * TCP_ROOM];
    int items, count;
    bool is_sent;

    prctl(PR_SET_NAME, "tcp-send");
    tcp_lock(rail);
    for (;;) {
        while (rail->rail.live && rail->count == 0)
            pthread_cond_wait(&rail->has_items, rail->owner.lock);
        if (!rail->rail.live)
            break;
        items = collect(rail, parts, &count);
        tcp_unlock(rail);
        is_sent = send_all(rail->request.fd, parts, count);
        int code = errno;
        tcp_lock(rail);
        if (!is_sent)
            tcp_lose(rail, "its connection broke while sending", code);
        if (!rail->rail.live)
            break;
        sent(rail, items);
        measure(rail);
        engine_progress(rail->owner.engine);
    }
    tcp_unlock(rail);
    return NULL;
}

static double last_asked(const struct rail *base)
{
    struct tcp_info info;

    return ask_kernel((const struct tcp_rail *)base, &info)
               ? engine_now() - 1e-3 * info.tcpi_last_data_sent
               : 0;
}

/* What was sent is sent again, and not answered. A peer that only rests closes its window, and its
 * kernel goes on answering: nothing is sent again then. */
static bool is_late(const struct rail *base, double before, char *reason)
{
    const struct tcp_rail *rail = (const struct tcp_rail *)base;
    struct tcp_info info;

    if (unconfirmed(rail) == 0 || rail->waiting_since > before || last_heard(base) > before ||
        !ask_kernel(rail, &info) || info.tcpi_retransmits + info.tcpi_probes < LEAST_REPEATED)
        return false;
    snprintf(reason, RAIL_TEXT_BYTES, "nothing was answered for %.1f s, while other rails were",
             engine_now() - before);
    return true;
}

static bool is_drained(const struct rail *base)
{
    return ((const struct tcp_rail *)base)->is_ended || !base->live;
}

/* Its threads tell the engine by themselves what has happened. */
static bool poll_nothing(struct rail *base, struct engine *engine)
{
    (void)base;
    (void)engine;
    return false;
}

static void stop(struct rail *base)
{
    shutdown(rail_of(base)->request.fd, SHUT_RDWR);
    pthread_cond_broadcast(&rail_of(base)->has_items);
}

static void join(struct rail *base)
{
    struct tcp_rail *rail = rail_of(base);

    if (rail->is_started && !rail->is_joined) {
        pthread_join(rail->sender, NULL);
        pthread_join(rail->receiver, NULL);
        rail->is_joined = true;
    }
}

static void close_rail(struct rail *base)
{
    struct tcp_rail *rail = rail_of(base);

    close(rail->request.fd);
    pthread_cond_destroy(&rail->has_items);
    free(rail->scratch);
    free(rail);
}

static int start(struct rail *base)
{
    struct tcp_rail *rail = rail_of(base);
    int code;

    /* The threads of rails that were started before this look at it. */
    tcp_lock(rail);
    base->live = true;
    tcp_unlock(rail);
    code = pthread_create(&rail->sender, NULL, send_loop, rail);
    if (code != 0)
        return code;
    code = pthread_create(&rail->receiver, NULL, tcp_receive_loop, rail);
    if (code == 0) {
        rail->is_started = true;
        return 0;
    }
    tcp_lock(rail);
    base->live = false;
    stop(base);
    tcp_unlock(rail);
    pthread_join(rail->sender, NULL);
    return code;
}

static const struct rail_operations operations = {
    .post_record = post_record,
    .post_data = post_data,
    .post_credit = post_credit,
    .has_room = has_room,
    .bytes_under_way = bytes_under_way,
    .is_late = is_late,
    .last_heard = last_heard,
    .last_asked = last_asked,
    .is_drained = is_drained,
    .poll = poll_nothing,
    .start = start,
    .stop = stop,
    .join = join,
    .close = close_rail,
};

struct rail *tcp_open(const struct tcp_request *request, const struct tcp_owner *owner, int *code)
{
    struct tcp_rail *rail = calloc(1, sizeof *rail);

    *code = ENOMEM;
    if (rail == NULL)
        return NULL;
    rail->rail.operations = &operations;
    rail->rail.event_fd = rail->rail.async_fd = -1;
    rail->request = *request;
    rail->owner = *owner;
    rail->scratch = malloc(TCP_SCRATCH_BYTES);
    if (rail->scratch == NULL) {
        free(rail);
        return NULL;
    }
    pthread_cond_init(&rail->has_items, NULL);
    return &rail->rail;
}
