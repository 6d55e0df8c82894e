# SPDX-License-Identifier: Apache-2.0
"""The model that the study starts from: the recipe's own, or another one that is warmed up here."""

import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.bapo.language_model import cache
from recipe.bapo.language_model.task import draw_rows
from recipe.bapo.language_model.warm_up import Settings, share_of_right_answers, warm_up


def device_of_this_machine() -> torch.device:
    """Return the first GPU, or the CPU if there is none or VERL_PLATFORM=cpu asks for it."""
    return torch.device("cuda" if os.environ.get("VERL_PLATFORM") != "cpu" and torch.cuda.is_available() else "cpu")


def warmed_up_model(given: str | None) -> Path:
    """Return the folder of a warmed-up model and its tokenizer.

    Args:
        given: a folder with a causal language model of Hugging Face, which is warmed up once and kept in .cache. None:
            the recipe's language model, which must have been made.

    Raises:
        ValueError: the recipe's model is not made yet, or the tokenizer does not fit the task.
        OSError: ``given`` holds no such model.
    """
    folder = cache_of(given)
    if given is not None:
        cache.make_once(folder, lambda unfinished: _warm_up_copy(Path(given).resolve(), unfinished / "model"))
    elif not folder.exists():
        raise ValueError("the language model is not made yet: run python -m recipe.bapo.language_model")
    return folder / "model"


def cache_of(given: str | None) -> Path:
    """Return the folder in .cache where ``warmed_up_model`` keeps a model, whether it exists or not."""
    return cache.folder_of("language_model", {"model": str(Path(given).resolve())} if given else {})


def _warm_up_copy(source, folder):
    """Warm up a model as the recipe does its own, and write it to a folder."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    lengths = {len(tokenizer.encode(row["prompt"][0]["content"] + "\n")) for row in draw_rows("lengths", 64)}
    if len(lengths) > 1:
        raise ValueError("its tokenizer gives the prompts different lengths.")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    device, settings = device_of_this_machine(), Settings()
    warm_up(model, tokenizer, settings, device)
    model.to(torch.bfloat16)  # the precision in which it is saved
    right = share_of_right_answers(model, tokenizer, settings.samples, device)
    print(f"Warmed up {source}: {right:.0%} of {settings.samples} sampled answers are right.", file=sys.stderr)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
