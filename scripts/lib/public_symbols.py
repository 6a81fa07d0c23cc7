#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the names that the installed headers declare, one a line.

With --map, writes them into src/libferry.map instead. A name is public when
a header of include/ferry declares it as a function or an extern object;
macros, types and static inline functions are not symbols.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAP = ROOT / "src" / "libferry.map"


def strip(text):
    """A header's text without comments, strings and preprocessor lines."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"//[^\n]*", " ", text)
    text = re.sub(r'"(\\.|[^"\\])*"', '""', text.replace('"C"', ""))
    text = text.replace("\\\n", " ")
    return "\n".join(
        line for line in text.split("\n") if not line.lstrip().startswith("#")
    )


def statements(text):
    """Top-level statements, with what is inside braces left out."""
    # The braces of extern "C" hold declarations, so they do not count.
    text = re.sub(r"\bextern\s*(\"\")?\s*\{", " ", text)
    depth, current = 0, []
    for char in text:
        if char == "{":
            depth += 1
        elif char == "}":
            if depth == 0:
                continue  # closes extern "C"
            depth -= 1
            if depth == 0 and "".join(current).lstrip().startswith("static"):
                current = []
        elif char == ";" and depth == 0:
            yield " ".join("".join(current).split())
            current = []
        elif depth == 0:
            current.append(char)


def public_symbols():
    names = set()
    for header in sorted((ROOT / "include" / "ferry").glob("*.h")):
        for line in statements(strip(header.read_text())):
            if line.startswith(("typedef", "static", "_Static_assert")):
                continue
            call = re.search(r"\b(ferry_[a-z0-9_]+)\s*\(", line)
            if call:
                names.add(call.group(1))
            elif line.startswith("extern"):
                names.add(re.search(r"(ferry_[a-z0-9_]+)(\[[^\]]*\])*$",
                                    line).group(1))
    return sorted(names)


def map_symbols():
    """Names that the map's public node lists."""
    node = re.search(r"FERRY_0 \{(.*?)\}", MAP.read_text(), re.S).group(1)
    return sorted(set(re.findall(r"\bferry_[^;\s]+(?=;)", node)))


def write_map():
    names = "".join(f"        {name};\n" for name in public_symbols())
    text = MAP.read_text()
    MAP.write_text(re.sub(
        r"(FERRY_0 \{\n    global:\n).*?(    local:)",
        lambda m: m.group(1) + names + m.group(2), text, flags=re.S))


if __name__ == "__main__":
    if sys.argv[1:] == ["--map"]:
        write_map()
    else:
        print("\n".join(public_symbols()))
