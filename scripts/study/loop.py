# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of the example's model in one process: what the study's small policies are checked against.

It shares with a real run the bound search and the loss (``bapo/``), the methods (``configs/method``), the task, the
model and verl's group-relative advantages. It leaves out verl's trainer, FSDP, vLLM, Ray and several micro-batches per
update: one model samples and trains in float32, the mini-batch is one forward, the old log-probs are the trainer's own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo import BAPOConfig, clipped_surrogate_loss, find_clip_bounds, read_values
from recipe.bapo.example.reward import compute_score
from recipe.bapo.example.task import MAX_RESPONSE, PAIRS, prompt_of
from scripts.study.methods import config_of
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

FINAL_SAMPLES = 64  # of each problem, after the last update
SEARCH_METRICS = (
    "positive_contribution",
    "positive_contribution_start",
    "saturated",
    "clipfrac_positive",
    "clipfrac_negative",
)


@dataclass(frozen=True)
class Settings:
    """One run, apart from method and seed.

    Attributes:
        mini_batches: optimizer updates per rollout batch and epoch.
        epochs: how often each sample is used.
        updates: optimizer updates in all, a multiple of ``mini_batches * epochs``.
        prompts: prompts per update.
        samples: responses per prompt, the group that GRPO compares.
        learning_rate: of AdamW, constant.
        norm_clip, dual_clip: of the gradient's norm, and of negative tokens' ratio; None: off.
    """

    mini_batches: int
    updates: int
    prompts: int
    samples: int
    learning_rate: float
    epochs: int = 1
    norm_clip: float | None = 1.0
    dual_clip: float | None = 3.0


@dataclass(frozen=True)
class Result:
    """What a run gave.

    Attributes:
        updates: the metrics of every update. ``rho_value`` and ``rho_gradient`` are the positive contribution at the
            bounds that were used, by one definition each for every method; the others are as in a real run.
        final_reward: of responses sampled after the last update.
        weights: hash of the weights after the last update.
    """

    updates: list[dict[str, float]]
    final_reward: float
    weights: str


@dataclass
class Rollouts:
    """Responses to ``B`` prompts of ``P`` tokens: ``ids`` ``(B, P + T)``, ``mask`` ``(B, T)``, ``rewards`` ``(B,)``."""

    ids: Tensor
    mask: Tensor
    rewards: Tensor
    prompt_length: int

    def rows(self, index) -> Rollouts:
        """Some of them."""
        return Rollouts(self.ids[index], self.mask[index], self.rewards[index], self.prompt_length)


@torch.no_grad()
def sample(model, tokenizer, pairs: list[tuple[int, int]], generator: torch.Generator) -> Rollouts:
    """One response to each pair, at temperature 1."""
    prompts = torch.tensor([tokenizer.encode(prompt_of(a, b) + "\n") for a, b in pairs])
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    done = torch.zeros(len(pairs), dtype=torch.bool)
    tokens, masks = [], []
    output = model(input_ids=prompts, use_cache=True)
    for _ in range(MAX_RESPONSE):
        token = torch.multinomial(output.logits[:, -1].softmax(-1), 1, generator=generator).squeeze(1)
        tokens.append(token.masked_fill(done, pad))
        masks.append(~done)
        done = done | (token == end)
        if done.all():
            break
        output = model(input_ids=tokens[-1][:, None], past_key_values=output.past_key_values, use_cache=True)
    responses, mask = torch.stack(tokens, 1), torch.stack(masks, 1)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    rewards = [compute_score("", text, f"{a + b:02d}") for text, (a, b) in zip(texts, pairs, strict=True)]
    return Rollouts(torch.cat([prompts, responses], 1), mask, torch.tensor(rewards), prompts.shape[1])


def log_probs_of(model, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens and the entropy at each, in nats, both ``(B, T)``."""
    logits = model(input_ids=rollouts.ids).logits[:, rollouts.prompt_length - 1 : -1]
    log_probs = logits.log_softmax(-1)
    responses = rollouts.ids[:, rollouts.prompt_length :]
    chosen = log_probs.gather(-1, responses[..., None]).squeeze(-1)
    return chosen, -(log_probs.exp() * log_probs).sum(-1).detach()


def rho_at(low: float, high: float, contribution: str, tensors, clip_ratio_c: float | None) -> float:
    """The positive contribution at these bounds, by the paper's token weight."""
    ranges = dict(ratio_lower_start=low, ratio_lower_max=low, ratio_upper_start=high, ratio_upper_max=high)
    config = BAPOConfig(contribution=contribution, **ranges)
    bounds, _ = find_clip_bounds(*tensors, config, clip_ratio_c=clip_ratio_c)
    return bounds.positive_contribution.item()


def mean_length(rollouts: Rollouts, chosen: Tensor) -> float:
    """Mean number of tokens of the chosen responses; NaN if there are none."""
    return rollouts.mask[chosen].sum(1).float().mean().item()


def train(model_folder: Path, method: str | BAPOConfig, seed: int, settings: Settings) -> Result:
    """Train from the model in a folder; ``method``: as in ``scripts.study.methods``, but none of the study's own, or
    its switches."""
    config = method if isinstance(method, BAPOConfig) else config_of(method)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    updates = []
    for _ in range(settings.updates // (settings.mini_batches * settings.epochs)):
        batches = sample_mini_batches(model, tokenizer, settings, generator)
        for _ in range(settings.epochs):
            updates += [update(model, optimizer, batch, config, settings) for batch in batches]
    final = sample(model, tokenizer, PAIRS * FINAL_SAMPLES, generator).rewards.mean().item()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return Result(updates, final, hashlib.sha256(weights).hexdigest())


def sample_mini_batches(model, tokenizer, settings: Settings, generator) -> list[tuple[Rollouts, Tensor, Tensor]]:
    """A rollout batch in mini-batches of whole groups: responses, old log-probs and advantages ``(B, T)``."""
    size = settings.prompts * settings.samples
    draw = torch.randint(len(PAIRS), (settings.prompts * settings.mini_batches,), generator=generator)
    pairs = [PAIRS[i] for i in draw.repeat_interleave(settings.samples)]
    rollouts = sample(model, tokenizer, pairs, generator)
    scores = torch.zeros(rollouts.mask.shape)
    scores[:, -1] = rollouts.rewards  # verl sums a response's token scores
    groups = np.arange(len(pairs)) // settings.samples
    advantages, _ = compute_grpo_outcome_advantage(scores, rollouts.mask.float(), groups)
    batches = []
    for part in torch.arange(len(pairs)).split(
        size
    ):  # cut as training will be: the first update's ratios are exactly 1
        rows = rollouts.rows(part)
        with torch.no_grad():
            batches.append((rows, log_probs_of(model, rows)[0], advantages[part]))
    return batches


def update(model, optimizer, batch: tuple, config: BAPOConfig, settings: Settings) -> dict[str, float]:
    """One optimizer update and its metrics."""
    rows, old_log_prob, advantages = batch
    clip_ratio_c = settings.dual_clip
    log_prob, entropy = log_probs_of(model, rows)
    tensors = (old_log_prob, log_prob, advantages, rows.mask)
    bounds, diagnostics = find_clip_bounds(*tensors, config, clip_ratio_c=clip_ratio_c)
    surrogate = clipped_surrogate_loss(*tensors, low=bounds.low, high=bounds.high, clip_ratio_c=clip_ratio_c)
    optimizer.zero_grad()
    surrogate.loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.norm_clip or torch.inf)
    optimizer.step()
    found = read_values(bounds, diagnostics)
    return {
        "reward": rows.rewards.mean().item(),
        "entropy": entropy[rows.mask].mean().item(),
        "grad_norm": grad_norm.item(),
        "length_of_successes": mean_length(rows, rows.rewards > 0),
        "length_of_failures": mean_length(rows, rows.rewards <= 0),
        "rho_value": rho_at(found["low"], found["high"], "value", tensors, clip_ratio_c),
        "rho_gradient": rho_at(found["low"], found["high"], "gradient", tensors, clip_ratio_c),
        "clip_low": found["low"],
        "clip_high": found["high"],
        "search_steps": found["search_steps"],
        **{key: found[key] for key in SEARCH_METRICS},
    }
