/* CRC-32C (Castagnoli, RFC 3720) of memory. */
#ifndef HETERO_CHECKSUM_H
#define HETERO_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

uint32_t checksum(const void *bytes, size_t nbytes);
/* The same without the CPU's CRC instruction. */
uint32_t checksum_portable(const void *bytes, size_t nbytes);

#endif
