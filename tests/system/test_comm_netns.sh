#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ctest: labels=deep timeout=180 serial
# A root and 1, 2 or 4 hosts, each a network namespace on one bridge, every
# link held to 1 Gbit/s in both directions. A broadcast to 4 hosts may take
# at most 1.15 x the time of one to a single host, must reach 90 % of what one
# plain stream does, and the root sends the bytes once. A link-local IPv6
# address with its scope id is reached too (O-15).
set -u
driver=$FERRY_BUILD_DIR/tests/comm_driver_main
mib=${FERRY_NETNS_MIB:-48}
tag=fc$$
hosts="0 1 2 3 4"
pids=""

skip() {
    echo "skipped: $1"
    exit 77
}
[ "$(id -u)" = 0 ] || skip "namespaces need root"
command -v ip >/dev/null && command -v tc >/dev/null || skip "no iproute2"
ip netns add "${tag}p" 2>/dev/null || skip "namespaces are not permitted"

tear_down() {
    for p in $pids; do kill "$p" 2>/dev/null; done
    for h in $hosts; do ip netns del "$tag$h" 2>/dev/null; done
    ip netns del "${tag}p" 2>/dev/null
}
trap tear_down EXIT

# The bridge has a namespace of its own, so that the machine's own network
# rules do not reach it.
p="ip netns exec ${tag}p"
$p ip link add name sw0 type bridge || skip "no bridges here"
$p ip link set sw0 up
for h in $hosts; do
    ip netns add "$tag$h"
    ip link add "v$h" netns "$tag$h" type veth peer name "b$h" \
        netns "${tag}p" || skip "no veth here"
    $p ip link set "b$h" master sw0 up
    ip netns exec "$tag$h" sh -c "
        ip link set lo up; ip addr add 10.77.0.1$h/24 dev v$h
        ip addr add fe80::77:$h/64 dev v$h nodad; ip link set v$h up"
    ip netns exec "$tag$h" tc qdisc add dev "v$h" root tbf rate 1gbit \
        burst 128kb latency 20ms || skip "no tbf here"
    $p tc qdisc add dev "b$h" root tbf rate 1gbit burst 128kb latency 20ms
done
sleep 1

fail() {
    echo "failed: $1"
    exit 1
}

# group N: a root and N hosts; prints the root's line.
group() {
    local n=$1 h mine=""
    for h in $(seq 1 "$n"); do
        ip netns exec "$tag$h" "$driver" "$h" $((n + 1)) 10.77.0.10 7700 \
            "10.77.0.1$h" "$mib" 3 >&2 &
        mine="$mine $!"
    done
    ip netns exec "${tag}0" "$driver" 0 $((n + 1)) 10.77.0.10 7700 \
        10.77.0.10 "$mib" 3
    for h in $mine; do wait "$h" || fail "a rank of $n hosts"; done
}

seconds() { echo "$1" | awk '{ print $2 }'; }
remote() { echo "$1" | awk '{ print $4 }'; }

# The best of three, as the driver tells of a broadcast.
raw=""
for port in 7701 7702 7703; do
    ip netns exec "${tag}1" "$driver" raw-recv 10.77.0.11 "$port" "$mib" &
    pids="$pids $!"
    try=$(ip netns exec "${tag}0" "$driver" raw-send 10.77.0.11 "$port" \
        "$mib") || fail "plain stream"
    raw=$(printf '%s\n%s\n' "$raw" "$try" | grep . | sort | head -n 1)
done
one=$(group 1) || fail "1 host"
two=$(group 2) || fail "2 hosts"
four=$(group 4) || fail "4 hosts"
printf 'plain stream  %s\n1 host        %s\n2 hosts       %s\n' \
    "$raw" "$one" "$two"
printf '4 hosts       %s\n' "$four"

ip netns exec "${tag}1" "$driver" raw-recv fe80::77:1%v1 7704 1 &
pids="$pids $!"
ip netns exec "${tag}0" "$driver" raw-send "[fe80::77:1%v0]" 7704 1 ||
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
