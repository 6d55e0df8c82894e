# SPDX-License-Identifier: Apache-2.0
"""The example's reward against values by hand, and the stored files from which every example starts."""

import json
import re

import pandas as pd
import pytest
from support.configs import ROOT, compose_in_groups

from recipe.bapo.example.reward import compute_score
from recipe.bapo.language_model.warm_up import IGNORED, encode
from scripts import example_task
from scripts.example_task import make_rows

FILES = ROOT / "recipe" / "bapo" / "example" / "files"


@pytest.mark.parametrize(
    "response, score",
    [
        ("09 yes", 1.0),
        ("07 no 12 no 09 yes", 1.0),
        (" 09 yes \n", 1.0),  # with white space around it
        ("07 yes", 0.0),  # a wrong claim
        ("09 yes 07 yes", 0.0),  # only the last guess counts
        ("09 no", 0.0),  # right, but denied
        ("9 yes", 0.0),  # one digit
        ("09 yes.", 0.0),  # text follows
        ("", 0.0),
    ],
)
def test_the_reward_by_hand(response, score):
    assert compute_score("bapo/guess", response, "09") == score and compute_score("bapo/guess", response, "02") == 0.0


def test_the_stored_data_are_those_that_the_code_makes():
    for split, repeats in (("train", 60), ("test", 8)):
        stored, made = pd.read_parquet(FILES / f"{split}.parquet"), make_rows(split, repeats)
        assert len(stored) == 36 * repeats and list(stored) == list(made)
        for column in made:
            assert [plain(value) for value in stored[column]] == [plain(value) for value in made[column]]


def plain(value):
    """Convert a cell of a parquet file, whose lists come back as arrays."""
    return list(value) if hasattr(value, "tolist") else value


def test_every_stored_file_has_a_hash():
    hashed = re.findall(r"^[0-9a-f]{64}  (.+)$", (FILES / "SHA256SUMS").read_text(), re.M)
    stored = {str(path.relative_to(FILES)) for path in FILES.rglob("*") if path.is_file()}
    assert set(hashed) == stored - {"SHA256SUMS"}


def test_the_stored_runs_are_of_the_examples_settings():
    config = compose_in_groups("experiment=example", "size=cpu_example")
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    mini_batches = config.data.train_batch_size // actor.ppo_mini_batch_size
    settings = {
        "mini_batches": mini_batches,
        "epochs": actor.ppo_epochs,
        "updates": config.trainer.total_training_steps * actor.ppo_epochs * mini_batches,
        "prompts": actor.ppo_mini_batch_size,
        "samples": rollout.n,
        "learning_rate": actor.optim.lr,
        "dual_clip": actor.clip_ratio_c,
    }
    rows = [json.loads(line) for line in (ROOT / "docs" / "results" / "example_loop.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    for row in rows:
        assert row["switches"].items() <= dict(actor.policy_loss).items()
        assert settings.items() <= row["settings"].items()


def test_a_taught_answer_ends_with_the_end_token_unless_the_response_is_full():
    tokenizer = example_task.make_tokenizer()
    full = "07 no " * example_task.TRIES
    ids, labels = encode(tokenizer, [("3+6=", "09 yes"), ("3+6=", full)], example_task.MAX_RESPONSE)
    prompt = tokenizer.encode("3+6=\n")
    short, long = (row[len(prompt) :].tolist() for row in labels)
    ignored = len(long) - len("09 yes") - 1
    assert short == [*tokenizer.encode("09 yes"), tokenizer.eos_token_id, *[IGNORED] * ignored]
    assert long == tokenizer.encode(full) and tokenizer.eos_token_id not in long
    assert ids[:, : len(prompt)].tolist() == [prompt] * 2 and (labels[:, : len(prompt)] == IGNORED).all()
