# SPDX-License-Identifier: Apache-2.0
# `ferry serve` on hosts made of network namespaces, and a trainer that pushes
# to them over `nccl`. Sourced by tests after netns_hosts.sh:
#   fleet_models SIZE     makes $TMPDIR/a and $TMPDIR/b, one shape, other
#                         weights; SIZE small or large (26 MB)
#   fleet_start HOST [FLAGS]          a server there
#   fleet_push MODEL HOSTS [FLAGS]    from host 0; the answer in $fleet_said
#   fleet_status HOST     what the server says of itself
#   fleet_sent HOST       bytes that have left it over its link
#   fleet_holds MODEL HOSTS           every host has exactly these weights
# HOSTS is a list of numbers in one word. Every wait is bounded.

fleet_said=""

fail() {
    echo "failed: $1"
    exit 1
}

fleet_models() {
    "$FERRY_PYTHON" - "$FERRY_SOURCE_DIR/tests/reference" "$TMPDIR" "$1" <<'PY'
import sys
reference, folder, size = sys.argv[1:]
sys.path.insert(0, reference)
import checkpoints
if size == "large":
    checkpoints.BASE.update(hidden_size=512, intermediate_size=2048,
                            num_hidden_layers=4)
for seed, name in enumerate("ab"):
    checkpoints.make(f"{folder}/{name}", arch="llama", variant="gqa",
                     seed=seed, dtype="BF16")
PY
}

fleet_url() { echo "http://$(netns_address "$1"):8000"; }

fleet_start() {
    local host=$1 tries
    shift
    netns_in "$host" "$FERRY_BIN" serve "$TMPDIR/a" \
        --load-format dummy --serve-unsynced --threads 1 \
        --host "$(netns_address "$host")" --port 8000 \
        --port-file "$TMPDIR/port$host" \
        --weight-transfer-config '{"backend":"nccl"}' "$@" \
        >"$TMPDIR/serve$host" 2>&1 &
    for tries in $(seq 1 300); do
        [ -s "$TMPDIR/port$host" ] && return
        sleep 0.1
    done
    fail "host $host does not serve: $(tail -n 3 "$TMPDIR/serve$host")"
}

fleet_push() {
    local model=$1 hosts=$2 host urls=()
    shift 2
    for host in $hosts; do
        urls+=(--to "$(fleet_url "$host")")
    done
    fleet_said=$(netns_in 0 timeout 100 "$FERRY_BIN" push "$TMPDIR/$model" \
        --backend nccl --master-address "$(netns_address 0)" \
        "${urls[@]}" "$@" 2>&1)
}

fleet_holds() {
    local host said
    for host in $2; do
        said=$(netns_in 0 timeout 60 "$FERRY_BIN" verify "$TMPDIR/$1" \
            "$(fleet_url "$host")" 2>&1) ||
            fail "host $host does not hold $1: $said"
    done
}

# The server's own status, as JSON.
fleet_status() {
    netns_in 0 "$FERRY_PYTHON" - "$(fleet_url "$1")/ferry/status" <<'PY'
import sys
import urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(opener.open(sys.argv[1], timeout=10).read().decode())
PY
}

# Bytes that a host has sent over its link, and whatever else is on them.
fleet_sent() {
    netns_in "$1" cat /sys/class/net/up0/statistics/tx_bytes
}
