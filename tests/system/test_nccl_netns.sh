#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ctest: labels=deep timeout=300 serial
# A trainer and servers on 1, 2 and 4 hosts over links of their own, `nccl`:
# every server holds what was sent (ferry verify), the trainer's link carries
# the bytes once however many hosts there are, also when a host has two ranks
# or two replicas; by `tcp` and, over TCP, by `ucx`. A link that is cut in
# mid-round ends the push within its bound, by an error that names a peer;
# healed, the next push works.
set -u
cd "$FERRY_SOURCE_DIR/tests/system" || exit 1
. ./netns_hosts.sh
. ./netns_fleet.sh

# Namespaces share one kernel, where UCX would find shared memory.
export UCX_TLS=tcp,self
netns_open 4 "${FERRY_NETNS_MBIT:-1000}"
fleet_models large || fail "no models"
bytes=$(stat -c %s "$TMPDIR/a/model.safetensors")
fleet_start 1
fleet_start 2
fleet_start 3 --data-parallel-size 2
fleet_start 4 --tensor-parallel-size 2

# ---- shaped links, 1, 2 and 4 hosts ----

# once MODEL HOSTS: the push works, and its bytes leave the trainer once: a
# tenth more for headers and for the calls.
once() {
    local before sent
    before=$(fleet_sent 0)
    fleet_push "$1" "$2" --json || fail "push to $2: $fleet_said"
    sent=$(($(fleet_sent 0) - before))
    echo "hosts $2: the trainer sent $sent for $bytes," \
        "$(echo "$fleet_said" | grep -o '"total_ms": *[0-9.]*')"
    [ "$sent" -le $((bytes + bytes / 10)) ] ||
        fail "the trainer sent $sent bytes for $bytes"
    fleet_holds "$1" "$2"
}
once a "1"
once b "1 2"
once a "1 2 3 4"
once b "1 2 3 4"

# ---- by UCX, over TCP between the hosts ----

if "$FERRY_BIN" info --probe | grep -Eq '^ +ucx +available$'; then
    for model in a b; do
        fleet_push "$model" "1 2 3 4" --json --provider ucx --init-info \
            '{"no_progress_ms": 10000}' || fail "push by ucx: $fleet_said"
        fleet_holds "$model" "1 2 3 4"
    done
    path=$(fleet_status 4 | grep -o '"path": *"[^"]*"' | head -n 1)
    echo "by ucx: $path"
    [[ $path =~ \"ucx\ tcp ]] || fail "UCX uses something else than tcp: $path"
else
    echo "no provider ucx here"
fi

# ---- a link cut in mid-round ----

# 27 MB at 40 Mbit/s take more than five seconds.
for host in 0 3; do
    netns_shape "$host" 40 || fail "shape"
done

# cut_one HOST: host 3 or the trainer's own link goes down when a megabyte
# has passed it.
cut_one() {
    local before began took tries said result
    before=$(fleet_sent 0)
    {
        fleet_push a "1 2 3 4" --init-info '{"no_progress_ms": 3000}' \
            --timeout 60
        result=$?
        echo "$fleet_said" >"$TMPDIR/push"
        exit "$result"
    } &
    began=$SECONDS
    for tries in $(seq 1 100); do
        [ $(($(fleet_sent 0) - before)) -gt 1000000 ] && break
        sleep 0.05
    done
    netns_cut "$1"
    wait $! && fail "a push over a cut link works"
    took=$((SECONDS - began))
    said=$(grep -E '^ferry push: ' "$TMPDIR/push")
    echo "cut of host $1: $took s: $said"
    [ "$took" -le 30 ] || fail "the push took $took s to fail"
    echo "$said" | tail -n 1 | grep -Eq 'rank [0-9]|10\.79\.0\.[0-9]+' ||
        fail "the error names no peer: $said"
    netns_heal "$1"
    # What the servers still wait for ends by the same bound.
    for tries in 1 2 3; do
        fleet_push b "1 2 3 4" && break
        echo "again: $fleet_said"
        [ "$tries" -lt 3 ] || fail "the push after healing: $fleet_said"
        sleep 5
    done
    fleet_holds b "1 2 3 4"
}
cut_one 3
cut_one 0
echo "good"
