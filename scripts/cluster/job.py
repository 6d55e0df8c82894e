# SPDX-License-Identifier: Apache-2.0
"""Run a job on the Ray cluster at ``RAY_ADDRESS`` (http://HEAD:8265). The run script and ray.sh call this.

    python scripts/cluster/job.py submit NAME COMMAND...   run COMMAND in a copy of this repository, and follow it
    python scripts/cluster/job.py follow NAME              print the job's output from the start, and exit with its code
    python scripts/cluster/job.py stop NAME                end the job

The job gets the environment variables that a run reads (``FORWARDED``), and those that begin with HF_, NCCL_, GLOO_,
TORCH_ or VLLM_ (``FORWARDED_KINDS``). It never gets a secret, that is a variable whose name ends in _KEY, _TOKEN,
_SECRET or _PASSWORD: set secrets where you call ``scripts/cluster/ray.sh head`` and ``join``. The command prints the
names, not the values, of relevant variables that were not forwarded.
"""

import asyncio
import logging
import os
import shlex
import sys
import time
from pathlib import Path

from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

ROOT = Path(__file__).parents[2]
FORWARDED = (
    *("MODEL_PATH", "TRAIN_FILE", "TEST_FILE", "OUTPUT_DIR", "NNODES", "BAPO_GPUS"),
    *("VERL_PLATFORM", "VERL_ENGINE_DEVICE", "OMP_NUM_THREADS", "TQ_NUM_THREADS"),
)
FORWARDED_KINDS = ("HF_", "NCCL_", "GLOO_", "TORCH_", "VLLM_")
NAMED_KINDS = ("CUDA_", "RAY_", "VERL_", "WANDB_", "UCX_", "FI_", "MLX5_", "TRITON_", "PYTORCH_", "XDG_CACHE_")
HERE_ALONE = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")  # only this command needs them
SECRETS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
PATIENCE = 120  # seconds to wait until a new cluster accepts jobs


def is_forwarded(name: str) -> bool:
    """Whether a job gets this environment variable."""
    return name in FORWARDED or (name.startswith(FORWARDED_KINDS) and not name.endswith(SECRETS))


def is_named(name: str) -> bool:
    """Whether to print that this variable was not forwarded, because a run might use it."""
    return name.startswith((*NAMED_KINDS, *FORWARDED_KINDS)) and name not in HERE_ALONE and not is_forwarded(name)


def connect() -> JobSubmissionClient:
    """Connect to the cluster. Exits the program if there is none."""
    address = os.environ.get("RAY_ADDRESS", "http://127.0.0.1:8265")
    try:
        return JobSubmissionClient(address)
    except AuthenticationError as error:
        fix = "set RAY_AUTH_TOKEN_PATH to the file that scripts/cluster/ray.sh head uses"
        sys.exit(f"Error: RAY_ADDRESS={address} requires the cluster's token: {fix}. {error}")
    except Exception as error:  # raised by Ray or by its HTTP client
        said, fix = " ".join(str(error).split()), "set it to http://HEAD:8265, HEAD being the node of ray.sh head"
        sys.exit(f"Error: RAY_ADDRESS={address} accepts no jobs: {fix}. {said}")


def submit(client: JobSubmissionClient, name: str, command: list[str]) -> int:
    """Submit a command and follow it; returns what ``follow`` returns. Exits the program if the cluster refuses it."""
    environment = [f"{key}={value}" for key, value in os.environ.items() if value and is_forwarded(key)]
    if left_out := sorted(filter(is_named, os.environ)):
        print(f"Not given to the job: {', '.join(left_out)}. If it needs one, set it where ray.sh starts the nodes.")
    runtime_env = {"working_dir": str(ROOT), "excludes": [".venv*", "runs", ".*_cache", ".hypothesis"]}
    until = time.monotonic() + PATIENCE
    while True:
        try:
            client.submit_job(
                entrypoint=shlex.join(["env", *environment, *command]), submission_id=name, runtime_env=runtime_env
            )
            break
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > until:
                sys.exit(f"Error: job {name} was not accepted: {str(error).strip().splitlines()[-1]}")
            time.sleep(2)
    print(f"Job {name}. It continues if you interrupt this command. To follow it again or to end it:")
    print(f"  bash scripts/cluster/ray.sh follow {name}\n  bash scripts/cluster/ray.sh stop {name}", flush=True)
    return follow(client, name)


def follow(client: JobSubmissionClient, name: str) -> int:
    """Print a job's output until it ends. Exits the program if there is no such job.

    Returns:
        0, or the job's exit code; 1 if it failed without one; 130 if this command is interrupted (Ctrl-C).
    """

    async def tail():
        async for lines in client.tail_job_logs(name):
            print(lines, end="", flush=True)

    try:
        client.get_job_info(name)  # raises if there is no such job
        asyncio.run(tail())
        info = client.get_job_info(name)
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        sys.exit(f"Error: job {name}: {str(error).strip().splitlines()[-1]}")
    if info.status == JobStatus.SUCCEEDED:
        return 0
    print(f"Error: job {name} {info.status.lower()}: {info.message}", file=sys.stderr)
    return info.driver_exit_code or 1


def stop(client: JobSubmissionClient, name: str) -> int:
    """Ask Ray to end a job; returns 0 if it was running, else 1. Exits the program if there is no such job."""
    try:
        return 0 if client.stop_job(name) else 1
    except RuntimeError as error:
        sys.exit(f"Error: job {name}: {str(error).strip().splitlines()[-1]}")


def main() -> int:
    """Submit, follow or stop a job, as the arguments say. Returns the exit code."""
    logging.getLogger("ray").setLevel(logging.WARNING)
    match sys.argv[1:]:
        case ["submit", name, *command] if command:
            return submit(connect(), name, command)
        case ["follow", name]:
            return follow(connect(), name)
        case ["stop", name]:
            return stop(connect(), name)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
