#include "carrier.h"

#include "tcp.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

/* While it has to poll, the thread yields at first, then sleeps briefly between polls, then longer. */
#define YIELD_SECONDS 100e-6
#define SHORT_SLEEP_SECONDS 0.1
#define SHORT_SLEEP_NANOSECONDS 20000
#define LONG_SLEEP_NANOSECONDS 200000
/* Between two polls of wait_until. */
#define POLL_NANOSECONDS 200000
/* Between two checks of rails that raise no event: for overdue acknowledgements. */
#define CHECK_MILLISECONDS 250

static void sleep_for(long nanoseconds)
{
    struct timespec time = {0, nanoseconds};

    nanosleep(&time, NULL);
}

/* The thread. */

/* An error without data would leave the descriptor ready, and this thread without sleep, for ever. */
static void take_event(struct carrier *carrier, struct rail *rail, short events)
{
    if (events & POLLIN && rail->operations->acknowledge(rail))
        return;
    engine_lock(&carrier->engine);
    engine_lose_rail(&carrier->engine, rail, "its completion channel failed");
    engine_unlock(&carrier->engine);
}

/* Sleep until wake_fd is written, a rail has an event, or rails have to be checked. */
static void sleep_until_event(struct carrier *carrier)
{
    struct engine *engine = &carrier->engine;
    struct pollfd polled[1 + ENGINE_RAILS] = {{.fd = engine->wake_fd, .events = POLLIN}};
    eventfd_t value;
    int timeout = -1, count;

    engine_lock(engine);
    for (int index = 0; index < engine->rail_count; index++) {
        const struct rail *rail = engine->rails[index];

        polled[1 + index] =
            (struct pollfd){.fd = rail->live ? rail->event_fd : -1, .events = POLLIN};
        if (rail->live && rail->event_fd < 0)
            timeout = CHECK_MILLISECONDS;
    }
    engine_unlock(engine);
    count = poll(polled, 1 + (nfds_t)engine->rail_count, timeout);
    if (count <= 0)
        return;
    if (polled[0].revents & POLLIN)
        eventfd_read(engine->wake_fd, &value);
    for (int index = 0; index < engine->rail_count; index++)
        if (polled[1 + index].revents != 0)
            take_event(carrier, engine->rails[index], polled[1 + index].revents);
}

static void back_off(double idle_seconds)
{
    if (idle_seconds < YIELD_SECONDS)
        sched_yield();
    else if (idle_seconds < SHORT_SLEEP_SECONDS)
        sleep_for(SHORT_SLEEP_NANOSECONDS);
    else
        sleep_for(LONG_SLEEP_NANOSECONDS);
}

static void *run(void *argument)
{
    struct carrier *carrier = argument;
    struct engine *engine = &carrier->engine;
    double last_moved = engine_now();
    bool is_armed = false;

    prctl(PR_SET_NAME, "hetero-carrier");
    /* The default timer slack adds 50 us to a sleep of 20. */
    prctl(PR_SET_TIMERSLACK, 1000);
    while (!atomic_load(&carrier->stopping)) {
        bool moved, busy;
        double time;

        while (atomic_load(&engine->lock_waiters) > 0)
            sched_yield();
        pthread_mutex_lock(&engine->lock);
        moved = engine_progress(engine);
        time = engine_now();
        busy = engine_needs_polling(engine);
        if (!moved && !busy && !is_armed)
            engine_request_notifications(engine);
        pthread_mutex_unlock(&engine->lock);
        if (moved) {
            last_moved = time;
            is_armed = false;
        } else if (busy) {
            back_off(time - last_moved);
        } else if (!is_armed) {
            /* An event before the notifications were requested raises none: poll once more. */
            is_armed = true;
        } else {
            sleep_until_event(carrier);
            is_armed = false;
            last_moved = engine_now();
        }
    }
    return NULL;
}

/* Calls from Python. */

struct carrier *carrier_new(const struct engine_options *options, char *error)
{
    struct carrier *carrier = calloc(1, sizeof *carrier);

    if (carrier == NULL) {
        set_reason(error, "a link's carrier cannot be made (%s)", strerror(ENOMEM));
        return NULL;
    }
    if (!engine_init(&carrier->engine, options)) {
        set_reason(error, "a link's carrier cannot be made (%s)", strerror(errno));
        carrier_free(carrier);
        return NULL;
    }
    return carrier;
}

static bool has_room(const struct carrier *carrier, char *error)
{
    return carrier->engine.rail_count < ENGINE_RAILS ||
           set_reason(error, "a link has %d rails at most", ENGINE_RAILS);
}

/* False for no rail. */
static bool add_rail(struct carrier *carrier, struct rail *rail)
{
    if (rail == NULL)
        return false;
    rail->index = (uint8_t)carrier->engine.rail_count;
    carrier->engine.rails[carrier->engine.rail_count++] = rail;
    return true;
}

bool carrier_add_verbs(struct carrier *carrier, const char *device, uint8_t port,
                       struct verbs_end *made, bool *by_dmabuf, char *error)
{
    return has_room(carrier, error) &&
           add_rail(carrier, verbs_open(&carrier->engine.options, device, port, made, by_dmabuf, error));
}

bool carrier_connect_verbs(struct carrier *carrier, int index, const struct verbs_end *peer,
                           const struct verbs_route *route, const struct verbs_route *own,
                           char *error)
{
    return verbs_connect(carrier->engine.rails[index], peer, route, own, error);
}

bool carrier_add_tcp(struct carrier *carrier, int fd, char *error)
{
    return has_room(carrier, error) && add_rail(carrier, tcp_open(&carrier->engine, fd, error));
}

/* Block signals in the threads that are started next: one delivered there would not interrupt Python's main
 * thread. */
static void block_signals(sigset_t *before)
{
    sigset_t all;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, before);
}

bool carrier_start(struct carrier *carrier, char *error)
{
    sigset_t before;
    int code = 0;

    block_signals(&before);
    for (int index = 0; index < carrier->engine.rail_count && code == 0; index++) {
        struct rail *rail = carrier->engine.rails[index];

        code = rail->operations->start != NULL ? rail->operations->start(rail) : 0;
    }
    if (code == 0)
        code = pthread_create(&carrier->thread, NULL, run, carrier);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    carrier->is_running = code == 0;
    return code == 0 || set_reason(error, "a link's thread cannot be started (%s)", strerror(code));
}

bool carrier_reopen_tcp(struct carrier *carrier, int index, int fd, char *error)
{
    struct engine *engine = &carrier->engine;
    struct rail *opened = tcp_open(engine, fd, error), *lost = engine->rails[index];
    sigset_t before;
    int code;

    if (opened == NULL)
        return false;
    engine_lock(engine);
    opened->index = lost->index;
    opened->bytes_sent = lost->bytes_sent;
    engine->rails[index] = opened;
    engine_unlock(engine);
    /* No thread has kept a pointer to it: its own have ended, and others look rails up with the lock. */
    lost->operations->close(lost);
    block_signals(&before);
    code = opened->operations->start(opened);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code != 0) {
        carrier_stop_rail(carrier, index);
        return set_reason(error, "a rail's threads cannot be started (%s)", strerror(code));
    }
    /* The carrier's thread checks rails only while one is live. */
    eventfd_write(engine->wake_fd, 1);
    return true;
}

void carrier_progress(struct carrier *carrier)
{
    engine_drive(&carrier->engine);
}

int carrier_loss_fd(const struct carrier *carrier)
{
    return carrier->engine.loss_fd;
}

int carrier_next_loss(struct carrier *carrier, char *reason, bool *may_have_ended)
{
    struct engine *engine = &carrier->engine;
    eventfd_t value;
    int found = -1;

    engine_lock(engine);
    eventfd_read(engine->loss_fd, &value);
    for (int index = 0; index < engine->rail_count && found < 0; index++)
        if (engine->rails[index]->loss[0] != '\0') {
            memcpy(reason, engine->rails[index]->loss, RAIL_TEXT_BYTES);
            *may_have_ended = engine->rails[index]->may_have_ended;
            engine->rails[index]->loss[0] = '\0';
            found = index;
        }
    engine_unlock(engine);
    return found;
}

void carrier_stop_rail(struct carrier *carrier, int index)
{
    struct rail *rail = carrier->engine.rails[index];

    engine_lock(&carrier->engine);
    engine_lose_rail(&carrier->engine, rail, "");
    rail->loss[0] = '\0';
    engine_unlock(&carrier->engine);
    rail->operations->join(rail);
    /* Discard what was being received while it was stopped. */
    engine_lock(&carrier->engine);
    incoming_discard(&carrier->engine.incoming, rail->index);
    engine_unlock(&carrier->engine);
}

int carrier_retransmit(struct carrier *carrier, int index)
{
    struct engine *engine = &carrier->engine;
    struct rail *rail = engine->rails[index];
    int count;

    engine_lock(engine);
    rail->operations->poll(rail, engine);
    count = outgoing_retransmit(&engine->outgoing, rail->index, !rail->confirms_delivery,
                                !rail->confirms_delivery || rail->peer_reads_back);
    engine->incoming.credit_lost = true;
    engine->retransmitted += (uint64_t)count;
    engine_unlock(engine);
    carrier_progress(carrier);
    return count;
}

uint64_t carrier_rail_counters(struct carrier *carrier, struct rail_counters *counters, int count)
{
    struct engine *engine = &carrier->engine;
    uint64_t retransmitted;

    engine_lock(engine);
    for (int index = 0; index < engine->rail_count && index < count; index++)
        counters[index] = (struct rail_counters){
            .bytes_sent = engine->rails[index]->bytes_sent,
            .bytes_per_second = engine->rails[index]->bytes_per_second,
        };
    retransmitted = engine->retransmitted;
    engine_unlock(engine);
    return retransmitted;
}

static bool has_flushed_credits(struct engine *engine)
{
    engine_progress(engine);
    return engine_has_sent_credits(engine);
}

/* Poll a condition under the lock up to `seconds`; returns whether it was met. */
static bool wait_until(struct carrier *carrier, bool (*condition)(struct engine *),
                       double seconds)
{
    double deadline = engine_now() + seconds;

    for (;;) {
        engine_lock(&carrier->engine);
        bool is_met = condition(&carrier->engine);
        engine_unlock(&carrier->engine);
        if (is_met || engine_now() > deadline)
            return is_met;
        sleep_for(POLL_NANOSECONDS);
    }
}

bool carrier_drain(struct carrier *carrier, double seconds)
{
    return wait_until(carrier, engine_is_drained, seconds);
}

bool carrier_flush_credits(struct carrier *carrier, double seconds)
{
    return wait_until(carrier, has_flushed_credits, seconds);
}

void carrier_free(struct carrier *carrier)
{
    atomic_store(&carrier->stopping, true);
    if (carrier->is_running) {
        eventfd_write(carrier->engine.wake_fd, 1);
        pthread_join(carrier->thread, NULL);
    }
    /* Stop all rails before freeing any: their threads use all of them. */
    for (int index = 0; index < carrier->engine.rail_count; index++)
        carrier_stop_rail(carrier, index);
    for (int index = 0; index < carrier->engine.rail_count; index++)
        carrier->engine.rails[index]->operations->close(carrier->engine.rails[index]);
    engine_destroy(&carrier->engine);
    free(carrier);
}
