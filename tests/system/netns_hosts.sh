# SPDX-License-Identifier: Apache-2.0
# Hosts made of network namespaces: a trainer (host 0) and workers' hosts 1 …,
# each with one link to a bridge. Sourced by tests:
#   netns_open N [MBIT]   makes them, every link held to MBIT; skips the test
#                         with the reason where that is not permitted
#   netns_name H, netns_address H     of a host
#   netns_in H COMMAND…   runs a command there
#   netns_shape H MBIT    holds its link to another rate
#   netns_cut H, netns_heal H         takes its link down and up
#   netns_close           removes all; also done on every exit
# Run by itself, for programs that are not shell:
#   netns_hosts.sh N [MBIT]   prints "NAME ADDRESS" of each host and "open",
#                             and removes all when its input ends
# The bridge has a namespace of its own, so that the machine's own network
# rules do not reach it, and nothing is left in the machine's namespace.

netns_tag="" netns_count=0

netns_skip() {
    echo "skipped: $1"
    exit 77
}

netns_name() { echo "$netns_tag$1"; }
netns_address() { echo "10.79.0.$((10 + $1))"; }

netns_in() {
    local host=$1
    shift
    ip netns exec "$(netns_name "$host")" "$@"
}

# What still runs there would keep a removed namespace alive.
netns_close() {
    local name pid
    [ -n "$netns_tag" ] || return 0
    for name in $(seq 0 "$netns_count") s; do
        name=$netns_tag$name
        for pid in $(ip netns pids "$name" 2>/dev/null); do
            [ "$pid" = $$ ] || kill -9 "$pid" 2>/dev/null
        done
        ip netns del "$name" 2>/dev/null
    done
    netns_tag=""
}

# Both directions of a link.
netns_shape() {
    local host=$1 tbf="root tbf rate ${2}mbit burst 128kb latency 20ms"
    # shellcheck disable=SC2086
    netns_in "$host" tc qdisc replace dev up0 $tbf &&
        netns_in s tc qdisc replace dev "port$host" $tbf
}

netns_link() {
    local host=$1 name
    name=$(netns_name "$host")
    ip netns add "$name" && ip link add up0 netns "$name" type veth \
        peer name "port$host" netns "${netns_tag}s" &&
        netns_in s ip link set "port$host" master sw0 up &&
        netns_in "$host" ip link set lo up &&
        netns_in "$host" ip addr add "$(netns_address "$host")/24" dev up0 &&
        netns_in "$host" ip link set up0 up
}

netns_open() {
    local hosts=$1 mbit=${2:-0} host
    [ "$(id -u)" = 0 ] || netns_skip "namespaces need root"
    command -v ip >/dev/null && command -v tc >/dev/null ||
        netns_skip "no iproute2"
    netns_tag=fn${$}x netns_count=$hosts
    trap netns_close EXIT
    trap 'exit 130' INT TERM HUP
    ip netns add "${netns_tag}s" 2>/dev/null ||
        netns_skip "namespaces are not permitted"
    { netns_in s ip link add name sw0 type bridge &&
        netns_in s ip link set sw0 up; } 2>/dev/null ||
        netns_skip "no bridges here"
    for host in $(seq 0 "$hosts"); do
        netns_link "$host" 2>/dev/null || netns_skip "no veth here"
        if [ "$mbit" != 0 ]; then
            netns_shape "$host" "$mbit" 2>/dev/null || netns_skip "no tbf here"
        fi
    done
    netns_await
}

# A port of the bridge forwards soon after its link is up, not at once.
netns_await() {
    local host tries
    for host in $(seq 1 "$netns_count"); do
        for tries in $(seq 1 50); do
            netns_reaches "$host" && continue 2
            sleep 0.1
        done
        echo "failed: host $host is not reached"
        exit 1
    done
}

# A refused connection is an answer.
netns_reaches() {
    local said
    said=$(netns_in 0 timeout 1 bash -c \
        ": </dev/tcp/$(netns_address "$1")/9" 2>&1)
    [[ $said == *refused* ]]
}

netns_cut() { netns_in s ip link set "port$1" down; }

netns_heal() {
    netns_in s ip link set "port$1" up
    netns_await
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    netns_open "${1:?number of hosts}" "${2:-0}"
    for host in $(seq 0 "$netns_count"); do
        echo "$(netns_name "$host") $(netns_address "$host")"
    done
    echo open
    cat >/dev/null
fi
