#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Check the style: ruff's rules and format, and the subjects of the commits. This takes a minute and needs no set-up.
set -euo pipefail
cd "$(dirname "$0")/.."
FIRST=982181d  # check only the subjects of later commits

ruff=.venv/bin/ruff
if [ ! -x $ruff ]; then  # a machine without our environment, such as CI's first job
    python3 -m pip install -q "$(grep '^ruff==' requirements.txt)"
    ruff=ruff
fi
$ruff check .
$ruff format --check .

if git cat-file -e $FIRST 2>/dev/null; then
    bad=$(git log --no-merges --format='%h %s' $FIRST..HEAD | awk '
        { hash = $1; sub(/^[^ ]+ /, ""); verb = $0; sub(/^[a-z_]+: /, "", verb); sub(/ .*/, "", verb) }
        length > 72 { print hash ": " length " characters, 72 at most: " $0 }
        /\.$/ { print hash ": ends with a full stop: " $0 }
        verb !~ /^[A-Za-z][a-z]+$/ { print hash ": does not begin with a verb: " $0 }')
    if [ -n "$bad" ]; then
        printf 'Error: these commits have subjects that do not read as "worker: skip the extra forward in bypass mode" does:\n%s\n' "$bad" >&2
        exit 1
    fi
fi
