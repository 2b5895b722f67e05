#include "streams.h"

#include <stddef.h>

/* The drivers' own values. CU_STREAM_WAIT_VALUE_GEQ and hipStreamWaitValueGte are 0, as are the default
 * flags of the other calls. */
#define AT_LEAST 0
#define HIP_ALL_BITS 0xFFFFFFFFu
#define HIP_MEMCPY_DEFAULT 4

typedef int (*cuda_copy)(uint64_t, uint64_t, size_t, void *);
typedef int (*cuda_value)(void *, uint64_t, uint32_t, unsigned);
typedef int (*hip_copy)(void *, const void *, size_t, int, void *);
typedef int (*hip_wait)(void *, void *, uint32_t, unsigned, uint32_t);
typedef int (*hip_write)(void *, void *, uint32_t, unsigned);
typedef int (*host_step)(void *, const struct copy_step *);
typedef int (*event_record)(void *, void *);
typedef int (*event_wait)(void *, void *, unsigned);

#define FUNCTION(type, address) ((type)(uintptr_t)(address))
#define POINTER(address) ((void *)(uintptr_t)(address))

static failure outcome(enum step step, int code)
{
    return code ? (uint64_t)step << 32 | (uint32_t)code : 0;
}

static failure enqueue_on_host(const struct entry_points *driver, uint64_t stream,
                               const struct copy_step *step)
{
    return outcome(STEP_COPY, FUNCTION(host_step, driver->copy)(POINTER(stream), step));
}

failure native_wait_value(const struct entry_points *driver, uint64_t stream, uint64_t address,
                          uint32_t value)
{
    struct copy_step step = {.wait = {address, value}};
    int code;

    if (driver->vendor == HOST)
        return enqueue_on_host(driver, stream, &step);
    if (value >= driver->counter_limit)
        return outcome(STEP_COUNTER_LIMIT, (int)value);
    if (driver->vendor == HIP)
        code = FUNCTION(hip_wait, driver->wait_value)(POINTER(stream), POINTER(address), value,
                                                      AT_LEAST, HIP_ALL_BITS);
    else
        code = FUNCTION(cuda_value, driver->wait_value)(POINTER(stream), address, value, AT_LEAST);
    return outcome(STEP_WAIT_VALUE, code);
}

failure native_write_value(const struct entry_points *driver, uint64_t stream, uint64_t address,
                           uint32_t value)
{
    int code;

    if (driver->vendor == HIP)
        code = FUNCTION(hip_write, driver->write_value)(POINTER(stream), POINTER(address), value, 0);
    else
        code = FUNCTION(cuda_value, driver->write_value)(POINTER(stream), address, value, 0);
    return outcome(STEP_WRITE_VALUE, code);
}

int driver_copy(const struct entry_points *driver, uint64_t stream, const struct copy_step *step)
{
    if (driver->vendor == HIP)
        return FUNCTION(hip_copy, driver->copy)(POINTER(step->target), POINTER(step->source),
                                                step->nbytes, HIP_MEMCPY_DEFAULT, POINTER(stream));
    return FUNCTION(cuda_copy, driver->copy)(step->target, step->source, step->nbytes,
                                             POINTER(stream));
}

static failure wait_event(const struct streams *streams, uint64_t stream, uint64_t event)
{
    event_wait wait = FUNCTION(event_wait, streams->driver.wait_event);

    return outcome(STEP_WAIT_EVENT, wait(POINTER(stream), POINTER(event), 0));
}

failure streams_wait_stream(const struct streams *streams, uint64_t stream, uint64_t other)
{
    event_record record = FUNCTION(event_record, streams->driver.record_event);
    failure failed;

    if (stream == other)
        return 0;
    failed = outcome(STEP_RECORD_EVENT, record(POINTER(streams->join_event), POINTER(other)));
    return failed ? failed : wait_event(streams, stream, streams->join_event);
}

/* Make the copies wait for a word. */
static failure enqueue_wait(const struct streams *streams, struct word word, bool on_side_stream)
{
    uint64_t stream = on_side_stream ? streams->waits : streams->copies;
    failure failed = native_wait_value(&streams->driver, stream, word.address, word.value);

    return failed ? failed : streams_wait_stream(streams, streams->copies, stream);
}

/* Write a word after all copies and writes enqueued so far. */
static failure enqueue_write(struct streams *streams, struct word word, bool on_side_stream)
{
    uint64_t stream = on_side_stream ? streams->writes : streams->copies;
    failure failed = 0;

    if (stream != streams->copies)
        failed = streams_wait_stream(streams, stream, streams->copies);
    else if (streams->last_write_on_side)
        failed = streams_wait_stream(streams, stream, streams->writes);
    if (failed)
        return failed;
    streams->last_write_on_side = stream != streams->copies;
    return native_write_value(&streams->driver, stream, word.address, word.value);
}

failure streams_enqueue(struct streams *streams, const struct copy_step *step, bool on_side_stream)
{
    failure failed = 0;

    if (streams->driver.vendor == HOST)
        return enqueue_on_host(&streams->driver, streams->copies, step);
    if (step->event)
        failed = wait_event(streams, streams->copies, step->event);
    if (!failed && step->wait.address)
        failed = enqueue_wait(streams, step->wait, on_side_stream);
    if (!failed && step->nbytes)
        failed = outcome(STEP_COPY, driver_copy(&streams->driver, streams->copies, step));
    return failed ? failed : enqueue_write(streams, step->write, on_side_stream);
}
