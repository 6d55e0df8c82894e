# SPDX-License-Identifier: Apache-2.0
"""The study's two tasks, batched over runs: each seed has its own right answers and its own prior.

A task has ``vocabulary``, ``length`` (tokens of the longest response), ``feature_count``, ``must_end`` (whether a
response that fills its length counts as truncated) and the methods below. ``R`` runs, ``N`` responses a run.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from scripts.study.policies import TASK, WARM_UP, Optimizer, next_log_probs, random_weights, sample, stream, uniforms

PROMPT_COUNT = 24
WARM_UP_STEPS, WARM_UP_RESPONSES, WARM_UP_RATE = 500, 128, 3e-3


class RetryChain:
    """Guess one of 32 answers up to six times; the right one ends the response and earns 1.

    The prior of every prompt is peaked at wrong answers and gives the right one 2 %, at every guess. Whether a policy
    still knows the rare right answer of a prompt can be counted.
    """

    vocabulary, length, must_end = 32, 6, False
    feature_count = PROMPT_COUNT + length + vocabulary
    right_share, spread = 0.02, 1.85  # of the prior: the right answer, and the deviation of the others' logits

    def __init__(self, seeds: list[int]):
        draws = [stream(seed, TASK) for seed in seeds]
        right = np.stack([rng.integers(self.vocabulary, size=PROMPT_COUNT) for rng in draws])
        logits = np.stack([rng.normal(0, self.spread, (PROMPT_COUNT, self.vocabulary)) for rng in draws])
        self.right = torch.from_numpy(right)  # (R, PROMPT_COUNT)
        wrong = torch.from_numpy(logits).scatter(-1, self.right[..., None], -torch.inf).softmax(-1)
        self.prior = (wrong * (1 - self.right_share)).scatter(-1, self.right[..., None], self.right_share).float()

    def features(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """The prompt, the number of the guess, and the set of earlier guesses: ``(R, N, feature_count)``."""
        index = torch.cat([prompts[..., None], tokens + PROMPT_COUNT + self.length], -1)
        features = torch.zeros(*prompts.shape, self.feature_count).scatter_(-1, index, 1.0)
        features[..., PROMPT_COUNT + tokens.shape[-1]] = 1.0
        return features

    def ends(self, prompts: Tensor, token: Tensor) -> Tensor:
        """Whether this token ``(R, N)`` ends the response."""
        return token == self.right.gather(1, prompts)

    def rewards(self, prompts: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Whether a guess is right, ``(R, N)``."""
        return ((tokens == self.right.gather(1, prompts)[..., None]) & mask).any(-1)

    def first_right(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Whether the first guess is right, ``(R, N)``."""
        return tokens[..., 0] == self.right.gather(1, prompts)

    def teacher(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Log-probs ``(R, N, V)`` that the warm-up teaches."""
        index = prompts[..., None].expand(-1, -1, self.vocabulary)
        return self.prior.gather(1, index).log()


class Reversal:
    """Write a string of three to five of eight letters backwards, then end; ten tokens at most.

    The warm-up's teacher is right at 75 % of the letters and ends where it should with 75 %, later with 30 %. A policy
    that forgets to end never earns anything again.
    """

    letters, longest, length, must_end = 8, 5, 10, True
    vocabulary = letters + 1  # the last one ends the response
    end = letters
    feature_count = longest * (letters + 1) + length + vocabulary + 1
    right_share, end_late = 0.75, 0.3

    def __init__(self, seeds: list[int]):
        strings = []
        for seed in seeds:
            rng = stream(seed, TASK)
            lengths = rng.integers(3, self.longest + 1, PROMPT_COUNT)
            letters = rng.integers(self.letters, size=(PROMPT_COUNT, self.longest))
            # Backwards already: position t holds what the response should have there, then the end.
            strings.append(np.where(np.arange(self.longest) < lengths[:, None], letters, self.end))
        padded = np.pad(np.stack(strings), ((0, 0), (0, 0), (0, self.length - self.longest)), constant_values=self.end)
        self.answers = torch.from_numpy(padded)  # (R, PROMPT_COUNT, length)

    def _answers_to(self, prompts):
        return self.answers.gather(1, prompts[..., None].expand(-1, -1, self.length))

    def features(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """The prompt's letters by place, the position and the last token: ``(R, N, feature_count)``."""
        position = tokens.shape[-1]
        string = self._answers_to(prompts)[..., : self.longest] + torch.arange(self.longest) * (self.letters + 1)
        start = self.longest * (self.letters + 1)
        last = tokens[..., -1:] if position else torch.full((*prompts.shape, 1), self.vocabulary)
        index = torch.cat([string, last + start + self.length], -1)
        features = torch.zeros(*prompts.shape, self.feature_count).scatter_(-1, index, 1.0)
        features[..., start + position] = 1.0
        return features

    def ends(self, prompts: Tensor, token: Tensor) -> Tensor:
        """Whether this token ``(R, N)`` ends the response."""
        return token == self.end

    def rewards(self, prompts: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Whether the whole string and its end are right, ``(R, N)``; what follows the end does not count."""
        wrong = ((tokens != self._answers_to(prompts)) & mask).any(-1)
        return ~wrong & ((tokens == self.end) & mask).any(-1)

    def first_right(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Whether the first letter is right, ``(R, N)``."""
        return tokens[..., 0] == self._answers_to(prompts)[..., 0]

    def teacher(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Log-probs ``(R, N, V)`` that the warm-up teaches."""
        answers, position = self._answers_to(prompts), tokens.shape[-1]
        late = (answers[..., :position] == self.end).any(-1)  # it should have ended before
        share = torch.where(late, self.end_late, self.right_share)[..., None]
        others = ((1 - share) / (self.vocabulary - 1)).expand(-1, -1, self.vocabulary)
        return others.scatter(-1, answers[..., position, None], share).log()


TASKS = {"chain": RetryChain, "reversal": Reversal}


@functools.lru_cache(maxsize=2)
def warmed_up(name: str, seeds: tuple[int, ...]) -> Tensor:
    """Weights ``(R, weights)`` after supervised steps towards the teacher: where all methods start."""
    task = TASKS[name](list(seeds))
    weights = random_weights(task, list(seeds)).requires_grad_()
    optimizer = Optimizer("adamw", weights, WARM_UP_RATE, None)
    for step in range(WARM_UP_STEPS):
        optimizer.learning_rate = WARM_UP_RATE * (1 - step / WARM_UP_STEPS)
        draws = uniforms(list(seeds), WARM_UP, step, WARM_UP_RESPONSES, task.length + 1)
        prompts = (draws[..., -1] * PROMPT_COUNT).long()
        tokens = sample(task, task.teacher, prompts, draws).tokens
        loss = 0.0
        for t in range(task.length):
            target = task.teacher(prompts, tokens[..., :t]).exp()
            loss = loss - (target * next_log_probs(task, weights, prompts, tokens[..., :t])).sum()
        (gradient,) = torch.autograd.grad(loss / (WARM_UP_RESPONSES * task.length), weights)
        optimizer.step(gradient)
    return weights.detach()
