# SPDX-License-Identifier: Apache-2.0
"""Writes the C source of the binding `ferry._libferry` (cffi, API mode).

    python _ffi_build.py --include DIR --output FILE.c [--cc CC]

What Python sees is read from the installed headers by the C preprocessor, so
it cannot drift from them; the compiler checks it once more when it compiles
the result. The only declarations written here are the callbacks, and those of
the headers beside this file, which are part of the binding.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

# Standard headers are replaced by empty ones: cffi knows their types.
STANDARD = ("stddef.h", "stdint.h", "stdbool.h")

# Functions that C calls and _ffi.py defines.
CALLBACKS = """
extern "Python" {
ferry_status ferry_py_source_metadata(void *, const ferry_param_meta **,
                                      size_t *);
ferry_status ferry_py_source_begin(void *);
ferry_status ferry_py_source_refill(void *);
ferry_status ferry_py_source_wait(void *, int64_t);
void ferry_py_source_end(void *);
bool ferry_py_source_holds(void *, const char *);
ferry_status ferry_py_source_groups(void *, const size_t **, size_t *);

ferry_status ferry_py_client_init(void *, const char *);
ferry_status ferry_py_client_start(void *);
ferry_status ferry_py_client_update(void *, const char *);
ferry_status ferry_py_client_finish(void *, const char *);
void ferry_py_client_cancel(void *);
ferry_status ferry_py_client_abort(void *);
ferry_status ferry_py_client_start_draft(void *);
ferry_status ferry_py_client_pause(void *, const char *, int);
ferry_status ferry_py_client_resume(void *);
ferry_status ferry_py_client_status(void *, char *, size_t);
ferry_status ferry_py_client_prepare(void *);
ferry_status ferry_py_client_commit(void *, const char *);
const char *ferry_py_client_peer(void *, size_t);
ferry_status ferry_py_client_world_size(void *, int32_t *);

void ferry_py_progress(void *, uint64_t, uint64_t);

ferry_status ferry_py_worker_create(const ferry_worker_host *,
                                    ferry_worker_context *, void **);
ferry_status ferry_py_worker_init(void *, const void *);
ferry_status ferry_py_worker_start(void *);
ferry_status ferry_py_worker_receive(void *, const void *);
ferry_status ferry_py_worker_finish(void *);
void ferry_py_worker_abort(void *);
ferry_status ferry_py_worker_drain(void *);
void ferry_py_worker_shutdown(void *);
void ferry_py_worker_destroy(void *);

ferry_status ferry_py_receiver_load(void *, ferry_loader *, const char *,
                                    const ferry_tensor *);
ferry_status ferry_py_receiver_room(void *, const ferry_tensor *, void **);
}
"""

# The binding's own headers, in the order in which they need each other.
OWN = ("_batch.h", "_module.h", "_file.h")

OWN_DECLARATIONS = """
#define FERRY_PY_BATCH_ITEMS ...
typedef struct ferry_py_batch {
    void *handle;
    ferry_item *items;
    size_t count, at;
    uint64_t devices;
    bool ready;
} ferry_py_batch;
void ferry_py_batch_event(ferry_py_batch *, ferry_item *);
ferry_status ferry_py_batch_next(void *, ferry_item *);
bool ferry_py_batch_torch(uintptr_t, uintptr_t);
size_t ferry_py_batch_fill(ferry_py_batch *, uintptr_t, uintptr_t, size_t,
                           size_t);
bool ferry_py_module_same(uintptr_t, const uintptr_t *, size_t, uintptr_t);
bool ferry_py_module_declared(uintptr_t, const ferry_param_meta *, size_t);
typedef struct ferry_py_file {
    const char *path;
    ferry_dtype to;
    ferry_source_ops ops;
    ...;
} ferry_py_file;
ferry_status ferry_py_file_init(ferry_py_file *);
void ferry_py_file_close(ferry_py_file *);
ferry_status ferry_py_pass_begin(const char *, ferry_dtype, ferry_source *);
void ferry_py_pass_end(ferry_source *);
bool ferry_py_pass_own(const ferry_tensor *);
"""

PREAMBLE = """
#include <ferry/ferry.h>
#include <ferry/backend.h>
"""


def declarations(include: pathlib.Path, cc: str) -> str:
    """Return all types and functions of the public headers, preprocessed."""
    with tempfile.TemporaryDirectory() as tmp:
        for header in STANDARD:
            pathlib.Path(tmp, header).touch()
        done = subprocess.run(
            [cc, "-E", "-P", "-nostdinc", f"-I{tmp}", f"-I{include}",
             "-D__attribute__(x)=", "-x", "c", "-"],
            input=PREAMBLE, capture_output=True, text=True, check=False,
        )
    if done.returncode != 0:
        sys.exit(f"{cc} -E failed:\n{done.stderr}")
    return done.stdout


def constants(include: pathlib.Path) -> str:
    """Return the numeric macros of the public headers."""
    found: list[str] = []
    for header in sorted((include / "ferry").glob("*.h")):
        for name in re.findall(
            r"^#define\s+(FERRY_\w+)\s+(?:0x[0-9a-fA-F]+|\d+)u?\s*(?:/\*.*)?$",
            header.read_text(encoding="utf-8"), flags=re.M,
        ):
            found.append(f"#define {name} ...\n")
    return "".join(found)


def builder(include: pathlib.Path, cc: str) -> Any:
    """Return the cffi builder over the headers under `include`."""
    import cffi

    ffi = cffi.FFI()
    ffi.cdef(
        declarations(include, cc) + constants(include) + CALLBACKS
        + OWN_DECLARATIONS)
    here = pathlib.Path(__file__)
    own = [here.with_name(name).read_text(encoding="utf-8") for name in OWN]
    ffi.set_source("ferry._libferry", "".join([PREAMBLE, *own]))
    return ffi


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--include", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--cc", default="cc")
    options = parser.parse_args()
    ffi = builder(options.include, options.cc)
    ffi.emit_c_code(str(options.output))


if __name__ == "__main__":
    main()
