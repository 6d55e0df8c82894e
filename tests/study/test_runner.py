# SPDX-License-Identifier: Apache-2.0
"""The study's runner trains what a plain loop over single policies trains, with the project's search and loss."""

import numpy as np
import pytest
import torch

from bapo import clipped_surrogate_loss, find_clip_bounds
from scripts.study import policies
from scripts.study.measures import search_columns, summaries, token_measures
from scripts.study.methods import Tokens, config_of, contribution_at, loss_of, search, searches
from scripts.study.plan import ABLATION, METHODS
from scripts.study.policies import PROBES, PROMPTS, SAMPLING, Optimizer, log_probs_of, sample_from, uniforms
from scripts.study.tasks import PROMPT_COUNT, TASKS, warmed_up
from scripts.study.train import GROUP, GROUPS, SOURCES, Cell, Trainer, delay, epochs, group_advantages

SEEDS = [1000, 1001]


def trained(method="grpo", source="block", staleness=8, updates=16, rate=8e-3, **changed):
    settings = dict(map="A", task="chain", optimizer="adamw", norm_clip=1.0, dual_clip=None) | changed
    cell = Cell(method=method, source=source, staleness=staleness, updates=updates, learning_rate=rate, **settings)
    trainer = Trainer(cell, SEEDS)
    trainer.train()
    return trainer


class OneChain:
    """The retry chain for one seed, as plain as possible."""

    def __init__(self, seed):
        self.seed, self.right = seed, TASKS["chain"]([seed]).right[0]
        self.model = torch.nn.Sequential(
            torch.nn.Linear(62, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)
        )
        flat, used = warmed_up("chain", tuple(SEEDS))[SEEDS.index(seed)], 0
        for parameter in self.model.parameters():  # ours are stored as (inputs, outputs)
            part = flat[used : used + parameter.numel()]
            parameter.data = part.view(*parameter.shape[::-1]).T.clone() if parameter.dim() == 2 else part.clone()
            used += parameter.numel()

    def weights(self):
        parts = [p.detach().T if p.dim() == 2 else p.detach() for p in self.model.parameters()]
        return torch.cat([part.flatten() for part in parts])

    def log_probs(self, prompt, guesses):
        x = torch.zeros(62)
        x[prompt] = x[24 + len(guesses)] = 1
        for guess in guesses:
            x[30 + guess] = 1
        return self.model(x).log_softmax(-1)

    def mini_batch(self, number):
        prompts = np.floor(policies.stream(self.seed, PROMPTS, number).random(GROUPS, dtype=np.float32) * PROMPT_COUNT)
        draws = policies.stream(self.seed, SAMPLING, number).random((GROUP * GROUPS, 6), dtype=np.float32)
        responses = []
        for row, draw in enumerate(draws):
            prompt, guesses, old = int(prompts[row // GROUP]), [], []
            while len(guesses) < 6 and (not guesses or guesses[-1] != self.right[prompt]):
                with torch.no_grad():
                    log_probs = self.log_probs(prompt, guesses)
                guess = int((log_probs.exp().cumsum(0) <= draw[len(guesses)]).sum())
                guesses.append(guess)
                old.append(log_probs[guess].item())
            responses.append((prompt, guesses, old, float(guesses[-1] == self.right[prompt])))
        return responses

    def tensors(self, responses):
        rewards = torch.tensor([reward for *_, reward in responses]).view(GROUPS, GROUP)
        centred = rewards - rewards.mean(1, keepdim=True)
        advantages = (centred / (rewards.std(1, keepdim=True) + 1e-6)).view(-1, 1).expand(-1, 6)
        old, new, mask = torch.zeros(128, 6), torch.zeros(128, 6), torch.zeros(128, 6)
        rows = []
        for row, (prompt, guesses, old_log_probs, _) in enumerate(responses):
            mask[row, : len(guesses)] = 1
            old[row, : len(guesses)] = torch.tensor(old_log_probs)
            chosen = [self.log_probs(prompt, guesses[:t])[guess] for t, guess in enumerate(guesses)]
            rows.append(torch.cat([torch.stack(chosen), torch.zeros(6 - len(guesses))]))
        new = torch.stack(rows)
        return old, new, advantages, mask

    def train(self, method, updates, staleness, make_optimizer, norm_clip, dual_clip):
        optimizer = make_optimizer(self.model.parameters())
        for start in range(0, updates, staleness):
            for responses in [self.mini_batch(start + k) for k in range(staleness)]:
                tensors = self.tensors(responses)
                bounds, _ = find_clip_bounds(*tensors, config_of(method), clip_ratio_c=dual_clip)
                loss = clipped_surrogate_loss(*tensors, low=bounds.low, high=bounds.high, clip_ratio_c=dual_clip).loss
                optimizer.zero_grad()
                loss.backward()
                if norm_clip:
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm_clip)
                optimizer.step()
        return self.weights()


@pytest.mark.parametrize(
    "method, optimizer, norm_clip, dual_clip",
    [("grpo", "sgd", None, None), ("bapo@0.4", "adamw", 1.0, 3.0), ("bapo_gradient@0.4", "adamw", None, None)],
)
def test_the_batch_of_runs_is_a_loop_over_single_runs(method, optimizer, norm_clip, dual_clip):
    rate = {"sgd": 2.0, "adamw": 8e-3}[optimizer]
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    runs = Trainer(Cell("A", "chain", "block", 4, optimizer, rate, norm_clip, dual_clip, method, 4), SEEDS)
    for batch in SOURCES["block"](runs.sampler, 4, 4):
        runs.update(batch)
    for run, seed in enumerate(SEEDS):
        alone = OneChain(seed)
        start = alone.weights()
        weights = alone.train(method, 4, 4, lambda p: make(p, lr=rate), norm_clip, dual_clip)
        assert (weights - start).abs().max() > 0.01
        assert torch.allclose(runs.weights[run].detach(), weights, atol=2e-4), (runs.weights[run] - weights).abs().max()


def test_at_staleness_1_all_methods_make_the_same_updates():
    methods = [method for method in METHODS if method != "balance"]  # which scales whatever the ratio
    clips = [None, 3.0] * len(methods)
    weights = [
        trained(method, staleness=1, dual_clip=clip).weights for method, clip in zip(methods, clips, strict=False)
    ]
    assert all(torch.equal(weights[0], others) for others in weights[1:])
    assert not torch.equal(weights[0], warmed_up("chain", tuple(SEEDS)))


def test_they_differ_where_samples_are_stale():
    methods = [method for method in METHODS if method != "bapo@0.5"]  # its target is out of reach for so few updates
    weights = [trained(method, source="epochs", staleness=2).weights for method in methods]
    assert len({w.detach().numpy().tobytes() for w in weights}) == len(methods)


def test_a_runs_result_does_not_depend_on_its_neighbours_method_or_repetition():
    first, second = trained("bapo@0.4").rows(), trained("bapo@0.4").rows()
    assert first[1]["weights"] == second[1]["weights"] and first[0]["weights"] != first[1]["weights"]


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize(
    "method", [name for name in (*METHODS, *ABLATION) if name.partition("@")[0] not in ("topr", "balance")]
)
def test_the_search_is_the_projects_own(method, dual_clip):
    generator = torch.Generator().manual_seed(1)
    config = config_of(method)
    ways = set()
    for spread in (0.0, 0.2, 1.0, 3.0):
        old = -3 * torch.rand(8, 32, 6, generator=generator)
        new = old + spread * torch.randn(8, 32, 6, generator=generator)
        advantages = torch.randn(8, 32, 1, generator=generator).expand(-1, -1, 6) + torch.linspace(-1, 1.5, 8).view(
            8, 1, 1
        )
        tokens = Tokens(old, new, advantages, torch.rand(8, 32, 6, generator=generator) < 0.8)
        found = search(tokens, config, dual_clip)
        for run in range(8):
            bounds, _ = find_clip_bounds(*tokens.of_run(run), config, clip_ratio_c=dual_clip)
            for name in ("low", "high", "search_steps", "saturated"):
                assert getattr(bounds, name).item() == found[name][run].item(), name
            for name in ("positive_contribution", "positive_contribution_start"):
                assert getattr(bounds, name).item() == pytest.approx(found[name][run].item(), abs=1e-12)
            ways.add((bounds.search_steps.item() > 0, bounds.saturated.item()))
    assert len(ways) >= (3 if method in ("bapo@0.4", "bapo_gradient@0.4") else 2 if searches(method) else 1)


def test_the_methods_of_the_study_alone_by_hand():
    # One positive token at r = 2 and one negative at r = 4, |A| = 1: gradients of the log-probs are -c A / 2.
    old = torch.log(torch.tensor([[[0.25, 0.125]]]))
    new = torch.log(torch.tensor([[[0.5, 0.5]]])).requires_grad_()
    tokens = Tokens(old, new, torch.tensor([[[1.0, -1.0]]]), torch.ones(1, 1, 2, dtype=torch.bool))

    def gradient(method):
        return torch.autograd.grad(loss_of(method, tokens, None)[0], new)[0].flatten().tolist()

    assert gradient("topr") == [-0.5, 0.5]  # 1 and min(4, 1)
    assert gradient("grpo") == [0.0, 2.0]
    # P = 0.25 * 1.2 = 0.3, N = 0.125 * 4 = 0.5, so N is scaled by 0.3 * 1.5 / 0.5 = 0.9.
    assert gradient("balance") == pytest.approx([0.0, 1.8])


def test_balance_reaches_its_share_and_leaves_higher_ones():
    tokens = Tokens(*(torch.rand(4, 16, 6).log() for _ in range(2)), torch.randn(4, 16, 6), torch.ones(4, 16, 6).bool())
    low, high = torch.full((4,), 0.8).double(), torch.full((4,), 1.2).double()
    rho = contribution_at(tokens, low, high, "value", None)
    scale = (rho * 0.6 / (0.4 * (1 - rho))).clamp(max=1)
    advantages = torch.where(tokens.advantages < 0, tokens.advantages * scale[:, None, None], tokens.advantages)
    scaled = Tokens(tokens.old_log_prob, tokens.log_prob, advantages, tokens.mask)
    assert torch.allclose(contribution_at(scaled, low, high, "value", None), rho.clamp(min=0.4))


@pytest.mark.parametrize("name", TASKS)
def test_the_trainers_log_probs_are_the_samplers(name):
    task, weights = TASKS[name](SEEDS), policies.random_weights(TASKS[name](SEEDS), SEEDS)
    prompts = torch.arange(PROMPT_COUNT).repeat_interleave(4).expand(len(SEEDS), -1)
    responses = sample_from(task, weights, prompts, uniforms(SEEDS, PROBES, 0, prompts.shape[1], task.length))
    assert torch.equal(log_probs_of(task, weights, responses), responses.log_prob)
    assert weights.shape[1] == sum(rows * columns for rows, columns in policies.weight_shapes(task))


def test_the_chain_starts_as_the_plan_says():
    fresh = trained(staleness=1, updates=16, rate=0.0).fresh(32, 0)
    task = TASKS["chain"](SEEDS)
    entropy = ((fresh.entropy * fresh.mask).sum() / fresh.mask.sum()).item()
    right = (fresh.tokens[..., 0] == task.right.gather(1, fresh.prompts)).float().mean().item()
    assert entropy == pytest.approx(2.25, abs=0.15) and right == pytest.approx(0.02, abs=0.012)
    assert fresh.rewards.mean().item() == pytest.approx(0.11, abs=0.03)  # 1 - 0.98^6


def test_a_string_is_reversed_by_hand():
    task = TASKS["reversal"](SEEDS)
    answer = task.answers[:, :1]  # of prompt 0
    prompts, mask = torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1, 10, dtype=torch.bool)
    length = [(run != task.end).sum().item() for run in answer[:, 0]]
    assert all(3 <= n <= 5 for n in length)
    for run, n in enumerate(length):
        mask[run, 0, n + 1 :] = False
    assert task.rewards(prompts, answer, mask).tolist() == [[True], [True]]
    after = answer.clone()
    after[..., -1] = 3  # behind the end
    assert task.rewards(prompts, after, mask).tolist() == [[True], [True]]
    wrong = answer.clone()
    wrong[..., 0] = (wrong[..., 0] + 1) % 8
    assert task.rewards(prompts, wrong, mask).tolist() == [[False], [False]]
    endless = torch.zeros_like(answer)
    assert task.rewards(prompts, endless, torch.ones_like(mask)).tolist() == [[False], [False]]


@pytest.mark.parametrize("name, norm_clip", [("sgd", None), ("sgd", 0.5), ("adamw", None), ("adamw", 0.5)])
def test_the_optimizer_is_torchs(name, norm_clip):
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(2, 7, generator=generator)
    theirs = [row.clone().requires_grad_() for row in weights]
    ours = Optimizer(name, weights, 0.1, norm_clip)
    optimizers = [{"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]([row], lr=0.1) for row in theirs]
    for _ in range(5):
        gradient = torch.randn(2, 7, generator=generator)
        norm = ours.step(gradient)
        assert torch.allclose(norm, gradient.norm(dim=1))
        for row, optimizer, of_run in zip(theirs, optimizers, gradient, strict=True):
            row.grad = of_run.clone()
            if norm_clip:
                torch.nn.utils.clip_grad_norm_([row], norm_clip)
            optimizer.step()
    assert torch.allclose(weights, torch.stack(theirs).detach(), atol=1e-6)


def test_advantages_are_verls():
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    rewards = (torch.rand(1, 32) < 0.3).float()
    scores = torch.nn.functional.pad(rewards.view(32, 1), (3, 0))
    expected, _ = compute_grpo_outcome_advantage(scores, torch.ones(32, 4), np.arange(32) // GROUP)
    assert torch.allclose(group_advantages(rewards)[0], expected[:, 0])


def ages(source, staleness, updates):
    """At every update, how many updates ago its mini-batch was sampled."""
    now, found = [0], []

    def sampler(number, ages=None):
        return now[0]

    for update, sampled in enumerate(source(sampler, staleness, updates)):
        found.append(update - sampled)
        now[0] = update + 1
    return found


def test_sources_of_staleness():
    assert ages(SOURCES["block"], 4, 8) == [0, 1, 2, 3] * 2
    assert ages(delay, 3, 8) == [0, 1, 2, 3, 3, 3, 3, 3]
    assert ages(epochs, 2, 16) == list(range(8)) * 2


def test_partial_rollout_mixes_the_ages_of_tokens():
    """Of six tokens and a queue of six updates, token t was sampled 6 - t updates ago."""
    trainer = Trainer(Cell("partial", "chain", "partial", 6, "adamw", 8e-3, 1.0, None, "grpo", 16), SEEDS)
    trainer.train()
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
    found = {key: value.item() for key, value in token_measures(tokens, bounds, None).items()}
    assert found["clipped_positive"] == found["clipped_negative"] == found["negative_above_3"] == 0.5
    assert found["gradient_above_3"] == pytest.approx(4 / (4 + 2))  # the other two are clipped
    assert found["effective_sample"] == pytest.approx(7**2 / (4 * 19.5))
    assert found["rho_value"] == pytest.approx(4.4 / (4.4 + 4.8)) and found["rho_gradient"] == pytest.approx(2 / 6)
    assert token_measures(tokens, bounds, 3.0)["gradient_above_3"].item() == 0


def test_summaries_by_hand():
    updates = {key: torch.ones(32, 1) for key in ("effective_sample", "gradient_above_3", "low", "high", "rho_value")}
    updates |= {key: torch.ones(32, 1) for key in ("clipped_positive", "clipped_negative", "negative_above_3")}
    updates |= {"rho_gradient": torch.ones(32, 1), "grad_norm": torch.ones(32, 1)}
    updates["grad_norm"][5] = 7.0
    probes = {"reward": torch.linspace(0, 1, 17)[:, None], "entropy": torch.linspace(2, 1, 17)[:, None]}
    found = summaries(updates, probes)
    assert found["updates_to_08"].item() == 2 * 13  # 13/16 is the first above 0.8
    assert found["mean_reward"].item() == pytest.approx(17 / 32) and found["entropy"].item() == 1
    assert found["norm_ratio"].item() == 7 and found["grad_norm_series"][0, 2].item() == 7
    assert np.isnan(found["on_the_way"].item()) and found["search_path"].shape == (1, 0)


def test_how_a_search_ended_by_hand():
    steps = torch.tensor([[0.0], [1.0], [51.0], [51.0]])
    updates = {"grad_norm": torch.ones(4, 1), "search_steps": steps, "saturated": torch.tensor([[0.0], [0], [0], [1]])}
    updates |= {"positive_contribution_start": torch.ones(4, 1), "positive_contribution": torch.ones(4, 1)}
    found = search_columns(updates)
    assert [found[key].item() for key in ("at_once", "on_the_way", "out_of_reach")] == [0.25, 0.5, 0.25]
    assert found["search_path"].tolist() == [[1, 1, *[0] * 10, 1, 1]]
