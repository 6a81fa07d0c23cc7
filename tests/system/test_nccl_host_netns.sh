#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ctest: labels=deep timeout=120 serial
# libferry_nccl_host between hosts: loopback is the default and does not
# reach over, the setting nccl_host_address on rank 0 alone does.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/netns_hosts.sh"
driver=$FERRY_BUILD_DIR/tests/nccl_driver_main
folder=${TMPDIR:-/tmp}

netns_open 2

# group NAME SETTING…: three ranks on three hosts; true when all are ok.
group() {
    local name=$1 rank pids="" bad=0
    shift
    for rank in 0 1 2; do
        netns_in $rank env "$@" "$driver" rank $rank 3 "$folder/id-$name" \
            >"$folder/$name-$rank" 2>&1 &
        pids="$pids $!"
    done
    for rank in $pids; do
        wait "$rank" || bad=1
    done
    return $bad
}

fail() {
    echo "failed: $1"
    cat "$folder"/*-[0-2]
    exit 1
}

group reached FERRY_NCCL_HOST_TIMEOUT_MS=20000 \
    FERRY_NCCL_HOST_ADDRESS="$(netns_address 0)" ||
    fail "the ranks did not meet at $(netns_address 0)"
group loopback FERRY_NCCL_HOST_TIMEOUT_MS=1500 &&
    fail "loopback was reached from another host"
grep -q "rank 1, 2 did not come" "$folder/loopback-0" ||
    fail "rank 0 does not name who is missing"
echo "three hosts meet at $(netns_address 0)"
