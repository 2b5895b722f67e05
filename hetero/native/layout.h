/* What the library says of itself (layout.c). The tables end with a row of NULL. */
#ifndef HETERO_LAYOUT_H
#define HETERO_LAYOUT_H

#include <stdint.h>

/* A checksum of the sources that the library was built from (setup.py). */
uint32_t native_version(void);

/* A member of a structure; without a name the structure's end, whose `nbytes` are the structure's. */
struct layout_member {
    const char *structure, *name, *type;
    uint32_t offset, nbytes;
};
extern const struct layout_member native_members[];

/* A number, and the enumeration that it belongs to. */
struct layout_number {
    const char *kind, *name;
    int64_t value;
};
extern const struct layout_number native_numbers[];

#endif
