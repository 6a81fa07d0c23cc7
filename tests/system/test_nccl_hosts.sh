#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ctest: timeout=60 serial
# One push over `nccl` from a trainer's host to servers on two others, and a
# second one with other weights: both hold what was sent. The long form is
# test_nccl_netns.sh.
set -u
cd "$FERRY_SOURCE_DIR/tests/system" || exit 1
. ./netns_hosts.sh
. ./netns_fleet.sh

netns_open 2
fleet_models small || fail "no models"
fleet_start 1
fleet_start 2
fleet_push a "1 2" || fail "push a: $fleet_said"
fleet_holds a "1 2"
fleet_push b "1 2" || fail "push b: $fleet_said"
fleet_holds b "1 2"
echo "good"
