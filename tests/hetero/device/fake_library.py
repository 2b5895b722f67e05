"""A shared library that has a driver's functions and does nothing but return what it is told."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from hetero.device.vendor_library import Symbol
from tests.hip_on_cuda.library import compile_library

_PREAMBLE = """
#include <pthread.h>
#include <string.h>
#pragma GCC diagnostic ignored "-Wstrict-prototypes"
static char failing[128];
static int code, times;
static char log_of_calls[4096];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
void fake_fail(const char *name, int with, int this_often)
{
    strncpy(failing, name, sizeof failing - 1);
    code = with;
    times = this_often;
}
const char *fake_calls(void) { return log_of_calls; }
void fake_forget(void) { log_of_calls[0] = 0; }
static int answer(const char *name)
{
    int result = 0;
    pthread_mutex_lock(&lock);
    if (strlen(log_of_calls) + strlen(name) + 2 < sizeof log_of_calls) {
        strcat(log_of_calls, name);
        strcat(log_of_calls, " ");
    }
    if (strcmp(name, failing) == 0 && times > 0) {
        times--;
        result = code;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
"""

_TEXTS = """
int cuGetErrorName(int error, const char **text) { (void)error; *text = "NAME_OF_ERROR"; return 0; }
int cuGetErrorString(int error, const char **text) { (void)error; *text = "its words"; return 0; }
const char *hipGetErrorName(int error) { (void)error; return "NAME_OF_ERROR"; }
const char *hipGetErrorString(int error) { (void)error; return "its words"; }
int hsa_status_string(int error, const char **text) { (void)error; *text = "HSA words"; return 0; }
"""

# Calls whose results decide what a driver does next.
_RESULTS = {
    "hipDeviceGetAttribute": "int hipDeviceGetAttribute(int *value) { *value = 1; ",
    "cuDeviceGetAttribute": (
        "static int attributes[256];\n"
        "void fake_attribute(int number, int value) { attributes[number] = value; }\n"
        "int cuDeviceGetAttribute(int *value, int number) { *value = attributes[number]; "
    ),
}


class FakeLibrary:
    """Compiled for a list of symbols, less those that `lacking` names."""

    def __init__(self, folder: Path, symbols: Sequence[Symbol], *, lacking: Sequence[str] = ()):
        source = folder / "fake.c"
        names = [s.name for s in symbols if s.name not in lacking and f" *{s.name}(" not in _TEXTS]
        names = [name for name in names if f"int {name}(" not in _TEXTS]
        functions = [
            f'{_RESULTS.get(name, f"int {name}() {{ ")}return answer("{name}"); }}'
            for name in names
        ]
        source.write_text("\n".join((_PREAMBLE, _TEXTS, *functions, "")))
        self.path = str(compile_library(source, target=folder / "libfake.so"))
        self._library = ctypes.CDLL(self.path)
        self._library.fake_calls.restype = ctypes.c_char_p

    def fail(self, name: str, code: int, *, times: int = 1) -> None:
        """Let a function return `code` for its next calls."""
        self._library.fake_fail(name.encode(), code, times)

    def calls(self) -> list[str]:
        """The functions called since the last `forget`, in order."""
        return bytes(self._library.fake_calls()).decode().split()

    def forget(self) -> None:
        self._library.fake_forget()

    def set_attribute(self, number: int, value: int) -> None:
        """What cuDeviceGetAttribute says from now on."""
        self._library.fake_attribute(number, value)
