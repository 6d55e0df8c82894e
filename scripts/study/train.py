# SPDX-License-Identifier: Apache-2.0
"""One cell of a map: all its seeds trained at once, and what is measured of each run."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.study.measures import POINTS, summaries, token_measures
from scripts.study.methods import Tokens, loss_of
from scripts.study.policies import (
    PROBES,
    PROMPTS,
    SAMPLING,
    Optimizer,
    Responses,
    log_probs_of,
    next_log_probs,
    sample,
    sample_from,
    uniforms,
)
from scripts.study.tasks import PROMPT_COUNT, TASKS, warmed_up

GROUP, GROUPS, MINI_BATCHES = 8, 16, 4  # responses a prompt, prompts an update, mini-batches a rollout of map B
PROBE_SAMPLES, FINAL_SAMPLES = 8, 32  # a prompt
UNSOLVED = 0.02  # a prompt with fewer right samples is not solved


@dataclass(frozen=True)
class Cell:
    """Everything about a run but its seed.

    Attributes:
        map: of study.md, A, B or C, or ``control``.
        task: ``chain`` or ``reversal``.
        source: of staleness: ``block`` (S updates a rollout, each sample used once), ``epochs`` (each rollout of four
            mini-batches used S times), ``delay`` (a queue of S updates), ``partial`` (a queue, and each token sampled
            by the policy of its own time).
        staleness: S.
        optimizer: ``sgd`` or ``adamw``.
        learning_rate: constant.
        norm_clip, dual_clip: None: off.
        method: see ``scripts.study.methods``.
        updates: optimizer updates.
    """

    map: str
    task: str
    source: str
    staleness: int
    optimizer: str
    learning_rate: float
    norm_clip: float | None
    dual_clip: float | None
    method: str
    updates: int

    @property
    def name(self) -> str:
        """What it is called in the table, on the command line and in messages."""
        clips = f"norm{self.norm_clip:g}" if self.norm_clip else "nonorm"
        clips += f"-dual{self.dual_clip:g}" if self.dual_clip else "-nodual"
        run = f"{self.optimizer}-{clips}-{self.source}{self.staleness}-lr{self.learning_rate:g}-{self.method}"
        return f"{self.map}-{self.task}-{run}"


@dataclass(frozen=True)
class Batch:
    """One mini-batch: responses, and the advantages of their tokens ``(R, N, T)``."""

    responses: Responses
    advantages: Tensor


def group_advantages(rewards: Tensor) -> Tensor:
    """GRPO's: reward minus the group's mean, over its standard deviation; ``(R, N)`` in whole groups."""
    groups = rewards.view(rewards.shape[0], -1, GROUP)
    centred = groups - groups.mean(-1, keepdim=True)
    return (centred / (groups.std(-1, keepdim=True) + 1e-6)).view(rewards.shape)


Sampler = Callable[..., Batch]  # of the number of the batch


def block_replay(sampler: Sampler, staleness: int, updates: int) -> Iterator[Batch]:
    """Sample ``staleness`` mini-batches, then train on each once."""
    for start in range(0, updates, staleness):
        yield from [sampler(start + k) for k in range(staleness)]


def epochs(sampler: Sampler, staleness: int, updates: int) -> Iterator[Batch]:
    """Sample four mini-batches, then train on all of them ``staleness`` times."""
    for rollout in range(updates // (MINI_BATCHES * staleness)):
        rollouts = [sampler(MINI_BATCHES * rollout + k) for k in range(MINI_BATCHES)]
        for _ in range(staleness):
            yield from rollouts


def delay(sampler: Sampler, staleness: int, updates: int) -> Iterator[Batch]:
    """Train on what was sampled ``staleness`` updates ago; at first on what the first policy sampled."""
    queue: deque[Batch] = deque(sampler(k) for k in range(staleness))
    for update in range(updates):
        if update + staleness < updates:
            queue.append(sampler(update + staleness))
        yield queue.popleft()


def partial(sampler: Sampler, staleness: int, updates: int) -> Iterator[Batch]:
    """Train on responses whose first token is ``staleness`` updates old and whose last token is nearly new."""
    for update in range(updates):
        yield sampler(update, ages=staleness)


SOURCES = {"block": block_replay, "epochs": epochs, "delay": delay, "partial": partial}


class Trainer:
    """The runs of one cell, one for each seed."""

    def __init__(self, cell: Cell, seeds: list[int]):
        self.cell, self.seeds = cell, seeds
        self.task = TASKS[cell.task](seeds)
        self.weights = warmed_up(cell.task, tuple(seeds)).clone().requires_grad_()
        self.optimizer = Optimizer(cell.optimizer, self.weights, cell.learning_rate, cell.norm_clip)
        self.past: deque[Tensor] = deque(maxlen=cell.staleness + 1)  # weights by age, for ``partial``
        self.updates: list[dict[str, Tensor]] = []
        self.probes: list[dict[str, Tensor]] = []

    def sampler(self, number: int, ages: int | None = None) -> Batch:
        """Mini-batch ``number``: whole groups, and their advantages; ``ages``: of the first token, in updates."""
        draws = uniforms(self.seeds, PROMPTS, number, GROUPS)
        prompts = (draws * PROMPT_COUNT).long().repeat_interleave(GROUP, 1)
        draws = uniforms(self.seeds, SAMPLING, number, GROUP * GROUPS, self.task.length)
        if ages is None:
            responses = sample_from(self.task, self.weights, prompts, draws)
        else:
            self.past.append(self.weights.detach().clone())

            def log_probs_after(prompts, tokens):
                age = ages - ages * tokens.shape[-1] // self.task.length
                return next_log_probs(self.task, self.past[max(0, len(self.past) - 1 - age)], prompts, tokens)

            responses = sample(self.task, log_probs_after, prompts, draws)
        advantages = group_advantages(responses.rewards)[..., None].expand_as(responses.log_prob)
        return Batch(responses, advantages)

    def train(self) -> None:
        """All updates, with a probe of the policy before, sixteen times between and after them."""
        source = SOURCES[self.cell.source](self.sampler, self.cell.staleness, self.cell.updates)
        self.probe()
        for number, batch in enumerate(source, 1):
            self.update(batch)
            if number % (self.cell.updates // POINTS) == 0:
                self.probe()

    def update(self, batch: Batch) -> None:
        """One optimizer step of every run."""
        responses, dual_clip = batch.responses, self.cell.dual_clip
        log_prob = log_probs_of(self.task, self.weights, responses)
        tokens = Tokens(responses.log_prob, log_prob, batch.advantages, responses.mask)
        loss, bounds = loss_of(self.cell.method, tokens, dual_clip)
        (gradient,) = torch.autograd.grad(loss, self.weights)
        norm = self.optimizer.step(gradient)
        self.updates.append({"grad_norm": norm, **bounds, **token_measures(tokens, bounds, dual_clip)})

    def probe(self) -> None:
        """Reward and entropy of the policy as it is now, from fresh responses to every prompt."""
        fresh = self.fresh(PROBE_SAMPLES, len(self.probes))
        entropy = (fresh.entropy * fresh.mask).sum((1, 2)) / fresh.mask.sum((1, 2))
        self.probes.append({"reward": self.finite() * fresh.rewards.mean(1), "entropy": entropy})

    def fresh(self, samples: int, index: int) -> Responses:
        """``samples`` responses to every prompt."""
        prompts = torch.arange(PROMPT_COUNT).repeat_interleave(samples).expand(len(self.seeds), -1)
        draws = uniforms(self.seeds, PROBES, index, prompts.shape[1], self.task.length)
        return sample_from(self.task, self.weights, prompts, draws)

    def finite(self) -> Tensor:
        """Whether a run's weights are all finite, ``(R,)``."""
        return self.weights.detach().isfinite().all(1)

    def rows(self) -> list[dict]:
        """One row of the table for each run."""
        fresh, finite = self.fresh(FINAL_SAMPLES, POINTS + 1), self.finite()
        by_prompt = fresh.rewards.view(len(self.seeds), PROMPT_COUNT, FINAL_SAMPLES).mean(-1) * finite[:, None]
        columns = {
            "final_reward": by_prompt.mean(1),
            "unsolved": (by_prompt < UNSOLVED).float().mean(1),
            "truncated": fresh.truncated.float().mean(1),
            "finite": finite,
            "first_right": self.task.first_right(fresh.prompts, fresh.tokens).float().mean(1),
            "response_length": fresh.mask.sum(-1).float().mean(1),
        }
        updates = {key: torch.stack([update[key] for update in self.updates]) for key in self.updates[0]}
        probes = {key: torch.stack([probe[key] for probe in self.probes]) for key in self.probes[0]}
        columns |= summaries(updates, probes)
        weights = self.weights.detach().numpy()
        return [
            {
                "cell": self.cell.name,
                **vars(self.cell),
                "seed": seed,
                "weights": hashlib.sha256(weights[run].tobytes()).hexdigest()[:16],
                **{key: value[run].tolist() for key, value in columns.items()},
            }
            for run, seed in enumerate(self.seeds)
        ]
