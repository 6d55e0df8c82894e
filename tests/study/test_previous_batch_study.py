# SPDX-License-Identifier: Apache-2.0
"""The bounds of ``previous_batch`` come from a search on the tokens of the same update of the previous batch."""

import pytest
import torch

from bapo import collect_clip_statistics, search_clip_bounds
from scripts.study import loop, methods, plan, previous_batch, run
from scripts.study.methods import config_of, path_of
from scripts.study.train import Cell, Trainer

SEEDS = [1000, 1001]
# Staleness, total updates, and updates on one rollout batch: 2 epochs of 4 mini-batches; 1 epoch of 4; and with
# delay and partial rollout every update has its own batch.
SOURCES = {"epochs": (2, 24, 8), "once": (4, 64, 4), "delay": (8, 24, 1), "partial": (8, 16, 1)}


def trained(method, source, staleness, updates):
    """Train a cell. Returns the trainer and the tokens of each update in order."""
    trainer, seen = Trainer(Cell("chain", source, staleness, 1.6e-2, 3.0, method, updates), SEEDS), []
    bounds_of_update = trainer.bounds

    def recorded(tokens, epoch):
        seen.append(tokens)
        return bounds_of_update(tokens, epoch)

    trainer.bounds = recorded
    trainer.train()
    return trainer, seen


@pytest.mark.parametrize("source", SOURCES)
def test_the_bounds_are_the_searches_of_the_batch_before(source):
    staleness, updates, on_a_batch = SOURCES[source]
    trainer, seen = trained("previous_batch:bapo@0.4", source, staleness, updates)
    config, moved = config_of("bapo@0.4"), 0
    for number, update in enumerate(trainer.updates):
        batch, position = divmod(number, on_a_batch)
        for index in range(len(SEEDS)):
            used = update["low"][index].item(), update["high"][index].item()
            if number == 0:
                expected = 0.6, 1.2  # before any search
            else:
                before = (batch - 1) * on_a_batch + position if batch else number - 1
                statistics = collect_clip_statistics(*seen[before].of_run(index), config, clip_ratio_c=3.0)
                found = search_clip_bounds(statistics, config)
                expected = found.low.item(), found.high.item()
            assert used == expected, (number, index)
            own = search_clip_bounds(
                collect_clip_statistics(*seen[number].of_run(index), config, clip_ratio_c=3.0), config
            )
            assert update["search_steps"][index] == own.search_steps  # the table keeps the update's own search
            moved += used != (own.low.item(), own.high.item())
    assert len(seen) == updates and moved > 2  # otherwise exact bounds would pass, too


def test_the_loss_uses_them():
    exact, _ = trained("bapo@0.4", "once", 4, 16)
    lagged, _ = trained("previous_batch:bapo@0.4", "once", 4, 16)
    assert not torch.equal(exact.weights, lagged.weights)
    low, high = (torch.stack([update[key] for update in lagged.updates], 1) for key in ("low", "high"))
    fixed = Trainer(Cell("chain", "once", 4, 1.6e-2, 3.0, "other_seed:bapo@0.4", 16), SEEDS)
    fixed.donated = low, high  # the same bounds, given in advance
    fixed.train()
    assert torch.equal(fixed.weights, lagged.weights)


def test_the_larger_model_too(monkeypatch):
    # In so few updates most searches find the same bounds. So replace their numbers of steps by ones that differ.
    planted = iter(range(1, 100))
    searched = methods.find_bounds

    def find_bounds(*arguments):
        return searched(*arguments) | {"search_steps": torch.tensor([float(next(planted) % 40)])}

    monkeypatch.setattr(methods, "find_bounds", find_bounds)
    settings = loop.Settings(mini_batches=2, epochs=2, updates=12, prompts=2, samples=4, learning_rate=1e-3)
    updates = loop.train(loop.MODEL, "previous_batch:bapo@0.4", 1, settings).updates
    low, high = path_of(config_of("bapo@0.4"))
    steps = [
        0,
        1,
        2,
        3,
        *range(1, 9),
    ]  # update 0; then the latest search; from the second batch on, four updates earlier
    assert [update["search_steps"] for update in updates] == list(range(1, 13))
    assert [update["low"] for update in updates] == low[steps].tolist()
    assert [update["high"] for update in updates] == high[steps].tolist()


def test_the_plan_runs_every_declared_cell_on_fresh_seeds_and_the_two_methods_first():
    planned = previous_batch.cells()
    assert len(set(cell.name for cell in planned)) == len(planned)
    order = {cell.name: index for index, cell in enumerate(planned)}
    declared = {
        cell.name
        for comparison in previous_batch.comparisons()
        for cell in comparison.place.cells([comparison.method, comparison.other])
    }
    assert sorted(order[name] for name in declared) == list(range(len(declared)))
    for cell in planned:
        if cell.donor:
            assert order[cell.donor.name] < order[cell.name]
            assert set(previous_batch.seeds_of(cell)) <= set(previous_batch.seeds_of(cell.donor))
    used = {*range(1, 21), *range(501, 541), *range(601, 625), 1000, 1001, *range(3000, 3040)}
    used |= {seed for seeds in plan.SEEDS.values() for seed in seeds}
    assert not used & {seed for cell in planned for seed in previous_batch.seeds_of(cell)}


def test_fixed_bounds_are_what_their_names_say():
    for method, bounds in ((previous_batch.NARROW, (0.6, 1.2)), (previous_batch.WIDE, (0.8, 3.0))):
        config = config_of(method)
        assert config.fixed and (config.ratio_lower_start, config.ratio_upper_start) == bounds


def test_seeds_in_parts_are_the_same_runs(monkeypatch):
    cells = [Cell("chain", "delay", 8, 8e-3, 3.0, method, 16) for method in ("previous_batch:bapo@0.4", "grpo")]
    together = [run.train_cell(cell, SEEDS) for cell in cells]
    monkeypatch.setattr(run, "SEEDS_AT_A_TIME", 1)
    assert [[row["weights"] for row in run.train_cell(cell, SEEDS)] for cell in cells] == [
        [row["weights"] for row in rows] for rows in together
    ]
    assert [row["seed"] for row in together[0]] == SEEDS


def test_the_follow_up_has_seeds_of_its_own():
    others = {seed for cell in previous_batch.cells() for seed in previous_batch.seeds_of(cell)}
    assert not others & set(previous_batch.FOLLOW_UP_SEEDS)
    assert len(previous_batch.follow_up_cells()) == 8 and len(previous_batch.FOLLOW_UP_SEEDS) == 60
    assert set(previous_batch.follow_up_cells()) <= set(previous_batch.cells())
