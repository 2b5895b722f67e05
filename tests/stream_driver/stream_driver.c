/* A GPU's driver as far as an ordered link calls it, played by one thread that takes up the work of all
 * streams. Giving it work costs a call of the system only where it sleeps. Copies are left out if asked
 * for. *Emulated*: it says nothing of how a real GPU behaves. */

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { STREAMS = 8, ROOM = 4096, FULL = 1 };

/* Recorded in several streams in turn, which reach their marks in any order. */
struct event {
    _Atomic uint64_t recorded;
    _Atomic uint64_t reached[ROOM];
};

enum kind { COPY, WAIT_VALUE, WRITE_VALUE, RECORD_EVENT, WAIT_EVENT };

struct work {
    enum kind kind;
    uint64_t target, source, nbytes;
    struct event *event;
    uint64_t generation;
    uint32_t value;
};

struct stream {
    struct device *device;
    _Atomic uint64_t given, done;
    struct work work[ROOM];
};

struct device {
    pthread_t thread;
    bool copies;
    atomic_bool stop;
    _Atomic uint32_t asleep;
    struct stream streams[STREAMS];
};

static bool may_go_on(const struct work *work)
{
    if (work->kind == WAIT_EVENT)
        return atomic_load(&work->event->reached[work->generation % ROOM]) >= work->generation;
    if (work->kind == WAIT_VALUE) {
        uint32_t *word = (uint32_t *)(uintptr_t)work->target;
        return (int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - work->value) >= 0;
    }
    return true;
}

static void carry_out(const struct device *device, const struct work *work)
{
    void *target = (void *)(uintptr_t)work->target;

    if (work->kind == COPY && device->copies)
        memcpy(target, (const void *)(uintptr_t)work->source, work->nbytes);
    else if (work->kind == WRITE_VALUE)
        __atomic_store_n((uint32_t *)target, work->value, __ATOMIC_RELEASE);
    else if (work->kind == RECORD_EVENT)
        atomic_store(&work->event->reached[work->generation % ROOM], work->generation);
}

static bool is_idle(const struct stream *stream)
{
    return atomic_load(&stream->done) == atomic_load(&stream->given);
}

bool device_is_idle(const struct device *device)
{
    for (int number = 0; number < STREAMS; number++)
        if (!is_idle(&device->streams[number]))
            return false;
    return true;
}

static void go_on(const struct device *device, struct stream *stream)
{
    while (!is_idle(stream)) {
        uint64_t next = atomic_load(&stream->done);
        const struct work *work = &stream->work[next % ROOM];
        if (!may_go_on(work))
            return;
        carry_out(device, work);
        atomic_store(&stream->done, next + 1);
    }
}

static void *run(void *argument)
{
    struct device *device = argument;

    while (!atomic_load(&device->stop)) {
        for (int number = 0; number < STREAMS; number++)
            go_on(device, &device->streams[number]);
        if (!device_is_idle(device)) {
            sched_yield();
            continue;
        }
        atomic_store(&device->asleep, 1);
        if (device_is_idle(device) && !atomic_load(&device->stop))
            syscall(SYS_futex, &device->asleep, FUTEX_WAIT, 1, NULL, NULL, 0);
        atomic_store(&device->asleep, 0);
    }
    return NULL;
}

static void wake(struct device *device)
{
    if (atomic_exchange(&device->asleep, 0))
        syscall(SYS_futex, &device->asleep, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static int give(struct stream *stream, struct work work)
{
    uint64_t given = atomic_load(&stream->given);

    if (given - atomic_load(&stream->done) >= ROOM)
        return FULL;
    stream->work[given % ROOM] = work;
    atomic_store(&stream->given, given + 1);
    wake(stream->device);
    return 0;
}

void *device_new(bool copies)
{
    struct device *device = calloc(1, sizeof *device);

    device->copies = copies;
    for (int number = 0; number < STREAMS; number++)
        device->streams[number].device = device;
    if (pthread_create(&device->thread, NULL, run, device) == 0)
        return device;
    free(device);
    return NULL;
}

void *device_stream(struct device *device, int number)
{
    return number < STREAMS ? &device->streams[number] : NULL;
}

void device_free(struct device *device)
{
    atomic_store(&device->stop, true);
    wake(device);
    pthread_join(device->thread, NULL);
    free(device);
}

void *event_new(void) { return calloc(1, sizeof(struct event)); }

void event_free(struct event *event) { free(event); }

int driver_copy(uint64_t target, uint64_t source, size_t nbytes, struct stream *stream)
{
    return give(stream, (struct work){COPY, target, source, nbytes, NULL, 0, 0});
}

int driver_wait_value(struct stream *stream, uint64_t word, uint32_t value, unsigned flags)
{
    (void)flags;
    return give(stream, (struct work){WAIT_VALUE, word, 0, 0, NULL, 0, value});
}

int driver_write_value(struct stream *stream, uint64_t word, uint32_t value, unsigned flags)
{
    (void)flags;
    return give(stream, (struct work){WRITE_VALUE, word, 0, 0, NULL, 0, value});
}

int driver_record_event(struct event *event, struct stream *stream)
{
    uint64_t generation = atomic_fetch_add(&event->recorded, 1) + 1;

    return give(stream, (struct work){RECORD_EVENT, 0, 0, 0, event, generation, 0});
}

int driver_wait_event(struct stream *stream, struct event *event, unsigned flags)
{
    (void)flags;
    return give(stream,
                (struct work){WAIT_EVENT, 0, 0, 0, event, atomic_load(&event->recorded), 0});
}
