#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ctest: labels=no_asan,no_tsan timeout=120 serial
# The broadcast benchmark, with little of everything: every case gives rows of
# the agreed form, the bytes that arrive are compared, and no figure is held
# to anything. Peers in Python, which take long to start, are left out.
set -u
bench=$FERRY_SOURCE_DIR/bench/bench_broadcast.py
"$FERRY_PYTHON" "$bench" --quick --json \
    --peers openmpi,mpich,ucx,stream >"$TMPDIR/rows" || {
    echo "failed: exit $?"
    cat "$TMPDIR/rows"
    exit 1
}
"$FERRY_PYTHON" - "$TMPDIR/rows" <<'PY'
import json
import sys

rows = [json.loads(line) for line in open(sys.argv[1])]
keys = {"bench", "case", "value", "unit", "limit", "peers", "goal", "ok"}
for row in rows:
    assert keys <= set(row) and row["bench"] == "broadcast", row
    assert row["ok"] is True and row["goal"] is None, row
    assert "skipped" in row or row["value"] > 0, row
cases = {row["case"].split(",")[0].split(" ")[0] for row in rows}
assert {"smol", "1", "veth", "shaped", "overlap", "empty"} <= cases, cases
print(f"good: {len(rows)} rows, "
      f"{sum('skipped' in row for row in rows)} skipped")
PY
