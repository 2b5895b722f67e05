/* Two ends of a carried link in one process, without Python. They exchange messages as ring_link.py does, by flows
 * that the carriers' threads drive; the rails are TCP connections or emulated NICs, and some are cut on the way. Every
 * byte is compared. With `gpu` one end or both have streams that act as a GPU's: nobody is told what they write, and
 * callers enqueue alone. Built with sanitizers by test_sanitized.py.
 * Usage: carriers tcp|verbs host|gpu SEED MESSAGES RAILS ABANDON LIVES. Prints how many messages were compared. With ABANDON
 * both ends are given up after so many, in the middle of everything. Rails are cut where there is one life: of many,
 * each ends right after its last message. */
#include "carrier.h"
#include "host.h"
#include "require.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SMALL_BYTES 2000u
#define CHUNK_BYTES 4096u
/* Of more than RING_ENTRIES such chunks. */
#define LARGEST ((RING_ENTRIES + 20) * CHUNK_BYTES)
/* Messages without bytes, which take no room in the ring: more than it has records for. */
#define FIRST_EMPTY 100
#define LAST_EMPTY (FIRST_EMPTY + RING_ENTRIES + 20)
#define STALL_SECONDS 1.0
#define PATIENCE_MS 30000
#define SLICE_MS 5
/* So that counters count round in the middle. */
#define FIRST (UINT32_MAX - 100)
/* The most messages of a direction that are queued at once. */
#define BATCH 4
/* More than an emulated GPU records before the first of them is reached. */
#define RECORDINGS 16384

struct work {
    struct transfer transfer;
    uint8_t *bytes;
    uint32_t number;
    struct work *next;
};

/* What an emulated GPU records on its streams, each time in another word. */
struct event {
    uint32_t recorded;
    struct ring_word reached[RECORDINGS];
};

/* A direction of an end, and its messages that are not complete. */
struct line {
    struct end *end;
    int direction; /* the side that sends */
    struct flow flow;
    struct host_stream *stream;
    struct host_stream *sides[2]; /* of a GPU, for waits and writes */
    struct event *event;
    uint32_t begun; /* messages */
    uint64_t nbytes; /* of those that are not complete */
    struct work *first, *last;
    struct work *waiting; /* the first that was not seen to be enqueued */
};

struct end {
    int side;
    pthread_mutex_t lock; /* the link's */
    struct ring_control *control;
    uint8_t *rings;
    struct carrier *carrier;
    bool is_gpu;
    struct line lines[2]; /* out and in */
    int fds[ENGINE_RAILS];
    struct verbs_end rails[ENGINE_RAILS];
};

/* A thread of an end, and the lines that are its own. */
struct caller {
    struct end *end;
    struct line *lines[2];
    int count;
    unsigned chance;
    struct host_stream *stream; /* on a GPU */
};

static const char *const nics[2][2] = {{"a0", "a1"}, {"b0", "b1"}};
static struct end ends[2];
static struct proxy *proxy;
static uint32_t messages;
static int rails;
/* Many chunks, which the threads that post them send, or few, which the senders send. */
static struct shape {
    uint32_t ring_bytes, chunk_bytes, least_chunk_bytes;
} shape;
static const struct shape shapes[2] = {{16 * CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES / 4}, {1 << 20, 1 << 18, 1 << 18}};
static bool is_verbs, is_cut, with_gpu;
/* Behind each entry in the ring; where there is none, TCP may pass the ring by. */
static uint64_t check_bytes;
/* Of the emulated NICs. */
static void (*break_nic)(int index, int fault);
static unsigned seed;
static unsigned abandon;
static atomic_uint compared;
static pthread_barrier_t over;
/* What messages consist of. */
static uint8_t noise[LARGEST + 4099];

#define IS_ABANDONED (atomic_load(&compared) >= abandon)

static uint64_t address(const void *pointer)
{
    return (uint64_t)(uintptr_t)pointer;
}

/* What message `number` of a direction consists of, which both ends know. */
static uint32_t size_of_message(int direction, uint32_t number)
{
    uint32_t mixed = (number + (uint32_t)direction * 7919u + seed) * 2654435761u, kind = mixed >> 26;

    mixed &= (1u << 26) - 1;
    if (number >= FIRST_EMPTY && number < LAST_EMPTY)
        return 0;
    if (kind == 0)
        return LARGEST - mixed % CHUNK_BYTES;
    if (kind < 8)
        return 0;
    if (kind < 28)
        return mixed % (SMALL_BYTES + 1);
    return mixed % (kind < 56 ? 8 * CHUNK_BYTES : 96 * CHUNK_BYTES);
}

static const uint8_t *bytes_of_message(int direction, uint32_t number)
{
    return noise + (number * 31u + (uint32_t)direction * 113u) % 4099;
}

/* An emulated GPU's driver. */

static int gpu_copy(uint64_t target, uint64_t source, size_t nbytes, void *stream)
{
    return host_enqueue(stream, &(struct copy_step){.target = target, .source = source, .nbytes = nbytes});
}

static int gpu_wait(void *stream, uint64_t word, uint32_t value, unsigned flags)
{
    (void)flags;
    return host_enqueue(stream, &(struct copy_step){.wait = {word, value}});
}

static int gpu_write(void *stream, uint64_t word, uint32_t value, unsigned flags)
{
    (void)flags;
    return host_enqueue(stream, &(struct copy_step){.write = {word, value}});
}

static int gpu_record(void *handle, void *stream)
{
    struct event *event = handle;
    uint32_t number = ++event->recorded;

    return gpu_write(stream, address(&event->reached[number % RECORDINGS]), number, 0);
}

static int gpu_wait_event(void *stream, void *handle, unsigned flags)
{
    const struct event *event = handle;

    return gpu_wait(stream, address(&event->reached[event->recorded % RECORDINGS]), event->recorded, flags);
}

/* Messages. */

/* The next message of a line, not begun. */
static struct work *make_message(struct line *line, uint64_t caller_stream)
{
    struct work *made = calloc(1, sizeof *made);
    uint32_t nbytes = size_of_message(line->direction, line->begun);

    made->number = line->begun++;
    made->bytes = malloc(nbytes + 1);
    if (line->flow.is_outgoing)
        memcpy(made->bytes, bytes_of_message(line->direction, made->number), nbytes);
    made->transfer.flow = address(&line->flow);
    made->transfer.address = address(made->bytes);
    made->transfer.nbytes = nbytes;
    made->transfer.caller_stream = caller_stream;
    made->transfer.after_caller = caller_stream != 0;
    made->transfer.tag = made->number % 7;
    line->nbytes += nbytes;
    return made;
}

static void append(struct line *line, struct work *message)
{
    if (line->first == NULL)
        line->first = message;
    else
        line->last->next = message;
    line->last = message;
    if (line->waiting == NULL)
        line->waiting = message;
}

/* Call with the lock. */
static void free_first(struct line *line)
{
    struct work *first = line->first;

    line->first = first->next;
    if (line->waiting == first)
        line->waiting = first->next;
    line->nbytes -= first->transfer.nbytes;
    /* Nothing may be sent from it any more. */
    memset(first->bytes, 0xEE, first->transfer.nbytes);
    free(first->bytes);
    free(first);
}

static bool is_enqueued(const struct work *message)
{
    return __atomic_load_n(&message->transfer.progress, __ATOMIC_ACQUIRE) == ENQUEUED;
}

/* Progress what waits, whichever thread will wait for it, as ring_link.py's _enqueue. */
static void progress(struct end *end)
{
    pthread_mutex_lock(&end->lock);
    for (int index = 0; index < 2; index++) {
        struct line *line = &end->lines[index];

        while (line->waiting != NULL) {
            struct transfer *transfer = &line->waiting->transfer;
            uint32_t found = ENQUEUED;

            if (!is_enqueued(line->waiting))
                found = native_progress(transfer, transfer->caller_stream != 0);
            REQUIRE(found == WAITING || found == ENQUEUED);
            if (found == WAITING)
                break;
            line->waiting = line->waiting->next;
        }
    }
    pthread_mutex_unlock(&end->lock);
}

/* Queue some messages of each line: one after the other, or by one call. */
static void queue_messages(struct caller *caller)
{
    struct transfer *transfers[2 * BATCH];
    struct work *made[2 * BATCH];
    struct line *lines[2 * BATCH];
    uint32_t count = 0, microseconds = (uint32_t)rand_r(&caller->chance) % 50;
    /* At times none: as of a GPU's memory, which streams of the host alone copy. */
    uint64_t own = address(caller->stream != NULL ? (void *)caller->stream : HOST_CALLING_THREAD);
    uint64_t stream = rand_r(&caller->chance) % 4 ? own : 0;

    /* As many of each: were both ends to wait for more than the other has queued, neither would go on. */
    for (int left = 1 + rand_r(&caller->chance) % BATCH; left > 0; left--)
        for (int index = 0; index < caller->count && caller->lines[index]->begun < messages; index++) {
            lines[count] = caller->lines[index];
            made[count] = make_message(lines[count], stream);
            transfers[count] = &made[count]->transfer;
            count++;
        }
    pthread_mutex_lock(&caller->end->lock);
    if (stream != 0 && rand_r(&caller->chance) % 2) {
        if (native_exchange(transfers, count, microseconds, count) == ENQUEUED)
            for (uint32_t index = 0; index < count; index++)
                REQUIRE(is_enqueued(made[index]));
    } else {
        for (uint32_t index = 0; index < count; index++)
            native_begin(transfers[index]);
    }
    for (uint32_t index = 0; index < count; index++)
        append(lines[index], made[index]);
    pthread_mutex_unlock(&caller->end->lock);
    progress(caller->end);
}

/* Wait until a message is enqueued; false if everything is given up. No look at it but where the doorbell has rung: it
 * has to ring for each. */
static bool await_enqueued(const struct caller *caller, const struct work *message)
{
    uint32_t *doorbell = &caller->end->control->ends[caller->end->side].doorbell.value;

    for (;;) {
        uint32_t bell = __atomic_load_n(doorbell, __ATOMIC_ACQUIRE);

        progress(caller->end);
        if (is_enqueued(message))
            return true;
        if (IS_ABANDONED)
            return false;
        REQUIRE(host_wait_word(doorbell, bell + 1, 40, PATIENCE_MS));
    }
}

/* Wait until a word has come to a value; false if everything is given up. */
static bool await_word(const struct caller *caller, struct ring_word *awaited, uint32_t value)
{
    for (int waited = 0; !host_wait_word(&awaited->value, value, 40, SLICE_MS); waited += SLICE_MS) {
        if (IS_ABANDONED)
            return false;
        REQUIRE(waited < PATIENCE_MS);
        /* As the monitor does for a caller that waits for something else. */
        progress(caller->end);
    }
    return true;
}

static void count_compared(void)
{
    if (atomic_fetch_add(&compared, 1) + 1 == abandon)
        for (int side = 0; side < 2; side++)
            host_ring_doorbell(&ends[side].control->ends[side].doorbell.value);
}

/* Complete a line's first message; false if everything is given up. */
static bool complete_first(const struct caller *caller, struct line *line)
{
    struct work *message = line->first;
    struct ring_direction *direction = &line->end->control->directions[line->direction];

    if (!await_enqueued(caller, message))
        return false;
    bool is_consumed = message->transfer.completes_at_receiver;
    if (!await_word(caller, is_consumed ? &direction->consumed : &direction->produced,
                    (uint32_t)message->transfer.count))
        return false;
    if (!line->flow.is_outgoing) {
        REQUIRE(memcmp(message->bytes, bytes_of_message(line->direction, message->number),
                       message->transfer.nbytes) == 0);
        count_compared();
    }
    pthread_mutex_lock(&caller->end->lock);
    free_first(line);
    pthread_mutex_unlock(&caller->end->lock);
    return true;
}

/* Exchange all messages, of which now more and now fewer are under way. */
static void *call(void *argument)
{
    struct caller *caller = argument;
    bool is_last = false, goes_on = true;

    while (goes_on && !is_last) {
        uint64_t limit = rand_r(&caller->chance) % 3 * (64 * CHUNK_BYTES);

        if (rand_r(&caller->chance) % 8 == 0)
            usleep((unsigned)rand_r(&caller->chance) % 2000);
        queue_messages(caller);
        is_last = caller->lines[0]->begun == messages;
        for (int index = 0; index < caller->count; index++) {
            struct line *line = caller->lines[index];

            while (goes_on && line->first != NULL && (is_last || line->nbytes > limit))
                goes_on = complete_first(caller, line);
        }
        goes_on &= !IS_ABANDONED;
    }
    return NULL;
}

static void connect_pair(int rail)
{
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof name;
    int listener = socket(AF_INET, SOCK_STREAM, 0);

    REQUIRE(bind(listener, (struct sockaddr *)&name, length) == 0 && listen(listener, 1) == 0);
    getsockname(listener, (struct sockaddr *)&name, &length);
    ends[1].fds[rail] = socket(AF_INET, SOCK_STREAM, 0);
    REQUIRE(connect(ends[1].fds[rail], (struct sockaddr *)&name, length) == 0);
    ends[0].fds[rail] = accept(listener, NULL, NULL);
    REQUIRE(ends[0].fds[rail] >= 0);
    for (int side = 0; side < 2; side++)
        setsockopt(ends[side].fds[rail], IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    close(listener);
}

static void add_tcp(struct end *end, int rail)
{
    char error[RAIL_TEXT_BYTES];

    REQUIRE(carrier_add_tcp(end->carrier, end->fds[rail], error));
}

static void add_verbs(struct end *end, int rail)
{
    char error[RAIL_TEXT_BYTES];
    const char *nic = nics[end->side][rail];
    bool by_dmabuf;

    REQUIRE(carrier_add_verbs(end->carrier, nic, 1, &end->rails[rail], &by_dmabuf, error));
}

static void connect_verbs(struct end *end, int rail)
{
    const struct verbs_end *there = &ends[1 - end->side].rails[rail];
    struct verbs_route route = {0};
    char error[RAIL_TEXT_BYTES];

    REQUIRE(carrier_connect_verbs(end->carrier, rail, there, &route, &route, error));
}

static void notified(void *carrier)
{
    carrier_progress(carrier);
}

/* The streams of a line, which tell the carrier what they write unless they are a GPU's. */
static struct streams open_streams(struct line *line, struct end *end)
{
    uint64_t sides[2];

    if (!end->is_gpu) {
        line->stream = host_stream_create(proxy, NULL, notified, end->carrier);
        return (struct streams){.driver = {.vendor = HOST, .copy = (uint64_t)(uintptr_t)host_enqueue},
                                .copies = address(line->stream)};
    }
    line->stream = host_stream_create(proxy, NULL, NULL, NULL);
    for (int index = 0; index < 2; index++) {
        line->sides[index] = host_stream_create(proxy, NULL, NULL, NULL);
        sides[index] = address(line->sides[index]);
    }
    line->event = calloc(1, sizeof *line->event);
    return (struct streams){
        .driver = {.vendor = CUDA,
                   .counter_limit = 1ull << 32,
                   .copy = (uint64_t)(uintptr_t)gpu_copy,
                   .wait_value = (uint64_t)(uintptr_t)gpu_wait,
                   .write_value = (uint64_t)(uintptr_t)gpu_write,
                   .record_event = (uint64_t)(uintptr_t)gpu_record,
                   .wait_event = (uint64_t)(uintptr_t)gpu_wait_event},
        .copies = address(line->stream),
        .waits = sides[0],
        .writes = sides[1],
        .join_event = address(line->event),
    };
}

/* Wait for what its streams were given, until the end of a wait for the peer if they have to. */
static void synchronize(struct line *line)
{
    /* Twice: those of a GPU give each other work. */
    for (int round = 0; round < 2; round++) {
        REQUIRE(host_stream_synchronize(line->stream, PATIENCE_MS));
        for (int index = 0; index < 2 && line->sides[index] != NULL; index++)
            REQUIRE(host_stream_synchronize(line->sides[index], PATIENCE_MS));
    }
}

static void close_streams(struct line *line)
{
    host_stream_destroy(line->stream);
    for (int index = 0; index < 2 && line->sides[index] != NULL; index++)
        host_stream_destroy(line->sides[index]);
    free(line->event);
}

static void open_line(struct line *line, struct end *end, bool is_outgoing)
{
    struct ring_control *control = end->control;
    int direction = is_outgoing ? end->side : 1 - end->side;
    struct ring_direction *words = &control->directions[direction];
    /* Each end decides alone. */
    bool zero_copy = !is_verbs && !end->is_gpu && check_bytes == 0 && (seed + (unsigned)end->side) % 3 > 0;

    line->end = end;
    line->direction = direction;
    line->flow = (struct flow){
        .streams = open_streams(line, end),
        .direction = address(words),
        .produced_word = address(&words->produced),
        .consumed_word = address(&words->consumed),
        .ring = address(end->rings) + (is_outgoing ? 0 : shape.ring_bytes),
        .ring_bytes = shape.ring_bytes,
        .chunk_bytes = shape.chunk_bytes,
        .least_chunk_bytes = shape.least_chunk_bytes,
        .small_bytes = SMALL_BYTES,
        .checksum_bytes = check_bytes,
        .user_buffers = zero_copy ? address(control->user_buffers[direction]) : 0,
        .wake_peer = (uint64_t)(uintptr_t)notified,
        .wake_argument = address(end->carrier),
        .doorbell = address(&control->ends[end->side].doorbell),
        .bytes_header = {.magic = "test", .dimensions = 1},
        .is_outgoing = is_outgoing,
        .begun = FIRST,
        .count = FIRST,
        .freed = FIRST,
    };
    native_init_flow(&line->flow);
}

static void open_end(struct end *end, int side)
{
    char error[RAIL_TEXT_BYTES];

    end->side = side;
    end->is_gpu = with_gpu && (side == 0 || seed % 3 > 0);
    pthread_mutex_init(&end->lock, NULL);
    end->control = aligned_alloc(64, sizeof *end->control);
    memset(end->control, 0, sizeof *end->control);
    end->rings = aligned_alloc(64, 2 * shape.ring_bytes);
    for (int number = 0; number < 2; number++) {
        struct ring_direction *direction = &end->control->directions[number];

        direction->posted.value = direction->retired.value = FIRST;
        direction->produced.value = direction->consumed.value = FIRST;
    }
    struct engine_options options = {
        .control = address(end->control),
        .side = (uint64_t)end->side,
        .rings = address(end->rings),
        .ring_bytes = shape.ring_bytes,
        .checksum_bytes = check_bytes,
        .stall_seconds = STALL_SECONDS,
        .reads_back = is_verbs && seed % 2,
        .dmabuf = -1,
        .device_notifies = !end->is_gpu,
    };
    end->carrier = carrier_new(proxy, &options, error);
    REQUIRE(end->carrier != NULL);
    for (int rail = 0; rail < rails; rail++)
        (is_verbs ? add_verbs : add_tcp)(end, rail);
    open_line(&end->lines[0], end, true);
    open_line(&end->lines[1], end, false);
}

static void start_end(struct end *end)
{
    char error[RAIL_TEXT_BYTES];

    for (int rail = 0; is_verbs && rail < rails; rail++)
        connect_verbs(end, rail);
    REQUIRE(carrier_start(end->carrier, error));
    if (!end->is_gpu)
        carrier_drive_flows(end->carrier, &end->lines[0].flow, &end->lines[1].flow);
}

/* What an end has counted, beside what it has sent. What a lost rail had in flight may have arrived, and is
 * then not counted; what it had completed may not have, and is then counted twice. */
static void check_counters(struct end *end)
{
    struct rail_counters counters[ENGINE_RAILS] = {0};
    uint64_t counted = 0, sent = (end->lines[0].flow.count - FIRST) * check_bytes;

    uint64_t retransmitted = carrier_rail_counters(end->carrier, counters, ENGINE_RAILS);
    for (int rail = 0; rail < rails; rail++)
        counted += counters[rail].bytes_sent;
    for (uint32_t number = 0; number < messages; number++)
        sent += size_of_message(end->side, number);
    REQUIRE(counted + (uint64_t)rails * shape.ring_bytes >= sent);
    REQUIRE(counted <= sent + retransmitted * (shape.chunk_bytes + check_bytes));
}

/* Have a stream end that waits for the peer. */
static void unblock(struct end *end, const struct line *line)
{
    struct ring_direction *direction = &end->control->directions[line->direction];
    struct ring_word *word = line->flow.is_outgoing ? &direction->consumed : &direction->produced;

    if (ring_ahead((uint32_t)line->flow.awaited, ring_load(word)) > 0)
        host_write_word(&word->value, (uint32_t)line->flow.awaited);
}

/* As ring_link.py closes a link. */
static void close_end(struct end *end, const struct caller *callers, int count)
{
    pthread_mutex_lock(&end->lock);
    for (int index = 0; index < 2; index++)
        native_abort(&end->lines[index].flow);
    for (int index = 0; index < 2 && IS_ABANDONED; index++)
        unblock(end, &end->lines[index]);
    pthread_mutex_unlock(&end->lock);
    for (int index = 0; index < 2; index++)
        synchronize(&end->lines[index]);
    for (int index = 0; index < count && end->is_gpu; index++) {
        REQUIRE(host_stream_synchronize(callers[index].stream, PATIENCE_MS));
        host_stream_destroy(callers[index].stream);
    }
    if (!IS_ABANDONED) {
        REQUIRE(carrier_flush_credits(end->carrier, 5.0));
        check_counters(end);
        REQUIRE(host_stream_failure(end->lines[1].stream) == HOST_OK);
    }
    carrier_free(end->carrier);
    for (int index = 0; index < 2; index++) {
        while (end->lines[index].first != NULL)
            free_first(&end->lines[index]);
        close_streams(&end->lines[index]);
        memset(&end->lines[index], 0, sizeof end->lines[index]);
    }
    pthread_mutex_destroy(&end->lock);
}

/* The life of an end: one thread sends and one receives, or one does both. */
static void *live(void *argument)
{
    struct end *end = argument;
    unsigned chance = seed * 2 + (unsigned)end->side;
    struct caller callers[2] = {
        {end, {&end->lines[0], &end->lines[1]}, 1 + (seed + (unsigned)end->side) / 2 % 2, chance, NULL},
        {end, {&end->lines[1]}, 1, ~chance, NULL},
    };
    struct ring_word *consumed = &end->control->directions[end->side].consumed;
    int count = 3 - callers[0].count;
    pthread_t threads[2];

    for (int index = 0; index < count; index++) {
        if (end->is_gpu)
            callers[index].stream = host_stream_create(proxy, NULL, NULL, NULL);
        pthread_create(&threads[index], NULL, call, &callers[index]);
    }
    for (int index = 0; index < count; index++)
        pthread_join(threads[index], NULL);
    if (!IS_ABANDONED)
        await_word(&callers[0], consumed, (uint32_t)end->lines[0].flow.count);
    if (is_cut)
        pthread_barrier_wait(&over);
    close_end(end, callers, count);
    return NULL;
}

/* As failover.py does it: both stop the rail before either sends anything again. */
static void lose(int rail)
{
    for (int side = 0; side < 2; side++)
        carrier_stop_rail(ends[side].carrier, rail);
    for (int side = 0; side < 2; side++)
        carrier_retransmit(ends[side].carrier, rail);
}

/* Put a new pair of connections in the place of a lost rail's. */
static void open_again(int rail)
{
    int lost[2] = {ends[0].fds[rail], ends[1].fds[rail]};
    char error[RAIL_TEXT_BYTES];

    connect_pair(rail);
    for (int side = 0; side < 2; side++) {
        REQUIRE(carrier_reopen_tcp(ends[side].carrier, rail, ends[side].fds[rail], error));
        close(lost[side]);
    }
}

/* Cut all rails but one, at any time, at one of their ends or by the rail's own fault; with TCP, which is
 * opened again, that one too. */
static void cut(void)
{
    struct rail_counters counters[ENGINE_RAILS];
    char reason[RAIL_TEXT_BYTES];
    unsigned chance = seed;
    uint32_t all = 2 * messages;
    bool ended;

    for (int rail = is_verbs ? 1 : 0; rail < rails; rail++) {
        uint32_t when = all / (unsigned)(rails + 1) * (unsigned)(rail + 1);

        while (atomic_load(&compared) < when && !IS_ABANDONED) {
            carrier_rail_counters(ends[rail % 2].carrier, counters, rails);
            usleep(200);
        }
        if (rand_r(&chance) % 2 == 0) {
            int side = rand_r(&chance) % 2;

            if (is_verbs)
                break_nic(2 * side + rail, 1 + rand_r(&chance) % 2);
            else
                shutdown(ends[side].fds[rail], SHUT_RDWR);
            /* The end at fault may have nothing under way by which it could notice. */
            for (bool is_found = false; !is_found && !IS_ABANDONED; usleep(200))
                for (int end = 0; end < 2; end++)
                    is_found |= carrier_next_loss(ends[end].carrier, reason, &ended) == rail;
        }
        lose(rail);
        if (!is_verbs)
            open_again(rail);
    }
}

static void live_once(void)
{
    pthread_t threads[2];

    atomic_store(&compared, 0);
    for (int rail = 0; rail < rails && !is_verbs; rail++)
        connect_pair(rail);
    for (int side = 0; side < 2; side++)
        open_end(&ends[side], side);
    for (int side = 0; side < 2; side++)
        start_end(&ends[side]);
    for (int side = 0; side < 2; side++)
        pthread_create(&threads[side], NULL, live, &ends[side]);
    if (is_cut) {
        cut();
        pthread_barrier_wait(&over);
    }
    for (int side = 0; side < 2; side++)
        pthread_join(threads[side], NULL);
    for (int side = 0; side < 2; side++) {
        for (int rail = 0; rail < rails && !is_verbs; rail++)
            close(ends[side].fds[rail]);
        free(ends[side].control);
        free(ends[side].rings);
    }
}

int main(int count, char **arguments)
{
    char error[RAIL_TEXT_BYTES];
    unsigned all = 0, chance, lives;

    REQUIRE(count == 8);
    is_verbs = strcmp(arguments[1], "verbs") == 0;
    with_gpu = strcmp(arguments[2], "gpu") == 0;
    seed = chance = (unsigned)atoi(arguments[3]);
    messages = (uint32_t)atoi(arguments[4]);
    rails = atoi(arguments[5]);
    abandon = atoi(arguments[6]) ? (unsigned)atoi(arguments[6]) : UINT32_MAX;
    lives = (unsigned)atoi(arguments[7]);
    is_cut = lives == 1;
    for (size_t index = 0; index < sizeof noise; index++)
        noise[index] = (uint8_t)rand_r(&chance);
    if (is_verbs)
        *(void **)&break_nic =
            dlsym(dlopen(getenv("HETERO_IBVERBS_LIBRARY"), RTLD_NOW), "loopback_break");
    proxy = proxy_new(error);
    REQUIRE(proxy != NULL);
    pthread_barrier_init(&over, NULL, 3);
    for (; lives > 0; lives--, seed++) {
        shape = shapes[seed / 2 % 2];
        /* A GPU computes none. */
        check_bytes = seed % 2 && !with_gpu ? HOST_CHECKSUM_BYTES : 0;
        live_once();
        all += atomic_load(&compared);
    }
    proxy_free(proxy);
    printf("%u\n", all);
    return 0;
}
