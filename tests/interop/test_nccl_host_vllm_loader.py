# SPDX-License-Identifier: Apache-2.0
# ctest: timeout=120
"""libferry_nccl_host as vLLM's communicator uses it, without vLLM: every name
that its loader demands, bound by ctypes with its argument types; three
processes that meet by the unique id, sum one element and broadcast; and the
value under `broadcast_from/0/0`, which must be what Python's pickle makes of
the same ctypes struct under the same module path."""

import base64
import ctypes
import multiprocessing
import os
import pathlib
import pickle
import subprocess
import sys
import types

import pytest

BUILD = pathlib.Path(os.environ["FERRY_BUILD_DIR"])
LIBRARY = BUILD / "lib" / "libferry_nccl_host.so"
DRIVER = BUILD / "tests" / "nccl_driver_main"
MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"
WORLD = 3
COUNT = 100003

needs_plain_library = pytest.mark.skipif(
    bool(os.environ.get("FERRY_SANITIZE")),
    reason="a sanitizer's library does not load into this Python")

C = ctypes
P, I, N = C.c_void_p, C.c_int, C.c_size_t


class ncclUniqueId(C.Structure):  # noqa: N801, the name is part of the pickle
    _fields_ = [("internal", C.c_byte * 128)]


def under_vllms_name():
    """The struct as pickle sees vLLM's: module path and name."""
    parts = MODULE.split(".")
    for i in range(len(parts)):
        name = ".".join(parts[:i + 1])
        sys.modules.setdefault(name, types.ModuleType(name))
    ncclUniqueId.__module__ = MODULE
    sys.modules[MODULE].ncclUniqueId = ncclUniqueId


# name: (result, arguments), in the loader's order.
DEMANDED = {
    "ncclGetErrorString": (C.c_char_p, [I]),
    "ncclGetVersion": (I, [C.POINTER(I)]),
    "ncclGetUniqueId": (I, [C.POINTER(ncclUniqueId)]),
    "ncclCommInitRank": (I, [C.POINTER(P), I, ncclUniqueId, I]),
    "ncclAllReduce": (I, [P, P, N, I, I, P, P]),
    "ncclReduce": (I, [P, P, N, I, I, I, P, P]),
    "ncclAllGather": (I, [P, P, N, I, P, P]),
    "ncclReduceScatter": (I, [P, P, N, I, I, P, P]),
    "ncclSend": (I, [P, N, I, I, P, P]),
    "ncclRecv": (I, [P, N, I, I, P, P]),
    "ncclBroadcast": (I, [P, P, N, I, I, P, P]),
    "ncclCommDestroy": (I, [P]),
    "ncclCommAbort": (I, [P]),
    "ncclCommSuspend": (I, [P, I]),
    "ncclCommResume": (I, [P]),
    "ncclGroupStart": (I, []),
    "ncclGroupEnd": (I, []),
    "ncclCommWindowRegister": (I, [P, P, N, C.POINTER(P), I]),
    "ncclCommWindowDeregister": (I, [P, P]),
}
UINT8, FLOAT32, SUM = 1, 7, 0


def load():
    library = C.CDLL(str(LIBRARY))
    bound = types.SimpleNamespace()
    for name, (result, arguments) in DEMANDED.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        setattr(bound, name, function)
    return bound


def good(lib, result):
    assert result == 0, lib.ncclGetErrorString(result).decode()


def pattern(seed):
    return bytes((i * 31 + seed) % 256 for i in range(COUNT))


def one_rank(rank, raw, queue):
    """What PyNcclCommunicator does for a weight transfer."""
    lib = load()
    identity = ncclUniqueId()
    if raw is None:
        good(lib, lib.ncclGetUniqueId(C.byref(identity)))
        for _ in range(WORLD - 1):
            queue.put(bytes(identity))
    else:
        C.memmove(C.addressof(identity.internal), raw, 128)
    comm = P()
    good(lib, lib.ncclCommInitRank(C.byref(comm), WORLD, identity, rank))
    one = C.c_float(1)
    good(lib, lib.ncclAllReduce(C.addressof(one), C.addressof(one), 1, FLOAT32,
                                SUM, comm, None))
    assert one.value == WORLD
    for root in range(WORLD):
        data = C.create_string_buffer(
            pattern(root) if rank == root else bytes(COUNT), COUNT)
        address = C.addressof(data)
        good(lib, lib.ncclBroadcast(address if rank == root else None, address,
                                    COUNT, UINT8, root, comm, None))
        assert data.raw == pattern(root)
    good(lib, lib.ncclCommAbort(comm))


def first(queue):
    one_rank(0, None, queue)


def other(rank, queue):
    one_rank(rank, queue.get(timeout=20), queue)


@needs_plain_library
def test_every_demanded_name_is_bound():
    lib = load()
    version = I()
    good(lib, lib.ncclGetVersion(C.byref(version)))
    assert version.value >= 22703
    # What is not offered says so instead of answering success.
    for call in (lambda: lib.ncclCommSuspend(None, 1),
                 lambda: lib.ncclCommResume(None),
                 lambda: lib.ncclCommWindowRegister(None, None, 0, None, 0),
                 lambda: lib.ncclCommWindowDeregister(None, None)):
        assert call() == 5


@needs_plain_library
def test_optional_names_are_absent_or_work():
    library = C.CDLL(str(LIBRARY))
    library.ncclGetLastError.restype = C.c_char_p
    assert library.ncclGetLastError(None) is not None
    # Its absence is what tells vLLM that the properties cannot be asked.
    assert not hasattr(library, "ncclCommQueryProperties")


@needs_plain_library
def test_three_processes_broadcast():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=first, args=(queue,))]
    ranks += [context.Process(target=other, args=(r, queue))
              for r in range(1, WORLD)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=60)
        alive = rank.is_alive()
        if alive:
            rank.kill()
        assert not alive and rank.exitcode == 0


def ask(*arguments):
    done = subprocess.run([DRIVER, *arguments], capture_output=True, timeout=20,
                          text=True)
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize("protocol", [4, 5])
def test_pickle_is_what_python_makes(protocol):
    under_vllms_name()
    raw = bytes((i * 37 + 11) % 256 for i in range(128))
    dumped = pickle.dumps(ncclUniqueId.from_buffer_copy(raw), protocol)
    assert len(dumped) == 247
    assert ask("unpickle", dumped.hex()) == (0, raw.hex())
    if protocol == 4:
        assert ask("pickle", raw.hex()) == (0, dumped.hex())
        loaded = pickle.loads(bytes.fromhex(ask("pickle", raw.hex())[1]))
        assert type(loaded) is ncclUniqueId and bytes(loaded) == raw


def test_other_pickles_are_refused_by_offset():
    under_vllms_name()
    value = ncclUniqueId.from_buffer_copy(bytes(128))
    rc, line = ask("unpickle", pickle.dumps(value, 2).hex())
    assert rc == 1 and "byte 1 is 0x02" in line
    rc, line = ask("unpickle", pickle.dumps([b"x"], 4).hex())
    assert rc == 1 and "byte 3 is" in line


def test_base64_is_what_python_makes():
    raw = bytes((i * 101 + 3) % 256 for i in range(128))
    text = base64.b64encode(raw).decode()
    assert ask("base64", raw.hex()) == (0, text)
    assert ask("unbase64", text) == (0, raw.hex())
    assert ask("unbase64", base64.urlsafe_b64encode(b"\xff" * 128).decode()
               )[0] == 1
