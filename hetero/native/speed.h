/* Chooses the rail for each message: the one expected to complete it first, by its bandwidth and its
 * bytes in flight. A slow rail so gets less, and delays no other. Call with the engine's lock. */
#ifndef HETERO_SPEED_H
#define HETERO_SPEED_H

#include "rail.h"

/* NULL while the chosen rail has no room: do not fall back to a slower one. */
struct rail *speed_choose(struct rail *const *rails, int count, enum message message,
                          uint64_t nbytes);
/* The same of a small message (rail_operations.small_bytes): stay on rail `*last`, which this sets, unless
 * it has no room or much under way, is in doubt, or is known to be much slower than another. */
struct rail *speed_choose_small(struct rail *const *rails, int count, enum message message,
                                uint64_t nbytes, int *last);
/* Add a bandwidth sample to the rail's moving average. */
void speed_add_sample(struct rail *rail, uint64_t nbytes, double seconds);
/* Account for a completed message, on a rail without `bytes_in_flight` of its own. */
void speed_completed(struct rail *rail, uint64_t nbytes, double posted, double now);
/* Call at intervals: raises the bandwidth assumed of idle rails, so that a slow one is tried again. */
void speed_raise_idle(struct rail *const *rails, int count);

#endif
