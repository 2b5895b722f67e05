#include "checksum.h"

#include <pthread.h>
#include <string.h>

#define POLYNOMIAL 0x82F63B78u /* reflected */

/* Slicing-by-8: the remainder of each value of a byte, by its position in an 8-byte word. */
static uint32_t tables[8][256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t remainder = byte;

        for (int bit = 0; bit < 8; bit++)
            remainder = remainder >> 1 ^ (remainder & 1 ? POLYNOMIAL : 0);
        tables[0][byte] = remainder;
    }
    for (int position = 1; position < 8; position++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t before = tables[position - 1][byte];

            tables[position][byte] = before >> 8 ^ tables[0][before & 0xFF];
        }
}

static uint32_t step(uint32_t remainder, uint64_t word)
{
    uint32_t result = 0;

    word ^= remainder;
    for (int position = 0; position < 8; position++)
        result ^= tables[7 - position][word >> 8 * position & 0xFF];
    return result;
}

uint32_t checksum_portable(const void *bytes, size_t nbytes)
{
    const uint8_t *at = bytes;
    uint32_t remainder = UINT32_MAX;
    uint64_t word;

    pthread_once(&once, make_tables);
    for (; nbytes >= sizeof word; nbytes -= sizeof word, at += sizeof word) {
        memcpy(&word, at, sizeof word);
        remainder = step(remainder, word);
    }
    for (; nbytes > 0; nbytes--)
        remainder = remainder >> 8 ^ tables[0][(remainder ^ *at++) & 0xFF];
    return ~remainder;
}

#if defined(__x86_64__)

/* GCC has the instruction in SSE 4.2; Clang, from 14 on, as a feature of its own. */
#if defined(__clang__) && __clang_major__ >= 14
#define WITH_CRC32 __attribute__((target("crc32")))
#else
#define WITH_CRC32 __attribute__((target("sse4.2")))
#endif

WITH_CRC32 static uint32_t checksum_sse(const void *bytes, size_t nbytes)
{
    const uint8_t *at = bytes;
    uint64_t remainder = UINT32_MAX, word;

    for (; nbytes >= sizeof word; nbytes -= sizeof word, at += sizeof word) {
        memcpy(&word, at, sizeof word);
        remainder = __builtin_ia32_crc32di(remainder, word);
    }
    for (; nbytes > 0; nbytes--)
        remainder = __builtin_ia32_crc32qi((uint32_t)remainder, *at++);
    return ~(uint32_t)remainder;
}

uint32_t checksum(const void *bytes, size_t nbytes)
{
    return __builtin_cpu_supports("sse4.2") ? checksum_sse(bytes, nbytes)
                                            : checksum_portable(bytes, nbytes);
}

#else

uint32_t checksum(const void *bytes, size_t nbytes)
{
    return checksum_portable(bytes, nbytes);
}

#endif
