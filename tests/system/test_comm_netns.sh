#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ctest: labels=deep timeout=180 serial
# A root and 1, 2 or 4 hosts, each a network namespace on one bridge, every
# link held to 1 Gbit/s in both directions. A broadcast to 4 hosts may take
# at most 1.15 x the time of one to a single host, must reach 90 % of what one
# plain stream does, and the root sends the bytes once. A link-local IPv6
# address with its scope id is reached too (O-15).
set -u
source "$(dirname "${BASH_SOURCE[0]}")/netns_hosts.sh"
driver=$FERRY_BUILD_DIR/tests/comm_driver_main
mib=${FERRY_NETNS_MIB:-48}
root=$(netns_address 0)
netns_open 4 1000

fail() {
    echo "failed: $1"
    exit 1
}

# group N: a root and N hosts; prints the root's line.
group() {
    local n=$1 h mine=""
    for h in $(seq 1 "$n"); do
        netns_in "$h" "$driver" "$h" $((n + 1)) "$root" 7700 \
            "$(netns_address "$h")" "$mib" 3 >&2 &
        mine="$mine $!"
    done
    netns_in 0 "$driver" 0 $((n + 1)) "$root" 7700 "$root" "$mib" 3
    for h in $mine; do wait "$h" || fail "a rank of $n hosts"; done
}

seconds() { echo "$1" | awk '{ print $2 }'; }
remote() { echo "$1" | awk '{ print $4 }'; }

# The best of three, as the driver tells of a broadcast.
raw=""
for port in 7701 7702 7703; do
    netns_in 1 "$driver" raw-recv "$(netns_address 1)" "$port" "$mib" &
    try=$(netns_in 0 "$driver" raw-send "$(netns_address 1)" "$port" \
        "$mib") || fail "plain stream"
    raw=$(printf '%s\n%s\n' "$raw" "$try" | grep . | sort | head -n 1)
done
one=$(group 1) || fail "1 host"
two=$(group 2) || fail "2 hosts"
four=$(group 4) || fail "4 hosts"
printf 'plain stream  %s\n1 host        %s\n2 hosts       %s\n' \
    "$raw" "$one" "$two"
printf '4 hosts       %s\n' "$four"

netns_in 1 ip addr add fe80::77:1/64 dev up0 nodad
netns_in 1 "$driver" raw-recv fe80::77:1%up0 7704 1 &
netns_in 0 "$driver" raw-send "[fe80::77:1%up0]" 7704 1 ||
    fail "a link-local address"

bytes=$((mib << 20))
for line in "$one" "$two" "$four"; do
    sent=$(remote "$line")
    [ "$sent" -ge "$bytes" ] && [ "$sent" -lt $((bytes + 65536)) ] ||
        fail "the root sent $sent bytes for $bytes"
done
awk -v raw="$(seconds "$raw")" -v one="$(seconds "$one")" \
    -v four="$(seconds "$four")" 'BEGIN {
    printf "4 hosts / 1 host %.3f, plain stream / 4 hosts %.3f\n",
        four / one, raw / four
    exit !(four <= 1.15 * one && raw >= 0.90 * four) }' ||
    fail "the chain is too slow"
echo "good"
