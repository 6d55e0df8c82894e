# SPDX-License-Identifier: Apache-2.0
"""The command that starts a run, and then becomes its parent; ``run_bapo_example.sh`` calls it.

    python -m recipe.bapo.run.start [--preflight] [key=value ...]

``main`` looks at the machine, has ``choose`` fill in what the command leaves out, makes the language model where that
is trained, and then becomes preflight, the run, or the command that submits it to a Ray cluster.
"""

import importlib
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from recipe.bapo.host.files import names_folder
from recipe.bapo.run import bapo_run
from recipe.bapo.run.choose import FILES, INPUTS, ROOT, choose


def visible_gpus(environment: Mapping[str, str]) -> int:
    """Count the GPUs that nvidia-smi lists and ``CUDA_VISIBLE_DEVICES`` allows."""
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    listed = len(re.findall("^GPU", said, re.M))
    if "CUDA_VISIBLE_DEVICES" in environment:  # nvidia-smi lists all GPUs, whatever this variable says
        named = [one.strip() for one in environment["CUDA_VISIBLE_DEVICES"].split(",")]
        listed = min(listed, len([one for one in named if one and not one.startswith("-")]))
    return listed


def system_variables(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return variables without which torch or vLLM fails on this system.

    Raises:
        ValueError: the home folder cannot be written.
    """
    found: dict[str, str | None] = {}
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:  # docker --user, OpenShift: torch asks for the user's name, and Python for the variable first
        if not environment.get("USER"):
            found["USER"] = f"uid{os.getuid()}"
    if "microsoft" in os.uname().release.lower():  # vLLM's runner needs pinned memory, which it turns off in WSL2
        found["VLLM_WSL2_ENABLE_PIN_MEMORY"] = environment.get("VLLM_WSL2_ENABLE_PIN_MEMORY", "1")
    home = environment.get("HOME") or os.path.expanduser("~")
    if not os.access(home, os.W_OK):
        raise ValueError(
            f"HOME={home} cannot be written, and torch, triton and vLLM keep files there: set HOME to a folder."
        )
    return found


def has_flash_attn() -> bool:
    """Whether flash-attn 2 can be imported; flash-attn-4 alone is a package ``flash_attn``, too."""
    try:
        importlib.import_module("torch")
        importlib.import_module("flash_attn_2_cuda")
    except ImportError:
        print(
            "flash-attn cannot be imported, so torch's own flash attention is used: platform=gpu_varlen.",
            file=sys.stderr,
        )
        return False
    return True


def main(arguments: list[str]) -> int:
    """Fill in what the command leaves out, and replace this process by preflight, the run, or its submission."""
    for name in (*INPUTS, "OUTPUT_DIR", "BAPO_CACHE"):  # relative to where the command was given
        value = os.environ.get(name)
        if value and (name != "MODEL_PATH" or Path(value).exists()):  # else it is a name on the hub
            os.environ[name] = os.path.abspath(value)
    try:
        amd = Path("/dev/kfd").exists() or any(map(shutil.which, ("rocm-smi", "amd-smi")))
        choice = choose(
            os.environ, visible_gpus(os.environ), arguments, amd, has_flash_attn, "--preflight" in arguments
        )
        choice.environment |= system_variables(os.environ)
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    os.chdir(ROOT)
    for name, value in choice.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    # OUTPUT_DIR has replaced run_dir=, which was relative to the folder that has just been left.
    given = [*choice.arguments, *(one for one in arguments if one != "--preflight" and not names_folder(one))]
    checks = [sys.executable, "-m", "recipe.bapo.preflight", "--config-name", bapo_run.CONFIG_NAME, *given]
    if choice.language_model and not _use_language_model(checks, "--preflight" in arguments):
        return 1
    if "--preflight" in arguments:
        os.execv(sys.executable, checks)
    train = [sys.executable, "-m", "recipe.bapo.run", *given]
    if os.environ.get("RAY_ADDRESS", "").startswith("http"):
        token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
        if token.is_file() and token.stat().st_size:
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        name = f"{Path(os.environ['OUTPUT_DIR']).name}-{time.strftime('%H%M%S')}"
        train = [sys.executable, "scripts/cluster/job.py", "submit", name, *train]
    os.execv(sys.executable, train)


def _use_language_model(checks, only_checks):
    """Make the language model unless it is there; first check the run with the model as it was fetched."""
    from recipe.bapo.language_model.__main__ import obtain

    def use(folder):
        os.environ.update({name: f"{folder}/{file}" for name, file in FILES.items()})

    made = obtain("find")
    if made is None:
        use(obtain("convert"))
        if only_checks:
            return True
        if "preflight=false" not in checks:
            checked = subprocess.run(checks, stdout=subprocess.PIPE, text=True)
            if checked.returncode:
                print(checked.stdout, file=sys.stderr)
                return False
        made = obtain("make")
    use(made)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
