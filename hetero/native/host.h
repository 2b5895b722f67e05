/* The host as a device: streams that are played by threads, and words that threads sleep on.
 *
 * The functions of a driver (`host_copy` and so on) take what CUDA's of the same purpose take, so that
 * whoever gives work to a GPU's streams gives it to these. */
#ifndef HETERO_HOST_H
#define HETERO_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The stream of a calling thread: what is given to it is done before the call returns. */
#define HOST_CALLER ((void *)1)

struct host_stream;

/* NULL where no thread can be started. */
struct host_stream *host_stream_create(void);
/* Have a function called after each word that the stream writes. Before it is given work. */
void host_stream_notify(struct host_stream *stream, void (*wrote)(void *), void *argument);
/* End the thread, in the middle of its work if need be. */
void host_stream_destroy(struct host_stream *stream);
/* Whether all work given so far has ended, waiting for it up to so many milliseconds. */
bool host_stream_synchronize(struct host_stream *stream, uint32_t milliseconds);

int host_copy(uint64_t target, uint64_t source, size_t nbytes, void *stream);
int host_wait_value(void *stream, uint64_t word, uint32_t value, unsigned flags);
int host_write_value(void *stream, uint64_t word, uint32_t value, unsigned flags);

/* A word that threads sleep on is followed by the count of those that do. */

/* Whether a word has come to a value or, counting round, past it, waiting up to so many milliseconds. */
bool host_wait_word(uint32_t *word, uint32_t value, uint32_t milliseconds);
/* Write a word, and wake whoever sleeps on it in any process. */
void host_write_word(uint32_t *word, uint32_t value);
/* The second half alone, after a store that is sequentially consistent. */
void host_wake_word(uint32_t *word);

#endif
