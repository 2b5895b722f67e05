#include "host.h"

#include "checksum.h"
#include "proxy.h"
#include "ring.h"
#include "streams.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define INITIAL_CAPACITY 64
#define SLICE_MILLISECONDS 100

/* A queue of steps, and what executes them: a job, or with a GPU a thread. The lock guards all that is neither
 * atomic nor set before the first step. */
struct host_stream {
    struct job job;
    bool is_submitted;
    struct pool *pool; /* NULL with a GPU */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t has_work, is_idle;
    atomic_bool stopping;
    struct host_gpu gpu;
    pid_t process; /* that has the threads */
    _Atomic uint32_t failure;
    void (*on_write)(void *);
    void *argument;
    struct copy_step *steps; /* a ring of `capacity` */
    size_t capacity, first, count;
    uint32_t enqueued;          /* steps */
    struct ring_word completed; /* of them */
};

int64_t spin_clock(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

void spin_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sequentially consistent, for host_wait_word. */
static bool has_reached(const uint32_t *word, uint32_t value, uint32_t *seen)
{
    *seen = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    return ring_ahead(*seen, value) >= 0;
}

/* Yields the core between batches of polls: another thread may have to run before the word can change. */
static bool spin_on_word(const uint32_t *word, uint32_t value, uint32_t microseconds)
{
    int64_t end = spin_clock() + (int64_t)microseconds * 1000;
    uint32_t seen;

    do {
        for (int poll = 0; poll < SPIN_POLLS; poll++) {
            if (has_reached(word, value, &seen))
                return true;
            spin_pause();
        }
        sched_yield();
    } while (spin_clock() < end);
    return false;
}

/* Sleep while a word has this value. */
static void sleep_on_word(uint32_t *word, uint32_t expected, uint32_t milliseconds)
{
    struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000L};

    syscall(SYS_futex, word, FUTEX_WAIT, expected, &time, NULL, 0);
}

bool host_wait_word(uint32_t *word, uint32_t value, uint32_t spin_microseconds,
                    uint32_t milliseconds)
{
    uint32_t *sleepers = word + 1, seen;
    int64_t left, end = spin_clock() / 1000000 + milliseconds;

    if (spin_on_word(word, value, spin_microseconds))
        return true;
    while (!has_reached(word, value, &seen)) {
        left = end - spin_clock() / 1000000;
        if (left <= 0)
            return false;
        /* Count before the last poll: a writer whose value that poll misses then sees the count. */
        __atomic_fetch_add(sleepers, 1, __ATOMIC_SEQ_CST);
        if (!has_reached(word, value, &seen))
            sleep_on_word(word, seen, (uint32_t)left);
        __atomic_fetch_sub(sleepers, 1, __ATOMIC_SEQ_CST);
    }
    return true;
}

void host_acquire(void)
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
}

void host_write_word(uint32_t *word, uint32_t value)
{
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
    host_wake_word(word);
}

void host_wake_word(uint32_t *word)
{
    if (__atomic_load_n(word + 1, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void host_ring_doorbell(uint32_t *doorbell)
{
    struct ring_doorbell *bell = (struct ring_doorbell *)doorbell;

    __atomic_fetch_add(&bell->value, 1, __ATOMIC_SEQ_CST);
    host_wake_word(&bell->value);
    /* Exchange: one system call for each time it was armed, however often it rings. */
    if (__atomic_load_n(&bell->armed, __ATOMIC_SEQ_CST) &&
        __atomic_exchange_n(&bell->armed, 0, __ATOMIC_SEQ_CST))
        eventfd_write(bell->event_fd, 1);
}

bool host_arm_doorbell(uint32_t *doorbell, uint32_t value)
{
    struct ring_doorbell *bell = (struct ring_doorbell *)doorbell;

    /* Arm before the load: who rings after that load then sees it armed. */
    __atomic_store_n(&bell->armed, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&bell->value, __ATOMIC_SEQ_CST) == value)
        return true;
    __atomic_store_n(&bell->armed, 0, __ATOMIC_SEQ_CST);
    return false;
}

/* False where the stream has to end. */
static bool wait_for_word(struct host_stream *stream, struct word word)
{
    uint32_t *address = (uint32_t *)(uintptr_t)word.address;

    while (!host_wait_word(address, word.value, HOST_SPIN_MICROSECONDS, SLICE_MILLISECONDS))
        if (stream != NULL && atomic_load(&stream->stopping))
            return false;
    return true;
}

static void write_word(struct host_stream *stream, struct word word)
{
    host_write_word((uint32_t *)(uintptr_t)word.address, word.value);
    if (stream != NULL && stream->on_write != NULL)
        stream->on_write(stream->argument);
}

/* Have the GPU's driver copy, and wait until it has; false if either failed. */
static bool copy_by_gpu(const struct host_gpu *gpu, const struct copy_step *step)
{
    int (*synchronize)(void *) = (int (*)(void *))(uintptr_t)gpu->driver.synchronize_stream;

    return driver_copy(&gpu->driver, gpu->stream, step) == 0 &&
           synchronize((void *)(uintptr_t)gpu->stream) == 0;
}

static bool copy(struct host_stream *stream, const struct copy_step *step)
{
    if (stream != NULL && stream->pool == NULL)
        return copy_by_gpu(&stream->gpu, step);
    memcpy((void *)(uintptr_t)step->target, (const void *)(uintptr_t)step->source, step->nbytes);
    return true;
}

static bool wait_for_event(const struct host_gpu *gpu, uint64_t event)
{
    int (*synchronize)(void *) = (int (*)(void *))(uintptr_t)gpu->driver.synchronize_event;

    return synchronize((void *)(uintptr_t)event) == 0;
}

static bool verify(uint64_t bytes, size_t nbytes)
{
    uint32_t expected;

    memcpy(&expected, (const uint8_t *)(uintptr_t)bytes + nbytes, sizeof expected);
    return checksum((const void *)(uintptr_t)bytes, nbytes) == expected;
}

static void append(uint64_t bytes, size_t nbytes)
{
    uint32_t found = checksum((const void *)(uintptr_t)bytes, nbytes);

    memcpy((uint8_t *)(uintptr_t)bytes + nbytes, &found, sizeof found);
}

/* What follows a step's wait. `stream` is NULL for HOST_CALLING_THREAD. */
static enum host_failure execute(struct host_stream *stream, const struct copy_step *step)
{
    if (step->checksum == VERIFY_SOURCE && !verify(step->source, step->nbytes))
        return HOST_WRONG_CHECKSUM;
    if (step->nbytes && !copy(stream, step))
        return HOST_GPU_FAILED;
    if (step->checksum == APPEND_BEHIND_TARGET)
        append(step->target, step->nbytes);
    if (step->write.address)
        write_word(stream, step->write);
    return HOST_OK;
}

/* The same after its wait, in a thread that may block. */
static enum host_failure wait_and_execute(struct host_stream *stream, const struct copy_step *step)
{
    if (step->event && !wait_for_event(&stream->gpu, step->event))
        return HOST_GPU_FAILED;
    if (step->wait.address && !wait_for_word(stream, step->wait))
        return HOST_OK;
    return execute(stream, step);
}

/* Of one with a GPU. */

/* Wait for the next step; false when the stream has to end. Call with the lock. */
static bool await_step(struct host_stream *stream)
{
    while (stream->count == 0 && !atomic_load(&stream->stopping))
        pthread_cond_wait(&stream->has_work, &stream->lock);
    return !atomic_load(&stream->stopping);
}

/* Call with the lock. */
static void remove_first(struct host_stream *stream)
{
    stream->first = (stream->first + 1) % stream->capacity;
    stream->count--;
}

static void complete_step(struct host_stream *stream)
{
    host_write_word(&stream->completed.value, stream->completed.value + 1);
}

static bool make_current(const struct host_gpu *gpu)
{
    uintptr_t set_current = gpu->driver.set_current;

    if (gpu->driver.vendor == HIP)
        return ((int (*)(int))set_current)((int)gpu->context) == 0;
    return ((int (*)(void *))set_current)((void *)(uintptr_t)gpu->context) == 0;
}

static void *run(void *argument)
{
    struct host_stream *stream = argument;

    prctl(PR_SET_NAME, "hetero-stream");
    if (!make_current(&stream->gpu))
        atomic_store(&stream->failure, HOST_GPU_FAILED);
    pthread_mutex_lock(&stream->lock);
    while (await_step(stream)) {
        struct copy_step step = stream->steps[stream->first];

        remove_first(stream);
        pthread_mutex_unlock(&stream->lock);
        if (atomic_load(&stream->failure) == HOST_OK)
            atomic_store(&stream->failure, wait_and_execute(stream, &step));
        complete_step(stream);
        pthread_mutex_lock(&stream->lock);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

/* Of host memory alone. */

/* Whether a word has come to its value, perhaps after a wait, which no other stream needs the thread for. */
static bool await_word(struct host_stream *stream, struct word word)
{
    uint32_t *address = (uint32_t *)(uintptr_t)word.address, seen;
    bool has_come;

    if (has_reached(address, word.value, &seen))
        return true;
    if (!pool_count_stuck(stream->pool))
        return false;
    has_come = host_wait_word(address, word.value, HOST_SPIN_MICROSECONDS, pool_begin_wait(stream->pool));
    pool_end_wait(stream->pool);
    return has_come;
}

/* Execute the first step; false if it has to wait. Call with the lock, which is released meanwhile. */
static bool execute_first(struct host_stream *stream)
{
    struct copy_step step = stream->steps[stream->first];
    bool is_due;

    pthread_mutex_unlock(&stream->lock);
    is_due = atomic_load(&stream->failure) != HOST_OK || step.wait.address == 0 ||
             await_word(stream, step.wait);
    if (is_due && atomic_load(&stream->failure) == HOST_OK)
        atomic_store(&stream->failure, execute(stream, &step));
    pthread_mutex_lock(&stream->lock);
    if (!is_due)
        return false;
    remove_first(stream);
    complete_step(stream);
    pool_has_moved(stream->pool);
    return true;
}

/* A copier's job. Gives way to other streams after each step. */
static void execute_some(struct job *job)
{
    struct host_stream *stream = (struct host_stream *)((char *)job - offsetof(struct host_stream, job));
    bool gives_way = false;

    pthread_mutex_lock(&stream->lock);
    while (stream->count > 0 && !gives_way && !atomic_load(&stream->stopping))
        gives_way = !execute_first(stream) || pool_has_jobs(stream->pool);
    if (stream->count > 0 && !atomic_load(&stream->stopping)) {
        pool_submit(stream->pool, job);
    } else {
        stream->is_submitted = false;
        pthread_cond_signal(&stream->is_idle);
    }
    pthread_mutex_unlock(&stream->lock);
}

/* Of both. */

/* Double the capacity. Call with the lock. */
static bool grow(struct host_stream *stream)
{
    size_t capacity = stream->capacity ? 2 * stream->capacity : INITIAL_CAPACITY;
    struct copy_step *steps = malloc(capacity * sizeof *steps);

    if (steps == NULL)
        return false;
    for (size_t index = 0; index < stream->count; index++)
        steps[index] = stream->steps[(stream->first + index) % stream->capacity];
    free(stream->steps);
    stream->steps = steps;
    stream->capacity = capacity;
    stream->first = 0;
    return true;
}

int host_enqueue(void *handle, const struct copy_step *step)
{
    struct host_stream *stream = handle;

    if (handle == HOST_CALLING_THREAD)
        return (int)wait_and_execute(NULL, step);
    pthread_mutex_lock(&stream->lock);
    if (stream->count == stream->capacity && !grow(stream)) {
        pthread_mutex_unlock(&stream->lock);
        return ENOMEM;
    }
    stream->steps[(stream->first + stream->count) % stream->capacity] = *step;
    stream->enqueued++;
    stream->count++;
    if (stream->pool == NULL) {
        pthread_cond_signal(&stream->has_work);
    } else if (!stream->is_submitted) {
        stream->is_submitted = true;
        pool_submit(stream->pool, &stream->job);
    }
    pthread_mutex_unlock(&stream->lock);
    return 0;
}

static void deinitialize(struct host_stream *stream)
{
    pthread_cond_destroy(&stream->has_work);
    pthread_cond_destroy(&stream->is_idle);
    pthread_mutex_destroy(&stream->lock);
    free(stream->steps);
    free(stream);
}

uint32_t host_stream_failure(const struct host_stream *stream)
{
    return atomic_load(&stream->failure);
}

struct host_stream *host_stream_create(struct proxy *proxy, const struct host_gpu *gpu,
                                       void (*on_write)(void *), void *argument)
{
    struct host_stream *stream = calloc(1, sizeof *stream);
    int code;

    if (stream == NULL)
        return NULL;
    if (gpu != NULL)
        stream->gpu = *gpu;
    else
        stream->pool = proxy_copiers(proxy);
    stream->job.run = execute_some;
    stream->on_write = on_write;
    stream->argument = argument;
    stream->process = getpid();
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->has_work, NULL);
    pthread_cond_init(&stream->is_idle, NULL);
    code = gpu == NULL ? pool_start(stream->pool) : pthread_create(&stream->thread, NULL, run, stream);
    if (code == 0)
        return stream;
    deinitialize(stream);
    return NULL;
}

void host_stream_destroy(struct host_stream *stream)
{
    if (stream->process != getpid())
        return;
    pthread_mutex_lock(&stream->lock);
    atomic_store(&stream->stopping, true);
    pthread_cond_signal(&stream->has_work);
    while (stream->is_submitted)
        pthread_cond_wait(&stream->is_idle, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    if (stream->pool == NULL)
        pthread_join(stream->thread, NULL);
    deinitialize(stream);
}

bool host_stream_synchronize(struct host_stream *stream, uint32_t milliseconds)
{
    uint32_t enqueued;

    pthread_mutex_lock(&stream->lock);
    enqueued = stream->enqueued;
    pthread_mutex_unlock(&stream->lock);
    return host_wait_word(&stream->completed.value, enqueued, 0, milliseconds);
}
