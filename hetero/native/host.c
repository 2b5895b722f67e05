#include "host.h"

#include "checksum.h"
#include "native.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define INITIAL_CAPACITY 64
#define SLICE_MILLISECONDS 100
/* Polls of a word before a thread sleeps on it, and between two yields of its core. */
#define POLLS_BEFORE_SLEEP 1024
#define POLLS_PER_YIELD 64

enum kind { COPY, APPEND_CHECKSUM, VERIFY_CHECKSUM, WAIT_EVENT, WAIT_VALUE, WRITE_VALUE };

struct request {
    enum kind kind;
    uint64_t target;
    uint64_t source;
    uint64_t nbytes;
    uint32_t value;
};

/* A queue of requests and the thread that executes them. The lock guards all that is neither atomic nor
 * set before the first request. */
struct host_stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t has_work;
    pthread_cond_t became_idle;
    atomic_bool stopping;
    struct host_gpu gpu;
    bool has_gpu;
    pid_t process; /* that has the thread */
    _Atomic uint32_t failure;
    bool is_working;
    void (*on_write)(void *);
    void *argument;
    struct request *requests; /* a ring of `capacity` */
    size_t capacity, first, count;
};

/* Sequentially consistent, for host_wait_word. */
static bool has_reached(const uint32_t *word, uint32_t value, uint32_t *seen)
{
    *seen = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    return (int32_t)(*seen - value) >= 0;
}

static bool spin_on_word(const uint32_t *word, uint32_t value)
{
    uint32_t seen;

    for (int poll = 1; poll <= POLLS_BEFORE_SLEEP; poll++) {
        if (has_reached(word, value, &seen))
            return true;
        if (poll % POLLS_PER_YIELD == 0)
            sched_yield();
        else
            spin_pause();
    }
    return false;
}

void host_wait_doorbell(uint32_t *word, uint32_t expected, uint32_t milliseconds)
{
    struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000L};

    syscall(SYS_futex, word, FUTEX_WAIT, expected, &time, NULL, 0);
}

bool host_wait_word(uint32_t *word, uint32_t value, uint32_t milliseconds)
{
    uint32_t *sleepers = word + 1, seen;
    int64_t left, end = spin_clock() / 1000000 + milliseconds;

    if (spin_on_word(word, value))
        return true;
    while (!has_reached(word, value, &seen)) {
        left = end - spin_clock() / 1000000;
        if (left <= 0)
            return false;
        /* Count before the last poll: a writer whose value that poll misses then sees the count. */
        __atomic_fetch_add(sleepers, 1, __ATOMIC_SEQ_CST);
        if (!has_reached(word, value, &seen))
            host_wait_doorbell(word, seen, (uint32_t)left);
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
    __atomic_fetch_add(doorbell, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, doorbell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void write_word(struct host_stream *stream, uint32_t *word, uint32_t value)
{
    host_write_word(word, value);
    if (stream != NULL && stream->on_write != NULL)
        stream->on_write(stream->argument);
}

/* Have the GPU's driver copy, and wait until it has; false if either failed. */
static bool copy_by_gpu(const struct host_gpu *gpu, const struct request *request)
{
    int (*synchronize)(void *) = (int (*)(void *))(uintptr_t)gpu->synchronize_stream;
    void *stream = (void *)(uintptr_t)gpu->stream;

    return driver_copy(gpu->vendor, gpu->copy, request->target, request->source, request->nbytes,
                       stream) == 0 &&
           synchronize(stream) == 0;
}

static bool wait_for_event(const struct host_gpu *gpu, uint64_t event)
{
    int (*synchronize)(void *) = (int (*)(void *))(uintptr_t)gpu->synchronize_event;

    return synchronize((void *)(uintptr_t)event) == 0;
}

static bool verify(const struct request *request)
{
    uint32_t expected;

    memcpy(&expected, (const uint8_t *)(uintptr_t)request->target + request->nbytes,
           sizeof expected);
    return checksum((const void *)(uintptr_t)request->target, request->nbytes) == expected;
}

static void append(const struct request *request)
{
    uint32_t found = checksum((const void *)(uintptr_t)request->target, request->nbytes);

    memcpy((uint8_t *)(uintptr_t)request->target + request->nbytes, &found, sizeof found);
}

/* `stream` is NULL for HOST_CALLING_THREAD. */
static enum host_failure execute(struct host_stream *stream, const struct request *request)
{
    void *target = (void *)(uintptr_t)request->target;

    switch (request->kind) {
    case COPY:
        if (stream != NULL && stream->has_gpu)
            return copy_by_gpu(&stream->gpu, request) ? HOST_OK : HOST_GPU_FAILED;
        memcpy(target, (const void *)(uintptr_t)request->source, request->nbytes);
        break;
    case APPEND_CHECKSUM:
        append(request);
        break;
    case VERIFY_CHECKSUM:
        return verify(request) ? HOST_OK : HOST_WRONG_CHECKSUM;
    case WAIT_EVENT:
        return wait_for_event(&stream->gpu, request->target) ? HOST_OK : HOST_GPU_FAILED;
    case WAIT_VALUE:
        while (!host_wait_word(target, request->value, SLICE_MILLISECONDS))
            if (stream != NULL && atomic_load(&stream->stopping))
                break;
        break;
    case WRITE_VALUE:
        write_word(stream, target, request->value);
        break;
    }
    return HOST_OK;
}

/* Wait for the next request; false when the stream has to end. Call with the lock. */
static bool dequeue(struct host_stream *stream, struct request *request)
{
    stream->is_working = false;
    if (stream->count == 0)
        pthread_cond_broadcast(&stream->became_idle);
    while (stream->count == 0 && !atomic_load(&stream->stopping))
        pthread_cond_wait(&stream->has_work, &stream->lock);
    if (atomic_load(&stream->stopping))
        return false;
    *request = stream->requests[stream->first];
    stream->first = (stream->first + 1) % stream->capacity;
    stream->count--;
    stream->is_working = true;
    return true;
}

static bool make_current(const struct host_gpu *gpu)
{
    if (gpu->vendor == HIP)
        return ((int (*)(int))(uintptr_t)gpu->set_current)((int)gpu->context) == 0;
    return ((int (*)(void *))(uintptr_t)gpu->set_current)((void *)(uintptr_t)gpu->context) == 0;
}

static void *run(void *argument)
{
    struct host_stream *stream = argument;
    struct request request;

    if (stream->has_gpu && !make_current(&stream->gpu))
        atomic_store(&stream->failure, HOST_GPU_FAILED);
    pthread_mutex_lock(&stream->lock);
    while (dequeue(stream, &request)) {
        pthread_mutex_unlock(&stream->lock);
        if (atomic_load(&stream->failure) == HOST_OK)
            atomic_store(&stream->failure, execute(stream, &request));
        pthread_mutex_lock(&stream->lock);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

/* Double the capacity. Call with the lock. */
static bool grow(struct host_stream *stream)
{
    size_t capacity = stream->capacity ? 2 * stream->capacity : INITIAL_CAPACITY;
    struct request *requests = malloc(capacity * sizeof *requests);

    if (requests == NULL)
        return false;
    for (size_t index = 0; index < stream->count; index++)
        requests[index] = stream->requests[(stream->first + index) % stream->capacity];
    free(stream->requests);
    stream->requests = requests;
    stream->capacity = capacity;
    stream->first = 0;
    return true;
}

static int enqueue(void *handle, struct request request)
{
    struct host_stream *stream = handle;

    if (handle == HOST_CALLING_THREAD)
        return (int)execute(NULL, &request);
    pthread_mutex_lock(&stream->lock);
    if (stream->count == stream->capacity && !grow(stream)) {
        pthread_mutex_unlock(&stream->lock);
        return ENOMEM;
    }
    stream->requests[(stream->first + stream->count) % stream->capacity] = request;
    if (stream->count++ == 0)
        pthread_cond_signal(&stream->has_work);
    pthread_mutex_unlock(&stream->lock);
    return 0;
}

int host_copy(uint64_t target, uint64_t source, size_t nbytes, void *stream)
{
    return enqueue(stream, (struct request){COPY, target, source, nbytes, 0});
}

int host_append_checksum(uint64_t bytes, size_t nbytes, void *stream)
{
    return enqueue(stream, (struct request){APPEND_CHECKSUM, bytes, 0, nbytes, 0});
}

int host_verify_checksum(uint64_t bytes, size_t nbytes, void *stream)
{
    return enqueue(stream, (struct request){VERIFY_CHECKSUM, bytes, 0, nbytes, 0});
}

int host_wait_event(void *stream, void *event, unsigned flags)
{
    (void)flags;
    return enqueue(stream, (struct request){WAIT_EVENT, (uint64_t)(uintptr_t)event, 0, 0, 0});
}

int host_wait_value(void *stream, uint64_t word, uint32_t value, unsigned flags)
{
    (void)flags;
    return enqueue(stream, (struct request){WAIT_VALUE, word, 0, 0, value});
}

int host_write_value(void *stream, uint64_t word, uint32_t value, unsigned flags)
{
    (void)flags;
    return enqueue(stream, (struct request){WRITE_VALUE, word, 0, 0, value});
}

static void initialize(struct host_stream *stream)
{
    pthread_condattr_t monotonic;

    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->has_work, NULL);
    pthread_cond_init(&stream->became_idle, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

static void deinitialize(struct host_stream *stream)
{
    pthread_cond_destroy(&stream->became_idle);
    pthread_cond_destroy(&stream->has_work);
    pthread_mutex_destroy(&stream->lock);
    free(stream->requests);
    free(stream);
}

uint32_t host_stream_failure(const struct host_stream *stream)
{
    return atomic_load(&stream->failure);
}

struct host_stream *host_stream_create(const struct host_gpu *gpu, void (*on_write)(void *),
                                       void *argument)
{
    struct host_stream *stream = calloc(1, sizeof *stream);

    if (stream == NULL)
        return NULL;
    if (gpu != NULL) {
        stream->gpu = *gpu;
        stream->has_gpu = true;
    }
    stream->on_write = on_write;
    stream->argument = argument;
    stream->process = getpid();
    initialize(stream);
    if (pthread_create(&stream->thread, NULL, run, stream) == 0)
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
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    deinitialize(stream);
}

bool host_stream_synchronize(struct host_stream *stream, uint32_t milliseconds)
{
    struct timespec end;
    bool is_idle;
    int code = 0;

    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += milliseconds / 1000;
    end.tv_nsec += milliseconds % 1000 * 1000000L;
    if (end.tv_nsec >= 1000000000L) {
        end.tv_sec++;
        end.tv_nsec -= 1000000000L;
    }
    pthread_mutex_lock(&stream->lock);
    while ((stream->count > 0 || stream->is_working) && code == 0)
        code = pthread_cond_timedwait(&stream->became_idle, &stream->lock, &end);
    is_idle = stream->count == 0 && !stream->is_working;
    pthread_mutex_unlock(&stream->lock);
    return is_idle;
}
