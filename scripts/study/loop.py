# SPDX-License-Identifier: Apache-2.0
"""Train the study's larger model, the example's Qwen2 of 99,136 weights, by reinforcement learning in one process.

Methods and measures are the same as for the small policies. Task, model and verl's group-relative advantages are the
same as in a real run. There is no trainer of verl, no FSDP, vLLM or Ray, and no split into micro-batches: one model
samples and trains in float32, a mini-batch is one forward, and the old log-probs are the trainer's own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo import BAPOConfig
from recipe.bapo.example.reward import compute_score
from scripts.example_task import MAX_RESPONSE, PAIRS, prompt_of
from scripts.study.measures import summaries, token_measures
from scripts.study.methods import PREVIOUS_BATCH, Tokens, find_bounds, loss_of, previous_batch_bounds, search
from scripts.study.train import TARGETS, Cell, table_rows
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

# The example's model after a longer warm-up, on answers of which few are right.
MODEL = Path(__file__).parent / "anchor_model"
FINAL_SAMPLES = 64  # responses to each problem after the last update
WINDOW = 32  # updates between two probes of the table's series


@dataclass(frozen=True)
class Settings:
    """The settings of a run, except method and seed.

    Attributes:
        mini_batches: optimizer updates per rollout batch and epoch.
        epochs: how often each sample is used.
        updates: total optimizer updates, a multiple of ``mini_batches * epochs``.
        prompts: prompts per update.
        samples: responses per prompt: the group within which GRPO compares.
        learning_rate: learning rate of AdamW, constant.
        norm_clip: limit on the gradient's norm. None: off.
        dual_clip: limit on the ratio of tokens with negative advantage. None: off.
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
    """The result of a run.

    Attributes:
        updates: reward, entropy, gradient norm, ``low``, ``high`` and ``token_measures`` of every update. If the method
            searches, also the other entries of ``methods.search``.
        final_reward: mean reward of responses sampled after the last update.
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
        """Select some responses."""
        return Rollouts(self.ids[index], self.mask[index], self.rewards[index], self.prompt_length)


@torch.no_grad()
def sample(model, tokenizer, pairs: list[tuple[int, int]], generator: torch.Generator) -> Rollouts:
    """Sample one response to each pair, at temperature 1."""
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
    """Compute log-prob and entropy of each response token, in nats, both ``(B, T)``."""
    logits = model(input_ids=rollouts.ids).logits[:, rollouts.prompt_length - 1 : -1]
    return log_probs_from(logits, rollouts.ids[:, rollouts.prompt_length :])


def log_probs_from(logits: Tensor, responses: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what ``log_probs_of`` returns from logits ``(B, T, V)`` and response tokens ``(B, T)``."""
    log_probs = logits.log_softmax(-1)
    chosen = log_probs.gather(-1, responses[..., None]).squeeze(-1)
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return chosen, entropy


def train(model_folder: Path, method: str | BAPOConfig, seed: int, settings: Settings) -> Result:
    """Train the model in a folder; ``method``: a name from ``scripts.study.methods``, or BAPO's options."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    updates = []
    for _ in range(settings.updates // (settings.mini_batches * settings.epochs)):
        batches = sample_mini_batches(model, tokenizer, settings, generator)
        for _ in range(settings.epochs):
            for batch in batches:
                updates.append(update(model, optimizer, batch, method, settings, updates))
    final = sample(model, tokenizer, PAIRS * FINAL_SAMPLES, generator).rewards.mean().item()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return Result(updates, final, hashlib.sha256(weights).hexdigest())


def sample_mini_batches(model, tokenizer, settings: Settings, generator) -> list[tuple[Rollouts, Tensor, Tensor]]:
    """Sample a rollout batch and return its mini-batches of whole groups.

    Each is a tuple of responses, old log-probs ``(B, T)`` and advantages ``(B, T)``.
    """
    size = settings.prompts * settings.samples
    draw = torch.randint(len(PAIRS), (settings.prompts * settings.mini_batches,), generator=generator)
    pairs = [PAIRS[i] for i in draw.repeat_interleave(settings.samples)]
    rollouts = sample(model, tokenizer, pairs, generator)
    scores = torch.zeros(rollouts.mask.shape)
    scores[:, -1] = rollouts.rewards  # verl adds up the scores of a response's tokens
    groups = np.arange(len(pairs)) // settings.samples
    advantages, _ = compute_grpo_outcome_advantage(scores, rollouts.mask.float(), groups)
    batches = []
    # Compute the log-probs in the mini-batches of training, so that the ratios of the first update are exactly 1.
    for part in torch.arange(len(pairs)).split(size):
        rows = rollouts.rows(part)
        with torch.no_grad():
            batches.append((rows, log_probs_of(model, rows)[0], advantages[part]))
    return batches


def update(
    model, optimizer, batch: tuple, method: str | BAPOConfig, settings: Settings, earlier: list[dict[str, float]]
) -> dict[str, float]:
    """Make one optimizer update and return its measures; ``earlier``: the measures of all updates before it."""
    rows, old_log_prob, advantages = batch
    log_prob, entropy = log_probs_of(model, rows)
    tokens = Tokens(old_log_prob[None], log_prob[None], advantages[None], rows.mask[None])
    if isinstance(method, BAPOConfig):
        bounds, method = search(tokens, method, settings.dual_clip), "bapo"
    elif method.startswith(PREVIOUS_BATCH):
        steps = [torch.tensor([measures["search_steps"]]) for measures in earlier]
        updates_on_a_batch = settings.mini_batches * settings.epochs
        bounds = previous_batch_bounds(method, tokens, settings.dual_clip, steps, updates_on_a_batch)
    else:
        bounds = find_bounds(method, tokens, settings.dual_clip)
    tokens.log_prob.retain_grad()
    optimizer.zero_grad()
    loss_of(method, tokens, bounds, settings.dual_clip).backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.norm_clip or torch.inf)
    optimizer.step()
    measured = bounds | token_measures(tokens, tokens.log_prob.grad, bounds)
    return {
        "reward": rows.rewards.mean().item(),
        "entropy": entropy[rows.mask].mean().item(),
        "grad_norm": grad_norm.item(),
        **{key: value.item() for key, value in measured.items()},
    }


def settings_of(cell: Cell) -> Settings:
    """Return the settings of a cell with source ``fresh`` or ``epochs``: 16 prompts of 8 responses an update.

    A rollout batch has four mini-batches with ``epochs``, and one with ``fresh``.
    """
    fresh = cell.source == "fresh"
    return Settings(
        mini_batches=1 if fresh else 4,
        epochs=cell.staleness,
        updates=cell.updates,
        prompts=16,
        samples=8,
        learning_rate=cell.learning_rate,
        dual_clip=cell.dual_clip,
    )


def rows_of(cell: Cell, seeds: list[int]) -> list[dict]:
    """Run one cell and return its rows of the table, one for each seed.

    The series of reward and entropy have one point for every ``WINDOW`` updates: the mean of the window's first four,
    which use their samples for the first time (``4 * staleness`` has to divide ``WINDOW``). One more point follows: the
    reward of new samples, and the entropy of the last update.
    """
    rows = []
    for seed in seeds:
        result = train(MODEL, cell.method, seed, settings_of(cell))
        updates = {key: torch.tensor([[u[key]] for u in result.updates]) for key in result.updates[0]}
        probes = {key: updates[key].view(-1, WINDOW, 1)[:, :4].mean(1) for key in ("reward", "entropy")}
        last = {"reward": torch.tensor([[result.final_reward]]), "entropy": updates["entropy"][-1:]}
        probes = {key: torch.cat([values, last[key]]) for key, values in probes.items()}
        finite = torch.tensor([np.isfinite(result.updates[-1]["grad_norm"])])
        columns = {"final_reward": last["reward"][0], "unsolved": torch.tensor([torch.nan]), "finite": finite}
        columns |= summaries(updates, probes, TARGETS[cell.task])
        rows += table_rows(cell, [seed], [result.weights[:16]], columns)
    return rows
