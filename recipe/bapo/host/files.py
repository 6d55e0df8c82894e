# SPDX-License-Identifier: Apache-2.0
"""Write and read the files of a run. This module holds the names of those in the run's folder itself.

Users' scripts read ``metrics.jsonl``. Every package of the recipe may import this one; it imports none of them.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

METRICS = "metrics.jsonl"  # a line per step, written by verl's file logger; recipe.bapo.host.metrics reads it
LOG = "train.log"  # everything that verl, Ray and vLLM print
CONFIG = "config.yaml"  # the whole config of the run
LOCK = "run.lock"  # locked by the run that writes to the folder
ANSWERS = "validation"  # folder of the answers of each validation, if trainer.validation_data_dir names it
PICTURE = "dynamics.png"
STACKS = "stacks.txt"  # the stack of each process, if the run was ended because it hung
RAY_LOGS = "ray_logs"  # folder with a copy of Ray's own logs, if the run failed


def output_folder(arguments: Sequence[str], environment: Mapping[str, str], name: str, root: Path = Path()) -> Path:
    """Decide a run's folder: ``run_dir=`` among the arguments, else ``OUTPUT_DIR``, else a new one in ``root/runs``.

    Args:
        arguments: those of the run.
        environment: an empty variable counts as none.
        name: the name of a new folder begins with it.

    Returns:
        An absolute path. What is given as a relative one is relative to the working directory.

    Raises:
        ValueError: it is empty, or holds an interpolation, which only the composed config could resolve.
    """
    given = environment.get("OUTPUT_DIR") or str(root / time.strftime(f"runs/{name}-%Y%m%d-%H%M%S"))
    for argument in filter(names_folder, arguments):
        given = argument.partition("=")[2]
        if given[:1] in ("'", '"') and given[-1:] == given[:1]:  # quotes that are for Hydra
            given = given[1:-1]
    if given in ("", "null") or "${" in given:
        raise ValueError(f"invalid run_dir (OUTPUT_DIR)={given}: name a folder, without ${{.")
    return Path(os.path.abspath(given))


def names_folder(argument: str) -> bool:
    """Whether an argument of a run sets ``run_dir``."""
    return argument.lstrip("+").startswith("run_dir=")


def keep_earlier(path: Path) -> Path:
    """Make ``path`` free to be written, and return it.

    A file of an earlier start becomes ``<name>.<N>.<ending>``: N is 1 for the first such file, 2 for the next.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        numbers = [other.suffixes[0][1:] for other in path.parent.glob(f"{path.stem}.*{path.suffix}")]
        last = max((int(number) for number in numbers if number.isdigit()), default=0)
        path.rename(path.with_suffix(f".{last + 1}{path.suffix}"))
    return path


def is_record(file: Path) -> bool:
    """Whether the first line is that of a record, ``record-*.jsonl``, of this version or another one."""
    with suppress(ValueError), open(file) as lines:
        first = json.loads(lines.readline())
        return isinstance(first, dict) and "options" in first
    return False


def latest_checkpoint(folder: Path) -> Path | None:
    """Find the last complete checkpoint in ``folder``, as verl does; None if there is none.

    Raises:
        ValueError: verl's tracker file names a checkpoint that is missing. verl would silently start from scratch.
    """
    tracker = folder / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return None
    number = tracker.read_text().strip()
    checkpoint = folder / f"global_step_{number}"
    if not checkpoint.is_dir():
        raise ValueError(
            f"{tracker} names the checkpoint {number!r}, which is not in {sorted(os.listdir(folder))}: write the "
            "number of a complete one into it, or remove it to start from scratch."
        )
    return checkpoint
