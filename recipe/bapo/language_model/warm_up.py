# SPDX-License-Identifier: Apache-2.0
"""The warm-up: supervised steps on the task's own answers, until about a third of the model's answers is right.

Were hardly any right, most groups of answers would be all wrong and teach reinforcement learning nothing. Were nearly
all right, nothing would be left to learn. So the warm-up first teaches the format, sorting and honest checking, with
many right tries, and then, with few of them, to try badly. To try well again is left to reinforcement learning.
"""

import random
import sys
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from recipe.bapo.language_model.task import MAX_RESPONSE, compute_score, draw_numbers, draw_rows, prompt_of, teach

IGNORED = -100  # label of what is not an answer


@dataclass(frozen=True)
class Settings:
    """Of the warm-up.

    Attributes:
        steps: optimizer steps, each on ``rows`` items of its own.
        learning_rate: of AdamW, reached after 10 steps and falling to nothing in a straight line.
        first_lesson: share of the steps in which half of the tries are right; then a share of ``right`` is.
        samples: answers by which the share of right ones is measured at the end.
    """

    steps: int = 120
    rows: int = 16
    learning_rate: float = 1e-4
    first_lesson: float = 0.6
    right: float = 0.16
    seed: int = 1
    samples: int = 128


def autocast(device: torch.device):
    """bfloat16 where the device multiplies it faster than float32; on other CPUs it would be slower."""
    if device.type == "cpu" and not any(map(torch.cpu.get_capabilities().get, ("avx512_bf16", "amx_bf16"))):
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def encode_batch(tokenizer, rows: int, right: float, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels ``(rows, L)`` of the task's own answers; prompts and padding have the label ``IGNORED``."""
    ids, labels = [], []
    for _ in range(rows):
        numbers = draw_numbers(rng)
        prompt = tokenizer.encode(prompt_of(numbers) + "\n")
        answer = tokenizer.encode(teach(numbers, right, rng))
        if len(answer) < MAX_RESPONSE:
            answer.append(tokenizer.eos_token_id)
        ids.append(torch.tensor(prompt + answer))
        labels.append(torch.tensor([IGNORED] * len(prompt) + answer))
    padded = pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    return padded, pad_sequence(labels, batch_first=True, padding_value=IGNORED)


def warm_up(model, tokenizer, settings: Settings, device: torch.device) -> None:
    """Train the model in place, with a progress bar on stderr."""
    torch.manual_seed(settings.seed)
    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 10, 1.0) * (1 - step / settings.steps)
    )
    model.to(device).train()
    interval = 0.5 if sys.stderr.isatty() else 30.0  # a file gets a line now and then
    progress = tqdm(range(settings.steps), desc="  warming up", unit="step", mininterval=interval)
    for step in progress:
        right = 0.5 if step < settings.first_lesson * settings.steps else settings.right
        ids, labels = (plane.to(device) for plane in encode_batch(tokenizer, settings.rows, right, rng))
        with autocast(device):
            # The last layer, a fifth of the work, of the answers alone.
            hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
            taught = labels[:, 1:] != IGNORED
            logits = model.lm_head(hidden[taught])
        loss = cross_entropy(logits.float(), labels[:, 1:][taught])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


@torch.no_grad()
def share_of_right_answers(model, tokenizer, samples: int, device: torch.device) -> float:
    """Mean reward of one answer each to ``samples`` items, sampled at temperature 1."""
    rows = list(draw_rows("warm-up", samples))
    prompts = [tokenizer.encode(row["prompt"][0]["content"] + "\n") for row in rows]
    model.to(device).eval()
    ids = torch.tensor(prompts, device=device)  # all of one length
    with autocast(device):
        answers = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=MAX_RESPONSE
        )
    texts = tokenizer.batch_decode(answers[:, ids.shape[1] :], skip_special_tokens=True)
    scores = [
        compute_score("", text, row["reward_model"]["ground_truth"]) for text, row in zip(texts, rows, strict=True)
    ]
    return sum(scores) / samples
