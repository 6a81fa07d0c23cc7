#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants one fault at a time and shows that a named test catches it.

usage: mutants.py [NAME...]

tests/mutants/*.json each hold a list of {"name", "file", "old", "new",
"test"}: `old`, which must occur exactly once in `file`, becomes `new`, and
the ctest test `test` must then fail, having passed before. Works on a copy
of the tree under build/mutants, so the checkout is not touched.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOME = ROOT / "build" / "mutants"
TREE, BUILD = HOME / "tree", HOME / "out"


def copy_tree():
    """The tracked and the new files. One that is the same already keeps its
    time, so a second run compiles only what changed; one that differs gets
    a new time, so that no object of a mutant outlives it."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others",
         "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True).stdout
    names = {n for n in listing.decode().split("\0")
             if n and (ROOT / n).is_file()}
    if TREE.exists():
        for path in TREE.rglob("*"):
            if path.is_file() and str(path.relative_to(TREE)) not in names:
                path.unlink()
    for name in names:
        source, target = ROOT / name, TREE / name
        if target.exists() and target.read_bytes() == source.read_bytes():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        shutil.copymode(source, target)


def build(test=None):
    """Builds everything, or what one C test and what it opens need."""
    command = ["cmake", "--build", str(BUILD), "-j",
               os.environ.get("FERRY_JOBS", str(os.cpu_count()))]
    folder, _, noun = (test or "").partition("_")
    if (TREE / "tests" / folder / f"test_{noun}.c").exists():
        command += ["--target", test, "build_support"]
    return subprocess.run(command, capture_output=True, text=True)


def passes(test):
    """True or False, or None when there is no such test."""
    done = subprocess.run(
        ["ctest", "--test-dir", str(BUILD), "--no-tests=error",
         "-R", f"^{test}$"], capture_output=True, text=True)
    if "No tests were found" in done.stdout + done.stderr:
        return None
    return done.returncode == 0


def configure():
    hints = sorted((ROOT / "build" / "venv").glob(
        "lib/python3*/site-packages/libggml/lib*/cmake/ggml"))
    command = ["cmake", "-S", str(TREE), "-B", str(BUILD), "-G", "Ninja",
               "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
               "-DFERRY_EXTRA_CFLAGS=-Wno-error"]
    if hints:
        command.append(f"-Dggml_DIR={hints[-1]}")
    python = ROOT / "build" / "venv" / "bin" / "python3"
    if python.exists():
        command.append(f"-DFERRY_PYTHON={python}")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def try_mutant(mutant):
    """None when the named test catches it, else what went wrong."""
    path = TREE / mutant["file"]
    if not path.exists():
        return f"{mutant['file']} is not there"
    text = path.read_text()
    times = text.count(mutant["old"])
    if times != 1:
        return f"the text to replace occurs {times} times"
    path.write_text(text.replace(mutant["old"], mutant["new"]))
    try:
        built = build(mutant["test"])
        if built.returncode != 0:
            return "does not build:\n" + built.stdout[-2000:]
        if passes(mutant["test"]):
            return f"{mutant['test']} still passes"
        return None
    finally:
        path.write_text(text)


def main():
    wanted = set(sys.argv[1:])
    mutants = [mutant
               for file in sorted((ROOT / "tests" / "mutants").glob("*.json"))
               for mutant in json.loads(file.read_text())]
    if wanted:
        mutants = [m for m in mutants if m["name"] in wanted]
    if not mutants:
        sys.exit("mutants: none to try")
    HOME.mkdir(parents=True, exist_ok=True)
    copy_tree()
    configure()
    built = build()
    if built.returncode != 0:
        print(built.stdout[-4000:])
        sys.exit("mutants: the unchanged tree does not build")
    alive = 0
    for test in sorted({m["test"] for m in mutants}):
        if not passes(test):
            sys.exit(f"mutants: {test} does not pass on the unchanged tree")
    for mutant in mutants:
        wrong = try_mutant(mutant)
        alive += wrong is not None
        print(f"mutant {mutant['name']}: "
              + (wrong or f"caught by {mutant['test']}"), flush=True)
    print(f"{len(mutants) - alive} caught, {alive} not")
    sys.exit(alive != 0)


if __name__ == "__main__":
    main()
