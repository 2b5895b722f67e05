/* HIP played by CUDA, for tests: every function of HIP and HSA that hetero/device/hip_driver.py
 * calls, done by its twin in NVIDIA's driver API. libcuda is opened when the first function is
 * called, so that this compiles and loads on a machine without CUDA. There every call fails with
 * hipErrorNoDevice. What it shows is that the HIP driver calls what it means to call, in order and
 * with the right arguments; it shows nothing of AMD hardware or of AMD's runtime. */

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NO_DEVICE = 100, INVALID_DEVICE = 101 };
enum { CAN_USE_STREAM_WAIT_VALUE = 10013, MEMCPY_DEFAULT = 4, DMA_BUF_FD = 1, DEVICES = 64 };
enum { LAZY_PEER_ACCESS = 1 };

/* The same sizes on both sides: 64 opaque bytes passed by value, and 16 of identity. */
typedef struct { char reserved[64]; } ipc_handle;
typedef struct { char bytes[16]; } identity;

typedef uint64_t address;
typedef void *stream;

#define FUNCTIONS(_)                                                              \
    _(cuInit, (unsigned))                                                         \
    _(cuGetErrorName, (int, const char **))                                       \
    _(cuGetErrorString, (int, const char **))                                     \
    _(cuDeviceGet, (int *, int))                                                  \
    _(cuDeviceGetPCIBusId, (char *, int, int))                                    \
    _(cuDeviceGetUuid_v2, (identity *, int))                                      \
    _(cuDevicePrimaryCtxRetain, (void **, int))                                   \
    _(cuDevicePrimaryCtxGetState, (int, unsigned *, int *))                       \
    _(cuCtxGetCurrent, (void **))                                                 \
    _(cuCtxSetCurrent, (void *))                                                  \
    _(cuCtxGetDevice, (int *))                                                    \
    _(cuStreamWaitValue32_v2, (stream, address, uint32_t, unsigned))              \
    _(cuStreamWriteValue32_v2, (stream, address, uint32_t, unsigned))             \
    _(cuMemcpyAsync, (address, address, size_t, stream))                          \
    _(cuEventRecord, (void *, stream))                                            \
    _(cuStreamWaitEvent, (stream, void *, unsigned))                              \
    _(cuStreamSynchronize, (stream))                                              \
    _(cuEventSynchronize, (void *))                                               \
    _(cuMemHostRegister_v2, (void *, size_t, unsigned))                           \
    _(cuMemHostUnregister, (void *))                                              \
    _(cuMemHostGetDevicePointer_v2, (address *, void *, unsigned))                \
    _(cuMemAlloc_v2, (address *, size_t))                                         \
    _(cuMemFree_v2, (address))                                                    \
    _(cuIpcGetMemHandle, (ipc_handle *, address))                                 \
    _(cuIpcOpenMemHandle_v2, (address *, ipc_handle, unsigned))                   \
    _(cuIpcCloseMemHandle, (address))                                             \
    _(cuMemGetHandleForAddressRange, (void *, address, size_t, int, unsigned long long))

#define DECLARE(name, arguments) int(*name) arguments;
static struct { FUNCTIONS(DECLARE) } cuda;
static int available;
static pthread_once_t opened = PTHREAD_ONCE_INIT;
static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
static void *contexts[DEVICES];

static void open_cuda(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL)
        return;
    available = 1;
#define FIND(name, arguments)                                \
    *(void **)&cuda.name = dlsym(library, #name);            \
    available = available && cuda.name != NULL;
    FUNCTIONS(FIND)
    available = available && cuda.cuInit(0) == SUCCESS;
}

static int ready(void)
{
    pthread_once(&opened, open_cuda);
    return available;
}

/* Make a device's primary context current. */
static int enter(int device)
{
    int error = SUCCESS;
    if (device < 0 || device >= DEVICES)
        return INVALID_DEVICE;
    pthread_mutex_lock(&contexts_lock);
    if (contexts[device] == NULL)
        error = cuda.cuDevicePrimaryCtxRetain(&contexts[device], device);
    pthread_mutex_unlock(&contexts_lock);
    return error != SUCCESS ? error : cuda.cuCtxSetCurrent(contexts[device]);
}

/* What precedes a call that needs a context: in HIP a thread that has chosen none has device 0. */
static int current(void)
{
    void *context = NULL;
    if (!ready())
        return NO_DEVICE;
    int error = cuda.cuCtxGetCurrent(&context);
    return error == SUCCESS && context == NULL ? enter(0) : error;
}

static __thread int forwarded_error;
#define FORWARD(call) (ready() ? cuda.call : NO_DEVICE)
#define FORWARD_IN_CONTEXT(call) \
    ((forwarded_error = current()) == SUCCESS ? cuda.call : forwarded_error)
#define ADDRESS(pointer) ((address)(uintptr_t)(pointer))

int hipInit(unsigned flags) { return FORWARD(cuInit(flags)); }

int hipGetLastError(void) { return SUCCESS; }

const char *hipGetErrorName(int error)
{
    const char *text = NULL;
    if (!ready())
        return error == NO_DEVICE ? "hipErrorNoDevice" : "hipErrorUnknown";
    return cuda.cuGetErrorName(error, &text) == SUCCESS ? text : "hipErrorUnknown";
}

const char *hipGetErrorString(int error)
{
    const char *text = NULL;
    if (!ready())
        return "no CUDA on this machine to play HIP";
    return cuda.cuGetErrorString(error, &text) == SUCCESS ? text : "unknown error";
}

int hipGetDevice(int *device)
{
    void *context = NULL;
    int error = FORWARD(cuCtxGetCurrent(&context));
    *device = 0;
    return error == SUCCESS && context != NULL ? cuda.cuCtxGetDevice(device) : error;
}

int hipSetDevice(int device)
{
    unsigned flags;
    int active = 0, error = FORWARD(cuDevicePrimaryCtxGetState(device, &flags, &active));
    if (error != SUCCESS)
        return error;
    /* A thread that goes back to the first device need not have a context made there. */
    return device == 0 && !active ? cuda.cuCtxSetCurrent(NULL) : enter(device);
}

int hipDeviceGetAttribute(int *value, int attribute, int device)
{
    int handle, error = FORWARD(cuDeviceGet(&handle, device));
    if (error == SUCCESS && attribute != CAN_USE_STREAM_WAIT_VALUE)
        return INVALID_VALUE;
    *value = error == SUCCESS;
    return error;
}

int hipDeviceGetPCIBusId(char *text, int length, int device)
{
    return FORWARD(cuDeviceGetPCIBusId(text, length, device));
}

int hipDeviceGetUuid(identity *uuid, int device)
{
    return FORWARD(cuDeviceGetUuid_v2(uuid, device));
}

int hipStreamWaitValue32(stream on, void *word, uint32_t value, unsigned flags, uint32_t mask)
{
    /* CUDA has no mask; its first comparison is HIP's first one, except that it wraps. */
    if (flags != 0 || mask != UINT32_MAX)
        return INVALID_VALUE;
    return FORWARD_IN_CONTEXT(cuStreamWaitValue32_v2(on, ADDRESS(word), value, flags));
}

int hipStreamWriteValue32(stream on, void *word, uint32_t value, unsigned flags)
{
    return FORWARD_IN_CONTEXT(cuStreamWriteValue32_v2(on, ADDRESS(word), value, flags));
}

int hipMemcpyAsync(void *target, const void *source, size_t size, int kind, stream on)
{
    if (kind != MEMCPY_DEFAULT)
        return INVALID_VALUE;
    return FORWARD_IN_CONTEXT(cuMemcpyAsync(ADDRESS(target), ADDRESS(source), size, on));
}

int hipEventRecord(void *event, stream on)
{
    return FORWARD_IN_CONTEXT(cuEventRecord(event, on));
}

int hipStreamWaitEvent(stream on, void *event, unsigned flags)
{
    return FORWARD_IN_CONTEXT(cuStreamWaitEvent(on, event, flags));
}

int hipStreamSynchronize(stream on)
{
    return FORWARD_IN_CONTEXT(cuStreamSynchronize(on));
}

int hipEventSynchronize(void *event)
{
    return FORWARD_IN_CONTEXT(cuEventSynchronize(event));
}

int hipHostRegister(void *host, size_t size, unsigned flags)
{
    return FORWARD_IN_CONTEXT(cuMemHostRegister_v2(host, size, flags));
}

int hipHostUnregister(void *host) { return FORWARD_IN_CONTEXT(cuMemHostUnregister(host)); }

int hipHostGetDevicePointer(void **device, void *host, unsigned flags)
{
    return FORWARD_IN_CONTEXT(cuMemHostGetDevicePointer_v2((address *)device, host, flags));
}

int hipMalloc(void **memory, size_t size)
{
    return FORWARD_IN_CONTEXT(cuMemAlloc_v2((address *)memory, size));
}

int hipFree(void *memory) { return FORWARD_IN_CONTEXT(cuMemFree_v2(ADDRESS(memory))); }

int hipIpcGetMemHandle(ipc_handle *handle, void *memory)
{
    return FORWARD_IN_CONTEXT(cuIpcGetMemHandle(handle, ADDRESS(memory)));
}

int hipIpcOpenMemHandle(void **memory, ipc_handle handle, unsigned flags)
{
    if (flags != LAZY_PEER_ACCESS)
        return INVALID_VALUE;
    return FORWARD_IN_CONTEXT(cuIpcOpenMemHandle_v2((address *)memory, handle, flags));
}

int hipIpcCloseMemHandle(void *memory) { return FORWARD_IN_CONTEXT(cuIpcCloseMemHandle(ADDRESS(memory))); }

int hsa_status_string(int status, const char **text)
{
    *text = hipGetErrorString(status);
    return SUCCESS;
}

int hsa_amd_portable_export_dmabuf(const void *memory, size_t size, int *descriptor,
                                   uint64_t *offset)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), before = ADDRESS(memory) % page;
    size_t whole = (before + size + page - 1) / page * page;
    *offset = before;
    return FORWARD_IN_CONTEXT(cuMemGetHandleForAddressRange(descriptor, ADDRESS(memory) - before, whole,
                                                 DMA_BUF_FD, 0));
}
