#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Try the two lines and the monitor with another verl, on a CPU: put it in front of the verl of an environment, whose other
# packages stay, and run the tests of what the lines load. 14 to 20 minutes on two cores. Into that environment nothing
# is installed.
#
#   bash scripts/try_verl.sh WHERE    a release such as 0.8.0, or a folder that holds verl/: a checkout, or site-packages
#
# The updates are those of verl's own actor with the config of verl.trainer.main_ppo. Their bounds are compared with those
# of a literal search over all tokens of all ranks, and weights of a monitored run with those of one without the line, bit
# for bit. Rollouts, Ray and a GPU are not part of this. The exit code is 1 if a row failed. Logs: runs/try_verl/.
# The environment is ours (.venv, which is set up first), or BAPO_VENV, such as the one in which your verl runs; it needs
# pytest, pytest-xdist and hypothesis. A worker of your own that only your run imports is not seen here: look for "BAPO:" at
# the start of its output. Tests that are skipped are of what a verl does not have; the logs name them.
set -euo pipefail
[ $# = 1 ] && [[ $1 != -* ]] || { sed -n '3,/^set /{/^set /d; s/^# \{0,1\}//; p}' "$0" >&2; exit 1; }
fail() { echo "Error: $*" >&2; exit 1; }
where=$1
release='' folder=''
if [[ $where =~ ^[0-9]+\.[0-9] ]]; then release=$where; else
    folder=$(realpath -m "$where")
    [ -f "$folder/verl/__init__.py" ] ||
        fail "$where is neither a release of verl, such as 0.8.0, nor a folder that holds verl/__init__.py."
fi
cd "$(dirname "$0")/.."
export VERL_PLATFORM=cpu
export CUDA_VISIBLE_DEVICES=
[ -n "${BAPO_VENV:-}" ] && [ -z "$release" ] || bash scripts/setup.sh
python=${BAPO_VENV:-$PWD/.venv}/bin/python
"$python" -c 'import pytest, xdist, hypothesis' || fail "$python lacks what the tests need, see above."
echo "Ten rows; the whole takes 14 to 20 minutes on two cores."
logs=$PWD/runs/try_verl
rm -rf "$logs"
mkdir -p "$logs"
if [ -n "$release" ]; then
    folder=$logs/verl
    .venv/bin/uv pip install -q --python "$python" --no-deps --target "$folder" "verl==$release" ||
        fail "verl==$release cannot be installed, see above."
fi
export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
status=0
row() {  # row NAME RESULT TEXT
    [ "$2" != failed ] || status=1
    printf '%-8s %-28s %s\n' "$2" "$1" "$3"
}
tests() {  # tests NAME ARGUMENTS...: a row with what pytest says at its end
    local name=$1 log="$logs/$1.log" result=ok
    shift
    "$python" -m pytest -q -rs -n 2 --dist loadfile -p no:cacheprovider "$@" >"$log" 2>&1 || result=failed
    row "$name" $result "$(tail -n 1 "$log" | tr -d =)"
    [ $result = ok ] || grep -E '^(FAILED|ERROR)' "$log" | cut -c 1-200 | head -n 5 || true
}
about='import verl; from verl.workers import engine_workers as w
from recipe.bapo.hook.install import install_worker; install_worker()
place = "an attribute" if hasattr(w.ActorRolloutRefWorker, "actor_worker_cls") else "its loss"
print(verl.__version__, "in", verl.__path__[0] + "; the actor gets our worker by", place)'
if said=$("$python" -W ignore -c "$about" 2>"$logs/verl.log"); then row verl ok "$(tail -n 1 <<<"$said")"; else
    row verl failed "$(tail -n 1 "$logs/verl.log")"
fi
worker=tests/actor
tests 'unit tests of the hook' tests/unit/test_{install,policy_loss,worker,monitor,sent_weights,engine_state,record}.py
tests 'two lines, FSDP2, one rank' $worker/test_real_worker.py -k 'FSDP2 and one'
tests 'two lines, FSDP2, two ranks' $worker/test_real_worker.py -k 'FSDP2 and two'
tests 'two lines, FSDP1, two ranks' $worker/test_real_worker.py -k 'FSDP1 and two'
tests 'few extra forwards, exact' $worker/test_exact_updates.py
tests 'monitor, FSDP2, one rank' $worker/test_monitored_updates.py -k 'FSDP2 and one'
tests 'monitor, FSDP2, two ranks' $worker/test_monitored_updates.py -k 'FSDP2 and two'
tests 'monitor, FSDP1, two ranks' $worker/test_monitored_updates.py -k 'FSDP1 and two'
example=recipe/bapo/example/files
said=$("$python" -W ignore -m recipe.bapo.preflight actor_rollout_ref.model.path=$example/model \
    data.train_files=$example/train.parquet data.val_files=$example/test.parquet algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 2>"$logs/preflight.log" || true)
if [[ $said = skipped* ]]; then row preflight skipped "$(cut -c 27- <<<"$said")"
elif failed=$(grep "^failed  *verl's config" <<<"$said"); then row preflight failed "$failed"
elif [[ $said = *versions* ]]; then row preflight ok "$(grep -c . <<<"$said") rows"
else row preflight failed "$(tail -n 1 "$logs/preflight.log")"; fi
exit $status
