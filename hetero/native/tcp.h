/* A rail over TCP: one connection, which the senders and receivers of the process serve.
 *
 * A completion means that the kernel has taken the bytes, never that the peer has them. */
#ifndef HETERO_TCP_H
#define HETERO_TCP_H

#include "proxy.h"

/* `fd` is connected and blocking; the caller closes it after the rail. NULL, with the reason in `error`, on
 * failure. */
struct rail *tcp_open(struct engine *engine, struct proxy *proxy, int fd, char *error);

#endif
