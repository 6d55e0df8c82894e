# SPDX-License-Identifier: Apache-2.0
"""What docs/results.md says of the first study follows from its runs."""

import json
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
from scipy.stats import t

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TEXT = RESULTS.with_suffix(".md").read_text().split("## The first study")[1]


def runs_of(part):
    """The runs by staleness and method, then by seed."""
    runs = defaultdict(dict)
    for record in map(json.loads, (RESULTS / f"first_study_{part}.jsonl").read_text().splitlines()):
        runs[record["settings"]["staleness"], record["method"]][record["seed"]] = record
    return runs


LOOP, STACK = runs_of("loop"), runs_of("stack")


def mean_reward(run):
    return statistics.fmean(run["series"]["reward"])


def difference(runs, staleness, method, measure):
    """From grpo, paired by seed, as the text writes it."""
    ours, theirs = runs[staleness, method], runs[staleness, "grpo"]
    found = [measure(ours[seed]) - measure(theirs[seed]) for seed in ours]
    half = t.ppf(0.975, len(found) - 1) * statistics.stdev(found) / len(found) ** 0.5
    return f"{statistics.fmean(found):.2f} ± {half:.2f}".replace("-0.00", "0.00")


@pytest.mark.parametrize(
    "where, runs, staleness, method",
    [
        ("stack, staleness 16", STACK, 16, "bapo"),
        ("stack, staleness 16", STACK, 16, "bapo_gradient"),
        ("one process, staleness 32", LOOP, 32, "bapo"),
        ("one process, staleness 8", LOOP, 8, "bapo"),
    ],
)
def test_the_differences_from_grpo(where, runs, staleness, method):
    final = difference(runs, staleness, method, lambda run: run["final_reward"])
    assert f"| `{method}`, {where} | {final} | {difference(runs, staleness, method, mean_reward)} |" in TEXT


def test_the_runs_are_all_there():
    assert sum(map(len, LOOP.values())) == 110 and sum(map(len, STACK.values())) == 9
    assert {staleness for staleness, _ in LOOP} == {1, 8, 32}


def spikes(run):
    norms = run["series"]["grad_norm"]
    return sum(norm > 5 * statistics.median(norms) for norm in norms)


def test_nothing_went_wrong_and_the_target_was_out_of_reach():
    assert statistics.fmean(map(spikes, LOOP[32, "grpo"].values())) == pytest.approx(0.8)
    assert not any(spikes(run) for runs in STACK.values() for run in runs.values())
    shares = [
        [statistics.fmean(run["series"]["saturated"]) for run in runs.values()]
        for runs in (STACK[16, "bapo"], LOOP[32, "bapo"])
    ]
    assert [round(statistics.fmean(share), 2) for share in shares] == [0.96, 1.0]
    methods = [LOOP[32, method] for method in ("bapo", "bapo_gradient", "widest")]
    assert sum(len({runs[seed]["weights"] for runs in methods}) == 1 for seed in range(1, 6)) == 4


def test_the_control_holds():
    at_1 = [runs for (staleness, _), runs in LOOP.items() if staleness == 1]
    assert [len({runs[seed]["weights"] for runs in at_1}) for seed in range(1, 6)] == [1] * 5


@pytest.mark.parametrize("kind", ["bapo", "bapo_gradient"])
def test_what_the_search_did_to_rho(kind):
    runs = [run for s in (8, 32) for method in (kind, f"{kind}@0.38") for run in LOOP[s, method].values()]
    rho, start = (
        [statistics.fmean(run["series"][key]) for run in runs]
        for key in ("positive_contribution", "positive_contribution_start")
    )
    moved = [at_bounds - at_start for at_bounds, at_start in zip(rho, start, strict=True)]
    assert len(moved) == 20 and f"({min(moved):+.4f} to {max(moved):+.4f})" in " ".join(TEXT.split())
