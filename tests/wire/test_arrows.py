# SPDX-License-Identifier: Apache-2.0
"""Includes point one way: base <- core <- {sources, clients, comm, device}
<- backends <- {model, serve} <- cli. Backends never include each other, and
an installed header includes installed headers only."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
SRC = ROOT / "src"

MIDDLE = {"sources", "clients", "comm", "device"}
# What the files of a room may include, beside their own room and
# include/ferry. `device` and `comm` carry bytes for the others of the middle
# row.
MAY = {
    "base": set(),
    "core": {"base"},
    "device": {"base", "core"},
    "comm": {"base", "core", "device"},
    "sources": {"base", "core", "comm", "device"},
    "clients": {"base", "core"},
    "backends": {"base", "core"} | MIDDLE,
    "model": {"base", "core", "backends"} | MIDDLE,
    "serve": {"base", "core", "backends", "model"} | MIDDLE,
    "cli": {"base", "core", "model", "serve"} | MIDDLE,
    "nccl_host": {"base", "core", "comm", "device"},
}
THIRD_PARTY = {
    # header: the rooms that may include it
    "ggml": {"model", "serve", "sources"},
    "gguf.h": {"model", "sources"},
    "microhttpd.h": {"serve"},
    "curl/": {"clients"},
    "openssl/": {"base", "serve", "model"},
    "pcre2.h": {"model", "serve"},
}


def includes(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        found = re.match(r'\s*#\s*include\s+(["<])([^">]+)[">]', line)
        if found:
            yield number, found.group(1), found.group(2)


def sources():
    for path in sorted(SRC.rglob("*.[ch]")):
        yield path, path.relative_to(SRC).parts


def resolve(path, name):
    """The room path of a quoted include: from src, or beside the file."""
    for base in (SRC, path.parent):
        if (base / name).is_file():
            return (base / name).resolve().relative_to(SRC).parts
    return None


def test_rooms_include_one_way():
    wrong = []
    for path, parts in sources():
        room = parts[0]
        for number, quote, name in includes(path):
            where = f"{path.relative_to(ROOT)}:{number}: {name}"
            if quote != '"':
                continue
            target = resolve(path, name)
            if target is None:
                wrong.append(where + " is in no room")
            elif target[0] != room and target[0] not in MAY[room]:
                wrong.append(where + f": {room} may not see {target[0]}")
            elif room == target[0] == "backends" and target[1] != parts[1]:
                wrong.append(where + ": one backend sees another")
    assert not wrong, "\n".join(wrong)


def test_every_room_is_known():
    rooms = {p.name for p in SRC.iterdir() if p.is_dir()}
    assert rooms <= set(MAY), rooms - set(MAY)


def test_third_party_headers_stay_in_their_rooms():
    wrong = []
    for path, parts in sources():
        for number, _, name in includes(path):
            for header, rooms in THIRD_PARTY.items():
                if name.startswith(header) and parts[0] not in rooms:
                    wrong.append(f"{path.relative_to(ROOT)}:{number}: {name}")
    assert not wrong, "\n".join(wrong)


def test_ggml_stays_out_of_libferry():
    for path, parts in sources():
        if parts[0] == "sources" and not path.name.startswith("gguf"):
            for number, _, name in includes(path):
                assert not name.startswith(("ggml", "gguf.h")), (path, number)


def test_installed_headers_include_installed_headers():
    wrong = []
    for path in sorted((ROOT / "include" / "ferry").glob("*.h")):
        for number, quote, name in includes(path):
            if quote == '"' or ("/" in name and
                                not name.startswith("ferry/")):
                wrong.append(f"{path.name}:{number}: {name}")
    assert not wrong, "\n".join(wrong)


LIBRARY = {"base", "core", "device", "comm", "sources", "clients",
           "backends", "model", "nccl_host"}


def calls(names, text):
    """Which of the functions are called, outside comments and strings."""
    text = re.sub(r'/\*.*?\*/|"(\\.|[^"\\])*"', " ", text, flags=re.S)
    return sorted(set(re.findall(rf"(?<![\w.>])({names})\s*\(", text)))


def test_settings_are_read_in_one_place():
    for path, parts in sources():
        if parts != ("base", "config.c"):
            found = calls("getenv|secure_getenv", path.read_text())
            assert not found, path


def test_the_library_never_exits_prints_or_installs_handlers():
    wrong = []
    for path, parts in sources():
        if parts[0] in LIBRARY and parts != ("base", "log.c"):
            found = calls("exit|_exit|abort|printf|vprintf|fprintf|puts|fputs|"
                          "perror|signal|sigaction|atexit", path.read_text())
            if found:
                wrong.append(f"{path.relative_to(ROOT)}: {found}")
    assert not wrong, "\n".join(wrong)


def test_basenames_are_unique():
    seen = {}
    for path, parts in sources():
        assert path.name not in seen, (path, seen[path.name])
        seen[path.name] = path
