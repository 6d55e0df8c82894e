# SPDX-License-Identifier: Apache-2.0
"""Sample responses, and make and measure the optimizer updates of the study.

One model samples and trains in one process, and the old log-probs are the trainer's own. An update is split into
micro-batches, because the logits of a mini-batch would take gigabytes. The responses to a prompt are consecutive rows,
so that their prompt is read once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn import functional

from bapo import BAPOConfig, clipped_surrogate_loss, find_clip_bounds
from bapo.bounds import read_and_validate
from recipe.bapo.language_model.task import MAX_RESPONSE, compute_score
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_policy_loss_fn
from verl.workers.config import ActorConfig

CONFIGS = Path(__file__).parents[2] / "configs" / "method"
SAMPLES = 8  # responses to each prompt
PROMPTS_AT_ONCE = 4  # prompts of a micro-batch, with all responses to them
SAMPLED_AT_ONCE = 128
DUAL_CLIP = 3.0
# GSPO with its published settings (arXiv 2507.18071; verl's examples/gspo_trainer). No loss reads the first three.
GSPO = ActorConfig(
    strategy="fsdp",
    rollout_n=1,
    use_dynamic_bsz=True,
    clip_ratio_low=3e-4,
    clip_ratio_high=4e-4,
    loss_agg_mode="seq-mean-token-mean",
)


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


@cache
def config_of(method: str) -> BAPOConfig:
    """Load the options of a method from its file in configs/method."""
    files = (CONFIGS / f"{name}.yaml" for name in ("bapo", method))  # every other file inherits bapo.yaml
    values = OmegaConf.merge(*map(OmegaConf.load, files))
    options = {key: value for key, value in values.items() if key in BAPOConfig.__dataclass_fields__}
    if method == "grpo":  # its file leaves the bounds to verl's loss
        options |= dict(ratio_lower_start=0.8, ratio_lower_max=0.8, ratio_upper_start=1.2, ratio_upper_max=1.2)
    return BAPOConfig(**options)


@torch.no_grad()
def sample(model, tokenizer, rows: list[dict], generator: torch.Generator) -> Rollouts:
    """Sample one response to each row's prompt, at temperature 1. All prompts have the same number of tokens."""
    prompts = [tokenizer.encode(row["prompt"][0]["content"] + "\n") for row in rows]
    prompts = torch.tensor(prompts, device=model.device)
    parts = [_respond(model, tokenizer, part, generator) for part in prompts.split(SAMPLED_AT_ONCE)]
    responses, mask = (torch.cat(planes) for planes in zip(*parts, strict=True))
    texts = [tokenizer.decode(ids[there], skip_special_tokens=True) for ids, there in zip(responses, mask, strict=True)]
    rewards = [
        compute_score("", text, row["reward_model"]["ground_truth"]) for text, row in zip(texts, rows, strict=True)
    ]
    rewards = torch.tensor(rewards, device=model.device)
    return Rollouts(torch.cat([prompts, responses], 1), mask, rewards, prompts.shape[1])


def _respond(model, tokenizer, prompts, generator):
    """Sample tokens, and return them with their mask, both ``(B, MAX_RESPONSE)``."""
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    tokens = prompts.new_full((len(prompts), MAX_RESPONSE), pad)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    done = mask[:, 0].clone()
    output = model(input_ids=prompts, use_cache=True, logits_to_keep=1)
    for place in range(MAX_RESPONSE):
        probabilities = output.logits[:, -1].float().softmax(-1)
        token = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
        tokens[:, place], mask[:, place] = token.masked_fill(done, pad), ~done
        done = done | (token == end)
        if done.all():
            break
        output = model(input_ids=tokens[:, place, None], past_key_values=output.past_key_values, use_cache=True)
    return tokens, mask


def log_probs_of(model, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """Compute log-prob and entropy of each response token, in nats, both ``(B, T)`` float32.

    The ``SAMPLES`` responses to a prompt must be consecutive: their prompt is read once for all of them. Places after
    the end of the longest response are 0.

    Raises:
        ValueError: if rows of a group of ``SAMPLES`` have different prompts.
    """
    longest = int(rollouts.mask.sum(1).max())
    prompts, responses = rollouts.ids.split([rollouts.prompt_length, rollouts.mask.shape[1]], 1)
    if not torch.equal(prompts, prompts[::SAMPLES].repeat_interleave(SAMPLES, 0)):
        raise ValueError(f"the {SAMPLES} responses to a prompt must be consecutive rows with the same prompt")
    responses = responses[:, :longest]
    read = model(input_ids=prompts[::SAMPLES], use_cache=True, logits_to_keep=1)
    read.past_key_values.batch_repeat_interleave(SAMPLES)
    logits = read.logits.repeat_interleave(SAMPLES, 0)
    if longest > 1:
        later = model(input_ids=responses[:, :-1], past_key_values=read.past_key_values)
        logits = torch.cat([logits, later.logits], 1)
    found = log_probs_from(logits.float(), responses)
    log_prob, entropy = (functional.pad(plane, (0, rollouts.mask.shape[1] - longest)) for plane in found)
    return log_prob, entropy


def log_probs_from(logits: Tensor, responses: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-prob and entropy ``(B, T)`` from logits ``(B, T, V)`` and response tokens ``(B, T)``."""
    log_probs = logits.log_softmax(-1)
    chosen = log_probs.gather(-1, responses[..., None]).squeeze(-1)
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return chosen, entropy


@torch.no_grad()
def log_probs(model, rollouts: Rollouts) -> Tensor:
    """Compute log-probs of the response tokens ``(B, T)``."""
    parts = torch.arange(len(rollouts.ids)).split(PROMPTS_AT_ONCE * SAMPLES)
    return torch.cat([log_probs_of(model, rollouts.rows(part))[0] for part in parts])


def advantages_of(rollouts: Rollouts) -> Tensor:
    """Compute verl's group-relative advantages ``(B, T)``. The responses of a group must be consecutive."""
    scores = torch.zeros(rollouts.mask.shape, device=rollouts.mask.device)
    scores[:, -1] = rollouts.rewards  # verl adds up the scores of a response's tokens
    groups = np.arange(len(rollouts.ids)) // SAMPLES
    return compute_grpo_outcome_advantage(scores, rollouts.mask.float(), groups)[0]


def make_update(model, optimizer, rollouts: Rollouts, old: Tensor, method: str) -> dict[str, float]:
    """Make one optimizer update, and measure its tokens at the method's, at GRPO's and at BAPO's bounds.

    Args:
        rollouts: a mini-batch.
        old: log-probs of its tokens before any update, ``(B, T)``.
        method: the name of a file in configs/method, or ``gspo``.
    """
    advantages, mask = advantages_of(rollouts), rollouts.mask
    low, high = bounds_of(model, rollouts, old, advantages, method)
    now, entropy, without_gradient = torch.zeros_like(old), torch.zeros_like(old), torch.ones_like(mask)
    for parameter in model.parameters():  # without any advantages AdamW still makes its step, with a gradient of 0
        parameter.grad = torch.zeros_like(parameter)
    for part, learns in micro_batches(advantages):
        with torch.set_grad_enabled(learns):
            log_prob, entropy[part] = log_probs_of(model, rollouts.rows(part))
        now[part] = log_prob.detach()
        if learns:
            log_prob.retain_grad()
            # GSPO's loss is a mean over the responses of the mini-batch, that of the others a mean over its tokens.
            weight = len(part) / len(mask) if method == "gspo" else mask[part].sum() / mask.sum()
            loss = loss_of(method, old[part], log_prob, advantages[part], mask[part], low, high)
            (loss * weight).backward()
            without_gradient[part] = log_prob.grad == 0
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return measures_of(old, now, advantages, mask) | {
        "low": low,
        "high": high,
        "without_gradient_positive": without_gradient[mask & (advantages > 0)].float().mean().item(),
        "without_gradient_negative": without_gradient[mask & (advantages < 0)].float().mean().item(),
        "reward": rollouts.rewards.mean().item(),
        "entropy": entropy[mask].mean().item(),
        "grad_norm": grad_norm.item(),
    }


def loss_of(method: str, old: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, low, high) -> Tensor:
    """Compute the loss of tokens ``(B, T)``, with a graph at ``log_prob``. GSPO does not use ``low`` and ``high``."""
    if method == "gspo":
        mode = GSPO.loss_agg_mode
        return get_policy_loss_fn("gspo")(old, log_prob, advantages, mask.float(), loss_agg_mode=mode, config=GSPO)[0]
    return clipped_surrogate_loss(old, log_prob, advantages, mask, low, high, clip_ratio_c=DUAL_CLIP).loss


def micro_batches(advantages: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """Yield the rows of each micro-batch, and whether its responses have a gradient.

    If all responses to a prompt are right, or all wrong, their advantages are 0. They need no backward.
    """
    groups = torch.arange(len(advantages)).view(-1, SAMPLES)
    learn = advantages.view(len(groups), -1).any(1).cpu()
    for learns in (True, False):
        for part in groups[learn == learns].split(PROMPTS_AT_ONCE):
            if len(part):
                yield part.flatten(), learns


def bounds_of(model, rollouts: Rollouts, old: Tensor, advantages: Tensor, method: str) -> tuple[float, float]:
    """Return the clip bounds of an update. GSPO does not clip the ratio of a token: 0 and infinity."""
    if method == "gspo":
        return 0.0, math.inf
    config = config_of(method)
    if config.fixed:
        return config.ratio_lower_start, config.ratio_upper_start
    before = log_probs(model, rollouts)  # the extra forward that exact bounds need
    bounds, _ = find_clip_bounds(old, before, advantages, rollouts.mask, config, clip_ratio_c=DUAL_CLIP)
    return bounds.low.item(), bounds.high.item()


def measures_of(old: Tensor, now: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, float]:
    """Measure tokens at GRPO's bounds (rho, clipped share by sign) and for BAPO's search.

    For the search: rho before it, the bounds that it would find, and whether they reach its target.
    """
    grpo, bapo = (
        read_and_validate(*find_clip_bounds(old, now, advantages, mask, config, clip_ratio_c=DUAL_CLIP))
        for config in (config_of("grpo"), config_of("bapo"))
    )
    names = ("clipfrac_positive", "clipfrac_negative", "effective_sample_size", "length_positive", "length_negative")
    found = {name: grpo[name] for name in (*names, "negative_unbounded_share", "positive_contribution")}
    names = ("positive_contribution_start", "positive_contribution", "low", "high", "search_steps", "saturated")
    return found | {f"bapo_{name}": float(bapo[name]) for name in names}
