#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compile scripts/requirements/*.in to requirements.txt and requirements-cuda.txt, with every package pinned. Each list is
# for x86_64 Linux with glibc 2.31 or newer (scripts/setup.sh checks that) and for Python 3.11 and 3.12. Nothing but
# .venv is installed, if it is not there.
#   bash scripts/lock.sh             apply changes of the .in files, and keep every other version
#   bash scripts/lock.sh --upgrade   take the newest versions that the .in files allow (or give another option of uv pip
#                                    compile, such as --upgrade-package NAME)
#   bash scripts/lock.sh --check     ask the package index whether both lists still resolve to the same versions;
#                                    change nothing
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/uv ] || VERL_PLATFORM=cpu bash scripts/setup.sh
check=
if [ "${1:-}" = --check ]; then check=1; shift; fi
upgrade=("$@")
sources=scripts/requirements
new=$(mktemp -d)
trap 'rm -r "$new"' EXIT

compile() {  # compile SOURCE OPTIONS...
    .venv/bin/uv pip compile -q --no-annotate --custom-compile-command "bash scripts/lock.sh" \
        --python-platform x86_64-manylinux_2_31 "$@" >/dev/null
}

lock() {  # lock NAME.txt SOURCE OPTIONS...
    local name=$1; shift
    cp "$name" "$new/$name"  # uv keeps its versions
    compile "$@" "${upgrade[@]}" --python-version 3.11 --output-file "$new/$name"
    compile "$@" --constraint "$new/$name" --python-version 3.12 --output-file "$new/3.12-$name"
    if ! diff "$new/$name" "$new/3.12-$name"; then
        echo "Error: $name: Python 3.12 needs another list than Python 3.11; see above." >&2
        exit 1
    elif [ -z "$check" ]; then
        cp "$new/$name" "$name"
    elif ! diff "$name" "$new/$name"; then
        echo "Error: $name no longer resolves to the same versions; see above." >&2
        exit 1
    fi
    echo "$name resolves for Python 3.11 and 3.12"
}
lock requirements.txt $sources/cpu.in --overrides $sources/cpu-overrides.txt --excludes $sources/cpu-excludes.txt
lock requirements-cuda.txt $sources/cuda.in
