# SPDX-License-Identifier: Apache-2.0
"""The study's runner trains the same policies as a plain loop over single ones with the project's search and loss."""

import numpy as np
import pytest
import torch

from bapo import clipped_surrogate_loss, collect_clip_statistics, search_clip_bounds
from scripts.study.methods import config_of
from scripts.study.plan import LABELS
from scripts.study.schedule import bounds_of_epoch
from scripts.study.tasks import warmed_up
from scripts.study.train import GROUP, SOURCES, Cell, Trainer
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

SEEDS = [1000, 1001]
BOUNDED = [name for name in LABELS if name.partition("@")[0] in ("grpo", "clip_higher", "high_only", "widest", "bapo")]


def trained(method="grpo", source="epochs", staleness=2, updates=16, rate=8e-3, dual_clip=None, donor=None):
    trainer = Trainer(Cell("chain", source, staleness, rate, dual_clip, method, updates), SEEDS, donor)
    trainer.train()
    return trainer


class OneChain:
    """The policy of one seed on the retry task, in the plainest code. It trains on given responses."""

    def __init__(self, run):
        self.run = run
        self.weights = warmed_up("chain", tuple(SEEDS))[run].clone().requires_grad_()

    def log_probs(self, prompt, guesses):
        x = torch.zeros(62)
        x[prompt] = x[24 + len(guesses)] = 1
        for guess in guesses:
            x[30 + guess] = 1
        first, bias, second, second_bias, last, last_bias = self.weights.split([62 * 64, 64, 64 * 64, 64, 64 * 32, 32])
        x = torch.relu(x @ first.view(62, 64) + bias)
        x = torch.relu(x @ second.view(64, 64) + second_bias)
        return (x @ last.view(64, 32) + last_bias).log_softmax(-1)

    def tensors(self, responses):
        prompts, tokens, mask = (of_runs[self.run] for of_runs in (responses.prompts, responses.tokens, responses.mask))
        log_prob = []
        for prompt, guesses in zip(prompts.tolist(), tokens.tolist(), strict=True):
            log_prob += [self.log_probs(prompt, guesses[:t])[guesses[t]] for t in range(6)]
        rewards = responses.rewards[self.run][:, None]
        advantages, _ = compute_grpo_outcome_advantage(rewards, mask.float(), np.arange(128) // GROUP)
        return responses.log_prob[self.run], torch.stack(log_prob).view(128, 6), advantages, mask

    def train(self, rollouts, method, rate, dual_clip):
        optimizer = torch.optim.AdamW([self.weights], lr=rate)
        for responses in rollouts:
            tensors = self.tensors(responses)
            config = config_of(method)
            bounds = search_clip_bounds(collect_clip_statistics(*tensors, config, clip_ratio_c=dual_clip), config)
            loss = clipped_surrogate_loss(*tensors, low=bounds.low, high=bounds.high, clip_ratio_c=dual_clip).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([self.weights], 1.0)
            optimizer.step()


@pytest.mark.parametrize("method, dual_clip", [("grpo", None), ("bapo@0.4", 3.0)])
def test_the_batch_of_runs_is_a_loop_over_single_runs(method, dual_clip):
    runs = Trainer(Cell("chain", "epochs", 1, 8e-3, dual_clip, method, 4), SEEDS)
    rollouts = []
    for batch, epoch in SOURCES["epochs"](runs.sampler, 1, 4):
        rollouts.append(batch.responses)
        runs.update(batch, epoch)
    for run in range(len(SEEDS)):
        alone = OneChain(run)
        start = alone.weights.detach().clone()
        _, log_prob, _, mask = alone.tensors(rollouts[0])
        assert torch.allclose(
            log_prob[mask], rollouts[0].log_prob[run][mask], atol=1e-5
        )  # the first policy sampled these
        alone.train(rollouts, method, 8e-3, dual_clip)
        assert (alone.weights - start).abs().max() > 0.01
        assert torch.allclose(runs.weights[run], alone.weights, atol=2e-4)


def test_on_fresh_data_all_bounds_make_the_same_updates():
    weights = [trained(method, "fresh", 1, dual_clip=3.0).weights for method in BOUNDED]
    weights += [trained("m2po", "fresh", 1).weights, trained("schedule", "fresh", 1).weights]
    assert all(torch.equal(weights[0], others) for others in weights[1:])
    assert not torch.equal(weights[0], warmed_up("chain", tuple(SEEDS)))


def test_methods_differ_where_samples_are_stale():
    methods = ["grpo", "high_only", "widest", "bapo@0.35", "schedule", "topr", "m2po", "cispo", "dppo_tv"]
    weights = [trained(method).weights.detach().numpy().tobytes() for method in methods]
    assert len(set(weights)) == len(methods)


def used_bounds(trainer):
    return tuple(torch.stack([update[key] for update in trainer.updates], 1) for key in ("low", "high"))


def test_another_seeds_bounds_are_those_of_the_next_seeds_run():
    donor = trained("bapo@0.35")
    steps = torch.stack([update["search_steps"] for update in donor.updates], 1)
    theirs = used_bounds(donor)
    assert not torch.equal(*theirs[1])  # the two seeds differ
    for own, bounds in zip(used_bounds(trained("other_seed:bapo@0.35", donor=steps)), theirs, strict=True):
        assert torch.equal(own, bounds.flip(0))  # with two seeds, the next seed is the other one
    for own, bounds in zip(used_bounds(trained("own_mean:bapo@0.35", donor=steps)), theirs, strict=True):
        assert torch.equal(own, bounds.mean(1, keepdim=True).expand_as(own))


def test_the_schedule_goes_by_the_epoch_on_the_rollout():
    low, high = used_bounds(trained("schedule", staleness=2))
    expected = torch.tensor([bounds_of_epoch(epoch) for epoch in (0, 1) for _ in range(4)] * 2).double()
    assert torch.allclose(low, expected[:, 0].expand_as(low)) and torch.allclose(high, expected[:, 1].expand_as(high))
    assert bounds_of_epoch(0) == (0.83, 2.6) and bounds_of_epoch(15) == bounds_of_epoch(40) == (0.62, 1.5)
