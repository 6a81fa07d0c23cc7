# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files as sources (B6): what a server stores after them, against
digests worked out from the file; what Python sees of them; what is refused."""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import checkpoints
import gguf_io
import model_files
import models
import numpy as np
import pytest
import safetensors_io
import stored
import torch
from cases import INFOS
from ferry.adapters import Cast, Filter, Rename, Reorder
from ferry.errors import (
    ArgumentError,
    InputOutputError,
    MismatchError,
    NotSupportedError,
    UnknownNameError,
)
from ferry.weight_transfer import (
    FileSource,
    HTTPVLLMWeightSyncClient,
    WeightTransferTrainerFactory,
)

# By layout: what of a checkpoint's folder is opened.
PATHS = {
    "file": "model.safetensors",
    "folder": "",
    "index": "model.safetensors.index.json",
    "shards": "",
    "gguf": "model.gguf",
}


def make(folder: Path, layout: str, seed: int) -> Path:
    checkpoints.make(
        str(folder), arch="llama", variant="gqa", seed=seed, dtype="BF16",
        n_shards=3 if layout in ("index", "shards") else 1,
        gguf="Q8_0" if layout == "gguf" else None)
    return folder / PATHS[layout]


def digests(path: Path) -> dict[str, str]:
    """What a server of two ranks must store, from the file alone."""
    if path.suffix in (".safetensors", ".json"):
        path = path.parent
    return stored.digests(model_files.open_model(str(path)), 2, 1, "bf16")


def engine_for(served: Any, source: Any) -> Any:
    backend, server = served
    return WeightTransferTrainerFactory.trainer_init(
        INFOS[backend](rank=0), client=HTTPVLLMWeightSyncClient(server.url),
        source=source)


# ---- what goes out ----


@pytest.mark.parametrize("layout", PATHS)
def test_b6_a_file_is_sent_without_python(
    served: Any, tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(self: Any, *_: Any) -> Any:
        raise AssertionError("Python's form of the source was asked")

    path = make(tmp_path / "a", layout, 2)
    source = FileSource(path)
    for name in ("__iter__", "_metadata", "metadata"):
        monkeypatch.setattr(FileSource, name, asked)
    engine = engine_for(served, source)
    for version in ("v1", "v2"):
        engine.send_weights(weight_version=version)
        assert served[1].checksums() == digests(path)
    assert engine.stats.n_params == 21
    engine.shutdown()


def test_b6_a_round_sends_what_lies_there_when_it_begins(
    served: Any, tmp_path: Path
) -> None:
    path = make(tmp_path / "live", "file", 2)
    engine = engine_for(served, FileSource(path))
    engine.send_weights()
    assert served[1].checksums() == digests(path)
    # Renamed over it, in another order of tensors.
    other = make(tmp_path / "other", "file", 3)
    tensors = safetensors_io.read_file(str(other))
    safetensors_io.write_file(
        str(other), dict(sorted(tensors.items(), reverse=True)))
    os.replace(other, path)
    engine.send_weights()
    assert served[1].checksums() == digests(path)
    # Written over in place, between rounds.
    path.write_bytes(make(tmp_path / "third", "file", 1).read_bytes())
    engine.send_weights()
    assert served[1].checksums() == digests(path)


def test_b6_a_round_over_a_file_that_is_gone_names_it_and_the_next_works(
    served: Any, tmp_path: Path
) -> None:
    path = make(tmp_path / "a", "shards", 3)
    engine = engine_for(served, FileSource(path))
    shard = sorted(path.glob("*-of-*.safetensors"))[1]
    shard.rename(tmp_path / "aside")
    with pytest.raises(InputOutputError, match=f"{shard.name}.*No such file"):
        engine.send_weights()
    (tmp_path / "aside").rename(shard)
    engine.send_weights()
    assert served[1].checksums() == digests(path)


def test_b6_a_file_that_turns_into_one_that_must_be_copied_is_refused(
    served: Any, tmp_path: Path
) -> None:
    path = make(tmp_path / "a", "file", 2)
    engine = engine_for(served, FileSource(path))
    aligned = path.read_bytes()
    path.write_bytes(misaligned(aligned))
    with pytest.raises(MismatchError, match=f"{path}.*must be copied"):
        engine.send_weights()
    engine_for(served, FileSource(path)).send_weights()
    assert served[1].checksums() == digests(path)
    path.write_bytes(aligned)
    engine.send_weights()
    assert served[1].checksums() == digests(path)


def misaligned(data: bytes) -> bytes:
    """The same file with one blank more in its header."""
    size = struct.unpack("<Q", data[:8])[0]
    return (struct.pack("<Q", size + 1) + data[8 : 8 + size] + b" "
            + data[8 + size :])


def test_b6_a_dtype_is_cast_on_the_way(served: Any, tmp_path: Path) -> None:
    path = make(tmp_path / "a", "gguf", 3)
    plain = engine_for(served, FileSource(path))
    plain.send_weights()
    for dtype in ("bfloat16", torch.bfloat16):
        source = FileSource(path, dtype=dtype)
        assert {m.dtype for m in source.metadata()} == {torch.bfloat16}
        engine = engine_for(served, source)
        engine.send_weights()
        assert 2 * engine.stats.bytes_declared == plain.stats.bytes_declared
        assert served[1].checksums() == digests(path)
    assert FileSource(make(tmp_path / "b", "file", 3), "bf16").stable
    with pytest.raises(NotSupportedError, match="float3"):
        FileSource(path, dtype="float3")
    with pytest.raises(ArgumentError, match="int64"):
        FileSource(path, dtype="int64")


def test_b6_b7_adapters_compose_with_files(
    served: Any, tmp_path: Path
) -> None:
    path = make(tmp_path / "a", "gguf", 2)
    engine_for(
        served, Cast(FileSource(path), torch.bfloat16)).send_weights()
    assert served[1].checksums() == digests(path)

    path = make(tmp_path / "b", "file", 3)
    tensors = safetensors_io.read_file(str(path))
    safetensors_io.write_file(str(path.with_name("other.safetensors")), {
        f"policy.{name}": tensor
        for name, tensor in sorted(tensors.items(), reverse=True)})
    source = FileSource(path.with_name("other.safetensors"))
    engine_for(
        served, Reorder(Rename(source, {"policy.": ""}))).send_weights()
    assert served[1].checksums() == digests(path)


# ---- what Python sees ----


@pytest.mark.parametrize("layout", PATHS)
def test_b6_both_forms_of_a_source_say_what_the_file_holds(
    tmp_path: Path, layout: str
) -> None:
    path = make(tmp_path, layout, 2)
    if layout == "gguf":
        wanted = {
            name: torch.from_numpy(tensor.f32())
            for name, tensor in gguf_io.to_hf(
                gguf_io.read_file(str(path))).items()}
    else:
        wanted = models.tensors(tmp_path)
    source = FileSource(path)
    assert source.stable == (layout != "gguf")
    assert source.metadata() == source.metadata
    assert all(a is b for a, b in zip(
        source.metadata(), source.metadata(), strict=True))
    declared = [(m.name, m.dtype, m.shape) for m in source.metadata()]
    assert len(declared) == len(wanted)
    for again in (source, source.iter_full(), zip(*map(
            itertools.chain.from_iterable,
            zip(*source.iter_groups(), strict=True)), strict=True)):
        items = list(again)  # all at once: none lies in a buffer
        assert [(n, t.dtype, tuple(t.shape)) for n, t in items] == declared
        assert all(torch.equal(t, wanted[n]) for n, t in items)
    assert sum(source.groups(), []) == [m.name for m in source.metadata()]
    assert source.owned_names(1) == [m.name for m in source.metadata()]
    # Passes side by side, and one that is left half way.
    next(iter(source))
    assert all(a[0] == b[0] and torch.equal(a[1], b[1])
               for a, b in zip(source, source, strict=True))
    copy = pickle.loads(pickle.dumps(source))
    assert copy.metadata() == source.metadata()
    Filter(source, ["model.layers."], keep=False).metadata()
    with pytest.raises(UnknownNameError):
        Filter(source, ["nobody."]).metadata()


def mapped(path: Path) -> list[tuple[int, int]]:
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            begin, end = line.split()[0].split("-")
            found.append((int(begin, 16), int(end, 16)))
    return found


def test_b6_tensors_lie_in_the_file_and_keep_it(tmp_path: Path) -> None:
    path = make(tmp_path, "file", 2)
    wanted = models.tensors(tmp_path)
    source = FileSource(path)
    tensors = dict(source)
    assert all(
        any(begin <= t.data_ptr() < end for begin, end in mapped(path))
        for t in tensors.values())
    # Who writes to them writes to pages of its own.
    name = next(iter(tensors))
    before = path.read_bytes()
    tensors[name].zero_()
    assert path.read_bytes() == before
    assert torch.equal(dict(source)[name], wanted[name])
    # They outlive the source, the pass and the file's name.
    moved = path.rename(tmp_path / "moved")
    del source
    gc.collect()
    assert mapped(moved)
    assert all(torch.equal(t, wanted[n]) for n, t in tensors.items()
               if n != name)
    part = tensors.pop(list(wanted)[-1])[:1]
    tensors.clear()
    gc.collect()
    assert mapped(moved)
    assert torch.equal(part, wanted[list(wanted)[-1]][:1])
    del part
    gc.collect()
    assert not mapped(moved)


def test_b6_tensors_that_are_not_aligned_are_copied(tmp_path: Path) -> None:
    path = make(tmp_path, "file", 2)
    path.write_bytes(misaligned(path.read_bytes()))
    wanted = models.tensors(tmp_path)
    source = FileSource(path)
    assert not source.stable
    tensors = dict(source)
    assert all(torch.equal(t, wanted[n]) for n, t in tensors.items())
    assert not mapped(path)
    with pytest.raises(NotSupportedError, match="stable"):
        Reorder(source)


def test_b6_scalars_and_empty_tensors(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    arrays = {
        "scalar": np.array(2.5, np.float64),
        "empty": np.zeros((0, 3), np.float32),
        "flags": np.array([True, False]),
        "last": np.arange(6, dtype=np.int64).reshape(1, 6),
    }
    words = {"float64": "F64", "float32": "F32", "bool": "BOOL",
             "int64": "I64"}
    safetensors_io.write_file(str(path), {
        name: safetensors_io.Tensor(words[array.dtype.name], array)
        for name, array in arrays.items()})
    tensors = dict(FileSource(path))
    for name, array in arrays.items():
        assert torch.equal(tensors[name], torch.from_numpy(array))


# ---- what is refused ----


def test_b6_what_is_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    path = make(tmp_path / "a", "file", 2)
    data = path.read_bytes()
    with pytest.raises(OSError, match=f"{tmp_path}/gone: .*No such file"):
        FileSource(tmp_path / "gone")
    for size in (len(data) - 1, len(data) // 2, 5, 0):
        path.write_bytes(data[:size])
        with pytest.raises(ArgumentError, match=str(path)):
            FileSource(path)
    path.write_bytes(data)

    path = make(tmp_path / "b", "gguf", 2)
    data = path.read_bytes()
    for size in (len(data) // 2, 20):
        path.write_bytes(data[:size])
        with pytest.raises(ArgumentError, match=str(path)):
            FileSource(path)

    with pytest.raises(InputOutputError, match=f"{tmp_path}: holds no"):
        FileSource(tmp_path)
    with pytest.raises(ArgumentError, match="NUL"):
        FileSource("a\0b")
    with pytest.raises(ArgumentError, match="empty"):
        FileSource("")  # not the folder that is the current one


def test_b6_a_path_is_the_one_that_the_system_would_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = make(tmp_path / "runs" / "kept", "file", 2)
    (tmp_path / "runs" / "step").mkdir()
    shutil.copy(kept, tmp_path / "runs" / "a.safetensors")
    wanted = FileSource(kept).metadata()
    # ".." of a link is that of what it leads to.
    (tmp_path / "last").symlink_to(tmp_path / "runs" / "step")
    (tmp_path / "a.safetensors").write_bytes(b"another file")
    monkeypatch.chdir(tmp_path)
    paths: list[Any] = [
        "last/../a.safetensors", b"last/../a.safetensors",
        tmp_path / "last/../a.safetensors", Path("runs/kept")]
    sources = [FileSource(path) for path in paths]
    monkeypatch.chdir("/")  # rounds come later
    for source in sources:
        assert source.metadata() == wanted
        assert len(list(source)) == len(wanted)


def test_b6_an_index_that_lacks_a_part_is_refused_by_name(
    tmp_path: Path
) -> None:
    folder = make(tmp_path, "shards", 2)
    first, second, _ = sorted(folder.glob("*-of-*.safetensors"))
    name = next(iter(safetensors_io.read_file(str(second))))
    kept = tmp_path / "kept"
    shutil.copy(second, kept)

    second.unlink()
    with pytest.raises(InputOutputError, match=f"{second}.*No such file"):
        FileSource(folder)
    shutil.copy(first, second)  # a shard without what the index puts there
    with pytest.raises(ArgumentError, match=f"{name}.*{second.name}"):
        FileSource(folder)
    second.write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(ArgumentError, match=second.name):
        FileSource(folder)
    shutil.copy(kept, second)
    assert FileSource(folder).metadata()


# ---- without torch ----


WITHOUT = textwrap.dedent("""
    import json, sys

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in sys.argv[1].split(","):
                raise ImportError(name + " is not to be imported")

    sys.meta_path.insert(0, Blocked())
    from ferry.adapters import Cast, Filter, Rename
    from ferry.errors import NotSupportedError
    from ferry.weight_transfer import *

    url, path = sys.argv[2:]
    source = FileSource(path)
    assert all(isinstance(m.dtype, str) for m in source.metadata())
    for sent in (source, FileSource(path, "float32"),
                 Rename(Filter(source, ["model.", "lm_head."]), {"no.": ""})):
        WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(rank=0), client=HTTPVLLMWeightSyncClient(url),
            source=sent).send_weights()
    own = source.metadata()[0].dtype
    assert len(list(Cast(source, own))) == len(source.metadata())
    try:
        list(Cast(source, "float16"))
    except NotSupportedError as error:
        assert "takes a dtype itself" in str(error)
    else:
        raise AssertionError("yielded as it is, and declared as float16")
    assert "torch" not in sys.modules
    if "numpy" not in sys.argv[1]:
        import numpy
        print(json.dumps({
            name: [str(numpy.asarray(t).dtype), t.shape,
                   numpy.asarray(t).tobytes().hex()]
            for name, t in list(source)}))
        assert "torch" not in sys.modules
""")


@pytest.mark.parametrize("layout", ["file", "shards", "gguf"])
@pytest.mark.parametrize("blocked", ["torch", "torch,numpy"])
def test_b6_a_file_is_sent_and_read_where_there_is_no_torch(
    server: Any, tmp_path: Path, layout: str, blocked: str
) -> None:
    path = make(tmp_path, layout, 2)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, blocked, server.url, str(path)],
        capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert server.checksums() == digests(path)
    if "numpy" in blocked:
        return
    seen = json.loads(done.stdout)
    wanted = dict(FileSource(path))
    assert list(seen) == list(wanted)
    for name, (dtype, shape, data) in seen.items():
        assert dtype == ("float32" if layout == "gguf" else "|V2")
        assert tuple(shape) == wanted[name].shape
        raw = wanted[name].reshape(-1).view(torch.uint8).numpy()
        assert bytes.fromhex(data) == raw.tobytes()
