#include "watch.h"

#include "speed.h"

#include <stddef.h>

#define CHECKS_PER_STALL 16

static bool answers_elsewhere(const struct engine *engine, const struct rail *late, double since)
{
    for (int index = 0; index < engine->rail_count; index++) {
        const struct rail *rail = engine->rails[index];

        if (rail != late && rail->live && rail->operations->last_heard(rail) > since)
            return true;
    }
    return false;
}

/* Have idle rails show whether the peer answers: what it has been credited with changes nothing there. */
static void ask_idle_rails(struct engine *engine)
{
    for (int index = 0; index < engine->rail_count; index++) {
        struct rail *rail = engine->rails[index];

        if (rail->live && rail->operations->last_heard != NULL &&
            rail->operations->bytes_under_way(rail) == 0)
            engine_took(engine, rail,
                        rail->operations->post_credit(rail, engine->incoming.credited));
    }
}

/* Where the peer, or the only way to it, rests for a while, no rail answers and none is at fault. So a
 * rail is lost that does not answer what it was sent after another one has answered. */
static bool is_lost(const struct engine *engine, struct rail *rail, double time, char *reason)
{
    const struct rail_operations *operations = rail->operations;
    double stall = engine->options.stall_seconds, tick = stall / CHECKS_PER_STALL;

    if (operations->last_heard == NULL)
        return operations->is_late(rail, time - stall, reason);
    if (rail->answered_elsewhere == 0 && answers_elsewhere(engine, rail, time - 4 * tick))
        rail->answered_elsewhere = time;
    if (rail->answered_elsewhere == 0 || !operations->is_late(rail, time - stall, reason))
        return false;
    double asked = operations->last_asked(rail);
    return asked > rail->answered_elsewhere && asked < time - tick;
}

void watch_rails(struct engine *engine)
{
    char reason[RAIL_TEXT_BYTES];
    double time = engine_now(), stall = engine->options.stall_seconds;
    bool is_in_doubt = false;

    if (time - engine->last_watched < stall / CHECKS_PER_STALL)
        return;
    engine->last_watched = time;
    for (int index = 0; index < engine->rail_count; index++) {
        struct rail *rail = engine->rails[index];

        /* A thread that was kept from running has completions that it has not looked at. */
        if (rail->live && rail->operations->is_late(rail, time - stall / 2, reason))
            rail->operations->poll(rail, engine);
        if (!rail->live || !rail->operations->is_late(rail, time - stall / 2, reason)) {
            rail->answered_elsewhere = 0;
            continue;
        }
        is_in_doubt |= rail->operations->last_heard != NULL;
        if (is_lost(engine, rail, time, reason))
            engine_lose(engine, rail, reason);
    }
    if (is_in_doubt)
        ask_idle_rails(engine);
    speed_trust_again(engine->rails, engine->rail_count);
}

bool watch_awaits_answer(const struct engine *engine)
{
    for (int index = 0; index < engine->rail_count; index++) {
        const struct rail *rail = engine->rails[index];

        if (rail->live && rail->operations->last_heard != NULL &&
            rail->operations->bytes_under_way(rail) > 0)
            return true;
    }
    return false;
}
