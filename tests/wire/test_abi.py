# SPDX-License-Identifier: Apache-2.0
"""What libferry shows to the linker is what its headers declare.

The map file, the exports and the headers name the same functions; the
library's own name and the libraries it asks for are the promised ones; each
module shows its entry function and nothing else.
"""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "lib"))
import public_symbols  # noqa: E402

LIB = pathlib.Path(os.environ["FERRY_BUILD_DIR"]) / "lib"
# The C library's own parts: what is in libm or libpthread on one release is
# in libc on another.
SYSTEM = {"libc", "libm", "libpthread", "libdl", "librt", "ld-linux-x86-64",
          "ld-linux-aarch64"}
PUBLIC_NEEDED = {"libcrypto", "libcurl", "libjansson"}
WORKER_NEEDED = {"libferry", "libjansson", "libcrypto", "libmicrohttpd",
                 "libpcre2-8", "libggml", "libggml-base", "libggml-cpu"}


def run(*command):
    return subprocess.run(command, check=True, text=True,
                          capture_output=True).stdout


def exports(library):
    """{name: version} of what a library defines for others."""
    found = {}
    for line in run("nm", "-D", "--defined-only", str(library)).splitlines():
        kind, name = line.split()[-2:]
        if kind in "TDRBVWi":
            name, _, version = name.partition("@")
            found[name] = version.lstrip("@")
    return found


def dynamic(library, tag):
    return re.findall(rf"\({tag}\).*\[(.*)\]",
                      run("readelf", "-d", str(library)))


def stems(names):
    return {re.sub(r"\.so.*", "", name) for name in names}


def instrumented():
    return bool(os.environ.get("FERRY_SANITIZE"))


def test_map_lists_what_headers_declare():
    assert public_symbols.map_symbols() == public_symbols.public_symbols(), \
        "run scripts/lib/public_symbols.py --map"


def test_exports_are_the_declared_functions():
    shown = exports(LIB / "libferry.so")
    public = sorted(n for n, v in shown.items() if v == "FERRY_0")
    assert public == public_symbols.public_symbols()


def test_other_exports_are_marked_private():
    for name, version in exports(LIB / "libferry.so").items():
        if version != "FERRY_0":
            assert version == "FERRY_PRIVATE" and name.startswith("ferry__") \
                or name in ("FERRY_0", "FERRY_PRIVATE"), (name, version)


def test_soname():
    assert dynamic(LIB / "libferry.so", "SONAME") == ["libferry.so.0"]


def test_libferry_asks_for_few_libraries():
    if instrumented():
        return
    needed = stems(dynamic(LIB / "libferry.so", "NEEDED"))
    assert needed - SYSTEM <= PUBLIC_NEEDED, needed


def test_worker_asks_for_its_libraries():
    worker = LIB / "libferry_worker.so"
    if instrumented() or not worker.exists():
        return
    needed = stems(dynamic(worker, "NEEDED"))
    assert needed - SYSTEM <= WORKER_NEEDED, needed


def test_nothing_is_left_unresolved():
    if instrumented():
        return
    for library in sorted(LIB.glob("*.so")) + sorted(LIB.glob("ferry/*.so")):
        done = subprocess.run(["ldd", "-r", str(library)], text=True,
                              capture_output=True)
        wrong = [line for line in (done.stdout + done.stderr).splitlines()
                 if "undefined symbol" in line or "not found" in line]
        assert not wrong, (library.name, wrong)


def test_modules_show_their_entry_alone():
    for module in sorted((LIB / "ferry").glob("ferry_*.so")):
        shown = [n for n in exports(module) if n != "FERRY_MODULE"]
        if "_comm_" in module.stem:
            assert shown == ["ferry__provider_entry"], (module.name, shown)
            continue
        side = "source" if "_source_" in module.stem else \
            module.stem.rsplit("_", 1)[1]
        assert len(shown) == 1 and f"ferry_{side}_" in shown[0], \
            (module.name, shown)


def test_nccl_host_shows_what_its_header_declares():
    library = LIB / "libferry_nccl_host.so"
    if not library.exists():
        return
    header = (ROOT / "src" / "comm" / "nccl_abi.h").read_text()
    declared = re.findall(r"^\w[\w ]*[ *](nccl[A-Z]\w+|ferry_nccl_\w+)\(",
                          header, flags=re.M)
    shown = {n for n, v in exports(library).items() if n != v and v}
    assert shown == set(declared)
    if not instrumented():
        assert stems(dynamic(library, "NEEDED")) - SYSTEM == {"libferry"}


def test_program_does_not_link_the_worker():
    program = pathlib.Path(os.environ["FERRY_BIN"])
    if instrumented() or not program.exists():
        return
    needed = stems(dynamic(program, "NEEDED"))
    assert needed - SYSTEM <= {"libferry", "libjansson"}, needed
