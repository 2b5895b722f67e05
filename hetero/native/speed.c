#include "speed.h"

#include <stddef.h>

/* The least that is assumed of a rail without samples: a slow one soon has some. */
#define ASSUMED_BYTES_PER_SECOND 1e9
/* The moving average forgets in about so long: a sample weighs as long as it took, or a chunk that took a
 * second would count as little as one that took a millisecond. */
#define AVERAGED_SECONDS 0.3
/* Growth of an idle rail at each speed_raise_idle, as a part of the fastest one's bandwidth. So a rail of a
 * hundredth of the bandwidth, which holds a message up for a second when it is tried, is tried every half
 * minute, and not every second. */
#define IDLE_GROWTH (1.0 / 500)

/* Leave a rail for small messages once it has less than this part of the fastest one's bandwidth. */
#define SMALL_RAIL_SHARE 0.5

/* Of the live rails, those without samples included. */
static double fastest(struct rail *const *rails, int count)
{
    double max_speed = 0, least = 0;

    for (int index = 0; index < count; index++)
        if (rails[index]->live) {
            if (rails[index]->bytes_per_second > max_speed)
                max_speed = rails[index]->bytes_per_second;
            if (rails[index]->bytes_per_second == 0)
                least = ASSUMED_BYTES_PER_SECOND;
        }
    return max_speed > least ? max_speed : least;
}

static uint64_t bytes_in_flight_on(const struct rail *rail)
{
    return rail->operations->bytes_in_flight != NULL ? rail->operations->bytes_in_flight(rail)
                                                     : rail->bytes_in_flight;
}

/* Seconds until a rail would have completed `nbytes` more. A rail without samples comes first while idle,
 * or it would never be measured beside a fast one; once busy it counts as fast as the fastest. */
static double completion_time(const struct rail *rail, uint64_t nbytes, double max_speed)
{
    uint64_t before = bytes_in_flight_on(rail);

    if (rail->bytes_per_second == 0 && before == 0)
        return 0;
    return (double)(before + nbytes) /
           (rail->bytes_per_second > 0 ? rail->bytes_per_second : max_speed);
}

struct rail *speed_choose(struct rail *const *rails, int count, enum message message,
                          uint64_t nbytes)
{
    struct rail *best = NULL;
    double min_time = 0, max_speed = fastest(rails, count);

    for (int index = 0; index < count; index++)
        if (rails[index]->live && rails[index]->suspected_since == 0) {
            double time = completion_time(rails[index], nbytes, max_speed);

            if (best == NULL || time < min_time) {
                best = rails[index];
                min_time = time;
            }
        }
    if (best == NULL || best->in_flight[message] >= best->operations->limits[message])
        return NULL;
    return best;
}

static bool suits_small(const struct rail *rail, enum message message, uint64_t nbytes,
                        double max_speed)
{
    return rail->live && rail->suspected_since == 0 &&
           rail->in_flight[message] < rail->operations->limits[message] &&
           (rail->bytes_per_second == 0 ||
            rail->bytes_per_second >= SMALL_RAIL_SHARE * max_speed) &&
           bytes_in_flight_on(rail) + nbytes <= rail->operations->small_bytes;
}

struct rail *speed_choose_small(struct rail *const *rails, int count, enum message message,
                                uint64_t nbytes, int *last)
{
    struct rail *chosen;

    if (suits_small(rails[*last], message, nbytes, fastest(rails, count)))
        return rails[*last];
    chosen = speed_choose(rails, count, message, nbytes);
    if (chosen != NULL)
        *last = chosen->index;
    return chosen;
}

void speed_add_sample(struct rail *rail, uint64_t nbytes, double seconds)
{
    double sample = (double)nbytes / (seconds + 1e-9);
    double weight = rail->bytes_per_second == 0 ? 1 : seconds / (seconds + AVERAGED_SECONDS);

    rail->bytes_per_second += weight * (sample - rail->bytes_per_second);
}

void speed_completed(struct rail *rail, uint64_t nbytes, double posted, double now)
{
    /* A rail serves requests in order: a message's service time begins when the one before completed. */
    double begin = posted > rail->last_completion ? posted : rail->last_completion;

    if (rail->operations->bytes_in_flight != NULL)
        return;
    speed_add_sample(rail, nbytes, now - begin);
    rail->last_completion = now;
    rail->bytes_in_flight -= nbytes < rail->bytes_in_flight ? nbytes : rail->bytes_in_flight;
}

void speed_raise_idle(struct rail *const *rails, int count)
{
    double max_speed = fastest(rails, count);

    for (int index = 0; index < count; index++) {
        double raised = rails[index]->bytes_per_second + IDLE_GROWTH * max_speed;

        if (bytes_in_flight_on(rails[index]) == 0 && rails[index]->bytes_per_second > 0 &&
            raised < max_speed)
            rails[index]->bytes_per_second = raised;
    }
}
