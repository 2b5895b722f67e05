#include "carrier.h"

#include "watch.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

/* While something is under way the thread spins for a while, then sleeps shortly, then longer. */
#define SPIN_SECONDS 100e-6
#define BRISK_SECONDS 0.1
#define BRISK_NANOSECONDS 20000
#define SLOW_NANOSECONDS 200000
#define WAITING_NANOSECONDS 200000
#define LOOKING_MILLISECONDS 250

struct carrier {
    struct engine engine;
    int bell;
    bool is_running;
    atomic_bool looks; /* now and then, for rails that do not answer */
    atomic_bool stopping;
    atomic_int callers; /* who wait for the lock, which the thread would else take again at once */
    pthread_mutex_t lock;
    pthread_t thread;
};

static void sleep_for(long nanoseconds)
{
    struct timespec time = {0, nanoseconds};

    nanosleep(&time, NULL);
}

static void lock(struct carrier *carrier)
{
    atomic_fetch_add(&carrier->callers, 1);
    pthread_mutex_lock(&carrier->lock);
    atomic_fetch_sub(&carrier->callers, 1);
}

static void unlock(struct carrier *carrier)
{
    pthread_mutex_unlock(&carrier->lock);
}

/* Sleeping. */

/* Sleep until the bell rings or a rail has an event, or it is time to see whether a rail is late. */
static void rest(struct carrier *carrier)
{
    struct engine *engine = &carrier->engine;
    struct pollfd watched[1 + ENGINE_RAILS] = {{.fd = carrier->bell, .events = POLLIN}};
    eventfd_t rings;
    int count;

    for (int index = 0; index < engine->rail_count; index++)
        watched[1 + index] =
            (struct pollfd){.fd = engine->rails[index]->event_fd, .events = POLLIN};
    count = poll(watched, 1 + (nfds_t)engine->rail_count, carrier->looks ? LOOKING_MILLISECONDS : -1);
    if (count == 0) {
        lock(carrier);
        carrier->looks = watch_awaits_answer(engine);
        unlock(carrier);
    }
    if (count <= 0)
        return;
    if (watched[0].revents & POLLIN)
        eventfd_read(carrier->bell, &rings);
    for (int index = 0; index < engine->rail_count; index++)
        if (watched[1 + index].revents & POLLIN)
            engine->rails[index]->operations->acknowledge(engine->rails[index]);
}

static void breathe(double idle_seconds)
{
    if (idle_seconds < SPIN_SECONDS)
        sched_yield();
    else
        sleep_for(idle_seconds < BRISK_SECONDS ? BRISK_NANOSECONDS : SLOW_NANOSECONDS);
}

static void *run(void *argument)
{
    struct carrier *carrier = argument;
    double last_moved = engine_now();
    bool asked = false;

    prctl(PR_SET_NAME, "hetero-carrier");
    /* The kernel would else stretch a sleep of 20 us by 50. */
    prctl(PR_SET_TIMERSLACK, 1000);
    while (!atomic_load(&carrier->stopping)) {
        bool moved, busy;
        double time;

        while (atomic_load(&carrier->callers) > 0)
            sched_yield();
        pthread_mutex_lock(&carrier->lock);
        moved = engine_progress(&carrier->engine);
        time = engine_now();
        busy = engine_is_under_way(&carrier->engine);
        if (!moved && !busy && !asked)
            engine_request_notifications(&carrier->engine);
        pthread_mutex_unlock(&carrier->lock);
        if (moved) {
            last_moved = time;
            asked = false;
        } else if (busy) {
            breathe(time - last_moved);
        } else if (!asked) {
            /* What came before the notice was asked for gives none: look once more. */
            asked = true;
        } else {
            rest(carrier);
            asked = false;
            last_moved = engine_now();
        }
    }
    return NULL;
}

/* What Python asks. */

static bool fail(char *error, const char *what, int code)
{
    snprintf(error, RAIL_TEXT_BYTES, "%s (%s)", what, strerror(code));
    return false;
}

struct carrier *carrier_new(const struct engine_options *options, char *error)
{
    struct carrier *carrier = calloc(1, sizeof *carrier);

    if (carrier == NULL) {
        fail(error, "a link's carrier cannot be made", ENOMEM);
        return NULL;
    }
    engine_begin(&carrier->engine, options);
    pthread_mutex_init(&carrier->lock, NULL);
    carrier->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    carrier->engine.loss_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (carrier->bell < 0 || carrier->engine.loss_fd < 0) {
        fail(error, "a link's carrier cannot be made", errno);
        carrier_free(carrier);
        return NULL;
    }
    return carrier;
}

static bool add(struct carrier *carrier, struct rail *rail)
{
    rail->index = (uint8_t)carrier->engine.rail_count;
    carrier->engine.losses[rail->index].is_told = true;
    carrier->engine.rails[carrier->engine.rail_count++] = rail;
    return true;
}

static bool is_full(const struct carrier *carrier)
{
    return carrier->engine.rail_count == ENGINE_RAILS;
}

bool carrier_add_verbs(struct carrier *carrier, const struct verbs_request *request,
                       struct verbs_connection_info *info, char *error)
{
    struct verbs_rail *rail;

    if (is_full(carrier))
        return fail(error, "a link has 32 rails at most", E2BIG);
    rail = calloc(1, sizeof *rail);
    if (rail == NULL)
        return fail(error, "a rail cannot be made", ENOMEM);
    if (verbs_open(rail, request, info, error))
        return add(carrier, &rail->rail);
    verbs_close(&rail->rail);
    return false;
}

bool carrier_connect_verbs(struct carrier *carrier, int index, const struct verbs_peer *peer,
                           const struct verbs_route *own, char *error)
{
    return verbs_connect((struct verbs_rail *)carrier->engine.rails[index], peer, own, error);
}

static void awaits_answer(struct carrier *carrier)
{
    if (!atomic_exchange(&carrier->looks, true))
        eventfd_write(carrier->bell, 1);
}

bool carrier_add_tcp(struct carrier *carrier, const struct tcp_request *request, char *error)
{
    struct tcp_owner owner = {&carrier->engine, &carrier->lock, carrier_progress, awaits_answer, carrier};
    int code = E2BIG;
    struct rail *rail = is_full(carrier) ? NULL : tcp_open(request, &owner, &code);

    if (rail != NULL)
        return add(carrier, rail);
    close(request->fd);
    return fail(error, "a rail cannot be made", code);
}

bool carrier_start(struct carrier *carrier, char *error)
{
    sigset_t all, before;
    int code;

    /* A signal that these threads took would not interrupt what Python's main thread waits in. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    code = engine_start_rails(&carrier->engine);
    if (code == 0)
        code = pthread_create(&carrier->thread, NULL, run, carrier);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    carrier->is_running = code == 0;
    return code == 0 || fail(error, "a link's thread cannot be started", code);
}

void carrier_words_notify(struct carrier *carrier)
{
    carrier->engine.words_notify = true;
}

void carrier_progress(struct carrier *carrier)
{
    bool is_under_way;

    lock(carrier);
    engine_progress(&carrier->engine);
    is_under_way = engine_is_under_way(&carrier->engine);
    unlock(carrier);
    if (is_under_way)
        eventfd_write(carrier->bell, 1);
}

int carrier_loss_fd(const struct carrier *carrier)
{
    return carrier->engine.loss_fd;
}

int carrier_async_fd(const struct carrier *carrier, int index)
{
    return carrier->engine.rails[index]->async_fd;
}

bool carrier_handle_async_event(struct carrier *carrier, int index, char *reason)
{
    struct rail *rail = carrier->engine.rails[index];

    return rail->operations->handle_async_event(rail, reason);
}

int carrier_next_loss(struct carrier *carrier, char *reason)
{
    struct engine *engine = &carrier->engine;
    eventfd_t rings;
    int found = -1;

    lock(carrier);
    eventfd_read(engine->loss_fd, &rings);
    for (int index = 0; index < engine->rail_count && found < 0; index++)
        if (!engine->rails[index]->live && !engine->losses[index].is_told) {
            memcpy(reason, engine->losses[index].reason, RAIL_TEXT_BYTES);
            engine->losses[index].is_told = true;
            found = index;
        }
    unlock(carrier);
    return found;
}

void carrier_stop_rail(struct carrier *carrier, int index)
{
    struct rail *rail = carrier->engine.rails[index];

    lock(carrier);
    engine_lose(&carrier->engine, rail, "");
    carrier->engine.losses[index].is_told = true;
    unlock(carrier);
    rail->operations->join(rail);
    /* What was coming in while it was stopped. */
    lock(carrier);
    incoming_forget(&carrier->engine.incoming, rail->index);
    unlock(carrier);
}

int carrier_retransmit(struct carrier *carrier, int index)
{
    struct engine *engine = &carrier->engine;
    struct rail *rail = engine->rails[index];
    int count;

    lock(carrier);
    rail->operations->poll(rail, engine);
    count = outgoing_retransmit(&engine->outgoing, rail->index, !rail->confirms,
                                !rail->confirms || rail->peer_reads_back);
    engine->incoming.credit_lost = true;
    unlock(carrier);
    carrier_progress(carrier);
    return count;
}

static bool has_credited(struct engine *engine)
{
    engine_progress(engine);
    return engine_has_credited(engine);
}

static bool wait_until(struct carrier *carrier, bool (*is_so)(struct engine *),
                       double seconds)
{
    double deadline = engine_now() + seconds;

    for (;;) {
        lock(carrier);
        bool is_reached = is_so(&carrier->engine);
        unlock(carrier);
        if (is_reached || engine_now() > deadline)
            return is_reached;
        sleep_for(WAITING_NANOSECONDS);
    }
}

bool carrier_settle(struct carrier *carrier, double seconds)
{
    return wait_until(carrier, engine_has_settled, seconds);
}

bool carrier_settle_credits(struct carrier *carrier, double seconds)
{
    return wait_until(carrier, has_credited, seconds);
}

/* Before any is freed: their threads look at all of them. */
static void stop_rails(struct carrier *carrier)
{
    struct engine *engine = &carrier->engine;

    lock(carrier);
    for (int index = 0; index < engine->rail_count; index++)
        if (engine->rails[index]->live) {
            engine->rails[index]->live = false;
            engine->rails[index]->operations->stop(engine->rails[index]);
        }
    unlock(carrier);
    for (int index = 0; index < engine->rail_count; index++)
        engine->rails[index]->operations->join(engine->rails[index]);
}

void carrier_free(struct carrier *carrier)
{
    atomic_store(&carrier->stopping, true);
    if (carrier->is_running) {
        eventfd_write(carrier->bell, 1);
        pthread_join(carrier->thread, NULL);
    }
    stop_rails(carrier);
    for (int index = 0; index < carrier->engine.rail_count; index++)
        carrier->engine.rails[index]->operations->close(carrier->engine.rails[index]);
    if (carrier->bell >= 0)
        close(carrier->bell);
    if (carrier->engine.loss_fd >= 0)
        close(carrier->engine.loss_fd);
    pthread_mutex_destroy(&carrier->lock);
    free(carrier);
}
