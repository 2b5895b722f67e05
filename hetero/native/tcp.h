/* A rail over TCP: one connection, with a thread that sends and one that receives.
 *
 * A completion means that the kernel has taken the bytes, never that the peer has them. */
#ifndef HETERO_TCP_H
#define HETERO_TCP_H

#include "engine.h"

/* `fd` is connected and blocking; the caller closes it after the rail. NULL, with the reason in `error`, on
 * failure. */
struct rail *tcp_open(struct engine *engine, int fd, char *error);

#endif
