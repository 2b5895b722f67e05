/* Finds rails on which something in flight completes too late, and loses them. */
#ifndef HETERO_WATCHDOG_H
#define HETERO_WATCHDOG_H

#include "engine.h"

/* Call often: it checks CHECKS_PER_STALL times in a stall timeout. */
void watchdog_check_rails(struct engine *engine);
/* Whether a rail awaits acknowledgements whose absence raises no event, so that somebody has to check. */
bool watchdog_awaits_ack(const struct engine *engine);

#endif
