# SPDX-License-Identifier: Apache-2.0
"""Many small policies as one batched model: the first dimension of every tensor is the run.

A policy is a network with two hidden layers. It maps features of the prompt and of the tokens so far to the logits of
the next token. ``R`` is the number of runs, ``N`` of responses in a run, ``T`` the length of the longest response,
``V`` the size of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

HIDDEN = 64
SAMPLING, PROMPTS, PROBES, WARM_UP, WEIGHTS, TASK = range(6)  # purposes of a seed's random numbers


def stream(seed: int, purpose: int, index: int = 0) -> np.random.Generator:
    """Return a generator that depends only on seed, purpose and index, so that all methods draw the same numbers."""
    return np.random.default_rng([seed, purpose, index])


def uniforms(seeds: list[int], purpose: int, index: int, *shape: int) -> Tensor:
    """Draw uniform numbers in [0, 1), ``(R, *shape)`` float32."""
    draws = [stream(seed, purpose, index).random(shape, dtype=np.float32) for seed in seeds]
    return torch.from_numpy(np.stack(draws))


def weight_shapes(task) -> list[tuple[int, ...]]:
    """Return the shapes of one policy's weights: three matrices, each followed by its bias."""
    sizes = [task.feature_count, HIDDEN, HIDDEN, task.vocabulary]
    return [shape for rows, columns in zip(sizes, sizes[1:], strict=False) for shape in ((rows, columns), (1, columns))]


def random_weights(task, seeds: list[int]) -> Tensor:
    """Draw weights ``(R, weights)``: matrices by He's normal initialisation, biases 0."""
    runs = []
    for seed in seeds:
        rng = stream(seed, WEIGHTS)
        parts = [
            rng.normal(0, (2 / shape[0]) ** 0.5, shape) if shape[0] > 1 else np.zeros(shape)
            for shape in weight_shapes(task)
        ]
        runs.append(np.concatenate([part.ravel() for part in parts]))
    return torch.from_numpy(np.stack(runs).astype(np.float32))


def next_log_probs(task, weights: Tensor, prompts: Tensor, tokens: Tensor) -> Tensor:
    """Compute the log-probs of the next token.

    Args:
        weights: ``(R, weights)``.
        prompts: ``(R, N)``.
        tokens: the tokens so far, ``(R, N, t)``.

    Returns:
        ``(R, N, V)``.
    """
    shapes = weight_shapes(task)
    parts = weights.split([rows * columns for rows, columns in shapes], 1)
    matrices = [part.view(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]
    hidden = task.features(prompts, tokens)
    for layer in (0, 2):
        hidden = torch.baddbmm(matrices[layer + 1], hidden, matrices[layer]).relu_()
    return torch.baddbmm(matrices[5], hidden, matrices[4]).log_softmax(-1)


@dataclass(frozen=True)
class Responses:
    """Sampled responses.

    Attributes:
        prompts: ``(R, N)``.
        tokens: ``(R, N, T)``.
        log_prob: log-probs of the tokens under the policies that sampled them, ``(R, N, T)``.
        mask: true up to the end of the response, ``(R, N, T)``.
        rewards: 0 or 1, ``(R, N)``.
    """

    prompts: Tensor
    tokens: Tensor
    log_prob: Tensor
    mask: Tensor
    rewards: Tensor


@torch.no_grad()
def sample(task, log_probs_after: Callable[[Tensor, Tensor], Tensor], prompts: Tensor, draws: Tensor) -> Responses:
    """Sample one response to each prompt, with the given uniform numbers.

    Args:
        log_probs_after: maps prompts ``(R, N)`` and the tokens so far ``(R, N, t)`` to log-probs ``(R, N, V)``.
        draws: uniform numbers ``(R, N, T)``.
    """
    tokens = torch.zeros(*prompts.shape, 0, dtype=torch.long)
    alive = torch.ones(prompts.shape, dtype=torch.bool)
    chosen, masks = [], []
    for position in range(task.length):
        log_probs = log_probs_after(prompts, tokens)
        cumulative = log_probs.exp().cumsum(-1)
        token = torch.searchsorted(cumulative, draws[..., position, None].contiguous(), right=True).squeeze(-1)
        token = token.clamp_(max=task.vocabulary - 1)  # rounding can leave the sum below the draw
        chosen.append(log_probs.gather(-1, token[..., None]).squeeze(-1))
        masks.append(alive)
        tokens = torch.cat([tokens, token[..., None]], -1)
        alive = alive & ~task.ends(prompts, token)
    mask = torch.stack(masks, -1)
    return Responses(
        prompts=prompts,
        tokens=tokens,
        log_prob=torch.stack(chosen, -1),
        mask=mask,
        rewards=task.rewards(prompts, tokens, mask).float(),
    )


def sample_from(task, weights: Tensor, prompts: Tensor, draws: Tensor) -> Responses:
    """Sample from one set of weights ``(R, weights)``; see ``sample``."""
    return sample(task, lambda p, tokens: next_log_probs(task, weights, p, tokens), prompts, draws)


def log_probs_of(task, weights: Tensor, responses: Responses) -> Tensor:
    """Compute log-probs ``(R, N, T)`` of sampled tokens, with a graph to ``weights``.

    This goes position by position, as the sampler does. With the weights that sampled, the log-probs are equal to the
    sampler's bit for bit, so every ratio is exactly 1.
    """
    tokens = responses.tokens
    return torch.stack(
        [
            next_log_probs(task, weights, responses.prompts, tokens[..., :t])
            .gather(-1, tokens[..., t, None])
            .squeeze(-1)
            for t in range(task.length)
        ],
        -1,
    )


class AdamW:
    """torch's AdamW with its defaults, on ``(R, weights)``.

    ``norm_clip`` is the limit on the norm of each run's gradient. None: off.
    """

    def __init__(self, weights: Tensor, learning_rate: float, norm_clip: float | None):
        self.weights, self.learning_rate, self.norm_clip = weights, learning_rate, norm_clip
        self.first, self.second, self.steps = torch.zeros_like(weights), torch.zeros_like(weights), 0

    @torch.no_grad()
    def step(self, gradient: Tensor) -> Tensor:
        """Make one step. Returns the norms ``(R,)`` before clipping."""
        norm = gradient.norm(dim=1)
        if self.norm_clip is not None:
            gradient = gradient * (self.norm_clip / (norm + 1e-6)).clamp(max=1)[:, None]
        self.steps += 1
        self.first.lerp_(gradient, 1 - 0.9)
        self.second.mul_(0.999).addcmul_(gradient, gradient, value=1 - 0.999)
        denominator = (self.second / (1 - 0.999**self.steps)).sqrt_().add_(1e-8)
        self.weights.mul_(1 - self.learning_rate * 0.01)
        self.weights.addcdiv_(self.first, denominator, value=-self.learning_rate / (1 - 0.9**self.steps))
        return norm
