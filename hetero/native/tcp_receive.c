#include "tcp.h"

#include <errno.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>

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
    struct engine *engine = &rail->carrier->engine;
    int code = receive_all(rail->fd, rail->scratch, frame->nbytes);
    void *record;

    if (code <= 0)
        return code;
    pthread_mutex_lock(&rail->carrier->lock);
    record = rail->rail.live ? engine_expect_record(engine, frame->number) : NULL;
    if (record != NULL) {
        memcpy(record, rail->scratch, frame->nbytes);
        engine_record_arrived(engine, frame->number);
    }
    pthread_mutex_unlock(&rail->carrier->lock);
    return 1;
}

static int receive_data(struct tcp_rail *rail, const struct frame *frame)
{
    struct engine *engine = &rail->carrier->engine;
    uint64_t target = 0;
    bool is_expected, is_valid_size;
    int code;

    pthread_mutex_lock(&rail->carrier->lock);
    is_expected = engine_expect_data(engine, &rail->rail, frame->number);
    is_valid_size = !is_expected || engine_target(engine, frame->number, frame->nbytes, &target);
    pthread_mutex_unlock(&rail->carrier->lock);
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
    pthread_mutex_lock(&rail->carrier->lock);
    engine_data_arrived(engine, &rail->rail, frame->number);
    pthread_mutex_unlock(&rail->carrier->lock);
    return 1;
}

static bool is_valid(const struct tcp_rail *rail, const struct frame *frame)
{
    uint64_t ring_bytes = rail->carrier->engine.options.ring_bytes;

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
    pthread_mutex_lock(&rail->carrier->lock);
    engine_credit_arrived(&rail->carrier->engine, &rail->rail, frame.number);
    pthread_mutex_unlock(&rail->carrier->lock);
    return 1;
}

void *tcp_receive_loop(void *argument)
{
    struct tcp_rail *rail = argument;
    int code;

    prctl(PR_SET_NAME, "tcp-receive");
    while ((code = receive_one(rail)) > 0) {
        pthread_mutex_lock(&rail->carrier->lock);
        engine_progress(&rail->carrier->engine);
        pthread_mutex_unlock(&rail->carrier->lock);
    }
    int reason = errno;
    pthread_mutex_lock(&rail->carrier->lock);
    /* Lose the rail even if the peer closed it in order: bytes that the peer's kernel had accepted may be
     * lost without any error. */
    tcp_lose(rail, code < 0 ? "its connection broke while receiving" : "its connection was closed",
             code < 0 ? reason : 0);
    pthread_mutex_unlock(&rail->carrier->lock);
    carrier_progress(rail->carrier);
    return NULL;
}
