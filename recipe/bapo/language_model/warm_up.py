# SPDX-License-Identifier: Apache-2.0
"""The warm-up: supervised steps on made-up answers, after which about 40 % of the model's answers are right.

If hardly any answer were right, most groups of answers would be all wrong and would teach reinforcement learning
nothing. If nearly all were right, nothing would be left to learn. The first lesson therefore has many right tries and
teaches the format, how to sort, and how to check honestly. The second has few right tries and teaches the model to try
badly. Learning to try well again is left to reinforcement learning.
"""

import random
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from recipe.bapo.language_model.task import MAX_RESPONSE, compute_score, draw_numbers, draw_rows, prompt_of, teach

IGNORED = -100  # label of the tokens outside the answer


@dataclass(frozen=True)
class Settings:
    """Settings of the warm-up.

    Attributes:
        steps: number of optimizer steps.
        rows: items of a step; every step draws new ones.
        learning_rate: AdamW's, reached after 10 steps; it then falls linearly to zero.
        first_lesson: share of the steps that belong to the first lesson, in which half of the tries are right.
        right: share of right tries in the second lesson. With three tries, 0.11 makes 30 % of the taught answers right.
        samples: number of answers sampled at the end, to measure the share of right ones.
    """

    steps: int = 120
    rows: int = 16
    learning_rate: float = 1e-4
    first_lesson: float = 0.6
    right: float = 0.11
    seed: int = 1
    samples: int = 128


def autocast(device: torch.device):
    """Return bfloat16 autocast where the device multiplies bfloat16 fast; on other CPUs it would be slower."""
    if device.type == "cpu" and not any(map(torch.cpu.get_capabilities().get, ("avx512_bf16", "amx_bf16"))):
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def encode(tokenizer, taught: Iterable[tuple[str, str]], longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels ``(N, L)`` of N prompts with taught answers.

    An answer of less than ``longest`` tokens ends with the end token. Prompts and padding have the label ``IGNORED``.
    """
    ids, labels = [], []
    for question, text in taught:
        prompt, answer = tokenizer.encode(question + "\n"), tokenizer.encode(text)
        if len(answer) < longest:
            answer.append(tokenizer.eos_token_id)
        ids.append(torch.tensor(prompt + answer))
        labels.append(torch.tensor([IGNORED] * len(prompt) + answer))
    padded = pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    return padded, pad_sequence(labels, batch_first=True, padding_value=IGNORED)


def draw_taught(right: float, rng: random.Random) -> tuple[str, str]:
    """Draw a prompt and a taught answer, whose tries are right with the probability ``right``."""
    numbers = draw_numbers(rng)
    return prompt_of(numbers), teach(numbers, right, rng)


def warm_up(model, tokenizer, settings: Settings, device: torch.device) -> None:
    """Train the model in place, with a progress bar on stderr."""
    torch.manual_seed(settings.seed)
    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 10, 1.0) * (1 - step / settings.steps)
    )
    model.to(device).train()
    interval = 0.5 if sys.stderr.isatty() else 30.0  # a log file gets a line every 30 seconds
    progress = tqdm(range(settings.steps), desc="  warming up", unit="step", mininterval=interval)
    for step in progress:
        right = 0.5 if step < settings.first_lesson * settings.steps else settings.right
        taught = [draw_taught(right, rng) for _ in range(settings.rows)]
        ids, labels = (plane.to(device) for plane in encode(tokenizer, taught, MAX_RESPONSE))
        with autocast(device):
            # The output layer is a fifth of the work, so it runs on the answers' tokens alone.
            hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
            answered = labels[:, 1:] != IGNORED
            logits = model.lm_head(hidden[answered])
        loss = cross_entropy(logits.float(), labels[:, 1:][answered])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


@torch.no_grad()
def share_of_right_answers(model, tokenizer, samples: int, device: torch.device) -> float:
    """Return the mean reward of ``samples`` items, each answered once at temperature 1."""
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
