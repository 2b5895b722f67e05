/* An engine whose device writes words without telling anybody, at the worst moment: when a pass has already looked at
 * them. Built with sanitizers by test_sanitized.py. */
#include "engine.h"
#include "require.h"

#include <sys/eventfd.h>

static struct ring_control control;
static struct engine engine;
static int records, data, credits;
/* Written by the device at the end of the next pass. */
static struct ring_word *late_word;

static int post_record(struct rail *rail, uint32_t number, uint64_t offset)
{
    (void)rail, (void)number, (void)offset;
    records++;
    return 0;
}

static int post_data(struct rail *rail, uint32_t number, uint64_t slot, uint64_t nbytes)
{
    (void)rail, (void)number, (void)slot, (void)nbytes;
    data++;
    return 0;
}

static int post_credit(struct rail *rail, uint32_t released)
{
    (void)rail, (void)released;
    credits++;
    return 0;
}

static bool poll_rail(struct rail *rail, struct engine *polled)
{
    (void)rail, (void)polled;
    return false;
}

static bool is_late(const struct rail *rail, double before, char *reason)
{
    (void)rail, (void)before, (void)reason;
    return false;
}

/* A pass calls it last. */
static bool flush(struct rail *rail)
{
    (void)rail;
    if (late_word != NULL)
        __atomic_store_n(&late_word->value, 1, __ATOMIC_SEQ_CST);
    late_word = NULL;
    return false;
}

/* A pass of the thread that has enqueued something; whether it wakes the proxy thread, which then makes another. */
static bool wakes_proxy(void)
{
    eventfd_t value;

    engine_drive(&engine);
    return eventfd_read(engine.wake_fd, &value) == 0;
}

int main(void)
{
    const struct rail_operations operations = {
        .limits = {64, 64, 64},
        .post_record = post_record,
        .post_data = post_data,
        .post_credit = post_credit,
        .poll = poll_rail,
        .is_late = is_late,
        .flush = flush,
    };
    struct rail rail = {.operations = &operations, .live = true, .event_fd = -1};
    const struct engine_options options = {
        .control = (uintptr_t)&control, .ring_bytes = 1 << 20, .stall_seconds = 60};

    REQUIRE(engine_init(&engine, &options));
    engine.rails[engine.rail_count++] = &rail;
    REQUIRE(!wakes_proxy());

    __atomic_store_n(&engine.out->posted.value, 1, __ATOMIC_SEQ_CST);
    late_word = &engine.out->produced;
    REQUIRE(wakes_proxy());
    REQUIRE(records == 1 && data == 0);
    REQUIRE(!wakes_proxy());
    REQUIRE(data == 1);

    engine_lock(&engine);
    engine_record_arrived(&engine, 0);
    engine_data_arrived(&engine, &rail, 0);
    engine_unlock(&engine);
    __atomic_store_n(&engine.in->retired.value, 1, __ATOMIC_SEQ_CST);
    late_word = &engine.in->consumed;
    REQUIRE(wakes_proxy());
    REQUIRE(credits == 0);
    REQUIRE(!wakes_proxy());
    REQUIRE(credits == 1);
    engine_destroy(&engine);
    return 0;
}
