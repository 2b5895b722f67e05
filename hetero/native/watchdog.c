#include "engine.h"

#include "speed.h"

#include <stddef.h>

#define CHECKS_PER_STALL 16
/* Without an acknowledgement for so many stall times a rail is lost whatever other rails do. */
#define STALLS_ALONE 6

static bool another_rail_acked(const struct engine *engine, const struct rail *late, double since)
{
    for (int index = 0; index < engine->rail_count; index++) {
        const struct rail *rail = engine->rails[index];

        if (rail != late && rail->live && rail->operations->last_ack(rail) > since)
            return true;
    }
    return false;
}

/* Send the last credit again, which has no effect, over idle rails: whether they are acknowledged tells a
 * lost rail from a peer that is paused. */
static void probe_idle_rails(struct engine *engine)
{
    for (int index = 0; index < engine->rail_count; index++) {
        struct rail *rail = engine->rails[index];

        if (rail->live && rail->operations->last_ack != NULL &&
            rail->operations->bytes_in_flight(rail) == 0)
            engine_post_credit(engine, rail, engine->incoming.credited);
    }
}

/* Where acknowledgements are the kernel's (`last_ack`), a paused peer stalls all rails and none is lost:
 * its kernel acknowledges what probes its window, however rare that becomes. So suspect a late rail once
 * another is acknowledged, and lose it if it does not acknowledge what was sent after that. */
static bool is_lost(const struct engine *engine, struct rail *rail, double time, char *reason)
{
    const struct rail_operations *operations = rail->operations;
    double stall = engine->options.stall_seconds, tick = stall / CHECKS_PER_STALL;

    if (operations->last_ack == NULL)
        return operations->is_late(rail, time - stall, reason);
    if (rail->suspected_since == 0 && another_rail_acked(engine, rail, time - 4 * tick))
        rail->suspected_since = time;
    double last_send = operations->last_send(rail);
    if (last_send > time - tick)
        return false;
    if (last_send > operations->last_ack(rail) &&
        operations->is_late(rail, time - STALLS_ALONE * stall, reason))
        return true;
    return rail->suspected_since != 0 && last_send > rail->suspected_since &&
           operations->is_late(rail, time - stall, reason);
}

void watchdog_check_rails(struct engine *engine)
{
    char reason[RAIL_TEXT_BYTES];
    double time = engine_now(), stall = engine->options.stall_seconds;
    bool is_suspected = false;

    if (time - engine->last_checked < stall / CHECKS_PER_STALL)
        return;
    engine->last_checked = time;
    for (int index = 0; index < engine->rail_count; index++) {
        struct rail *rail = engine->rails[index];

        /* If this thread was descheduled there may be completions that it has not polled. */
        if (rail->live && rail->operations->is_late(rail, time - stall / 2, reason))
            rail->operations->poll(rail, engine);
        if (!rail->live || !rail->operations->is_late(rail, time - stall / 2, reason)) {
            rail->suspected_since = 0;
            continue;
        }
        is_suspected |= rail->operations->last_ack != NULL;
        if (is_lost(engine, rail, time, reason))
            engine_lose_rail(engine, rail, reason);
    }
    if (is_suspected)
        probe_idle_rails(engine);
    speed_raise_idle(engine->rails, engine->rail_count);
}
