#include "forwarder.h"

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

#define CHECKS_PER_STALL 16
/* While something is under way the thread spins for a while, then sleeps shortly, then longer. */
#define SPIN_SECONDS 100e-6
#define BRISK_SECONDS 0.1
#define BRISK_NANOSECONDS 20000
#define SLOW_NANOSECONDS 200000
#define WAITING_NANOSECONDS 200000

struct forwarder {
    struct engine engine;
    int bell;
    bool is_running;
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

static void lock(struct forwarder *forwarder)
{
    atomic_fetch_add(&forwarder->callers, 1);
    pthread_mutex_lock(&forwarder->lock);
    atomic_fetch_sub(&forwarder->callers, 1);
}

static void unlock(struct forwarder *forwarder)
{
    pthread_mutex_unlock(&forwarder->lock);
}

/* Sleeping. */

/* Sleep until the bell rings or a rail has a completion. */
static void rest(struct forwarder *forwarder)
{
    struct pollfd watched[1 + ENGINE_RAILS] = {{.fd = forwarder->bell, .events = POLLIN}};
    eventfd_t rings;

    for (int index = 0; index < forwarder->engine.rail_count; index++)
        watched[1 + index] =
            (struct pollfd){.fd = forwarder->engine.rails[index].channel->fd, .events = POLLIN};
    if (poll(watched, 1 + (nfds_t)forwarder->engine.rail_count, -1) <= 0)
        return;
    if (watched[0].revents & POLLIN)
        eventfd_read(forwarder->bell, &rings);
    for (int index = 0; index < forwarder->engine.rail_count; index++) {
        struct ibv_cq *queue;
        void *context;

        if ((watched[1 + index].revents & POLLIN) &&
            ibv_get_cq_event(forwarder->engine.rails[index].channel, &queue, &context) == 0)
            ibv_ack_cq_events(queue, 1);
    }
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
    struct forwarder *forwarder = argument;
    double last_moved = engine_now(), last_watched = last_moved;
    bool asked = false;

    prctl(PR_SET_NAME, "rdma-forwarder");
    /* The kernel would else stretch a sleep of 20 us by 50. */
    prctl(PR_SET_TIMERSLACK, 1000);
    while (!atomic_load(&forwarder->stopping)) {
        bool moved, busy;
        double time;

        while (atomic_load(&forwarder->callers) > 0)
            sched_yield();
        pthread_mutex_lock(&forwarder->lock);
        moved = engine_progress(&forwarder->engine);
        time = engine_now();
        busy = engine_is_under_way(&forwarder->engine);
        if (time - last_watched > forwarder->engine.layout.stall_seconds / CHECKS_PER_STALL) {
            engine_watch(&forwarder->engine, time);
            last_watched = time;
        }
        if (!moved && !busy && !asked)
            engine_ask_for_notice(&forwarder->engine);
        pthread_mutex_unlock(&forwarder->lock);
        if (moved) {
            last_moved = time;
            asked = false;
        } else if (busy) {
            breathe(time - last_moved);
        } else if (!asked) {
            /* What came before the notice was asked for gives none: look once more. */
            asked = true;
        } else {
            rest(forwarder);
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

uint32_t forwarder_version(void)
{
    return FORWARDER_VERSION;
}

struct forwarder *forwarder_new(const struct engine_layout *layout, char *error)
{
    struct forwarder *forwarder = calloc(1, sizeof *forwarder);

    if (forwarder == NULL || layout->entries != FLOW_ENTRIES) {
        fail(error, "the forwarder cannot be made", forwarder == NULL ? ENOMEM : EINVAL);
        free(forwarder);
        return NULL;
    }
    forwarder->engine.layout = *layout;
    pthread_mutex_init(&forwarder->lock, NULL);
    forwarder->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    forwarder->engine.losses_bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (forwarder->bell < 0 || forwarder->engine.losses_bell < 0) {
        fail(error, "the forwarder cannot be made", errno);
        forwarder_free(forwarder);
        return NULL;
    }
    return forwarder;
}

bool forwarder_add_rail(struct forwarder *forwarder, const struct rail_request *request,
                        struct rail_ending *ending, char *error)
{
    struct rail *rail = &forwarder->engine.rails[forwarder->engine.rail_count];

    if (forwarder->engine.rail_count == ENGINE_RAILS)
        return fail(error, "a link has 32 rails at most", E2BIG);
    rail->index = (uint8_t)forwarder->engine.rail_count++;
    forwarder->engine.losses[rail->index].is_told = true;
    return rail_open(rail, request, ending, error);
}

bool forwarder_connect_rail(struct forwarder *forwarder, int index, const struct rail_peer *peer,
                            const struct rail_route *loop, char *error)
{
    return rail_connect(&forwarder->engine.rails[index], peer, loop, error);
}

bool forwarder_start(struct forwarder *forwarder, char *error)
{
    sigset_t all, before;
    int code;

    /* A signal that this thread took would not interrupt what Python's main thread waits in. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    code = pthread_create(&forwarder->thread, NULL, run, forwarder);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    forwarder->is_running = code == 0;
    return code == 0 || fail(error, "the forwarder's thread cannot be started", code);
}

void forwarder_ring(struct forwarder *forwarder)
{
    engine_ring(&forwarder->engine);
}

int forwarder_bell(const struct forwarder *forwarder)
{
    return forwarder->bell;
}

int forwarder_losses(const struct forwarder *forwarder)
{
    return forwarder->engine.losses_bell;
}

int forwarder_news(const struct forwarder *forwarder, int index)
{
    return forwarder->engine.rails[index].context->async_fd;
}

bool forwarder_hear_news(struct forwarder *forwarder, int index, char *reason)
{
    return rail_news(&forwarder->engine.rails[index], reason);
}

int forwarder_next_loss(struct forwarder *forwarder, char *reason)
{
    int found = -1;
    eventfd_t rings;

    lock(forwarder);
    eventfd_read(forwarder->engine.losses_bell, &rings);
    for (int index = 0; index < forwarder->engine.rail_count && found < 0; index++)
        if (!forwarder->engine.rails[index].live && !forwarder->engine.losses[index].is_told) {
            memcpy(reason, forwarder->engine.losses[index].reason, RAIL_TEXT_BYTES);
            forwarder->engine.losses[index].is_told = true;
            found = index;
        }
    unlock(forwarder);
    return found;
}

void forwarder_drop_rail(struct forwarder *forwarder, int index)
{
    lock(forwarder);
    engine_lose(&forwarder->engine, &forwarder->engine.rails[index], "");
    forwarder->engine.losses[index].is_told = true;
    unlock(forwarder);
}

int forwarder_repeat(struct forwarder *forwarder, int index)
{
    struct rail *rail = &forwarder->engine.rails[index];
    int count;

    lock(forwarder);
    engine_poll_rail(&forwarder->engine, rail);
    count = outgoing_repeat(&forwarder->engine.outgoing, rail->index, rail->peer.reads_back);
    forwarder->engine.incoming.telling_lost = true;
    unlock(forwarder);
    eventfd_write(forwarder->bell, 1);
    return count;
}

static bool has_settled(struct engine *engine)
{
    return !engine_progress(engine) && !engine_reads(engine);
}

static bool has_told(struct engine *engine)
{
    engine_progress(engine);
    engine_watch(engine, engine_now());
    return engine_has_told(engine);
}

static bool wait_until(struct forwarder *forwarder, bool (*is_so)(struct engine *),
                       double seconds)
{
    double deadline = engine_now() + seconds;

    for (;;) {
        lock(forwarder);
        bool is_reached = is_so(&forwarder->engine);
        unlock(forwarder);
        if (is_reached || engine_now() > deadline)
            return is_reached;
        sleep_for(WAITING_NANOSECONDS);
    }
}

bool forwarder_settle(struct forwarder *forwarder, double seconds)
{
    return wait_until(forwarder, has_settled, seconds);
}

bool forwarder_settle_credits(struct forwarder *forwarder, double seconds)
{
    return wait_until(forwarder, has_told, seconds);
}

double forwarder_cpu_seconds(struct forwarder *forwarder)
{
    struct timespec used = {0, 0};
    clockid_t clock;

    if (forwarder->is_running && pthread_getcpuclockid(forwarder->thread, &clock) == 0)
        clock_gettime(clock, &used);
    return (double)used.tv_sec + 1e-9 * (double)used.tv_nsec;
}

void forwarder_free(struct forwarder *forwarder)
{
    atomic_store(&forwarder->stopping, true);
    if (forwarder->is_running) {
        eventfd_write(forwarder->bell, 1);
        pthread_join(forwarder->thread, NULL);
    }
    for (int index = 0; index < forwarder->engine.rail_count; index++)
        rail_close(&forwarder->engine.rails[index]);
    if (forwarder->bell >= 0)
        close(forwarder->bell);
    if (forwarder->engine.losses_bell >= 0)
        close(forwarder->engine.losses_bell);
    pthread_mutex_destroy(&forwarder->lock);
    free(forwarder);
}
