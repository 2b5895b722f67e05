/* Which rails are lost because nothing comes of what is under way on them. */
#ifndef HETERO_WATCH_H
#define HETERO_WATCH_H

#include "engine.h"

/* Lose the rails on which a request has been under way for too long. Looks now and then only. */
void watch_rails(struct engine *engine);
/* Whether a peer has yet to answer that says nothing by itself, so that somebody has to look. */
bool watch_awaits_answer(const struct engine *engine);

#endif
