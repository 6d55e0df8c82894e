# SPDX-License-Identifier: Apache-2.0
"""Submit a run to the Ray cluster at ``RAY_ADDRESS`` (http://HEAD:8265), and follow it. The run script calls this.

    python scripts/cluster/job.py submit NAME COMMAND...

``ray job submit`` gets COMMAND and a copy of this repository to run it in. It prints what the job prints, and ends with
0 if the job succeeded, also if it was stopped, and otherwise with 1. This file adds what Ray does not do: the job gets
the environment variables that a run reads (``FORWARDED``), and those that begin with HF_, NCCL_, GLOO_, TORCH_ or VLLM_
(``FORWARDED_KINDS``). It never gets a secret, that is a variable whose name ends in _KEY, _TOKEN, _SECRET or _PASSWORD:
set secrets where you call ``ray start``. The names, not the values, of relevant variables that were not forwarded are
printed.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FORWARDED = (
    *("MODEL_PATH", "TRAIN_FILE", "TEST_FILE", "OUTPUT_DIR", "NNODES", "BAPO_GPUS"),
    *("VERL_PLATFORM", "VERL_ENGINE_DEVICE", "OMP_NUM_THREADS", "TQ_NUM_THREADS"),
)
FORWARDED_KINDS = ("HF_", "NCCL_", "GLOO_", "TORCH_", "VLLM_")
NAMED_KINDS = ("CUDA_", "RAY_", "VERL_", "WANDB_", "UCX_", "FI_", "MLX5_", "TRITON_", "PYTORCH_", "XDG_CACHE_")
HERE_ALONE = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # only this command needs them
SECRETS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
RUNTIME_ENV = {
    "working_dir": str(ROOT),
    "excludes": [".venv*", "runs", ".*_cache", ".hypothesis"],
    "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"},  # time for a stopped job to clean up; Ray gives 3 seconds
}


def is_forwarded(name: str) -> bool:
    """Whether a job gets this environment variable."""
    return name in FORWARDED or (name.startswith(FORWARDED_KINDS) and not name.endswith(SECRETS))


def is_named(name: str) -> bool:
    """Whether to print that this variable was not forwarded, because a run might use it."""
    return name.startswith((*NAMED_KINDS, *FORWARDED_KINDS)) and name not in HERE_ALONE and not is_forwarded(name)


def main(arguments: list[str]) -> int:
    """Replace this process by ``ray job submit``. Returns 2 where the arguments are wrong."""
    if arguments[:1] != ["submit"] or len(arguments) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    _, name, *command = arguments
    environment = [f"{key}={value}" for key, value in os.environ.items() if value and is_forwarded(key)]
    if left_out := sorted(filter(is_named, os.environ)):
        print(
            f"Not given to the job: {', '.join(left_out)}. If it needs one, set it where `ray start` is called.",
            flush=True,
        )
    # -u: Ray prints without flushing, so a log file would be minutes behind the job.
    submit = ["-u", "-m", "ray.scripts.scripts", "job", "submit", "--log-color=false", "--submission-id", name]
    submit += ["--runtime-env-json", json.dumps(RUNTIME_ENV), "--", "env", *environment, *command]
    os.execv(sys.executable, [sys.executable, *submit])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
