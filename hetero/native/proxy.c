#include "proxy.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

/* While it has to poll, the proxy thread yields at first, then sleeps briefly between polls, then longer. */
#define YIELD_SECONDS 100e-6
#define SHORT_SLEEP_SECONDS 0.1
#define SHORT_SLEEP_NANOSECONDS 20000
#define LONG_SLEEP_NANOSECONDS 200000
/* Between two checks of rails that raise no event: for overdue acknowledgements. */
#define CHECK_MILLISECONDS 250
#define EVENTS 64
/* The longest waits of a job that is stuck: where another may need its thread, and where none does. */
#define STUCK_MILLISECONDS 1
#define LONE_MILLISECONDS 100

/* An engine as the proxy thread sees it. Its events lead to it, so only that thread frees it. */
struct served {
    struct engine *engine;
    bool is_active;   /* something may be left to do */
    bool is_armed;    /* notifications have been requested since it last moved */
    bool is_leaving;
    struct served *next;
};

/* A thread, and the connections that it alone receives from. */
struct receiver {
    pthread_t thread;
    bool has_thread;
    int epoll;
    atomic_bool *stopping; /* the proxy's */
    atomic_int count;      /* connections */
};

struct pool {
    const char *name; /* of the threads */
    pthread_t threads[POOL_THREADS];
    int thread_count; /* started */
    atomic_bool stopping;
    pthread_mutex_t lock;
    pthread_cond_t has_jobs;
    struct job *first, *last;
    atomic_int job_count, stuck_count; /* queued; in a row, those that could not go on */
    atomic_int waiting;                /* threads in a job that waits */
};

struct proxy {
    pthread_t thread;
    bool has_thread;
    struct pool senders, copiers;
    struct receiver receivers[PROXY_RECEIVERS];
    atomic_bool stopping;
    int epoll;   /* of the proxy thread: engines, and connections that await room */
    int wake_fd; /* eventfd, wakes the proxy thread */
    int stop_fd; /* eventfd, ends the receivers */

    pthread_mutex_t lock; /* guards the receivers, and the list of engines */
    pthread_cond_t has_left;
    struct served *served;
};

static void sleep_for(long nanoseconds)
{
    struct timespec time = {0, nanoseconds};

    nanosleep(&time, NULL);
}

/* Block signals in the threads: one delivered there would not interrupt Python's main thread. */
static int start_thread(pthread_t *thread, void *(*loop)(void *), void *argument)
{
    sigset_t all, before;
    int code;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    code = pthread_create(thread, NULL, loop, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return code;
}

/* Pools. */

static void pool_init(struct pool *pool, const char *name)
{
    pool->name = name;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->has_jobs, NULL);
}

void pool_submit(struct pool *pool, struct job *job)
{
    pthread_mutex_lock(&pool->lock);
    job->next = NULL;
    if (pool->first == NULL)
        pool->first = job;
    else
        pool->last->next = job;
    pool->last = job;
    atomic_fetch_add(&pool->job_count, 1);
    pthread_cond_signal(&pool->has_jobs);
    pthread_mutex_unlock(&pool->lock);
}

bool pool_has_jobs(struct pool *pool)
{
    return atomic_load(&pool->job_count) > 0;
}

bool pool_count_stuck(struct pool *pool)
{
    return atomic_fetch_add(&pool->stuck_count, 1) >= atomic_load(&pool->job_count);
}

void pool_has_moved(struct pool *pool)
{
    if (atomic_load(&pool->stuck_count) != 0)
        atomic_store(&pool->stuck_count, 0);
}

/* Keep a thread for jobs that come, and have those that are queued looked after. */
uint32_t pool_begin_wait(struct pool *pool)
{
    bool is_last = atomic_fetch_add(&pool->waiting, 1) == POOL_THREADS - 1;

    return is_last || pool_has_jobs(pool) ? STUCK_MILLISECONDS : LONE_MILLISECONDS;
}

void pool_end_wait(struct pool *pool)
{
    atomic_fetch_sub(&pool->waiting, 1);
    pool_has_moved(pool);
}

static struct job *next_job(struct pool *pool)
{
    struct job *job;

    pthread_mutex_lock(&pool->lock);
    while (pool->first == NULL && !atomic_load(&pool->stopping))
        pthread_cond_wait(&pool->has_jobs, &pool->lock);
    job = pool->first;
    if (job != NULL) {
        pool->first = job->next;
        atomic_fetch_sub(&pool->job_count, 1);
    }
    pthread_mutex_unlock(&pool->lock);
    return job;
}

static void *run_jobs(void *argument)
{
    struct pool *pool = argument;
    struct job *job;

    prctl(PR_SET_NAME, pool->name);
    while ((job = next_job(pool)) != NULL)
        job->run(job);
    return NULL;
}

int pool_start(struct pool *pool)
{
    int code = 0;

    pthread_mutex_lock(&pool->lock);
    while (code == 0 && pool->thread_count < POOL_THREADS) {
        code = start_thread(&pool->threads[pool->thread_count], run_jobs, pool);
        pool->thread_count += code == 0;
    }
    pthread_mutex_unlock(&pool->lock);
    return code;
}

/* End the threads, after all jobs. */
static void pool_end(struct pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->stopping, true);
    pthread_cond_broadcast(&pool->has_jobs);
    pthread_mutex_unlock(&pool->lock);
    for (int index = 0; index < pool->thread_count; index++)
        pthread_join(pool->threads[index], NULL);
    pthread_cond_destroy(&pool->has_jobs);
    pthread_mutex_destroy(&pool->lock);
}

struct pool *proxy_senders(struct proxy *proxy)
{
    return &proxy->senders;
}

struct pool *proxy_copiers(struct proxy *proxy)
{
    return &proxy->copiers;
}

/* Receivers. */

static void remove_connection(struct receiver *receiver, struct connection *connection)
{
    epoll_ctl(receiver->epoll, EPOLL_CTL_DEL, connection->fd, NULL);
    atomic_fetch_sub(&receiver->count, 1);
    connection->removed(connection);
}

static void *receive_loop(void *argument)
{
    struct receiver *receiver = argument;
    struct epoll_event event;

    prctl(PR_SET_NAME, "hetero-receive");
    while (!atomic_load(receiver->stopping)) {
        /* One at a time: the next may be gone when this one has been handled. */
        if (epoll_wait(receiver->epoll, &event, 1, -1) != 1 || event.data.ptr == NULL)
            continue;
        struct connection *connection = event.data.ptr;

        if (!connection->receive(connection))
            remove_connection(receiver, connection);
    }
    return NULL;
}

/* Start senders and receivers with the first connection: with RDMA alone there is nothing for them to do. */
static int start_copying(struct proxy *proxy)
{
    int code = pool_start(&proxy->senders);

    pthread_mutex_lock(&proxy->lock);
    for (int index = 0; code == 0 && index < PROXY_RECEIVERS; index++) {
        struct receiver *receiver = &proxy->receivers[index];

        if (!receiver->has_thread)
            code = start_thread(&receiver->thread, receive_loop, receiver);
        receiver->has_thread = code == 0;
    }
    pthread_mutex_unlock(&proxy->lock);
    return code;
}

/* Connections. */

/* The one with the fewest connections. */
static struct receiver *free_receiver(struct proxy *proxy)
{
    struct receiver *found = &proxy->receivers[0];

    for (int index = 1; index < PROXY_RECEIVERS; index++)
        if (atomic_load(&proxy->receivers[index].count) < atomic_load(&found->count))
            found = &proxy->receivers[index];
    return found;
}

int proxy_add_connection(struct proxy *proxy, struct connection *connection)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
    struct receiver *receiver;
    int code = start_copying(proxy);

    if (code != 0)
        return code;
    pthread_mutex_lock(&proxy->lock);
    receiver = free_receiver(proxy);
    connection->receiver = receiver;
    atomic_fetch_add(&receiver->count, 1);
    if (epoll_ctl(receiver->epoll, EPOLL_CTL_ADD, connection->fd, &event) != 0) {
        code = errno;
        atomic_fetch_sub(&receiver->count, 1);
    }
    pthread_mutex_unlock(&proxy->lock);
    return code;
}

bool proxy_shares_receiver(const struct connection *connection)
{
    return atomic_load(&connection->receiver->count) > 1;
}

/* Only while it is awaited: errors and hang-ups raise an event unasked, which must not come when the
 * connection is gone. */
int proxy_await_room(struct proxy *proxy, struct connection *connection)
{
    struct epoll_event event = {.events = EPOLLOUT | EPOLLONESHOT, .data.ptr = connection};

    return epoll_ctl(proxy->epoll, EPOLL_CTL_ADD, connection->fd, &event) == 0 ? 0 : errno;
}

/* The proxy thread. */

/* An error without data would leave the descriptor ready, and this thread without sleep, for ever. */
static void take_event(struct engine *engine, struct rail *rail, short events)
{
    if (events & POLLIN && rail->operations->acknowledge(rail))
        return;
    engine_lock(engine);
    engine_lose_rail(engine, rail, "its completion channel failed");
    engine_unlock(engine);
}

/* Take the events of an engine's rails. A lost rail's are not waited for any more. */
static void take_events(struct proxy *proxy, struct engine *engine)
{
    struct pollfd polled[ENGINE_RAILS];
    int count;

    engine_lock(engine);
    count = engine->rail_count;
    for (int index = 0; index < count; index++) {
        const struct rail *rail = engine->rails[index];

        if (!rail->live && rail->event_fd >= 0)
            epoll_ctl(proxy->epoll, EPOLL_CTL_DEL, rail->event_fd, NULL);
        polled[index] = (struct pollfd){.fd = rail->live ? rail->event_fd : -1, .events = POLLIN};
    }
    engine_unlock(engine);
    if (poll(polled, (nfds_t)count, 0) <= 0)
        return;
    for (int index = 0; index < count; index++)
        if (polled[index].revents != 0)
            take_event(engine, engine->rails[index], polled[index].revents);
}

enum pass { RESTS, POLLS, AGAIN };

/* One pass over one engine. Call with the lock of `proxy`. */
static enum pass serve(struct served *served)
{
    struct engine *engine = served->engine;
    bool moved, busy;

    /* Whoever waits for the lock makes progress itself. */
    if (atomic_load(&engine->lock_waiters) > 0)
        return POLLS;
    pthread_mutex_lock(&engine->lock);
    moved = engine_progress(engine);
    busy = engine_needs_polling(engine);
    if (!moved && !busy && !served->is_armed)
        engine_request_notifications(engine);
    engine_unlock(engine);
    if (moved || busy) {
        served->is_armed = false;
        return moved ? AGAIN : POLLS;
    }
    /* An event before the notifications were requested raises none: poll once more. */
    if (!served->is_armed) {
        served->is_armed = true;
        return AGAIN;
    }
    served->is_active = false;
    return RESTS;
}

/* Have the events of an engine lead to it, or none any more. */
static int watch(struct proxy *proxy, int operation, struct served *served)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = served};
    const struct engine *engine = served->engine;
    int code = epoll_ctl(proxy->epoll, operation, engine->wake_fd, &event) == 0 ? 0 : errno;

    for (int index = 0; index < engine->rail_count; index++)
        if (engine->rails[index]->event_fd >= 0 &&
            epoll_ctl(proxy->epoll, operation, engine->rails[index]->event_fd, &event) != 0)
            code = errno;
    return code;
}

/* Forget the engines that leave. Call with the lock, while no event is being handled. */
static void let_leave(struct proxy *proxy)
{
    for (struct served **place = &proxy->served; *place != NULL;) {
        struct served *served = *place;

        if (!served->is_leaving) {
            place = &served->next;
            continue;
        }
        watch(proxy, EPOLL_CTL_DEL, served);
        *place = served->next;
        free(served);
        pthread_cond_broadcast(&proxy->has_left);
    }
}

/* Whether rails have to be checked at intervals. */
static bool needs_checks(struct engine *engine)
{
    bool found = false;

    engine_lock(engine);
    for (int index = 0; index < engine->rail_count; index++)
        found |= engine->rails[index]->live && engine->rails[index]->event_fd < 0;
    engine_unlock(engine);
    return found;
}

/* One pass over all engines with something to do, and over all that are due for a check: the most that any of
 * them says, and whether any needs checks. */
static enum pass serve_all(struct proxy *proxy, bool is_check, bool *checks)
{
    enum pass most = RESTS;

    pthread_mutex_lock(&proxy->lock);
    let_leave(proxy);
    for (struct served *served = proxy->served; served != NULL; served = served->next) {
        served->is_active |= is_check;
        enum pass pass = served->is_active ? serve(served) : RESTS;

        if (pass > most)
            most = pass;
    }
    *checks = false;
    for (struct served *served = proxy->served; most == RESTS && !*checks && served != NULL;
         served = served->next)
        *checks = needs_checks(served->engine);
    pthread_mutex_unlock(&proxy->lock);
    return most;
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

static struct served *served_at(const struct proxy *proxy, const void *pointer)
{
    struct served *served = proxy->served;

    while (served != NULL && served != pointer)
        served = served->next;
    return served;
}

static void take_engine_event(struct proxy *proxy, struct served *served)
{
    eventfd_t value;

    eventfd_read(served->engine->wake_fd, &value);
    take_events(proxy, served->engine);
    served->is_active = true;
    served->is_armed = false;
}

static void take_room(struct proxy *proxy, struct connection *connection)
{
    epoll_ctl(proxy->epoll, EPOLL_CTL_DEL, connection->fd, NULL);
    connection->has_room(connection);
}

static void wait_for_events(struct proxy *proxy, int timeout)
{
    struct epoll_event events[EVENTS];
    eventfd_t value;
    int count = epoll_wait(proxy->epoll, events, EVENTS, timeout);

    if (count <= 0)
        return;
    pthread_mutex_lock(&proxy->lock);
    for (int index = 0; index < count; index++) {
        void *pointer = events[index].data.ptr;
        struct served *served = served_at(proxy, pointer);

        if (pointer == proxy)
            eventfd_read(proxy->wake_fd, &value);
        else if (served != NULL)
            take_engine_event(proxy, served);
        else
            take_room(proxy, pointer);
    }
    pthread_mutex_unlock(&proxy->lock);
}

static void *run(void *argument)
{
    struct proxy *proxy = argument;
    double last_moved = engine_now(), last_checked = last_moved;

    prctl(PR_SET_NAME, "hetero-proxy");
    /* The default timer slack adds 50 us to a sleep of 20. */
    prctl(PR_SET_TIMERSLACK, 1000);
    while (!atomic_load(&proxy->stopping)) {
        double now = engine_now();
        bool is_check = now - last_checked >= 1e-3 * CHECK_MILLISECONDS, checks;
        enum pass pass = serve_all(proxy, is_check, &checks);

        if (is_check)
            last_checked = now;
        if (pass == POLLS)
            back_off(now - last_moved);
        wait_for_events(proxy, pass != RESTS ? 0 : checks ? CHECK_MILLISECONDS : -1);
        /* After a rest too: what has ended it is followed by more. */
        if (pass != POLLS)
            last_moved = engine_now();
    }
    return NULL;
}

static void wake(struct proxy *proxy)
{
    eventfd_write(proxy->wake_fd, 1);
}

int proxy_add_engine(struct proxy *proxy, struct engine *engine)
{
    struct served *served = calloc(1, sizeof *served);
    int code = 0;

    if (served == NULL)
        return ENOMEM;
    served->engine = engine;
    served->is_active = true;
    pthread_mutex_lock(&proxy->lock);
    code = watch(proxy, EPOLL_CTL_ADD, served);
    served->next = proxy->served;
    proxy->served = served;
    pthread_mutex_unlock(&proxy->lock);
    wake(proxy);
    /* Some of its events may be on their way already. */
    if (code != 0)
        proxy_remove_engine(proxy, engine);
    return code;
}

static struct served *served_of(const struct proxy *proxy, const struct engine *engine)
{
    struct served *served = proxy->served;

    while (served != NULL && served->engine != engine)
        served = served->next;
    return served;
}

void proxy_remove_engine(struct proxy *proxy, struct engine *engine)
{
    struct served *served;

    pthread_mutex_lock(&proxy->lock);
    served = served_of(proxy, engine);
    if (served != NULL)
        served->is_leaving = true;
    wake(proxy);
    while (served_of(proxy, engine) != NULL)
        pthread_cond_wait(&proxy->has_left, &proxy->lock);
    pthread_mutex_unlock(&proxy->lock);
}

/* Making and ending it. */

static bool watch_own(int epoll, int fd, void *pointer)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = pointer};

    return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

static bool open_descriptors(struct proxy *proxy)
{
    bool is_open;

    proxy->epoll = epoll_create1(EPOLL_CLOEXEC);
    proxy->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    proxy->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    is_open = watch_own(proxy->epoll, proxy->wake_fd, proxy);
    for (int index = 0; index < PROXY_RECEIVERS; index++) {
        struct receiver *receiver = &proxy->receivers[index];

        receiver->stopping = &proxy->stopping;
        receiver->epoll = epoll_create1(EPOLL_CLOEXEC);
        is_open = is_open && watch_own(receiver->epoll, proxy->stop_fd, NULL);
    }
    return is_open;
}

struct proxy *proxy_new(char *error)
{
    struct proxy *proxy = calloc(1, sizeof *proxy);
    int code = ENOMEM;

    if (proxy != NULL) {
        pthread_mutex_init(&proxy->lock, NULL);
        pthread_cond_init(&proxy->has_left, NULL);
        pool_init(&proxy->senders, "hetero-send");
        pool_init(&proxy->copiers, "hetero-copy");
        code = open_descriptors(proxy) ? start_thread(&proxy->thread, run, proxy) : errno;
        proxy->has_thread = code == 0;
        if (code == 0)
            return proxy;
        proxy_free(proxy);
    }
    set_reason(error, "the thread of a process's links cannot be started (%s)", strerror(code));
    return NULL;
}

static void close_descriptor(int fd)
{
    if (fd >= 0)
        close(fd);
}

void proxy_free(struct proxy *proxy)
{
    atomic_store(&proxy->stopping, true);
    wake(proxy);
    eventfd_write(proxy->stop_fd, 1);
    if (proxy->has_thread)
        pthread_join(proxy->thread, NULL);
    pool_end(&proxy->senders);
    pool_end(&proxy->copiers);
    for (int index = 0; index < PROXY_RECEIVERS; index++) {
        if (proxy->receivers[index].has_thread)
            pthread_join(proxy->receivers[index].thread, NULL);
        close_descriptor(proxy->receivers[index].epoll);
    }
    close_descriptor(proxy->epoll);
    close_descriptor(proxy->wake_fd);
    close_descriptor(proxy->stop_fd);
    pthread_cond_destroy(&proxy->has_left);
    pthread_mutex_destroy(&proxy->lock);
    free(proxy);
}
