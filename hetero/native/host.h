/* The host as a device: streams whose work threads execute, and words that threads sleep on. */
#ifndef HETERO_HOST_H
#define HETERO_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The calling thread as a stream: its work is complete when the call returns. */
#define HOST_CALLING_THREAD ((void *)1)
/* How long a stream polls a word before its thread sleeps on it. */
#define HOST_SPIN_MICROSECONDS 40
/* Room for a checksum behind an entry's bytes. */
#define HOST_CHECKSUM_BYTES 8

/* For loops that spin: a monotonic clock in nanoseconds, a pause between two polls, and the number of polls
 * between two system calls. */
#define SPIN_POLLS 32
int64_t spin_clock(void);
void spin_pause(void);

/* A word of registered host memory, by the device's address, and a value. No word if the address is 0. */
struct word {
    uint64_t address;
    uint32_t value;
};

enum checksums { NO_CHECKSUM, APPEND_BEHIND_TARGET, VERIFY_SOURCE };

/* One entry's work for a stream, of any device: follow an event, wait for a word, copy, write a word. What
 * is 0 is left out. */
struct copy_step {
    uint64_t event;
    struct word wait;
    uint32_t checksum; /* enum checksums, for streams of the host alone */
    uint64_t target;
    uint64_t source;
    uint64_t nbytes;
    struct word write;
};

/* Whose streams they are. */
enum vendor { CUDA, HIP, HOST };

/* Addresses of the functions of a GPU's driver that C calls. The host has one: `copy` is host_enqueue. */
struct entry_points {
    uint64_t vendor;
    /* The first value that its streams cannot wait for. */
    uint64_t counter_limit;
    uint64_t copy;
    uint64_t wait_value;
    uint64_t write_value;
    uint64_t record_event;
    uint64_t wait_event;
    uint64_t synchronize_stream;
    uint64_t synchronize_event;
    uint64_t set_current;
};

/* A GPU whose memory a stream of the host copies from and to. */
struct host_gpu {
    struct entry_points driver;
    uint64_t context; /* argument of `set_current`: CUDA's context, HIP's device number */
    uint64_t stream;
};

struct host_stream;
struct proxy;

enum host_failure { HOST_OK, HOST_GPU_FAILED, HOST_WRONG_CHECKSUM };

/* The copiers of `proxy` execute its work. With a `gpu`, unless NULL, a thread of its own does: it blocks in the
 * driver. `on_write`, unless NULL, is called after each word that the stream writes. Returns NULL where no thread can
 * be started. */
struct host_stream *host_stream_create(struct proxy *proxy, const struct host_gpu *gpu,
                                       void (*on_write)(void *), void *argument);
/* An enum host_failure. After a failure the stream executes nothing more. */
uint32_t host_stream_failure(const struct host_stream *stream);
/* Steps that have not been executed are dropped. A process forked since has no thread that would, and keeps its
 * copy. */
void host_stream_destroy(struct host_stream *stream);
/* Wait for all steps so far, for so many milliseconds at most; whether they have been executed. */
bool host_stream_synchronize(struct host_stream *stream, uint32_t milliseconds);

/* Give a stream, or HOST_CALLING_THREAD, a step. 0, or ENOMEM; of the calling thread an enum host_failure. Only a
 * stream with a GPU may follow an event, which is that GPU's. */
int host_enqueue(void *stream, const struct copy_step *step);

/* A word that threads sleep on is followed by a count of those threads (struct ring_word). */

/* Poll a word for so long, then sleep on it; whether it has come to the value or, wrapping, past it in time. */
bool host_wait_word(uint32_t *word, uint32_t value, uint32_t spin_microseconds,
                    uint32_t milliseconds);
/* Called after a plain load, as Python's, it makes that a load-acquire. */
void host_acquire(void);
/* Write a word, and wake the threads that sleep on it in any process. */
void host_write_word(uint32_t *word, uint32_t value);
/* Wake them alone, after a sequentially consistent store. */
void host_wake_word(uint32_t *word);
/* Increment a doorbell (struct ring_doorbell) and wake the threads that sleep on it. If it is armed, disarm it
 * and write its eventfd too. */
void host_ring_doorbell(uint32_t *doorbell);
/* Arm a doorbell, if it still has the value: whether the next ring writes the eventfd. */
bool host_arm_doorbell(uint32_t *doorbell, uint32_t value);

#endif
