#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ctest: labels=deep timeout=180 serial
# A trainer and 1 or 4 hosts, each a network namespace on one bridge. With
# every link held to 1 Gbit/s a stream to 4 hosts may take at most 1.15 x the
# time of one to a single host and reaches 90 % of what one plain stream does;
# with two ranks a host, more processes than most machines here have cores,
# 1.3 x. The trainer sends the bytes once. The figure of links that are not
# held is only told.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/netns_hosts.sh"
driver=$FERRY_BUILD_DIR/tests/stream_driver_main
plain=$FERRY_BUILD_DIR/tests/comm_driver_main
mib=${FERRY_NETNS_MIB:-48}
root=$(netns_address 0)
netns_open 4

fail() {
    echo "failed: $1"
    exit 1
}

port=7800
# stream HOSTS RANKS_A_HOST MIB ROUNDS: the trainer alone on its host, and
# HOSTS others; prints the root's line.
stream() {
    local n=$1 each=$2 size=$3 times=$4 h k world rank=1 mine=""
    world=$((n * each + 1))
    for h in $(seq 1 "$n"); do
        for k in $(seq 1 "$each"); do
            netns_in "$h" "$driver" "$rank" "$world" "$root" "$port" \
                "$(netns_address "$h")" "$size" "$times" >&2 &
            mine="$mine $!"
            rank=$((rank + 1))
        done
    done
    netns_in 0 "$driver" 0 "$world" "$root" "$port" "$root" "$size" \
        "$times" || return 1
    for h in $mine; do wait "$h" || return 1; done
}

# One plain stream of SIZE, the best of three.
raw() {
    local best="" try at
    for at in 1 2 3; do
        netns_in 1 "$plain" raw-recv "$(netns_address 1)" $((port + at)) \
            "$1" >&2 &
        try=$(netns_in 0 "$plain" raw-send "$(netns_address 1)" \
            $((port + at)) "$1") || return 1
        best=$(printf '%s\n%s\n' "$best" "$try" | grep . | sort | head -n 1)
    done
    echo "$best"
}

field() { echo "$1" | awk -v n="$2" '{ print $n }'; }

free_raw=$(raw 256) || fail "plain stream"
port=7810
free_one=$(stream 1 1 256 5) || fail "1 host, links not held"
echo "links not held: plain $free_raw"
echo "                1 host $free_one"

for h in 0 1 2 3 4; do
    netns_shape "$h" 1000 || netns_skip "no tbf here"
done
port=7820
held_raw=$(raw "$mib") || fail "plain stream"
port=7830
one=$(stream 1 1 "$mib" 5) || fail "1 host"
port=7831
four=$(stream 4 1 "$mib" 5) || fail "4 hosts"
port=7832
pairs=$(stream 4 2 "$mib" 5) || fail "4 hosts of 2 ranks"
printf '1 Gbit/s: plain %s\n1 host    %s\n4 hosts   %s\n4 x 2     %s\n' \
    "$held_raw" "$one" "$four" "$pairs"

[ "$(field "$one" 8)" = tcp ] || fail "path of 1 host"
[ "$(field "$pairs" 8)" = tcp+shared ] || fail "path of hosts with 2 ranks"
bytes=$((mib << 20))
for line in "$one" "$four" "$pairs"; do
    [ "$(field "$line" 4)" = "$bytes" ] ||
        fail "the trainer sent $(field "$line" 4) bytes for $bytes"
done
awk -v raw="$(field "$held_raw" 2)" -v one="$(field "$one" 2)" \
    -v four="$(field "$four" 2)" -v pairs="$(field "$pairs" 2)" \
    -v free_raw="$(field "$free_raw" 2)" -v free="$(field "$free_one" 2)" '
    BEGIN {
        printf "4 hosts / 1 host %.3f, of 2 ranks %.3f, plain / 4 hosts " \
            "%.3f, not held / plain %.3f\n", four / one, pairs / one,
            raw / four, free / free_raw
        exit !(four <= 1.15 * one && pairs <= 1.3 * one && raw >= 0.9 * four)
    }' || fail "the chain is too slow"
echo "good"
