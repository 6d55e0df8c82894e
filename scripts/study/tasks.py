# SPDX-License-Identifier: Apache-2.0
"""The study's retry tasks, batched over runs. Each seed has its own right answers and its own prior.

``R`` is the number of runs, ``N`` of responses in a run, ``V`` the size of the vocabulary.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from scripts.study.policies import TASK, WARM_UP, AdamW, next_log_probs, random_weights, sample, stream, uniforms

WARM_UP_STEPS, WARM_UP_RESPONSES, WARM_UP_RATE = 500, 128, 3e-3


class RetryChain:
    """Guess one of 32 answers up to ``length`` times. The right answer ends the response and earns 1.

    The prior of every prompt has its peaks at wrong answers, and gives the right one the same small share at every
    guess. So one can count for how many prompts a policy still knows the rare right answer.

    Args:
        seeds: one seed for each run.
        prompt_count: number of prompts in a run.
        length: largest number of guesses in a response.
        right_shares: smallest and largest share of the right answer in a prompt's prior; drawn log-uniformly.
    """

    vocabulary, spread = 32, 1.85  # spread: standard deviation of the wrong answers' logits in the prior

    def __init__(self, seeds: list[int], prompt_count: int, length: int, right_shares: tuple[float, float]):
        self.prompt_count, self.length = prompt_count, length
        self.feature_count = prompt_count + length + self.vocabulary
        draws = [stream(seed, TASK) for seed in seeds]
        right = np.stack([rng.integers(self.vocabulary, size=prompt_count) for rng in draws])
        logits = np.stack([rng.normal(0, self.spread, (prompt_count, self.vocabulary)) for rng in draws])
        shares = np.exp(np.stack([rng.uniform(*np.log(right_shares), (prompt_count, 1)) for rng in draws]))
        self.right, share = torch.from_numpy(right), torch.from_numpy(shares)
        wrong = torch.from_numpy(logits).scatter(-1, self.right[..., None], -torch.inf).softmax(-1)
        self.prior = (wrong * (1 - share)).scatter(-1, self.right[..., None], share).float()

    def features(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Encode the prompt, the number of the guess and the set of earlier guesses: ``(R, N, feature_count)``."""
        index = torch.cat([prompts[..., None], tokens + self.prompt_count + self.length], -1)
        features = torch.zeros(*prompts.shape, self.feature_count).scatter_(-1, index, 1.0)
        features[..., self.prompt_count + tokens.shape[-1]] = 1.0
        return features

    def ends(self, prompts: Tensor, token: Tensor) -> Tensor:
        """Whether this token ``(R, N)`` ends the response."""
        return token == self.right.gather(1, prompts)

    def rewards(self, prompts: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Whether a guess is right, ``(R, N)``."""
        return ((tokens == self.right.gather(1, prompts)[..., None]) & mask).any(-1)

    def teacher(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probs ``(R, N, V)`` that the warm-up teaches."""
        index = prompts[..., None].expand(-1, -1, self.vocabulary)
        return self.prior.gather(1, index).log()

    @torch.no_grad()
    def success(self, weights: Tensor, prompts: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Estimate the share of responses that succeed, without bias and with far less noise than by counting them.

        Only wrong answers are sampled. The estimate is 1 - (1 - p_1) ... (1 - p_length), where p_t is the probability
        of the right answer at guess t, after the wrong answers before it.

        Args:
            weights: ``(R, weights)``.
            prompts: ``(R, N)``.
            draws: uniform numbers ``(R, N, length)``.

        Returns:
            The success of each response ``(R, N)`` and the mean entropy ``(R,)`` of the tokens that the policy would
            sample, in nats.
        """
        right = self.right.gather(1, prompts)[..., None]
        tokens = torch.zeros(*prompts.shape, 0, dtype=torch.long)
        going, length, entropy = torch.ones(prompts.shape), 0.0, 0.0
        for position in range(self.length):
            log_probs = next_log_probs(self, weights, prompts, tokens)
            probs = log_probs.exp()
            length = length + going.sum(1)
            entropy = entropy - (going * (probs * log_probs.clamp(min=-100)).sum(-1)).sum(1)
            wrong = probs.scatter(-1, right, 0.0).cumsum(-1)
            going = going * (1 - probs.gather(-1, right).squeeze(-1))
            threshold = draws[..., position, None] * wrong[..., -1:]
            token = torch.searchsorted(wrong, threshold, right=True).clamp_(max=self.vocabulary - 1)
            tokens = torch.cat([tokens, token], -1)
        return 1 - going, entropy / length


TASKS = {
    "chain": functools.partial(RetryChain, prompt_count=24, length=6, right_shares=(0.02, 0.02)),
    "hard_chain": functools.partial(RetryChain, prompt_count=96, length=12, right_shares=(0.0005, 0.1)),
}


@functools.lru_cache(maxsize=16)  # a study runs its seeds in a few batches
def warmed_up(name: str, seeds: tuple[int, ...]) -> Tensor:
    """Return the weights ``(R, weights)`` after supervised steps towards the teacher. All methods start from these."""
    task = TASKS[name](list(seeds))
    weights = random_weights(task, list(seeds)).requires_grad_()
    optimizer = AdamW(weights, WARM_UP_RATE, norm_clip=None)
    for step in range(WARM_UP_STEPS):
        optimizer.learning_rate = WARM_UP_RATE * (1 - step / WARM_UP_STEPS)
        draws = uniforms(list(seeds), WARM_UP, step, WARM_UP_RESPONSES, task.length + 1)
        prompts = (draws[..., -1] * task.prompt_count).long()
        tokens = sample(task, task.teacher, prompts, draws).tokens
        loss = 0.0
        for t in range(task.length):
            target = task.teacher(prompts, tokens[..., :t]).exp()
            loss = loss - (target * next_log_probs(task, weights, prompts, tokens[..., :t])).sum()
        (gradient,) = torch.autograd.grad(loss / (WARM_UP_RESPONSES * task.length), weights)
        optimizer.step(gradient)
    return weights.detach()
