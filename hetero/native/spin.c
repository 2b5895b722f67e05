#include "native.h"

#include <time.h>

#ifndef NATIVE_VERSION
#define NATIVE_VERSION 0
#endif

uint32_t native_version(void)
{
    return NATIVE_VERSION;
}

int64_t spin_clock(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

void spin_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}
