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
/* What a checksum takes behind the bytes. */
#define HOST_CHECKSUM_BYTES 8

/* A GPU whose memory a stream of the host copies from and to, and the functions of its driver. */
struct host_gpu {
    uint64_t vendor; /* enum vendor */
    uint64_t copy;
    uint64_t synchronize_stream;
    uint64_t synchronize_event;
    uint64_t set_current;
    uint64_t context; /* what `set_current` takes: CUDA's a context, HIP's the number of a device */
    uint64_t stream;
};

struct host_stream;

enum host_failure { HOST_FINE, HOST_GPU_FAILED, HOST_WRONG_CHECKSUM };

/* For memory of the host alone where `gpu` is NULL. NULL where no thread can be started. */
struct host_stream *host_stream_create(const struct host_gpu *gpu);
/* An enum host_failure, after which the stream has done nothing more. */
uint32_t host_stream_failure(const struct host_stream *stream);
/* Have a function called after each word that the stream writes. Before it is given work. */
void host_stream_notify(struct host_stream *stream, void (*wrote)(void *), void *argument);
/* End the thread, in the middle of its work if need be. */
void host_stream_destroy(struct host_stream *stream);
/* Whether all work given so far has ended, waiting for it up to so many milliseconds. */
bool host_stream_synchronize(struct host_stream *stream, uint32_t milliseconds);

int host_copy(uint64_t target, uint64_t source, size_t nbytes, void *stream);
/* Put a checksum behind bytes of the host's memory, or compare it with what is there. */
int host_append_checksum(uint64_t bytes, size_t nbytes, void *stream);
int host_verify_checksum(uint64_t bytes, size_t nbytes, void *stream);
/* Have a stream with a GPU go on behind an event of that GPU. */
int host_wait_event(void *stream, void *event, unsigned flags);
int host_wait_value(void *stream, uint64_t word, uint32_t value, unsigned flags);
int host_write_value(void *stream, uint64_t word, uint32_t value, unsigned flags);

/* A word that threads sleep on is followed by the count of those that do. */

/* Whether a word has come to a value or, counting round, past it, waiting up to so many milliseconds. */
bool host_wait_word(uint32_t *word, uint32_t value, uint32_t milliseconds);
/* What was stored before the word can be seen by whoever has read it. */
uint32_t host_read_word(const uint32_t *word);
/* Write a word, and wake whoever sleeps on it in any process. */
void host_write_word(uint32_t *word, uint32_t value);
/* The second half alone, after a store that is sequentially consistent. */
void host_wake_word(uint32_t *word);
/* Count a doorbell up and wake whoever sleeps on it, of whom nobody keeps a count. */
void host_ring(uint32_t *doorbell);
/* Sleep while a doorbell is what it was, for so many milliseconds at most. */
void host_sleep(uint32_t *doorbell, uint32_t while_it_is, uint32_t milliseconds);

#endif
