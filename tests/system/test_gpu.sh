#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ctest: labels=gpu timeout=600 serial
# What needs a GPU, where there is one; elsewhere its programs are built, so
# that they do not rot, and the test is skipped with the reason.
set -eu

if [ -n "${FERRY_SANITIZE:-}" ]; then
    echo "skipped: the programs are built without sanitizers"
    exit 77
fi
exec "$FERRY_SOURCE_DIR/tests/gpu/run.sh"
