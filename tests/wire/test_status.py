# SPDX-License-Identifier: Apache-2.0
"""docs/status.md tells of every contract id and of the cases, in known words,
and each test that it names exists."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(os.environ.get("FERRY_SOURCE_DIR", Path(__file__).parents[2]))
STATUS = ROOT / "docs" / "status.md"

COUNTS = {"A": 3, "B": 10, "C": 8, "D": 6, "E": 8, "F": 5, "G": 5, "H": 5,
          "I": 3, "J": 8}
IDS = [f"{letter}{k}" for letter, n in COUNTS.items() for k in range(1, n + 1)]
CASES = (
    "01 05 06 07 08 09 10 11 12 13 14 15 16 17 18 19 20 21 23 24 26 27 28 29 30 "
    "31 32 34 35 36 37 38 42 43 45 47 48 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65"
).split()
# "works (C); not yet (Python)"
PART = r"(?:works|partly|not yet)(?: \([^()]+\))?"
STATE = re.compile(rf"{PART}(?:; {PART})*")
TEST = re.compile(r"`([\w/.-]+)(?:::(\w+))?`")


def rows(pattern: str) -> list[list[str]]:
    """The cells of the table rows whose first cell matches."""
    found = []
    for line in STATUS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and re.fullmatch(pattern, cells[0]):
            found.append(cells)
    return found


def check_tests(name: str, cell: str) -> list[str]:
    """What is wrong with the tests that a cell names."""
    wrong = []
    for file, test in TEST.findall(cell):
        path = ROOT / "tests" / file
        if not path.is_file():
            wrong.append(f"{name}: there is no tests/{file}")
            continue
        text = path.read_text()
        if path.suffix == ".c" and test:
            there = re.search(rf"(?:cmocka_unit_test\w*|CASE)\(\s*{test}\b", text)
        elif path.suffix == ".py" and test:
            there = re.search(rf"^def {test}\(", text, re.M)
        else:
            there = path.suffix == ".sh" and not test
        if not there:
            wrong.append(f"{name}: tests/{file} has no test {test or '(named)'}")
    return wrong


def test_every_contract_id_has_one_row():
    assert [row[0] for row in rows(r"[A-J]\d+")] == IDS


def test_states_are_known_and_all_but_not_yet_show_a_test():
    wrong = []
    for row in rows(r"[A-J]\d+"):
        if len(row) != 4:
            wrong.append(f"{row[0]}: {len(row)} cells instead of 4")
            continue
        name, state, tests, missing = row
        if not STATE.fullmatch(state):
            wrong.append(f"{name}: state is {state!r}")
        if ("works" in state or "partly" in state) and not TEST.search(tests):
            wrong.append(f"{name}: is said to work, and no test shows it")
        if state != "works" and not missing:
            wrong.append(f"{name}: what is missing is not said")
        if "::" in missing:
            wrong.append(f"{name}: a test is named as missing")
    assert not wrong, "\n".join(wrong)


def test_cases_are_complete():
    wrong = []
    seen = [row[0] for row in rows(r"O-\d\d")]
    assert seen == [f"O-{k}" for k in CASES]
    for row in rows(r"O-\d\d"):
        if len(row) != 3:
            wrong.append(f"{row[0]}: {len(row)} cells instead of 3")
        elif not TEST.search(row[1]) and not row[2].startswith("not yet"):
            wrong.append(f"{row[0]}: no test is named, and not why")
    assert not wrong, "\n".join(wrong)


def test_the_tests_that_are_named_exist():
    wrong = []
    for row in rows(r"[A-J]\d+"):
        wrong += check_tests(row[0], row[2])
    for row in rows(r"O-\d\d"):
        wrong += check_tests(row[0], row[1])
    assert not wrong, "\n".join(wrong)
