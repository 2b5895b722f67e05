/* A GPU's driver as far as an ordered link calls it, played by threads: one a stream, which takes up its
 * work every few microseconds. Giving it work costs no call of the system, as with a GPU. Copies are
 * left out if asked for. *Emulated*: it says nothing of how a real GPU behaves. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROOM = 4096, FULL = 1, NAP_NS = 20000 };

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
    pthread_t thread;
    bool copies;
    atomic_bool stop;
    _Atomic uint64_t given, done;
    struct work work[ROOM];
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

static void carry_out(const struct stream *stream, const struct work *work)
{
    void *target = (void *)(uintptr_t)work->target;

    if (work->kind == COPY && stream->copies)
        memcpy(target, (const void *)(uintptr_t)work->source, work->nbytes);
    else if (work->kind == WRITE_VALUE)
        __atomic_store_n((uint32_t *)target, work->value, __ATOMIC_RELEASE);
    else if (work->kind == RECORD_EVENT)
        atomic_store(&work->event->reached[work->generation % ROOM], work->generation);
}

static void *run(void *argument)
{
    struct stream *stream = argument;
    const struct timespec nap = {0, NAP_NS};

    while (!atomic_load(&stream->stop)) {
        uint64_t next = atomic_load(&stream->done);
        const struct work *work = &stream->work[next % ROOM];
        if (next < atomic_load(&stream->given) && may_go_on(work)) {
            carry_out(stream, work);
            atomic_store(&stream->done, next + 1);
        } else {
            nanosleep(&nap, NULL);
        }
    }
    return NULL;
}

static int give(struct stream *stream, struct work work)
{
    uint64_t given = atomic_load(&stream->given);

    if (given - atomic_load(&stream->done) >= ROOM)
        return FULL;
    stream->work[given % ROOM] = work;
    atomic_store(&stream->given, given + 1);
    return 0;
}

void *stream_new(bool copies)
{
    struct stream *stream = calloc(1, sizeof *stream);

    stream->copies = copies;
    if (pthread_create(&stream->thread, NULL, run, stream) == 0)
        return stream;
    free(stream);
    return NULL;
}

bool stream_is_idle(const struct stream *stream)
{
    return atomic_load(&stream->done) == atomic_load(&stream->given);
}

void stream_free(struct stream *stream)
{
    atomic_store(&stream->stop, true);
    pthread_join(stream->thread, NULL);
    free(stream);
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
