# SPDX-License-Identifier: Apache-2.0
"""Start runs on machines that this one is not, up to the point where the command becomes another, and compose them."""

import os
from types import SimpleNamespace
from unittest.mock import patch

from omegaconf import OmegaConf
from support.configs import ROOT
from support.gpus import write_nvidia_smi

from recipe.bapo.config import compose_config
from recipe.bapo.config.errors import explain
from recipe.bapo.language_model import __main__ as language_model
from recipe.bapo.run import start


class Became(BaseException):
    """The start command has replaced itself."""


def start_on(folder, gpus, command="", flash_attn=False, composes=True, **variables):
    """Start a run as on a machine with ``gpus`` GPUs, and compose its config.

    Args:
        folder: an empty folder, for an nvidia-smi and for the language model, which is not made. Its folder in this one
            would be ``made`` or, not warmed up, ``converted``.
        gpus: number of GPUs that nvidia-smi lists.
        command: the arguments of the run script.
        flash_attn: whether flash-attn can be imported.
        composes: whether to compose the config, which takes a second.
        variables: what the command has in front of it.

    Returns:
        ``config``, the composed and resolved config; ``environment``; ``command``, what it became; and ``error``, the
        line that tells what is wrong, where the other three are None.
    """
    write_nvidia_smi(folder, gpus)

    def become(program, command):
        raise Became(command)

    found = SimpleNamespace(config=None, environment=None, command=None, error=None)
    with (
        patch.dict(os.environ, {"PATH": f"{folder}:{os.environ['PATH']}", **variables}),
        patch.object(os, "execv", become),
        patch.object(os, "chdir"),
        patch.object(start, "has_flash_attn", lambda: flash_attn),
        patch.object(language_model, "obtain", lambda warmed_up: folder / ("made" if warmed_up else "converted")),
        patch.object(start, "print", lambda text, file: setattr(found, "error", text), create=True),
    ):
        for name in {"VERL_PLATFORM", "CUDA_VISIBLE_DEVICES", "BAPO_GPUS"} - variables.keys():
            os.environ.pop(name, None)
        try:
            assert start.main(command.split()) == 1
        except Became as became:
            (found.command,) = became.args
        else:
            return found
        found.environment = dict(os.environ)
        if not composes:
            return found
        first = found.command.index("--config-dir")
        try:
            config = compose_config(found.command[first + 2 :], ROOT / "configs")
            OmegaConf.resolve(config)
        except Exception as error:
            return SimpleNamespace(config=None, environment=None, command=None, error=explain(error))
        found.config = config
    return found
