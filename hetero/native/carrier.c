#include "carrier.h"

#include "tcp.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

/* Between two polls of wait_until. */
#define POLL_NANOSECONDS 200000

static void sleep_for(long nanoseconds)
{
    struct timespec time = {0, nanoseconds};

    nanosleep(&time, NULL);
}

struct carrier *carrier_new(struct proxy *proxy, const struct engine_options *options,
                            char *error)
{
    struct carrier *carrier = calloc(1, sizeof *carrier);

    if (carrier == NULL) {
        set_reason(error, "a link's carrier cannot be made (%s)", strerror(ENOMEM));
        return NULL;
    }
    carrier->proxy = proxy;
    if (!engine_init(&carrier->engine, options)) {
        set_reason(error, "a link's carrier cannot be made (%s)", strerror(errno));
        carrier_free(carrier);
        return NULL;
    }
    return carrier;
}

static bool has_room(const struct carrier *carrier, char *error)
{
    return carrier->engine.rail_count < ENGINE_RAILS ||
           set_reason(error, "a link has %d rails at most", ENGINE_RAILS);
}

/* False for no rail. */
static bool add_rail(struct carrier *carrier, struct rail *rail)
{
    if (rail == NULL)
        return false;
    rail->index = (uint8_t)carrier->engine.rail_count;
    carrier->engine.rails[carrier->engine.rail_count++] = rail;
    return true;
}

bool carrier_add_verbs(struct carrier *carrier, const char *device, uint8_t port,
                       struct verbs_end *made, bool *by_dmabuf, char *error)
{
    return has_room(carrier, error) &&
           add_rail(carrier, verbs_open(&carrier->engine.options, device, port, made, by_dmabuf, error));
}

bool carrier_connect_verbs(struct carrier *carrier, int index, const struct verbs_end *peer,
                           const struct verbs_route *route, const struct verbs_route *own,
                           char *error)
{
    return verbs_connect(carrier->engine.rails[index], peer, route, own, error);
}

bool carrier_add_tcp(struct carrier *carrier, int fd, char *error)
{
    return has_room(carrier, error) && add_rail(carrier, tcp_open(&carrier->engine, carrier->proxy, fd, error));
}

bool carrier_start(struct carrier *carrier, char *error)
{
    int code = 0;

    for (int index = 0; index < carrier->engine.rail_count && code == 0; index++) {
        struct rail *rail = carrier->engine.rails[index];

        code = rail->operations->start != NULL ? rail->operations->start(rail) : 0;
    }
    if (code == 0)
        code = proxy_add_engine(carrier->proxy, &carrier->engine);
    carrier->is_served = code == 0;
    return code == 0 || set_reason(error, "a link cannot be served (%s)", strerror(code));
}

bool carrier_reopen_tcp(struct carrier *carrier, int index, int fd, char *error)
{
    struct engine *engine = &carrier->engine;
    struct rail *opened = tcp_open(engine, carrier->proxy, fd, error), *lost = engine->rails[index];
    int code;

    if (opened == NULL)
        return false;
    engine_lock(engine);
    opened->index = lost->index;
    opened->bytes_sent = lost->bytes_sent;
    engine->rails[index] = opened;
    engine_unlock(engine);
    /* No thread has kept a pointer to it: its own have ended, and others look rails up with the lock. */
    lost->operations->close(lost);
    code = opened->operations->start(opened);
    if (code != 0) {
        carrier_stop_rail(carrier, index);
        return set_reason(error, "a rail cannot be started (%s)", strerror(code));
    }
    /* The proxy thread checks rails only while one is live. */
    eventfd_write(engine->wake_fd, 1);
    return true;
}

void carrier_drive_flows(struct carrier *carrier, struct flow *out, struct flow *in)
{
    engine_drive_flows(&carrier->engine, out, in);
}

void carrier_progress(struct carrier *carrier)
{
    engine_drive(&carrier->engine);
}

int carrier_loss_fd(const struct carrier *carrier)
{
    return carrier->engine.loss_fd;
}

int carrier_next_loss(struct carrier *carrier, char *reason, bool *may_have_ended)
{
    struct engine *engine = &carrier->engine;
    eventfd_t value;
    int found = -1;

    engine_lock(engine);
    eventfd_read(engine->loss_fd, &value);
    for (int index = 0; index < engine->rail_count && found < 0; index++)
        if (engine->rails[index]->loss[0] != '\0') {
            memcpy(reason, engine->rails[index]->loss, RAIL_TEXT_BYTES);
            *may_have_ended = engine->rails[index]->may_have_ended;
            engine->rails[index]->loss[0] = '\0';
            found = index;
        }
    engine_unlock(engine);
    return found;
}

void carrier_stop_rail(struct carrier *carrier, int index)
{
    struct rail *rail = carrier->engine.rails[index];

    engine_lock(&carrier->engine);
    engine_lose_rail(&carrier->engine, rail, "");
    rail->loss[0] = '\0';
    engine_unlock(&carrier->engine);
    rail->operations->join(rail);
    /* Discard what was being received while it was stopped. */
    engine_lock(&carrier->engine);
    incoming_discard(&carrier->engine.incoming, rail->index);
    engine_unlock(&carrier->engine);
}

int carrier_retransmit(struct carrier *carrier, int index)
{
    struct engine *engine = &carrier->engine;
    struct rail *rail = engine->rails[index];
    int count;

    engine_lock(engine);
    rail->operations->poll(rail, engine);
    count = outgoing_retransmit(&engine->outgoing, rail->index, !rail->confirms_delivery,
                                !rail->confirms_delivery || rail->peer_reads_back);
    engine->incoming.credit_lost = true;
    engine->retransmitted += (uint64_t)count;
    engine_unlock(engine);
    carrier_progress(carrier);
    return count;
}

uint64_t carrier_rail_counters(struct carrier *carrier, struct rail_counters *counters, int count)
{
    struct engine *engine = &carrier->engine;
    uint64_t retransmitted;

    engine_lock(engine);
    for (int index = 0; index < engine->rail_count && index < count; index++)
        counters[index] = (struct rail_counters){
            .bytes_sent = engine->rails[index]->bytes_sent,
            .bytes_per_second = engine->rails[index]->bytes_per_second,
        };
    retransmitted = engine->retransmitted;
    engine_unlock(engine);
    return retransmitted;
}

static bool has_flushed_credits(struct engine *engine)
{
    engine_progress(engine);
    return engine_has_sent_credits(engine);
}

/* Poll a condition under the lock up to `seconds`; returns whether it was met. */
static bool wait_until(struct carrier *carrier, bool (*condition)(struct engine *),
                       double seconds)
{
    double deadline = engine_now() + seconds;

    for (;;) {
        engine_lock(&carrier->engine);
        bool is_met = condition(&carrier->engine);
        engine_unlock(&carrier->engine);
        if (is_met || engine_now() > deadline)
            return is_met;
        sleep_for(POLL_NANOSECONDS);
    }
}

bool carrier_drain(struct carrier *carrier, double seconds)
{
    return wait_until(carrier, engine_is_drained, seconds);
}

bool carrier_flush_credits(struct carrier *carrier, double seconds)
{
    return wait_until(carrier, has_flushed_credits, seconds);
}

void carrier_free(struct carrier *carrier)
{
    /* First: a thread that drives them may go on to use the rails, when it serves none any more. */
    engine_leave_flows(&carrier->engine);
    if (carrier->is_served)
        proxy_remove_engine(carrier->proxy, &carrier->engine);
    /* Stop all rails before freeing any: who serves one uses all of them. */
    for (int index = 0; index < carrier->engine.rail_count; index++)
        carrier_stop_rail(carrier, index);
    for (int index = 0; index < carrier->engine.rail_count; index++)
        carrier->engine.rails[index]->operations->close(carrier->engine.rails[index]);
    engine_destroy(&carrier->engine);
    free(carrier);
}
