#include "native.h"

#include <sched.h>
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

void native_spin(const uint32_t *word, uint32_t expected, const uint32_t *other,
                 uint32_t other_expected, uint32_t microseconds)
{
    int64_t end = spin_clock() + (int64_t)microseconds * 1000;

    do {
        for (int poll = 0; poll < SPIN_POLLS; poll++) {
            if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != expected ||
                __atomic_load_n(other, __ATOMIC_ACQUIRE) != other_expected)
                return;
            spin_pause();
        }
        sched_yield();
    } while (spin_clock() < end);
}
