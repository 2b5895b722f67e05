/* What binding.py reads when it loads the library: its version, and the layout of what C and Python share. */
#include "carrier.h"
#include "flow.h"
#include "host.h"
#include "layout.h"
#include "verbs.h"

#include <stddef.h>

#ifndef NATIVE_VERSION
#define NATIVE_VERSION 0
#endif

uint32_t native_version(void)
{
    return NATIVE_VERSION;
}

/* A member's type, without `_t`, or the structure that it is; of an array its elements'. */
#define TYPE(member) _Generic((member), bool: "bool", double: "double", char *: "char",              \
    uint8_t: "uint8", uint8_t *: "uint8", uint16_t: "uint16", uint32_t: "uint32", int32_t: "int32",  \
    uint64_t: "uint64", uint64_t *: "uint64",                                                         \
    pthread_mutex_t: "uint8", struct user_buffer (*)[RING_ENTRIES]: "user_buffer",                                             \
    struct word: "word", struct entry_points: "entry_points", struct streams: "streams",             \
    struct message_header: "message_header", struct ring_word: "ring_word",                          \
    struct ring_doorbell: "ring_doorbell",                                                           \
    struct ring_record *: "ring_record", struct ring_end *: "ring_end",                              \
    struct ring_direction *: "ring_direction")
#define OF(structure, member)                                                                        \
    {#structure, #member, TYPE(((struct structure *)0)->member), offsetof(struct structure, member), \
     sizeof ((struct structure *)0)->member}
#define END(structure) {#structure, NULL, NULL, 0, sizeof(struct structure)}

/* Every member of a structure, in order, and then its end; a structure before those that contain it. */
const struct layout_member native_members[] = {
    OF(word, address), OF(word, value), END(word),
    OF(copy_step, event), OF(copy_step, wait), OF(copy_step, checksum), OF(copy_step, target),
    OF(copy_step, source), OF(copy_step, nbytes), OF(copy_step, write), END(copy_step),
    OF(entry_points, vendor), OF(entry_points, counter_limit), OF(entry_points, copy),
    OF(entry_points, wait_value), OF(entry_points, write_value), OF(entry_points, record_event),
    OF(entry_points, wait_event), OF(entry_points, synchronize_stream),
    OF(entry_points, synchronize_event), OF(entry_points, set_current), END(entry_points),
    OF(host_gpu, driver), OF(host_gpu, context), OF(host_gpu, stream), END(host_gpu),
    OF(streams, driver), OF(streams, copies), OF(streams, waits), OF(streams, writes),
    OF(streams, join_event), OF(streams, last_write_on_side), END(streams),
    OF(message_header, magic), OF(message_header, dtype), OF(message_header, dimensions),
    OF(message_header, sequence), OF(message_header, nbytes), OF(message_header, shape),
    OF(message_header, tag), END(message_header),
    OF(ring_word, value), OF(ring_word, sleepers), OF(ring_word, unused), END(ring_word),
    OF(ring_doorbell, value), OF(ring_doorbell, sleepers), OF(ring_doorbell, armed),
    OF(ring_doorbell, event_fd), OF(ring_doorbell, unused), END(ring_doorbell),
    OF(ring_record, header), OF(ring_record, offset), OF(ring_record, nbytes), OF(ring_record, slot),
    END(ring_record),
    OF(ring_direction, produced), OF(ring_direction, consumed), OF(ring_direction, posted),
    OF(ring_direction, retired), OF(ring_direction, records), END(ring_direction),
    OF(ring_end, doorbell), OF(ring_end, closed), OF(ring_end, fault_bytes), OF(ring_end, fault),
    OF(ring_end, unused), END(ring_end),
    OF(user_buffer, address), OF(user_buffer, nbytes), END(user_buffer),
    OF(ring_control, ends), OF(ring_control, directions), OF(ring_control, user_buffers),
    END(ring_control),
    OF(flow, streams), OF(flow, direction), OF(flow, produced_word), OF(flow, consumed_word),
    OF(flow, ring), OF(flow, ring_bytes), OF(flow, chunk_bytes),
    OF(flow, least_chunk_bytes), OF(flow, small_bytes),
    OF(flow, checksum_bytes), OF(flow, user_buffers), OF(flow, wake_peer), OF(flow, wake_argument),
    OF(flow, doorbell), OF(flow, bytes_header), OF(flow, is_outgoing),
    OF(flow, is_driven), OF(flow, is_being_driven), OF(flow, is_requested),
    OF(flow, first_queued), OF(flow, last_queued), OF(flow, lock), OF(flow, sequence), OF(flow, begun),
    OF(flow, count), OF(flow, awaited), OF(flow, failed), OF(flow, head), OF(flow, tail), OF(flow, ends),
    OF(flow, freed), OF(flow, caller_stream), OF(flow, on_caller_stream), END(flow),
    OF(transfer, flow), OF(transfer, address), OF(transfer, nbytes), OF(transfer, caller_stream),
    OF(transfer, event), OF(transfer, tag), OF(transfer, after_caller), OF(transfer, header_state),
    OF(transfer, progress), OF(transfer, on_caller_stream), OF(transfer, completes_at_receiver),
    OF(transfer, offset), OF(transfer, count), OF(transfer, first), OF(transfer, claimed),
    OF(transfer, next_queued), OF(transfer, header), END(transfer),
    OF(engine_options, control), OF(engine_options, side), OF(engine_options, rings),
    OF(engine_options, ring_bytes), OF(engine_options, checksum_bytes),
    OF(engine_options, stall_seconds), OF(engine_options, device_notifies),
    OF(engine_options, reads_back), OF(engine_options, dmabuf), OF(engine_options, dmabuf_offset),
    END(engine_options),
    OF(rail_counters, bytes_sent), OF(rail_counters, bytes_per_second), END(rail_counters),
    OF(verbs_end, qp), OF(verbs_end, psn), OF(verbs_end, receiving), OF(verbs_end, receiving_key),
    OF(verbs_end, control), OF(verbs_end, control_key), OF(verbs_end, reads_back), END(verbs_end),
    OF(verbs_route, mtu), OF(verbs_route, lid), OF(verbs_route, gid), OF(verbs_route, gid_index),
    OF(verbs_route, is_global), END(verbs_route),
    OF(verbs_port, state), OF(verbs_port, mtu), OF(verbs_port, max_message), OF(verbs_port, lid),
    OF(verbs_port, is_ethernet), END(verbs_port),
    {NULL, NULL, NULL, 0, 0},
};

#define NUMBER(kind, name) {#kind, #name, name}

/* Macros, of no kind, and enumerators. */
const struct layout_number native_numbers[] = {
    NUMBER(, RING_ENTRIES), NUMBER(, RING_FAULT_BYTES),
    NUMBER(, MESSAGE_DIMENSIONS), NUMBER(, ENGINE_RAILS),
    NUMBER(, RAIL_TEXT_BYTES), NUMBER(, HOST_CHECKSUM_BYTES),
    NUMBER(, HOST_SPIN_MICROSECONDS),
    NUMBER(vendor, CUDA), NUMBER(vendor, HIP), NUMBER(vendor, HOST),
    NUMBER(checksums, NO_CHECKSUM), NUMBER(checksums, APPEND_BEHIND_TARGET),
    NUMBER(checksums, VERIFY_SOURCE),
    NUMBER(step, STEP_WAIT_VALUE), NUMBER(step, STEP_COPY), NUMBER(step, STEP_WRITE_VALUE),
    NUMBER(step, STEP_RECORD_EVENT), NUMBER(step, STEP_WAIT_EVENT), NUMBER(step, STEP_COUNTER_LIMIT),
    NUMBER(host_failure, HOST_OK), NUMBER(host_failure, HOST_GPU_FAILED),
    NUMBER(host_failure, HOST_WRONG_CHECKSUM),
    NUMBER(progress, WAITING), NUMBER(progress, ENQUEUED), NUMBER(progress, REFUSED),
    NUMBER(progress, FAILED),
    NUMBER(header_state, HEADER_OF_BYTES), NUMBER(header_state, HEADER_WITHOUT_NUMBERS),
    NUMBER(header_state, HEADER_COMPLETE),
    {NULL, NULL, 0},
};
