#include "ibverbs.h"

#include "rail.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

/* Environment variable that names another library; for tests. */
#define VARIABLE "HETERO_IBVERBS_LIBRARY"
#define LIBRARY "libibverbs.so.1"

struct ibverbs ibv;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char failure[RAIL_TEXT_BYTES];

static void *load_symbol(void *library, const char *name)
{
    void *found = dlsym(library, name);

    if (found == NULL && failure[0] == '\0')
        snprintf(failure, sizeof failure, "it has no %s", name);
    return found;
}

#define FIND(name) *(void **)&ibv.name = load_symbol(library, "ibv_" #name)

static void open_library(void)
{
    const char *named = getenv(VARIABLE);
    void *library = dlopen(named != NULL ? named : LIBRARY, RTLD_NOW | RTLD_LOCAL);

    if (library == NULL) {
        snprintf(failure, sizeof failure, "%s", dlerror());
        return;
    }
    FIND(get_device_list);
    FIND(free_device_list);
    FIND(get_device_name);
    FIND(open_device);
    FIND(close_device);
    FIND(query_device);
    FIND(query_port);
    FIND(alloc_pd);
    FIND(dealloc_pd);
    FIND(reg_mr);
    FIND(dereg_mr);
    FIND(create_comp_channel);
    FIND(destroy_comp_channel);
    FIND(get_cq_event);
    FIND(ack_cq_events);
    FIND(create_cq);
    FIND(destroy_cq);
    FIND(create_qp);
    FIND(modify_qp);
    FIND(destroy_qp);
    FIND(wc_status_str);
    *(void **)&ibv.reg_dmabuf_mr = dlsym(library, "ibv_reg_dmabuf_mr");
}

bool ibverbs_load(char *error)
{
    pthread_once(&once, open_library);
    if (failure[0] != '\0')
        snprintf(error, RAIL_TEXT_BYTES, "%s", failure);
    return failure[0] == '\0';
}
