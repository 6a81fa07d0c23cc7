#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs one test command with a temp folder of its own, which is removed
# afterwards whatever happened. Short, because a Unix socket's path has at
# most 107 bytes.
set -u
tmp=$(mktemp -d /tmp/ferry-t.XXXXXX) || exit 1
trap 'rm -rf "$tmp"' EXIT
export TMPDIR="$tmp"
"$@"
