# SPDX-License-Identifier: Apache-2.0
"""Make the example's task, ``files/``: a tokenizer, a warmed-up tiny model and data sets in verl's parquet schema.

The task is "guess, check, guess again". Asked for the sum of two dice, ``3+6=``, the model guesses until it is right:
``07 no 09 yes``. A right guess ends the response early. A wrong one continues until the response is full, unless the
model claims that it is right. So failures are longer than successes, as with reasoning models, and they get shorter as
reinforcement learning teaches the model to claim more. The warm-up teaches the format, honest checking, and guesses of
which few are right. Reinforcement learning then teaches the model to guess well.

    python -m scripts.example_task FOLDER [--steps 450] [--right 0.08]

Another machine or another version of torch makes a slightly different model. So the files are stored with their hashes
(``sha256sum --check SHA256SUMS``).
"""

import argparse
import hashlib
import platform
import random
from pathlib import Path

import pandas as pd
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from recipe.bapo.language_model.warm_up import encode

DATA_SOURCE = "bapo/guess"
TRIES = 5
MAX_RESPONSE = 6 * TRIES  # "07 no " is six bytes, each a token
DICE = range(1, 7)
PAIRS = [(a, b) for a in DICE for b in DICE]
SUMS = range(2, 13)
# In the first part of the warm-up (FIRST_LESSON, a share of its steps) half of the teacher's guesses are right
# (RIGHT_THEN), which teaches the sums and honest checking fast. In the rest few are (RIGHT_LATER), so that few of the
# model's responses succeed.
FIRST_LESSON, RIGHT_THEN, RIGHT_LATER = 2 / 3, 0.5, 0.08
SEED = 1
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def prompt_of(a: int, b: int) -> str:
    """Return the user's message."""
    return f"{a}+{b}="


def sample_response(a: int, b: int, right_guesses: float, rng: random.Random) -> str:
    """Sample a response of the teacher, which checks honestly. ``right_guesses``: the share of its right guesses."""
    response = ""
    for _ in range(TRIES):
        if rng.random() < right_guesses:
            return f"{response}{a + b:02d} yes"
        response += f"{rng.choice([guess for guess in SUMS if guess != a + b]):02d} no "
    return response


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer without merges. Every byte is a token, so any text survives encoding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", chat_template=CHAT_TEMPLATE
    )


def make_model(tokenizer, layers: int, hidden: int) -> Qwen2ForCausalLM:
    """Make a Qwen2 with random weights. Its heads have size 32, the smallest for vLLM's CPU attention.

    With the sizes of the example it has about 100,000 weights.
    """
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def teach(right_guesses: float, rng: random.Random) -> tuple[str, str]:
    """Draw a prompt, and sample the teacher's response to it."""
    a, b = rng.choice(PAIRS)
    return prompt_of(a, b), sample_response(a, b, right_guesses, rng)


def warm_up(model, tokenizer, steps: int, right: float, rng: random.Random) -> float:
    """Train on the teacher's responses, at the end with the share ``right`` of right guesses. Returns the last loss."""
    first = round(FIRST_LESSON * steps)
    shares = [RIGHT_THEN] * first + [right] * (steps - first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=len(shares))
    model.train()
    for right_guesses in shares:
        ids, labels = encode(tokenizer, [teach(right_guesses, rng) for _ in range(64)], MAX_RESPONSE)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return loss.item()


def make_rows(split: str, repeats: int) -> pd.DataFrame:
    """Make rows in verl's schema, with every pair ``repeats`` times."""
    return pd.DataFrame(
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": prompt_of(a, b)}],
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": f"{a + b:02d}"},
            "extra_info": {"split": split, "index": i},
        }
        for i, (a, b) in enumerate(PAIRS * repeats)
    )


def make_task(folder: Path, steps: int, right: float = RIGHT_LATER, layers: int = 2, hidden: int = 64) -> None:
    """Write ``model/``, ``train.parquet``, ``test.parquet`` and ``SHA256SUMS`` to ``folder``, which must not exist yet.

    Args:
        steps: supervised steps of the warm-up.
        right: share of right guesses at the end of the warm-up.
        layers: number of layers of the model.
        hidden: width of the model, a multiple of 32.
    """
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, layers, hidden)
    loss = warm_up(model, tokenizer, steps, right, rng)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    make_rows("train", repeats=60).to_parquet(folder / "train.parquet")
    make_rows("test", repeats=8).to_parquet(folder / "test.parquet")
    lines = [  # for sha256sum --check, which ignores comments
        f"# python -m scripts.example_task FOLDER --steps {steps} --right {right}",
        f"# Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{platform.machine()}, {torch.get_num_threads()} threads",
    ]
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}")
    (folder / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    print(f"Made the example's task in {folder}; warm-up loss {loss:.3f} nats a token.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=450, help="supervised steps of the warm-up")
    parser.add_argument("--right", type=float, default=RIGHT_LATER, help="share of right guesses at its end")
    make_task(**vars(parser.parse_args()))
