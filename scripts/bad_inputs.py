# SPDX-License-Identifier: Apache-2.0
"""Give preflight the wrong inputs of docs/dev/bad_inputs.md, and write its answers into the page's table "Refused".

    .venv/bin/python -m scripts.bad_inputs [--only WORD]

The inputs are in the first column of the page's tables. To add one, add a row. In an input, X stands for a folder of
broken files, and ``bapo_trainer.yaml: OLD => NEW`` for a change in a copy of that file. Preflight has to refuse every
input of the table "Refused", and none of the table "Passed on purpose, or left to verl". The page's last table,
"Commands", is written by hand. All inputs are checked in one process, which takes about ten minutes.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

os.environ["VERL_PLATFORM"] = "cpu"  # before anything imports verl

import pandas as pd
from hydra import initialize_config_dir

import recipe.bapo.config
from recipe.bapo.run.preflight import keys as config_errors
from recipe.bapo.run.preflight.stages import run_preflight

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "dev" / "bad_inputs.md"
TASK = ROOT / "recipe" / "bapo" / "example" / "files"
OF_THE_RUN_SCRIPT = ("experiment=example", "size=cpu_example", "trainer.nnodes=1", "trainer.n_gpus_per_node=1")
OF_THE_MACHINE = ("another run is on this machine", "/dev/shm has")  # beginnings of messages about the machine
ROW = re.compile(r"^\| `(.*?)` \| (.*) \|$")
SLIP = "bapo_trainer.yaml: "


def make_broken_files(folder: Path) -> None:
    """Make the broken files in ``folder``, which the page calls X."""

    def model(name, remove=(), config=None, **texts):
        shutil.copytree(TASK / "model", folder / name)
        for file in remove:
            (folder / name / file).unlink()
        if config is not None:
            path = folder / name / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | config))
        for file, text in texts.items():
            (folder / name / file.replace("__", ".")).write_bytes(text)

    whole = (TASK / "model" / "model.safetensors").read_bytes()
    model("no_tokenizer", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
    model("no_weights", ["model.safetensors"])
    model("no_config", ["config.json"])
    model("truncated", model__safetensors=whole[:5000])
    model("empty_weights", model__safetensors=b"")
    model("bad_config", config__json=b"{")
    model("template_syntax", chat_template__jinja=b"{% for x in %}")
    model("template_raises", chat_template__jinja=b"{{ raise_exception('no') }}")
    model("shapes", config={"intermediate_size": 7})
    model("other_layers", config={"num_hidden_layers": 3})
    model("vocab", config={"vocab_size": 100})

    def data(name, rows=70, **changes):
        prompt, truth = [{"role": "user", "content": "1+2="}], {"style": "rule", "ground_truth": "03"}
        row = {"data_source": "bapo/guess", "prompt": prompt, "reward_model": truth} | changes
        pd.DataFrame([row] * rows).to_parquet(folder / f"{name}.parquet")

    data("few", rows=10)
    data("long", prompt=[{"role": "user", "content": "9" * 300}])
    data("source", data_source="nobody/knows")
    data("string_prompt", prompt="1+2=")
    data("no_truth", reward_model={"style": "rule"})
    data("number", data_source="openai/gsm8k", reward_model={"style": "rule", "ground_truth": 3})
    data("parts", prompt=[{"role": "user", "content": [{"type": "text", "text": "1+2="}]}])
    pd.DataFrame({"question": ["1+2="] * 70}).to_parquet(folder / "columns.parquet")
    (folder / "trunc.parquet").write_bytes((folder / "long.parquet").read_bytes()[:200])
    for name, text in {
        "text.parquet": "no parquet",
        "data.txt": "no parquet",
        "reward.py": "def compute_score(*args, **kwargs):\n    return 0.0\n",
        "broken_reward.py": "def compute_score(:\n",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def said_of(typed: str, folder: Path) -> list[str]:
    """Return preflight's messages about one input. A warning begins with "warning: "."""
    files = {"MODEL_PATH": "model", "TRAIN_FILE": "train.parquet", "TEST_FILE": "test.parquet"}
    environment = {name: str(TASK / file) for name, file in files.items()}
    overrides = []
    if not typed.startswith(SLIP):
        for word in typed.replace("X/", f"{folder}/").split():
            name, _, value = word.partition("=")
            if name in ("OUTPUT_DIR", "RAY_ADDRESS"):
                environment[name] = value
            else:
                overrides.append(word)
    with tempfile.TemporaryDirectory() as copy:
        ours = Path(copy, "bapo_trainer.yaml")
        shutil.copytree(config_errors.OURS.parent, copy, dirs_exist_ok=True)
        if typed.startswith(SLIP):
            old, new = (part.encode().decode("unicode_escape") for part in typed.removeprefix(SLIP).split(" => "))
            text = ours.read_text()
            assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in bapo_trainer.yaml"
            ours.write_text(text.replace(old, new))
        with (
            patch.dict(os.environ, environment),
            patch.object(config_errors, "OURS", ours),
            patch.object(
                recipe.bapo.config,
                "initialize_config_module",
                lambda _, version_base: initialize_config_dir(copy, version_base=version_base),
            ),
            open(os.devnull, "w") as nowhere,
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
        ):
            lines = run_preflight([*OF_THE_RUN_SCRIPT, *overrides], str(ROOT / "configs"))
    wrong = [line for line in lines if line.status != "ok" and not line.detail.startswith(OF_THE_MACHINE)]
    texts = [line.detail if line.status == "failed" else f"warning: {line.detail}" for line in wrong]
    places = {str(folder): "X", copy: "recipe/bapo/config", f"{ROOT}/": ""}
    for path, name in places.items():
        texts = [text.replace(path, name) for text in texts]
    return [re.sub(r"/tmp\w{8}'", "/...'", text) for text in texts]  # hide the random name of a temporary folder


def main() -> int:
    """Run the command. Returns 1 if an answer is not as expected, else 0.

    Preflight should refuse an input of the table "Refused" with exactly one message, and no input of the other table.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="check only inputs that contain this")
    only = parser.parse_args().only
    lines, bad, section = [], 0, ""
    with tempfile.TemporaryDirectory() as folder:
        make_broken_files(Path(folder))
        for line in PAGE.read_text().splitlines():
            section = line if line.startswith("## ") else section
            row = ROW.match(line)
            if row and section in ("## Passed on purpose, or left to verl", "## Refused") and only in row[1]:
                said = said_of(row[1].replace("\\|", "|"), Path(folder))
                if section == "## Refused":
                    text = "<br>".join(said).replace("|", "\\|")
                    line = f"| `{row[1]}` | {text} |"
                    wrong = len(said) != 1 or said[0].startswith("warning: ")
                else:
                    wrong = any(not text.startswith("warning: ") for text in said)
                if wrong:
                    bad += 1
                    print(f"{row[1]}: {said}", file=sys.stderr)
            lines.append(line)
    PAGE.write_text("\n".join(lines) + "\n")
    print(f"Wrote {PAGE.relative_to(ROOT)}. Inputs with an unexpected answer: {bad}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
