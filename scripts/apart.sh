#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run a command with a /tmp, a /dev/shm and processes of its own, as in a container, so that several runs share a machine
# (docs/clusters.md). Nothing that it reads or writes may be in /tmp. Needs root, or a kernel that lets users make
# namespaces.
#
#   CUDA_VISIBLE_DEVICES=0,1 bash scripts/apart.sh bash recipe/bapo/run_bapo_example.sh [key=value ...]
#
# The exit code is the command's. SIGINT, SIGTERM and SIGHUP go to the command as SIGTERM.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '3,/^set /{/^set /d; s/^# \{0,1\}//; p}' "$0" >&2; exit 1; }
fail() { echo "Error: $*" >&2; exit 1; }
for path in "$PWD" "OUTPUT_DIR=${OUTPUT_DIR:-}" "MODEL_PATH=${MODEL_PATH:-}" "TRAIN_FILE=${TRAIN_FILE:-}" \
    "TEST_FILE=${TEST_FILE:-}" "BAPO_VENV=${BAPO_VENV:-}" "HF_HOME=${HF_HOME:-}" "$@"; do
    [[ $path =~ (^|[=,[])/tmp(/|$|[],]) ]] || continue
    fail "$path is in /tmp, which the command would not see and whose new files would be lost: use another folder."
done
apart=(unshare --mount --pid --fork --mount-proc)
[ "$(id -u)" = 0 ] || apart+=(--user --map-root-user)
"${apart[@]}" true ||
    fail "no namespaces here (above is why): start it as root, or use a container with a /tmp and /dev/shm of its own."
folder=$(mktemp -d /var/tmp/apart.XXXXXX)
trap 'rm -rf "$folder"' EXIT
"${apart[@]}" bash -c \
    'mount --bind "$0" /tmp && mount -t tmpfs tmpfs /dev/shm && exec "$@"' "$folder" "$@" &
pid=$! status=0
trap 'pkill -TERM -P $pid || true' INT TERM HUP
wait $pid || status=$?
while kill -0 $pid 2>/dev/null; do status=0; wait $pid || status=$?; done  # the first wait ends with the signal
exit "$status"
