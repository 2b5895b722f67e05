#include "speed.h"

#include <stddef.h>

/* What a rail is taken to carry before it has shown it. */
#define ASSUMED_BYTES_PER_SECOND 1e9
/* What a new figure counts for against the older ones, and how fast an idle rail is trusted again. */
#define NEWEST_WEIGHT 0.3
#define IDLE_GROWTH 1.1

static double fastest(struct rail *const *rails, int count)
{
    double most = 0;

    for (int index = 0; index < count; index++)
        if (rails[index]->live && rails[index]->bytes_per_second > most)
            most = rails[index]->bytes_per_second;
    return most > 0 ? most : ASSUMED_BYTES_PER_SECOND;
}

static uint64_t under_way(const struct rail *rail)
{
    return rail->operations->bytes_under_way != NULL ? rail->operations->bytes_under_way(rail)
                                                     : rail->bytes_under_way;
}

/* When a rail would have brought so many bytes, from what it has to do and how fast it was. One that has
 * not shown it comes first while it is idle, and then counts as fast as the fastest: it would else never
 * be tried beside a fast one. */
static double time_for(const struct rail *rail, uint64_t nbytes, double most)
{
    uint64_t before = under_way(rail);

    if (rail->bytes_per_second == 0 && before == 0)
        return 0;
    return (double)(before + nbytes) /
           (rail->bytes_per_second > 0 ? rail->bytes_per_second : most);
}

struct rail *speed_choose(struct rail *const *rails, int count, enum message message,
                          uint64_t nbytes)
{
    struct rail *best = NULL;
    double least = 0, most = fastest(rails, count);

    for (int index = 0; index < count; index++)
        if (rails[index]->live && rails[index]->answered_elsewhere == 0) {
            double time = time_for(rails[index], nbytes, most);

            if (best == NULL || time < least) {
                best = rails[index];
                least = time;
            }
        }
    return best != NULL && best->operations->has_room(best, message) ? best : NULL;
}

void speed_note(struct rail *rail, uint64_t nbytes, double seconds)
{
    double figure = (double)nbytes / (seconds + 1e-9);

    rail->bytes_per_second = rail->bytes_per_second == 0
                                 ? figure
                                 : (1 - NEWEST_WEIGHT) * rail->bytes_per_second +
                                       NEWEST_WEIGHT * figure;
}

void speed_completed(struct rail *rail, uint64_t nbytes, double posted, double now)
{
    /* A rail serves its requests one after the other: the time of one begins with the end of another. */
    double begin = posted > rail->last_completion ? posted : rail->last_completion;

    if (rail->operations->bytes_under_way != NULL)
        return;
    speed_note(rail, nbytes, now - begin);
    rail->last_completion = now;
    rail->bytes_under_way -= nbytes < rail->bytes_under_way ? nbytes : rail->bytes_under_way;
}

void speed_trust_again(struct rail *const *rails, int count)
{
    double most = fastest(rails, count);

    for (int index = 0; index < count; index++)
        if (under_way(rails[index]) == 0 && rails[index]->bytes_per_second * IDLE_GROWTH < most)
            rails[index]->bytes_per_second *= IDLE_GROWTH;
}
