/* Which rail a message goes over: the one that would bring it first. So a slow rail carries less, and
 * nothing that another would have brought before it. Called with the lock of the carrier. */
#ifndef HETERO_SPEED_H
#define HETERO_SPEED_H

#include "rail.h"

/* NULL while there is no room for the message on the rail that would bring it first. */
struct rail *speed_choose(struct rail *const *rails, int count, enum message message,
                          uint64_t nbytes);
/* So many bytes took so many seconds. */
void speed_note(struct rail *rail, uint64_t nbytes, double seconds);
/* A message has completed, for a rail that does not itself know what it has under way. */
void speed_completed(struct rail *rail, uint64_t nbytes, double posted, double now);
/* Called now and then: one that was slow, and so was given nothing, may be fast again. */
void speed_trust_again(struct rail *const *rails, int count);

#endif
