/* The host as a device: streams whose work threads execute, and words that threads sleep on.
 *
 * Functions that enqueue work (`host_copy` and so on) have the signatures of CUDA's, so that the same code
 * enqueues work on a GPU's streams and on these. */
#ifndef HETERO_HOST_H
#define HETERO_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The calling thread as a stream: its work is complete when the call returns. */
#define HOST_CALLING_THREAD ((void *)1)
/* Room for a checksum behind an entry's bytes. */
#define HOST_CHECKSUM_BYTES 8

/* A GPU whose memory a stream of the host copies from and to, and the functions of its driver. */
struct host_gpu {
    uint64_t vendor; /* enum vendor */
    uint64_t copy;
    uint64_t synchronize_stream;
    uint64_t synchronize_event;
    uint64_t set_current;
    uint64_t context; /* argument of `set_current`: CUDA's context, HIP's device number */
    uint64_t stream;
};

struct host_stream;

enum host_failure { HOST_OK, HOST_GPU_FAILED, HOST_WRONG_CHECKSUM };

/* `gpu` is NULL for memory of the host alone. `on_write`, unless NULL, is called after each word that the
 * stream writes. Returns NULL where no thread can be started. */
struct host_stream *host_stream_create(const struct host_gpu *gpu, void (*on_write)(void *),
                                       void *argument);
/* An enum host_failure. After a failure the stream executes nothing more. */
uint32_t host_stream_failure(const struct host_stream *stream);
/* End the thread; requests that it has not executed are dropped. A process forked since has no such thread,
 * and keeps its copy. */
void host_stream_destroy(struct host_stream *stream);
/* Wait for all requests so far, for so many milliseconds at most; whether they have been executed. */
bool host_stream_synchronize(struct host_stream *stream, uint32_t milliseconds);

int host_copy(uint64_t target, uint64_t source, size_t nbytes, void *stream);
/* Write a checksum behind bytes of the host's memory; compare it with the one there. */
int host_append_checksum(uint64_t bytes, size_t nbytes, void *stream);
int host_verify_checksum(uint64_t bytes, size_t nbytes, void *stream);
/* Make a stream with a GPU wait for an event of that GPU. */
int host_wait_event(void *stream, void *event, unsigned flags);
int host_wait_value(void *stream, uint64_t word, uint32_t value, unsigned flags);
int host_write_value(void *stream, uint64_t word, uint32_t value, unsigned flags);

/* A word that threads sleep on is followed by a count of those threads (struct ring_word). */

/* Whether a word has come to a value or, wrapping, past it, within so many milliseconds. */
bool host_wait_word(uint32_t *word, uint32_t value, uint32_t milliseconds);
/* Called after a plain load, as Python's, it makes that a load-acquire. */
void host_acquire(void);
/* Write a word, and wake the threads that sleep on it in any process. */
void host_write_word(uint32_t *word, uint32_t value);
/* Wake them alone, after a sequentially consistent store. */
void host_wake_word(uint32_t *word);
/* Increment a doorbell and wake the threads that sleep on it, which are not counted. */
void host_ring_doorbell(uint32_t *doorbell);
/* Sleep while a doorbell has this value, for so many milliseconds at most. */
void host_wait_doorbell(uint32_t *doorbell, uint32_t expected, uint32_t milliseconds);

#endif
