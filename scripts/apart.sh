#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run a command with a /tmp, a /dev/shm and processes of its own, as in a container, so that several runs share a machine
# (docs/running.md). Its output folder must not be in /tmp. Needs root, or a kernel that lets users make namespaces.
#
#   CUDA_VISIBLE_DEVICES=0,1 bash scripts/apart.sh bash recipe/bapo/run_bapo_example.sh [key=value ...]
#
# The exit code is the command's. SIGINT, SIGTERM and SIGHUP go to the command as SIGTERM.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '3,/^set /{/^set /d; s/^# \{0,1\}//; p}' "$0" >&2; exit 1; }
user=()
[ "$(id -u)" = 0 ] || user=(--user --map-root-user)
folder=$(mktemp -d /var/tmp/apart.XXXXXX)
trap 'rm -rf "$folder"' EXIT
unshare "${user[@]}" --mount --pid --fork --mount-proc bash -c \
    'mount --bind "$0" /tmp && mount -t tmpfs tmpfs /dev/shm && exec "$@"' "$folder" "$@" &
pid=$! status=0
trap 'pkill -TERM -P $pid || true' INT TERM HUP
wait $pid || status=$?
while kill -0 $pid 2>/dev/null; do status=0; wait $pid || status=$?; done  # the first wait ends with the signal
exit "$status"
