#include "tcp.h"

#include "engine.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* Messages of each kind that wait for the sending thread: few data, which another rail may bring
 * sooner, but never none. */
#define RECORDS 64
#define DATA 2
#define CREDITS 2
#define ROOM (RECORDS + DATA + CREDITS)
#define SCRATCH_BYTES (64 << 10)

/* What stands before a message's bytes. Both ends are of one byte order, which the handshake of the
 * link checks. */
struct frame {
    uint32_t message; /* enum message */
    uint32_t number;  /* of the entry; of a credit, the count */
    uint64_t place;
    uint64_t nbytes;
};

struct item {
    struct frame frame;
    const void *bytes;
};

struct tcp_rail {
    struct rail rail; /* the first, so that either is the other */
    struct tcp_request request;
    struct tcp_owner owner;
    pthread_t sender, receiver;
    bool is_started, is_joined;
    /* Guarded by the carrier's lock, as is the part in common. */
    pthread_cond_t given;
    struct item items[ROOM]; /* a ring: what is to be sent, the first of it under way */
    int first, count;
    int waiting[4]; /* by what they carry */
    double sending_since; /* 0 while nothing is under way */
    bool is_ended;        /* the peer sends nothing more */
    char *scratch;
};

static struct tcp_rail *rail_of(struct rail *rail)
{
    return (struct tcp_rail *)rail;
}

static void lock(struct tcp_rail *rail)
{
    pthread_mutex_lock(rail->owner.lock);
}

static void unlock(struct tcp_rail *rail)
{
    pthread_mutex_unlock(rail->owner.lock);
}

/* Sending. */

static int give(struct rail *base, struct frame frame, const void *bytes)
{
    struct tcp_rail *rail = rail_of(base);

    rail->items[(rail->first + rail->count) % ROOM] = (struct item){frame, bytes};
    rail->waiting[frame.message]++;
    base->credits_under_way += frame.message == MESSAGE_CREDIT;
    if (rail->count++ == 0)
        pthread_cond_signal(&rail->given);
    return 0;
}

static int post_record(struct rail *base, uint32_t number, uint64_t offset, double now)
{
    const struct tcp_request *request = &rail_of(base)->request;
    struct frame frame = {MESSAGE_RECORD, number, 0, request->record_bytes};

    (void)now;
    return give(base, frame, (const void *)(uintptr_t)(request->control + offset));
}

static int post_data(struct rail *base, uint32_t number, uint64_t place, uint64_t nbytes,
                     double now)
{
    struct frame frame = {MESSAGE_DATA, number, place, nbytes};

    (void)now;
    return give(base, frame, (const void *)(uintptr_t)(rail_of(base)->request.sending + place));
}

static int post_credit(struct rail *base, uint32_t released, double now)
{
    (void)now;
    return give(base, (struct frame){MESSAGE_CREDIT, released, 0, 0}, NULL);
}

static bool has_room(const struct rail *base, enum message message)
{
    static const int limits[] = {RECORDS, DATA, CREDITS, 0};

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

/* A failure of the connection; nothing if the rail has been stopped. */
static void lose(struct tcp_rail *rail, const char *what, int code)
{
    char reason[RAIL_TEXT_BYTES];

    snprintf(reason, sizeof reason, "%s (%s)", what, strerror(code));
    engine_lose(rail->owner.engine, &rail->rail, reason);
}

/* As many of the first messages as go out in one call: all up to, and with, the first data. Called with
 * the lock. */
static int collect(const struct tcp_rail *rail, struct iovec *parts, int *count)
{
    int items = 0;

    for (*count = 0; items < rail->count; ) {
        const struct item *item = &rail->items[(rail->first + items++) % ROOM];

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
        rail->rail.credits_under_way -= frame->message == MESSAGE_CREDIT;
        engine_sent(rail->owner.engine, &rail->rail, frame->message, frame->number);
        rail->first = (rail->first + 1) % ROOM;
        rail->count--;
    }
}

static void *send_loop(void *argument)
{
    struct tcp_rail *rail = argument;
    struct iovec parts[2 * ROOM];
    int items, count;
    bool is_sent;

    prctl(PR_SET_NAME, "tcp-send");
    lock(rail);
    for (;;) {
        while (rail->rail.live && rail->count == 0)
            pthread_cond_wait(&rail->given, rail->owner.lock);
        if (!rail->rail.live)
            break;
        items = collect(rail, parts, &count);
        rail->sending_since = engine_now();
        unlock(rail);
        is_sent = send_all(rail->request.fd, parts, count);
        int code = errno;
        lock(rail);
        rail->sending_since = 0;
        if (!is_sent)
            lose(rail, "its connection broke while sending", code);
        if (!rail->rail.live)
            break;
        sent(rail, items);
        engine_progress(rail->owner.engine);
    }
    unlock(rail);
    return NULL;
}

/* Receiving. */

/* 1, 0 at the end of the connection, -1 with errno. */
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

/* What has come already over another rail. */
static int discard(struct tcp_rail *rail, uint64_t nbytes)
{
    int code = 1;

    while (nbytes > 0 && code > 0) {
        size_t part = nbytes < SCRATCH_BYTES ? nbytes : SCRATCH_BYTES;

        code = receive_all(rail->request.fd, rail->scratch, part);
        nbytes -= part;
    }
    return code;
}

static int receive_record(struct tcp_rail *rail, const struct frame *frame)
{
    struct engine *engine = rail->owner.engine;
    int code = receive_all(rail->request.fd, rail->scratch, frame->nbytes);
    void *record;

    if (code <= 0)
        return code;
    lock(rail);
    record = rail->rail.live ? engine_expect_record(engine, frame->number) : NULL;
    if (record != NULL) {
        memcpy(record, rail->scratch, frame->nbytes);
        engine_record_arrived(engine, frame->number);
    }
    unlock(rail);
    return 1;
}

static int receive_data(struct tcp_rail *rail, const struct frame *frame)
{
    struct engine *engine = rail->owner.engine;
    bool is_expected;
    int code;

    lock(rail);
    is_expected = engine_expect_data(engine, &rail->rail, frame->number);
    unlock(rail);
    if (!is_expected)
        return discard(rail, frame->nbytes);
    code = receive_all(rail->request.fd,
                       (void *)(uintptr_t)(rail->request.receiving + frame->place), frame->nbytes);
    if (code <= 0)
        return code;
    lock(rail);
    engine_data_arrived(engine, &rail->rail, frame->number);
    unlock(rail);
    return 1;
}

static bool makes_sense(const struct tcp_rail *rail, const struct frame *frame)
{
    const struct tcp_request *request = &rail->request;

    if (frame->message == MESSAGE_RECORD)
        return frame->nbytes == request->record_bytes;
    if (frame->message == MESSAGE_DATA)
        return frame->place <= request->ring_bytes &&
               frame->nbytes <= request->ring_bytes - frame->place;
    return frame->message == MESSAGE_CREDIT && frame->nbytes == 0;
}

static int receive_one(struct tcp_rail *rail)
{
    struct frame frame;
    int code = receive_all(rail->request.fd, &frame, sizeof frame);

    if (code <= 0)
        return code;
    if (!makes_sense(rail, &frame)) {
        errno = EPROTO;
        return -1;
    }
    if (frame.message == MESSAGE_RECORD)
        return receive_record(rail, &frame);
    if (frame.message == MESSAGE_DATA)
        return receive_data(rail, &frame);
    lock(rail);
    engine_credit_arrived(rail->owner.engine, frame.number);
    unlock(rail);
    return 1;
}

static void *receive_loop(void *argument)
{
    struct tcp_rail *rail = argument;
    int code;

    prctl(PR_SET_NAME, "tcp-receive");
    while ((code = receive_one(rail)) > 0) {
        lock(rail);
        engine_progress(rail->owner.engine);
        unlock(rail);
    }
    int reason = errno;
    lock(rail);
    rail->is_ended = true;
    if (code < 0)
        lose(rail, "its connection broke while receiving", reason);
    unlock(rail);
    rail->owner.progress(rail->owner.carrier);
    return NULL;
}

/* Everything else. */

static bool is_busy(const struct rail *base)
{
    (void)base;
    return false;
}

static bool is_late(const struct rail *base, double before, char *reason)
{
    const struct tcp_rail *rail = (const struct tcp_rail *)base;

    if (!base->live || rail->sending_since == 0 || rail->sending_since >= before)
        return false;
    snprintf(reason, RAIL_TEXT_BYTES, "its connection has taken nothing for too long");
    return true;
}

static bool is_drained(const struct rail *base)
{
    return ((const struct tcp_rail *)base)->is_ended || !base->live;
}

/* Its threads tell the engine by themselves. */
static bool poll_nothing(struct rail *base, struct engine *engine)
{
    (void)base;
    (void)engine;
    return false;
}

static int request_notification(struct rail *base)
{
    (void)base;
    return 0;
}

static void acknowledge(struct rail *base)
{
    (void)base;
}

static void stop(struct rail *base)
{
    shutdown(rail_of(base)->request.fd, SHUT_RDWR);
    pthread_cond_broadcast(&rail_of(base)->given);
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
    pthread_cond_destroy(&rail->given);
    free(rail->scratch);
    free(rail);
}

static int start(struct rail *base)
{
    struct tcp_rail *rail = rail_of(base);
    int code;

    base->live = true;
    code = pthread_create(&rail->sender, NULL, send_loop, rail);
    if (code != 0)
        return code;
    code = pthread_create(&rail->receiver, NULL, receive_loop, rail);
    if (code == 0) {
        rail->is_started = true;
        return 0;
    }
    lock(rail);
    base->live = false;
    stop(base);
    unlock(rail);
    pthread_join(rail->sender, NULL);
    return code;
}

static const struct rail_operations operations = {
    .post_record = post_record,
    .post_data = post_data,
    .post_credit = post_credit,
    .has_room = has_room,
    .is_busy = is_busy,
    .is_late = is_late,
    .is_drained = is_drained,
    .poll = poll_nothing,
    .request_notification = request_notification,
    .acknowledge = acknowledge,
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
    rail->scratch = malloc(SCRATCH_BYTES);
    if (rail->scratch == NULL) {
        free(rail);
        return NULL;
    }
    pthread_cond_init(&rail->given, NULL);
    return &rail->rail;
}
