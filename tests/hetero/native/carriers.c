/* Two ends of a carried link in one process, without Python: streams of the host fill one's ring and
 * empty the other's; the rails are TCP connections or emulated NICs, and some are cut on the way. Every
 * byte is compared. Built with sanitizers by test_sanitized.py.
 * Usage: carriers tcp|verbs SEED ENTRIES RAILS [ABANDON]. Prints how many entries were compared. With
 * ABANDON both ends are given up after so many, in the middle of everything. */
#include "carrier.h"
#include "host.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define RING_BYTES (64u << 10)
#define LARGEST 6000u
#define STALL_SECONDS 1.0
#define PATIENCE_MS 30000
#define SLICE_MS 20
/* So that counters count round in the middle. */
#define FIRST (UINT32_MAX - 100)

struct end {
    int side;
    struct ring_control *control;
    uint8_t *rings;
    struct carrier *carrier;
    struct host_stream *filling, *emptying;
    int fds[ENGINE_RAILS];
    struct verbs_end rails[ENGINE_RAILS];
};

static const char *const nics[2][2] = {{"a0", "a1"}, {"b0", "b1"}};
static struct end ends[2];
static struct proxy *proxy;
static uint32_t entries;
static int rails;
static bool is_verbs;
/* Behind each entry in the ring; where there is none, TCP may pass the ring by. */
static uint64_t check_bytes;
/* Of the emulated NICs. */
static void (*break_nic)(int index, int fault);
static unsigned seed;
static unsigned abandon = UINT32_MAX;
static atomic_uint compared;

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static struct ring_record *record_of(struct ring_direction *direction, uint32_t number)
{
    return &direction->records[number % RING_ENTRIES];
}

static uint64_t address(const void *pointer)
{
    return (uint64_t)(uintptr_t)pointer;
}

/* What entry `number` of a direction has in it, which both ends can make. */
static uint32_t size_of_entry(int direction, uint32_t number)
{
    uint32_t mixed = (number + (uint32_t)direction * 7919u + seed) * 2654435761u;

    return mixed % 5 == 0 ? mixed >> 8 & 1 : (mixed >> 4) % LARGEST;
}

static uint8_t byte_of_entry(int direction, uint32_t number, uint32_t index)
{
    return (uint8_t)(number * 31u + index * 7u + (uint32_t)direction * 113u);
}

/* Whether an end would have an entry go out of, or into, memory of its own: each decides alone. */
static bool is_zero_copy(int side, uint32_t number)
{
    return !is_verbs && check_bytes == 0 && (number + (uint32_t)side) % 3 > 0;
}

#define IS_ABANDONED (atomic_load(&compared) >= abandon)

/* Whether a word has come to a value; false if everything is given up. */
static bool await(struct ring_word *awaited, uint32_t value)
{
    for (int waited = 0; !host_wait_word(&awaited->value, value, 40, SLICE_MS); waited += SLICE_MS) {
        if (IS_ABANDONED)
            return false;
        REQUIRE(waited < PATIENCE_MS);
    }
    return true;
}

/* As a link does it: a copy into the ring, a checksum and a word. */
static void fill(struct end *end, const struct ring_record *record, uint64_t bytes, uint32_t number)
{
    struct ring_direction *out = &end->control->directions[end->side];
    bool zero_copy = is_zero_copy(end->side, number);
    uint64_t slot = address(end->rings) + record->slot;

    end->control->user_buffers[end->side][(FIRST + number) % RING_ENTRIES].address = zero_copy ? bytes : RING_SLOT;
    struct copy_step step = {
        .checksum = check_bytes ? APPEND_BEHIND_TARGET : NO_CHECKSUM,
        .target = slot,
        .source = bytes,
        .nbytes = zero_copy ? 0 : record->nbytes,
        .write = {address(&out->produced), FIRST + number + 1},
    };
    REQUIRE(host_enqueue(end->filling, &step) == 0);
}

/* The sender of one direction. */
static void *send_all(void *argument)
{
    struct end *end = argument;
    struct ring_direction *out = &end->control->directions[end->side];
    static uint8_t *contents[2][RING_ENTRIES];
    uint8_t **bytes = contents[end->side];
    uint64_t head = 0, tails[RING_ENTRIES] = {0}, tail = 0;
    uint32_t freed = 0;

    for (uint32_t number = 0; number < entries && !IS_ABANDONED; number++) {
        uint32_t nbytes = size_of_entry(end->side, number);
        uint64_t length = (nbytes + check_bytes + RING_ALIGNMENT - 1) / RING_ALIGNMENT * RING_ALIGNMENT;
        struct ring_record *record = record_of(out, FIRST + number);

        if (head % RING_BYTES + length > RING_BYTES)
            head += RING_BYTES - head % RING_BYTES;
        while (head + length - tail > RING_BYTES || number - freed >= RING_ENTRIES) {
            if (freed == number) {
                tail = head;
                continue;
            }
            if (!await(&out->retired, FIRST + freed + 1))
                return NULL;
            tail = tails[freed % RING_ENTRIES];
            free(bytes[freed % RING_ENTRIES]);
            freed++;
        }
        bytes[number % RING_ENTRIES] = malloc(nbytes + 1);
        for (uint32_t index = 0; index < nbytes; index++)
            bytes[number % RING_ENTRIES][index] = byte_of_entry(end->side, number, index);
        /* Half of them as if of small messages, which stay on one rail where they can. */
        record->header.nbytes = number % 8 < 4 ? nbytes : UINT32_MAX;
        record->nbytes = nbytes;
        record->slot = head % RING_BYTES;
        fill(end, record, address(bytes[number % RING_ENTRIES]), number);
        head += length;
        tails[number % RING_ENTRIES] = head;
        __atomic_store_n(&out->posted.value, FIRST + number + 1, __ATOMIC_RELEASE);
        carrier_progress(end->carrier);
    }
    for (; freed < entries && await(&out->consumed, FIRST + entries); freed++)
        free(bytes[freed % RING_ENTRIES]);
    return NULL;
}

static void empty(struct end *end, const struct ring_record *record, uint64_t target, uint32_t number)
{
    struct ring_direction *in = &end->control->directions[1 - end->side];
    uint64_t slot = address(end->rings) + RING_BYTES + record->slot, undecided = RING_UNDECIDED;
    struct user_buffer *buffer = &end->control->user_buffers[1 - end->side][(FIRST + number) % RING_ENTRIES];
    bool zero_copy = false;

    if (is_zero_copy(end->side, number) &&
        __atomic_load_n(&buffer->address, __ATOMIC_ACQUIRE) == RING_UNDECIDED) {
        buffer->nbytes = record->nbytes;
        zero_copy = __atomic_compare_exchange_n(&buffer->address, &undecided, target, false, __ATOMIC_ACQ_REL,
                                                __ATOMIC_ACQUIRE);
    }

    struct copy_step step = {
        .wait = {address(&in->produced), FIRST + number + 1},
        .checksum = check_bytes ? VERIFY_SOURCE : NO_CHECKSUM,
        .target = target,
        .source = slot,
        .nbytes = zero_copy ? 0 : record->nbytes,
        .write = {address(&in->consumed), FIRST + number + 1},
    };
    REQUIRE(host_enqueue(end->emptying, &step) == 0);
}

static void *receive_all(void *argument)
{
    struct end *end = argument;
    int direction = 1 - end->side;
    struct ring_direction *in = &end->control->directions[direction];
    static uint8_t targets[2][LARGEST];
    uint8_t *target = targets[end->side];

    for (uint32_t number = 0; number < entries && !IS_ABANDONED; number++) {
        uint32_t expected = size_of_entry(direction, number);

        if (!await(&in->posted, FIRST + number + 1))
            break;
        struct ring_record record = *record_of(in, FIRST + number);
        REQUIRE(record.nbytes == expected);
        empty(end, &record, address(target), number);
        __atomic_store_n(&in->retired.value, FIRST + number + 1, __ATOMIC_RELEASE);
        carrier_progress(end->carrier);
        if (!await(&in->consumed, FIRST + number + 1))
            break;
        for (uint32_t index = 0; index < expected; index++)
            REQUIRE(target[index] == byte_of_entry(direction, number, index));
        atomic_fetch_add(&compared, 1);
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

static void open_end(struct end *end)
{
    char error[RAIL_TEXT_BYTES];

    end->control = aligned_alloc(64, sizeof *end->control);
    memset(end->control, 0, sizeof *end->control);
    end->rings = aligned_alloc(64, 2 * RING_BYTES);
    for (int number = 0; number < 2; number++) {
        struct ring_direction *direction = &end->control->directions[number];

        direction->posted.value = direction->retired.value = FIRST;
        direction->produced.value = direction->consumed.value = FIRST;
    }
    struct engine_options options = {
        .control = address(end->control),
        .side = (uint64_t)end->side,
        .rings = address(end->rings),
        .ring_bytes = RING_BYTES,
        .checksum_bytes = check_bytes,
        .stall_seconds = STALL_SECONDS,
        .reads_back = is_verbs && seed % 2,
        .dmabuf = -1,
        .device_notifies = true,
    };
    end->carrier = carrier_new(proxy, &options, error);
    REQUIRE(end->carrier != NULL);
    for (int rail = 0; rail < rails; rail++)
        (is_verbs ? add_verbs : add_tcp)(end, rail);
    end->filling = host_stream_create(proxy, NULL, notified, end->carrier);
    end->emptying = host_stream_create(proxy, NULL, notified, end->carrier);
}

static void start_end(struct end *end)
{
    char error[RAIL_TEXT_BYTES];

    for (int rail = 0; is_verbs && rail < rails; rail++)
        connect_verbs(end, rail);
    REQUIRE(carrier_start(end->carrier, error));
}

/* What an end has counted, beside what it has sent. What a lost rail had in flight may have arrived, and is
 * then not counted; what it had completed may not have, and is then counted twice. */
static void check_counters(struct end *end)
{
    struct rail_counters counters[ENGINE_RAILS] = {0};
    uint64_t counted = 0, sent = 0;

    uint64_t retransmitted = carrier_rail_counters(end->carrier, counters, ENGINE_RAILS);
    for (int rail = 0; rail < rails; rail++)
        counted += counters[rail].bytes_sent;
    for (uint32_t number = 0; number < entries; number++)
        sent += size_of_entry(end->side, number) + check_bytes;
    REQUIRE(counted + (uint64_t)rails * RING_BYTES >= sent);
    REQUIRE(counted <= sent + retransmitted * (LARGEST + check_bytes));
}

static void close_end(struct end *end)
{
    if (!IS_ABANDONED) {
        REQUIRE(carrier_flush_credits(end->carrier, 5.0));
        REQUIRE(host_stream_synchronize(end->filling, PATIENCE_MS));
        REQUIRE(host_stream_synchronize(end->emptying, PATIENCE_MS));
        check_counters(end);
    }
    REQUIRE(host_stream_failure(end->emptying) == HOST_OK);
    host_stream_destroy(end->filling);
    host_stream_destroy(end->emptying);
    carrier_free(end->carrier);
    for (int rail = 0; rail < rails && !is_verbs; rail++)
        close(end->fds[rail]);
    free(end->control);
    free(end->rings);
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
static void *cut(void *argument)
{
    struct rail_counters counters[ENGINE_RAILS];
    char reason[RAIL_TEXT_BYTES];
    unsigned chance = seed;
    uint32_t all = 2 * entries;
    bool ended;

    (void)argument;
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
    return NULL;
}

int main(int count, char **arguments)
{
    pthread_t threads[5];
    char error[RAIL_TEXT_BYTES];

    REQUIRE(count == 5 || count == 6);
    is_verbs = strcmp(arguments[1], "verbs") == 0;
    seed = (unsigned)atoi(arguments[2]);
    entries = (uint32_t)atoi(arguments[3]);
    rails = atoi(arguments[4]);
    check_bytes = seed % 2 ? HOST_CHECKSUM_BYTES : 0;
    if (count == 6)
        abandon = (unsigned)atoi(arguments[5]);
    if (is_verbs)
        *(void **)&break_nic =
            dlsym(dlopen(getenv("HETERO_IBVERBS_LIBRARY"), RTLD_NOW), "loopback_break");
    for (int rail = 0; rail < rails && !is_verbs; rail++)
        connect_pair(rail);
    proxy = proxy_new(error);
    REQUIRE(proxy != NULL);
    for (int side = 0; side < 2; side++) {
        ends[side].side = side;
        open_end(&ends[side]);
    }
    for (int side = 0; side < 2; side++)
        start_end(&ends[side]);
    for (int side = 0; side < 2; side++) {
        pthread_create(&threads[2 * side], NULL, send_all, &ends[side]);
        pthread_create(&threads[2 * side + 1], NULL, receive_all, &ends[side]);
    }
    pthread_create(&threads[4], NULL, cut, NULL);
    for (int thread = 0; thread < 5; thread++)
        pthread_join(threads[thread], NULL);
    for (int side = 0; side < 2; side++)
        close_end(&ends[side]);
    proxy_free(proxy);
    printf("%u\n", atomic_load(&compared));
    return 0;
}
