# SPDX-License-Identifier: Apache-2.0
"""The study's runner trains what a plain loop over single policies trains, with the project's search and loss."""

import numpy as np
import pytest
import torch

from bapo import clipped_surrogate_loss, collect_clip_statistics, search_clip_bounds
from scripts.study.measures import summaries, token_measures
from scripts.study.methods import Tokens, config_of
from scripts.study.plan import LABELS
from scripts.study.policies import PROBES, log_probs_of, sample_from, uniforms
from scripts.study.schedule import bounds_of_epoch
from scripts.study.tasks import TASKS, warmed_up
from scripts.study.train import GROUP, SOURCES, Cell, Trainer, delay, epochs, fresh
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

SEEDS = [1000, 1001]
BOUNDED = [name for name in LABELS if name.partition("@")[0] in ("grpo", "clip_higher", "high_only", "widest", "bapo")]


def trained(method="grpo", source="epochs", staleness=2, updates=16, rate=8e-3, dual_clip=None, donor=None):
    trainer = Trainer(Cell("chain", source, staleness, rate, dual_clip, method, updates), SEEDS, donor)
    trainer.train()
    return trainer


class OneChain:
    """The policy of one seed on the retry task, as plain as possible; it trains on given responses."""

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
        assert torch.allclose(log_prob[mask], rollouts[0].log_prob[run][mask], atol=1e-5)  # of the first policy
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
        assert torch.equal(own, bounds.flip(0))  # of two seeds the next one is the other
    for own, bounds in zip(used_bounds(trained("own_mean:bapo@0.35", donor=steps)), theirs, strict=True):
        assert torch.equal(own, bounds.mean(1, keepdim=True).expand_as(own))


def test_the_schedule_goes_by_the_epoch_on_the_rollout():
    low, high = used_bounds(trained("schedule", staleness=2))
    expected = torch.tensor([bounds_of_epoch(epoch) for epoch in (0, 1) for _ in range(4)] * 2).double()
    assert torch.allclose(low, expected[:, 0].expand_as(low)) and torch.allclose(high, expected[:, 1].expand_as(high))
    assert bounds_of_epoch(0) == (0.83, 2.6) and bounds_of_epoch(15) == bounds_of_epoch(40) == (0.62, 1.5)


def test_the_probe_is_the_share_of_sampled_responses_that_succeed():
    trainer = trained(updates=16)
    success, entropy = trainer.success(64, 0)
    prompts = torch.arange(24).repeat_interleave(400).expand(len(SEEDS), -1)
    responses = sample_from(trainer.task, trainer.weights, prompts, uniforms(SEEDS, PROBES, 1, prompts.shape[1], 6))
    counted = responses.rewards.mean(1)
    assert torch.allclose(success.mean((1, 2)), counted, atol=4 * (0.25 / prompts.shape[1]) ** 0.5)
    surprise = -(responses.log_prob * responses.mask).sum((1, 2)) / responses.mask.sum((1, 2))
    assert torch.allclose(entropy, surprise, atol=0.06)  # whose mean is the entropy
    by_prompt = responses.rewards.view(2, 24, 400).mean(-1)
    assert (success.mean(-1) - by_prompt).abs().mean() < 0.02


def test_the_tasks_start_as_the_plan_says():
    task = TASKS["chain"](SEEDS)
    prior = task.prior.gather(-1, task.right[..., None])
    assert torch.allclose(prior, torch.full_like(prior, 0.02)) and torch.allclose(task.prior.sum(-1), torch.ones(2, 24))
    hard = TASKS["hard_chain"](list(range(1000, 1010)))
    shares = hard.prior.gather(-1, hard.right[..., None]).log10().flatten()
    assert hard.right.shape == (10, 96) and hard.length == 12
    assert shares.min() > np.log10(0.0005) - 1e-4 and shares.max() < -1 + 1e-4


def ages(source, staleness, updates):
    """At every update, how many updates ago its mini-batch was sampled, and how often it was used before."""
    now, found = [0], []

    def sampler(number, ages=None):
        return now[0]

    for update, (sampled, epoch) in enumerate(source(sampler, staleness, updates)):
        found.append((update - sampled, epoch))
        now[0] = update + 1
    return found


def test_sources_of_staleness():
    assert ages(fresh, 1, 4) == [(0, 0)] * 4
    assert ages(delay, 3, 8) == [(age, 0) for age in (0, 1, 2, 3, 3, 3, 3, 3)]
    assert ages(epochs, 2, 16) == [(age, age // 4) for age in range(8)] * 2


def test_partial_rollout_mixes_the_ages_of_tokens():
    """Of six tokens and a queue of six updates, token t was sampled 6 - t updates ago."""
    trainer = trained(source="partial", staleness=6)
    trainer.update(trainer.sampler(0, ages=6))
    kept = list(trainer.past)  # the weights before each of the last seven updates
    responses = trainer.sampler(1, ages=6).responses
    for t in range(6):
        log_probs = log_probs_of(trainer.task, [*kept[1:], trainer.weights.detach()][t], responses)
        assert torch.equal(log_probs[..., t], responses.log_prob[..., t])
        assert not torch.equal(log_probs[..., (t + 3) % 6], responses.log_prob[..., (t + 3) % 6])


def test_token_measures_by_hand():
    ratio = torch.tensor([[[0.5, 1.5, 4.0, 1.0]]])
    old = torch.log(torch.full_like(ratio, 0.2))
    tokens = Tokens(old, old + ratio.log(), torch.tensor([[[-1.0, 2.0, -1.0, 2.0]]]), torch.ones(1, 1, 4).bool())
    bounds = {"low": torch.tensor([0.8]).double(), "high": torch.tensor([1.2]).double()}
    gradient = torch.tensor([[[0.0, 0.0, 4.0, -2.0]]])
    found = {key: value.item() for key, value in token_measures(tokens, gradient, bounds).items()}
    assert found["no_gradient_positive"] == found["no_gradient_negative"] == found["negative_above_3"] == 0.5
    assert found["gradient_above_3"] == pytest.approx(4 / (4 + 2))
    assert found["effective_sample"] == pytest.approx(7**2 / (4 * 19.5))
    assert found["rho"] == pytest.approx(4.4 / (4.4 + 4.8))


def test_summaries_by_hand():
    names = ("effective_sample", "gradient_above_3", "low", "high", "rho", "no_gradient_positive")
    updates = {key: torch.ones(32, 3) for key in (*names, "no_gradient_negative", "negative_above_3", "grad_norm")}
    updates["grad_norm"][5] = 7.0
    steps = torch.tensor([0.0, 1, 51, 51]).repeat_interleave(8)[:, None].expand(32, 3)
    saturated = torch.tensor([0.0, 0, 0, 1]).repeat_interleave(8)[:, None].expand(32, 3)
    updates |= {"search_steps": steps, "saturated": saturated, "positive_contribution_start": torch.ones(32, 3)}
    start, end = torch.tensor([[0.0, 0.9, 0.1], [1.0, 0.9, 0.3]])
    share = torch.linspace(0, 1, 17)[:, None]
    probes = {"reward": start + (end - start) * share, "entropy": (2 - share).expand(-1, 3)}
    found = summaries(updates, probes, 0.8)
    assert found["updates_to_target"].tolist() == pytest.approx([0.8 * 32, 0, np.nan], nan_ok=True)
    assert found["entropy_at_target"].tolist() == pytest.approx([2 - 13 / 16, 2, np.nan], nan_ok=True)  # the next probe
    assert found["mean_reward"][0].item() == pytest.approx(17 / 32) and found["entropy"].tolist() == [1] * 3
    assert found["norm_ratio"].tolist() == [7] * 3 and found["start_reward"][0] == 0
    assert [found[key][0] for key in ("at_once", "on_the_way", "out_of_reach")] == [0.25, 0.5, 0.25]
    assert torch.equal(found["search_steps"], steps.T)
    assert found["reward_series"].shape == (3, 17) and found["c_low_series"].shape == (3, 16)
