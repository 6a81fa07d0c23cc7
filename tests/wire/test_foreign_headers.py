# SPDX-License-Identifier: Apache-2.0
"""Ferry declares what it needs of NCCL and of the CUDA driver itself. Where
their own headers are installed, a compiler compares the two."""

import glob
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CC = os.environ.get("FERRY_CC", "cc")

NCCL = """
#include <nccl.h>
#define FERRY__NCCL_TYPES_GIVEN
#include "comm/nccl_abi.h"
#define SAME(name, value) _Static_assert((int)name == value, #name);
FERRY__NCCL_RESULTS(SAME)
FERRY__NCCL_DTYPES(SAME)
FERRY__NCCL_OPS(SAME)
_Static_assert(sizeof(ncclUniqueId) == FERRY__NCCL_ID_BYTES, "id");
_Static_assert(sizeof(ncclResult_t) == sizeof(int), "result");
_Static_assert(sizeof(ncclDataType_t) == sizeof(int), "dtype");
_Static_assert(sizeof(ncclRedOp_t) == sizeof(int), "operator");
"""
CUDA = """
#include <cuda.h>
#define FERRY__CUDA_TYPES_GIVEN
#include "device/cuda_driver.h"
#define SAME(name, value) _Static_assert((int)name == value, #name);
SAME(CUDA_SUCCESS, 0)
SAME(CUDA_ERROR_OUT_OF_MEMORY, 2)
SAME(CUDA_ERROR_NO_DEVICE, 100)
SAME(CUDA_ERROR_NOT_READY, 600)
SAME(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2)
SAME(CU_MEMORYTYPE_DEVICE, FERRY__CU_MEMORY_DEVICE)
SAME(CU_STREAM_NON_BLOCKING, FERRY__CU_STREAM_ASYNC)
SAME(CU_EVENT_DISABLE_TIMING, FERRY__CU_EVENT_NO_TIMES)
"""
# All that nccl.h wants of CUDA's own headers.
STANDIN = {"cuda_runtime.h": "#include <stddef.h>\n"
                             "typedef struct CUstream_st *cudaStream_t;\n"
                             "typedef struct CUevent_st *cudaEvent_t;\n"
                             "#define CUDART_VERSION 0\n",
           "cuda_fp16.h": "\n"}


def folder_of(header, variable, patterns):
    """The first folder that holds the header, or a skip that says where it
    was looked for."""
    named = os.environ.get(variable)
    for pattern in ([named] if named else []) + patterns:
        for folder in sorted(glob.glob(pattern)):
            if (pathlib.Path(folder) / header).is_file():
                return folder
    pytest.skip(f"{header} is not installed ({variable} names its folder)")


def compile_with(tmp_path, text, folders):
    source = tmp_path / "same.c"
    source.write_text(text)
    command = [CC, "-std=c11", "-Wall", "-Werror", "-fsyntax-only",
               "-Wno-unused-function", f"-I{ROOT}/src", f"-I{ROOT}/include"]
    for folder in folders:
        command += ["-isystem", str(folder)]
    done = subprocess.run([*command, str(source)], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr


def test_nccl_declarations_are_nccls(tmp_path):
    folder = folder_of("nccl.h", "FERRY_NCCL_INCLUDE", [
        f"{ROOT}/build/venv*/lib/python3*/site-packages/nvidia/nccl/include",
        f"{ROOT}/build/nccl/nvidia/nccl/include",
        "/usr/include", "/usr/local/include", "/usr/local/cuda/include"])
    standin = tmp_path / "cuda"
    standin.mkdir()
    for name, text in STANDIN.items():
        (standin / name).write_text(text)
    compile_with(tmp_path, NCCL, [standin, folder])


def test_cuda_declarations_are_the_drivers(tmp_path):
    folder = folder_of("cuda.h", "FERRY_CUDA_INCLUDE", [
        "/usr/local/cuda/include", "/usr/local/cuda-*/include",
        "/usr/lib/cuda/include"])
    compile_with(tmp_path, CUDA, [folder])


def test_declarations_stand_alone(tmp_path):
    compile_with(tmp_path, '#include "comm/nccl_abi.h"\n'
                 '#include "device/cuda_driver.h"\n', [])
