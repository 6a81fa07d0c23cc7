#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Line and branch coverage of a room, from what gcov counted.

usage: coverage.py BUILD_DIR ROOM [--least PERCENT]

Prints one row a file and the total, and fails when either total is below
--least. Lines that only run when the program itself is wrong (the false
branch of an assert) count like all others.
"""

import argparse
import gzip
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def counters(build, room):
    """{file: {line: count}} and {file: [branch counts]}."""
    lines, branches = {}, {}
    for data in sorted(build.glob(f"CMakeFiles/*.dir/{room}/*.gcda")):
        text = subprocess.run(
            ["gcov", "--json-format", "--branch-probabilities", "--stdout",
             str(data)], check=True, capture_output=True).stdout
        if text[:2] == b"\x1f\x8b":
            text = gzip.decompress(text)
        for part in text.splitlines():
            for file in json.loads(part)["files"]:
                path = pathlib.Path(build, file["file"]).resolve()
                if room not in str(path) or path.suffix != ".c":
                    continue
                name = str(path.relative_to(ROOT))
                own = lines.setdefault(name, {})
                arms = branches.setdefault(name, {})
                for line in file["lines"]:
                    number = line["line_number"]
                    own[number] = own.get(number, 0) + line["count"]
                    for i, arm in enumerate(line["branches"]):
                        key = (number, i)
                        arms[key] = arms.get(key, 0) + arm["count"]
    return lines, branches


def percent(hit, all_):
    return 100.0 * hit / all_ if all_ else 100.0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("room")
    parser.add_argument("--least", type=float, default=0.0)
    args = parser.parse_args()

    lines, branches = counters(args.build.resolve(), args.room)
    if not lines:
        sys.exit(f"coverage: no counters of {args.room} under {args.build}")
    total = [0, 0, 0, 0]
    print(f"{'file':<36} {'lines':>16} {'branches':>18}")
    for name in sorted(lines):
        row = [sum(c > 0 for c in lines[name].values()), len(lines[name]),
               sum(c > 0 for c in branches[name].values()),
               len(branches[name])]
        total = [a + b for a, b in zip(total, row)]
        show(name, row)
    show(args.room, total)
    worst = min(percent(*total[:2]), percent(*total[2:]))
    if worst < args.least:
        sys.exit(f"coverage: {worst:.1f} % is below {args.least:.1f} %")


def show(name, row):
    print(f"{name:<36} {row[0]:>5}/{row[1]:<5}{percent(*row[:2]):6.1f} %"
          f" {row[2]:>5}/{row[3]:<5}{percent(*row[2:]):6.1f} %")


if __name__ == "__main__":
    main()
