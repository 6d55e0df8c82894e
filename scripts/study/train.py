# SPDX-License-Identifier: Apache-2.0
"""Train one cell of the study, all seeds at once, and measure each run."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scripts.study.measures import SEARCHED, summaries, token_measures
from scripts.study.methods import (
    PREVIOUS_BATCH,
    Tokens,
    config_of,
    find_bounds,
    fixed_bounds,
    loss_of,
    path_of,
    previous_batch_bounds,
)
from scripts.study.policies import (
    PROBES,
    PROMPTS,
    SAMPLING,
    AdamW,
    Responses,
    log_probs_of,
    next_log_probs,
    sample,
    sample_from,
    uniforms,
)
from scripts.study.schedule import bounds_of_epoch
from scripts.study.tasks import TASKS, warmed_up

GROUP, GROUPS, MINI_BATCHES = 8, 16, 4  # responses to a prompt, prompts of an update, mini-batches of ``epochs``
NORM_CLIP = 1.0
PROBE_EVERY = 4  # updates
PROBE_SAMPLES, FINAL_SAMPLES = 4, 16  # responses to each prompt
TARGETS = {"chain": 0.8, "hard_chain": 0.35, "larger_model": 0.6}  # target reward, for the number of updates to it
UNSOLVED = 0.02  # a prompt is unsolved if a smaller share of its responses succeeds


@dataclass(frozen=True)
class Cell:
    """The settings of a run, except its seed.

    Attributes:
        task: ``chain`` or ``hard_chain`` of ``scripts.study.tasks``, or ``larger_model``, which is the example's task.
        source: the source of staleness. ``fresh``: every update trains on samples of the current policy. ``epochs``:
            each rollout of four mini-batches is used S times. ``once``: each rollout of S mini-batches is used once.
            ``delay``: samples wait in a queue for S updates. ``partial``: a response is sampled during S updates, and
            each token by the policy of that time.
        staleness: S; 1 for ``fresh``.
        learning_rate: learning rate of AdamW, constant.
        dual_clip: limit on the ratio of negative tokens; None: off.
        method: see ``scripts.study.methods``.
        updates: number of optimizer updates.
    """

    task: str
    source: str
    staleness: int
    learning_rate: float
    dual_clip: float | None
    method: str
    updates: int

    @property
    def name(self) -> str:
        """The name of the cell in the table, on the command line and in messages."""
        dual_clip = f"dual{self.dual_clip:g}" if self.dual_clip else "nodual"
        return f"{self.task}-{self.source}{self.staleness}-lr{self.learning_rate:g}-{dual_clip}-{self.method}"

    @property
    def donor(self) -> Cell | None:
        """The cell whose bounds this cell's runs use, if its method begins with ``other_seed:`` or ``own_mean:``."""
        if self.method.startswith(PREVIOUS_BATCH):
            return None
        kind, _, method = self.method.partition(":")
        return replace(self, method=method) if method else None

    @property
    def updates_on_a_batch(self) -> int:
        """Number of optimizer updates on one rollout batch. With a queue every update has its own batch."""
        return {"epochs": MINI_BATCHES * self.staleness, "once": self.staleness}.get(self.source, 1)


@dataclass(frozen=True)
class Batch:
    """One mini-batch: responses, and the advantages of their tokens ``(R, N, T)``."""

    responses: Responses
    advantages: Tensor


def group_advantages(rewards: Tensor) -> Tensor:
    """Compute GRPO's advantages, (reward - group's mean) / group's standard deviation; ``(R, N)`` in whole groups."""
    groups = rewards.view(rewards.shape[0], -1, GROUP)
    centred = groups - groups.mean(-1, keepdim=True)
    return (centred / (groups.std(-1, keepdim=True) + 1e-6)).view(rewards.shape)


Sampler = Callable[..., Batch]  # takes the number of the batch
Source = Iterator[tuple[Batch, int]]  # yields mini-batches, and how often each was used before


def fresh(sampler: Sampler, staleness: int, updates: int) -> Source:
    """Train on samples of the current policy."""
    for update in range(updates):
        yield sampler(update), 0


def epochs(sampler: Sampler, staleness: int, updates: int) -> Source:
    """Sample four mini-batches, then train on all of them ``staleness`` times."""
    for rollout in range(updates // (MINI_BATCHES * staleness)):
        rollouts = [sampler(MINI_BATCHES * rollout + k) for k in range(MINI_BATCHES)]
        for epoch in range(staleness):
            yield from ((batch, epoch) for batch in rollouts)


def once(sampler: Sampler, staleness: int, updates: int) -> Source:
    """Sample ``staleness`` mini-batches, then train on each of them once."""
    for rollout in range(updates // staleness):
        rollouts = [sampler(staleness * rollout + k) for k in range(staleness)]
        yield from ((batch, 0) for batch in rollouts)


def delay(sampler: Sampler, staleness: int, updates: int) -> Source:
    """Train on samples from ``staleness`` updates ago; at first on samples of the first policy."""
    queue: deque[Batch] = deque(sampler(k) for k in range(staleness))
    for update in range(updates):
        if update + staleness < updates:
            queue.append(sampler(update + staleness))
        yield queue.popleft(), 0


def partial(sampler: Sampler, staleness: int, updates: int) -> Source:
    """Train on responses whose first token is ``staleness`` updates old and whose last token is nearly new."""
    for update in range(updates):
        yield sampler(update, ages=staleness), 0


SOURCES = {"fresh": fresh, "epochs": epochs, "once": once, "delay": delay, "partial": partial}


class Trainer:
    """The runs of one cell, one for each seed.

    Args:
        cell: what to train.
        seeds: one seed for each run.
        donor: ``search_steps`` of the donor cell's runs, ``(R, updates)``. None if the cell has no donor.
    """

    def __init__(self, cell: Cell, seeds: list[int], donor: Tensor | None = None):
        self.cell, self.seeds = cell, seeds
        self.task = TASKS[cell.task](seeds)
        self.weights = warmed_up(cell.task, tuple(seeds)).clone().requires_grad_()
        self.optimizer = AdamW(self.weights, cell.learning_rate, NORM_CLIP)
        self.past: deque[Tensor] = deque(maxlen=cell.staleness + 1)  # weights by age, for ``partial``
        self.updates: list[dict[str, Tensor]] = []
        self.probes: list[dict[str, Tensor]] = []
        self.donated = donated_bounds(cell, donor) if donor is not None else None

    def sampler(self, number: int, ages: int | None = None) -> Batch:
        """Sample mini-batch ``number``, in whole groups with advantages; ``ages``: first token's age in updates."""
        draws = uniforms(self.seeds, PROMPTS, number, GROUPS)
        prompts = (draws * self.task.prompt_count).long().repeat_interleave(GROUP, 1)
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
        """Make all updates, with a probe of the policy before the first and after every few."""
        self.probe()
        for batch, epoch in SOURCES[self.cell.source](self.sampler, self.cell.staleness, self.cell.updates):
            self.update(batch, epoch)
            if len(self.updates) % PROBE_EVERY == 0:
                self.probe()

    def update(self, batch: Batch, epoch: int = 0) -> None:
        """Make one optimizer step in every run; ``epoch``: how often the batch was used before."""
        responses = batch.responses
        log_prob = log_probs_of(self.task, self.weights, responses)
        tokens = Tokens(responses.log_prob, log_prob, batch.advantages, responses.mask)
        bounds = self.bounds(tokens, epoch)
        loss = loss_of(self.cell.method, tokens, bounds, self.cell.dual_clip)
        gradient, of_tokens = torch.autograd.grad(loss, [self.weights, log_prob])
        norm = self.optimizer.step(gradient)
        kept = {key: bounds[key] for key in ("low", "high", *SEARCHED) if key in bounds}
        self.updates.append({"grad_norm": norm, **kept, **token_measures(tokens, of_tokens, bounds)})

    def bounds(self, tokens: Tokens, epoch: int) -> dict[str, Tensor]:
        """Return the bounds of this update, ``(R,)`` each."""
        if self.donated is not None:
            low, high = self.donated
            return {"low": low[:, len(self.updates)], "high": high[:, len(self.updates)]}
        if self.cell.method == "schedule":
            return fixed_bounds(*bounds_of_epoch(epoch), len(self.seeds))
        if self.cell.method.startswith(PREVIOUS_BATCH):
            earlier = [update["search_steps"] for update in self.updates]
            return previous_batch_bounds(
                self.cell.method, tokens, self.cell.dual_clip, earlier, self.cell.updates_on_a_batch
            )
        return find_bounds(self.cell.method, tokens, self.cell.dual_clip)

    def probe(self) -> None:
        """Measure reward and entropy of the current policy on all prompts."""
        success, entropy = self.success(PROBE_SAMPLES, len(self.probes))
        self.probes.append({"reward": success.mean((1, 2)), "entropy": entropy})

    def success(self, samples: int, index: int) -> tuple[Tensor, Tensor]:
        """Measure the successes ``(R, prompts, samples)``, 0 if a weight is not finite, and the entropy ``(R,)``."""
        prompts = torch.arange(self.task.prompt_count).repeat_interleave(samples).expand(len(self.seeds), -1)
        draws = uniforms(self.seeds, PROBES, index, prompts.shape[1], self.task.length)
        success, entropy = self.task.success(self.weights.detach(), prompts, draws)
        success = torch.where(self.finite()[:, None], success, 0.0)
        return success.view(len(self.seeds), -1, samples), entropy

    def finite(self) -> Tensor:
        """Whether a run's weights are all finite, ``(R,)``."""
        return self.weights.detach().isfinite().all(1)

    def rows(self) -> list[dict]:
        """Make one row of the table for each run."""
        by_prompt = self.success(FINAL_SAMPLES, len(self.probes))[0].mean(-1)
        columns = {
            "final_reward": by_prompt.mean(1),
            "unsolved": (by_prompt < UNSOLVED).float().mean(1),
            "finite": self.finite(),
        }
        updates = {key: torch.stack([update[key] for update in self.updates]) for key in self.updates[0]}
        probes = {key: torch.stack([probe[key] for probe in self.probes]) for key in self.probes[0]}
        columns |= summaries(updates, probes, TARGETS[self.cell.task])
        weights = self.weights.detach().numpy()
        hashes = [hashlib.sha256(run.tobytes()).hexdigest()[:16] for run in weights]
        return table_rows(self.cell, self.seeds, hashes, columns)


def table_rows(cell: Cell, seeds: list[int], hashes: list[str], columns: dict[str, Tensor]) -> list[dict]:
    """Make the rows of the table: cell, seed, hash of the final weights, and the columns ``(R,)`` or ``(R, n)``."""
    return [
        {"cell": cell.name, **vars(cell), "seed": seed, "weights": hashes[run]}
        | {key: value[run].tolist() for key, value in columns.items()}
        for run, seed in enumerate(seeds)
    ]


def donated_bounds(cell: Cell, search_steps: Tensor) -> tuple[Tensor, Tensor]:
    """Compute lower and upper bounds ``(R, updates)`` of a cell that uses the bounds of its donor's runs."""
    low, high = (bound[search_steps.long()] for bound in path_of(config_of(cell.donor.method)))
    if cell.method.startswith("other_seed:"):
        return low.roll(-1, 0), high.roll(-1, 0)
    return low.mean(1, keepdim=True).expand_as(low), high.mean(1, keepdim=True).expand_as(high)
