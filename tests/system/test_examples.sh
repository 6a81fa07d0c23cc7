#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Each example does what its README says: a trainer's three rounds arrive in
# a server that is a third party's (fused, whole), and an engine from outside
# the tree carries a round, chosen by name on both sides (F1, F4).
# ctest: timeout=60
set -eu
bin="$FERRY_BUILD_DIR/examples"
fail() { echo "examples: $*"; exit 1; }
server=""
clean_up() { [ -z "$server" ] || kill "$server" 2>/dev/null || true; }
trap clean_up EXIT

[ "$(wc -l <"$FERRY_SOURCE_DIR/examples/01_trainer/trainer.c")" -le 60 ] ||
    fail "the smallest trainer has more than 60 lines"
[ "$(wc -l <"$FERRY_SOURCE_DIR/examples/02_server/server.c")" -le 120 ] ||
    fail "the smallest server has more than 120 lines"

# 01 and 02
"$bin/server" >"$TMPDIR/server.out" 2>"$TMPDIR/server.err" &
server=$!
for _ in $(seq 100); do
    [ -s "$TMPDIR/server.out" ] && break
    kill -0 "$server" 2>/dev/null ||
        fail "the server ended: $(cat "$TMPDIR/server.err")"
    sleep 0.1
done
url=$(head -n 1 "$TMPDIR/server.out")
timeout 30 "$bin/trainer" "$url" || fail "the trainer exits with $?"
# The trainer's weights are step * 1000 + their index in each tensor.
cat >"$TMPDIR/expected" <<'T'
step-1: q 1000, k 1000, v 1000, norm 1000
step-2: q 2000, k 2000, v 2000, norm 2000
step-3: q 3000, k 3000, v 3000, norm 3000
T
tail -n +2 "$TMPDIR/server.out" | cmp - "$TMPDIR/expected" ||
    fail "the server has: $(cat "$TMPDIR/server.out")"

# A backend that nobody has is refused in words, and the server lives on.
if timeout 30 "$bin/trainer" "$url" pigeon 2>"$TMPDIR/err"; then
    fail "the backend pigeon is accepted"
fi
grep -q "pigeon" "$TMPDIR/err" || fail "pigeon: $(cat "$TMPDIR/err")"
kill -0 "$server" || fail "the server is gone"

# 03
said=$(timeout 30 "$bin/custom_engine" "$bin/file_trainer.so" \
    "$bin/file_worker.so" "$TMPDIR/weights.bin") ||
    fail "custom_engine exits with $?"
[ "$said" = "1 2 3 4 5 6" ] || fail "custom_engine says: $said"
[ ! -e "$TMPDIR/weights.bin" ] || fail "the engine leaves its file behind"
if "$bin/custom_engine" "$TMPDIR/none.so" "$bin/file_worker.so" \
    "$TMPDIR/weights.bin" 2>"$TMPDIR/err"; then
    fail "a missing module is accepted"
fi
grep -q "none.so" "$TMPDIR/err" || fail "none.so: $(cat "$TMPDIR/err")"
# The wrong half: the symbol of one side is not in the module of the other.
if "$bin/custom_engine" "$bin/file_worker.so" "$bin/file_worker.so" \
    "$TMPDIR/weights.bin" 2>"$TMPDIR/err"; then
    fail "a worker module is accepted as a trainer's"
fi
grep -q "file_trainer_engine" "$TMPDIR/err" ||
    fail "wrong half: $(cat "$TMPDIR/err")"
echo "examples: ok"
