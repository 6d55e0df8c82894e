# SPDX-License-Identifier: Apache-2.0
"""What docs/results.md says of the second study follows from its table."""

import json
import re
from statistics import fmean

import numpy as np
import pytest

from scripts.study.plan import RESULTS
from scripts.study.second import analysis
from scripts.study.second.agreement import (
    LOOP_RUNS,
    STACK_RUNS,
    agreement,
    differences,
    rank_correlation,
    read_runs,
    with_every_method,
)

PAGE = RESULTS.with_suffix(".md")
TEXT = " ".join(PAGE.read_text().split("## Figures of the second study")[0].split())
CHAIN = ["A, protection", "B, epochs", "C, delay", "C, partial rollout"]


@pytest.fixture(scope="module")
def frame():
    return analysis.read_table()


@pytest.fixture(scope="module")
def tests(frame):
    return {(entry["map"], entry["other"]): entry for entry in analysis.primary_tests(frame)}


def says(*numbers):
    """Whether the text has these numbers in this order, with words between them."""
    return re.search(r"\D{1,80}".join(re.escape(number) for number in numbers), TEXT)


def test_the_speed(tests):
    against_grpo = [entry["reward"] for (_, other), entry in tests.items() if other == "grpo"]
    gains = [test["difference"] for test in against_grpo]
    assert len(gains) == 5 and says(f"{min(gains):.2f}", f"{max(gains):.2f}")
    assert {f"{test['p']:.0e}" for test in against_grpo} == {"2e-06"} and "(p = 2e-06 each)" in TEXT


def test_the_wide_bounds(tests, frame):
    differences = [tests[name, "widest"]["reward"]["difference"] for name in CHAIN]
    assert max(map(abs, differences)) < 0.003 and "within 0.003 of the fixed bounds" in TEXT
    assert f"differences of {min(differences):.4f} to {max(differences):+.4f}" in TEXT
    reversal = analysis.of_map(frame, "A", "reversal")
    at_once = reversal[reversal["method"] == "bapo@0.4"]["at_once"].mean()
    assert f"in {at_once:.0%}".replace("%", " %") in TEXT
    assert all(tests["A, never ending", other]["reward"]["difference"] > 0 for other in ("grpo", "widest"))


def test_the_safety(tests):
    chances = [tests[name, "grpo"]["failing"]["p"] for name in CHAIN]
    assert f"(p = {min(chances):.2g} to {max(chances):.2g})" in TEXT
    fails = tests["A, never ending", "grpo"]["failing"]
    assert f"in {fails['first']:.2f} of the runs against {fails['second']:.2f} (p = {fails['p']:.2g})" in TEXT


def test_the_dual_clip(frame):
    rows = frame[(frame["map"] == "A") & frame["method"].isin(["grpo", "widest", "bapo@0.4"])]
    fails = rows.groupby(["task", "dual_clip"])["failed"].agg(["sum", "size"])
    (with_clip, runs), (without, _) = fails.loc["chain", 3.0], fails.loc["chain", 0.0]
    of = f"of {runs:,}"
    assert (
        f"{with_clip} {of} runs of GRPO, [0.9, 3.0] and BAPO fail with a dual clip of 3 and {without} {of} without"
        in TEXT
    )
    (with_clip, runs), (without, _) = fails.loc["reversal", 3.0], fails.loc["reversal", 0.0]
    assert f"on its reversal {with_clip} and {without} of {runs}" in TEXT
    unprotected = rows[(rows["task"] == "chain") & (rows["dual_clip"] == 0)].groupby("method")["failed"]
    fails, runs = unprotected.sum(), unprotected.size()
    assert f"{fails['bapo@0.4']} of its {runs['bapo@0.4']} runs without one fail, {fails['grpo']} of GRPO's" in TEXT


def test_the_entropy(frame):
    rows = frame[(frame["map"] == "B") & (frame["staleness"] == 16) & (frame["learning_rate"] < 0.03)]
    means = rows.groupby(["dual_clip", "learning_rate", "method"])["entropy"].mean().unstack()
    more = means["bapo@0.4"] - means["widest"]
    assert f"BAPO ends with {more.min():.1f} to {more.max():.1f} nats more than [0.9, 3.0]" in TEXT
    fails = rows.groupby(["dual_clip", "learning_rate", "method"])["failed"].mean().unstack()
    assert fails["bapo@0.4"].max() == 0 and fails["widest"].max() == 0.05  # hardly
    rewards = rows.groupby(["learning_rate", "dual_clip", "method"])["final_reward"].mean().unstack()
    (low, high), (low_016, high_016) = (
        sorted(abs(rewards["bapo@0.4"] - rewards["widest"])[rate]) for rate in sorted(rows["learning_rate"].unique())
    )
    assert f"reward {low:.2f} to {high:.2f} lower at 0.004 and {low_016:.2f} to {high_016:.2f} higher at 0.016" in TEXT


def test_on_the_reversal_it_is_the_lower_bound(frame):
    rows = analysis.of_map(frame, "A", "reversal")
    fails = rows.groupby("method")["failed"].mean()
    low = fails[["figure7_low", "bapo@0.5", "bapo_gradient@0.4", "authors_code"]]
    high = fails[["grpo", "clip_higher", "high_only", "figure7_high", "low_only", "widest"]]
    assert f"or 0.6 there fail in {low.min():.2f} to {low.max():.2f}, those at 0.8 or 0.9 in {high.min():.2f}" in TEXT
    assert f"{high.min():.2f} to {high.max():.2f} (description)" in TEXT
    starts = rows[rows["method"].isin(low.index[1:])].groupby("method")["at_once"].mean()
    assert starts.min() > 0.5  # at their start of 0.6 in most updates


def test_the_dual_clip_of_all_methods(frame):
    rows = analysis.of_map(frame, "A", "chain")
    fails = rows.groupby(["dual_clip", "method"])["failed"].sum()
    runs = int((rows["dual_clip"] == 0).sum())
    assert f"{rows['method'].nunique()} methods {fails[3].sum()} and {fails[0].sum()} of {runs:,} runs fail" in TEXT
    assert f"[0.5, 1.2] ({fails[3]['figure7_low']}) and *balance* ({fails[3]['balance']})" in TEXT
    of_gradient, of_value = (fails[:, method] for method in ("bapo_gradient@0.4", "bapo@0.4"))
    guide = " ".join(PAGE.with_name("choosing.md").read_text().split())
    assert (
        f"in {of_gradient[0]} of {runs // 13} runs against {of_value[0]}; with one in none and {of_value[3]}" in guide
    )
    assert of_gradient[3] == 0


def test_what_failed_least(frame):
    rows = frame[(frame["dual_clip"] == 0) & frame["map"].isin(["A", "B", "C", "partial"])]
    fails = rows.replace({"map": {"partial": "C"}}).groupby(["map", "method"])["failed"].agg(["sum", "size"])
    a, b, c = ("{} of {}".format(*fails.loc[(name, "topr")]) for name in "ABC")
    assert f"{a} runs of map A (both tasks), {b} of map B and {c} of map C (both kinds)" in TEXT
    for method, before in (("bapo@0.4", "BAPO failed in"), ("grpo", "GRPO in"), ("balance", "(*balance*) failed in")):
        a, b, c = (fails.loc[(name, method), "sum"] for name in "ABC")
        assert f"{before} {a}, {b} and {c}" in TEXT
    assert (fails["sum"].unstack().idxmin(axis=1) == "topr").all()
    b = frame[(frame["map"] == "B") & (frame["method"] == "topr")]
    assert (
        len({frozenset(weights) for _, weights in b.groupby("dual_clip")["weights"]}) == 1
    )  # it changes nothing for it
    cell = rows[(rows["map"] == "B") & (rows["staleness"] == 16) & np.isclose(rows["learning_rate"], 0.016)]
    means = cell.groupby("method")[["failed", "final_reward"]].agg(["sum", "size", "mean"])
    assert "TOPR fails in {:.0f} of {:.0f}, BAPO and GRPO in none".format(*means["failed"].loc["topr"]) in TEXT
    assert means["failed"]["sum"][["bapo@0.4", "grpo"]].sum() == 0
    assert means["final_reward"]["mean"].idxmin() == "topr"


def test_on_a_larger_model(frame):
    runs, stack = read_runs(LOOP_RUNS), with_every_method(read_runs(STACK_RUNS))
    correlation, methods = rank_correlation(runs, frame)
    assert f"(rank correlation {correlation:.2f}, {methods} methods)" in TEXT
    ours = runs[runs["method"] == "bapo@0.4"]
    assert f"rho starts at {ours['positive_contribution_start'].mean():.2f}, above the target 0.4" in TEXT
    searches = {"bapo@0.4": [], "bapo@0.5": []}
    for run in map(json.loads, LOOP_RUNS.read_text().splitlines()):
        if run["method"] in searches:
            searches[run["method"]].append(run)
    at_once = fmean(run["at_once"] for run in searches["bapo@0.4"])
    never = fmean(run["out_of_reach"] for run in searches["bapo@0.5"])
    assert f"stands at [0.6, 1.2] in {at_once:.0%}".replace("%", " %") in TEXT
    assert f"it is [0.9, 3.0] in {never:.0%}".replace("%", " %") in TEXT
    assert min(differences(runs, "bapo@0.5", "widest")) >= 0
    above, below = (differences(runs, "bapo@0.4", other) for other in ("grpo", "widest"))
    assert f"is {fmean(above):.2f} above GRPO's (by seed {', '.join(f'{gain:+.2f}' for gain in above)})" in TEXT
    assert f"and {-fmean(below):.2f} below that of [0.9, 3.0], its final reward {final_rewards(runs)}" in TEXT
    assert f"In the real stack ({['no', 'one', 'two', 'three'][stack['seed'].nunique()]} seeds)" in TEXT
    above, below = (differences(stack, "bapo@0.4", other) for other in ("grpo", "widest"))
    assert f"reward is {fmean(above):.2f} above GRPO's (by seed {', '.join(f'{gain:+.2f}' for gain in above)})" in TEXT
    assert f"and {-fmean(below):.2f} below that of [0.9, 3.0], its final reward {final_rewards(stack)}." in TEXT
    assert max(*below, *differences(runs, "bapo@0.4", "widest")) < 0 and "BAPO 0.4 is below it in each" in TEXT
    ends = [part.pivot(index="seed", columns="method", values="final_reward") for part in (runs, stack)]
    fewer = sum(int((end["bapo@0.4"] < end["grpo"]).sum()) for end in ends)
    assert fewer == 4 and "wide bounds in six runs of six and ended with less reward than GRPO in four of them" in TEXT


def final_rewards(runs):
    means = runs.groupby("method")["final_reward"].mean()
    return f"{means['bapo@0.4']:.2f} against {means['grpo']:.2f} and {means['widest']:.2f}"


def test_the_page_has_the_anchors(frame):
    assert "\n".join(agreement(frame)) in PAGE.read_text()


def test_the_claims(frame):
    rows = frame[frame["method"] == "bapo@0.4"]
    starts = rows[~rows["map"].isin(["control", "ablation"])].groupby(["map", "task"])["rho_start"].mean()
    chain = starts.xs("chain", level="task")
    assert f"starts at {chain.min():.2f} to {chain.max():.2f}; on the reversal at {starts['A', 'reversal']:.2f}" in TEXT
    b = frame[(frame["map"] == "B") & (frame["dual_clip"] == 0) & np.isclose(frame["learning_rate"], 0.016)]
    entropy = b[b["method"] == "grpo"].groupby("staleness")["entropy"].mean()
    assert f"{entropy[1]:.2f}, {entropy[4]:.2f}, {entropy[16]:.2f} nats" in TEXT
    rho = b[b["staleness"] == 16].groupby("method")["rho_value"].mean()
    assert f"from {rho['grpo']:.3f} to {rho['bapo@0.4']:.3f}" in TEXT and f"[0.9, 3.0] {rho['widest']:.3f}" in TEXT
    a = frame[(frame["map"] == "A") & (frame["optimizer"] == "sgd") & (frame["task"] == "chain")]
    fails = a[a["method"] == "grpo"].groupby("staleness")["failed"].mean()
    assert fails[32] > max(fails[8], fails[128])


# Rows of the guide's table in docs/choosing.md.
GUIDE = {
    "GRPO, [0.8, 1.2]": "grpo",
    **{f"BAPO, target {target}": f"bapo@{target}" for target in (0.35, 0.4, 0.45, 0.5)},
    "[0.9, 3.0]": "widest",
    "target 0.4, `gradient`": "bapo_gradient@0.4",
    "target 0.5, `gradient`": "bapo_gradient@0.5",
    "target 0.4, `c_high` fixed at 1.2": "bapo@0.4,ratio_upper_max=1.2",
    "target 0.4, `c_low` fixed at 0.8": "bapo@0.4,ratio_lower_start=0.8,ratio_lower_max=0.8",
    "target 0.4, ranges 0.8 to 0.9 and 1.2 to 2.0": "paper_octothinker@0.4",
}


def test_the_guide(frame):
    page = PAGE.with_name("choosing.md").read_text()
    text = " ".join(page.split())
    everything = analysis.of_map(frame, "ablation", "chain")
    at_032 = everything[np.isclose(everything["learning_rate"], 0.032)].groupby("method")["failed"].mean()
    fails = at_032["bapo@0.4,ratio_lower_start=0.8,ratio_lower_max=0.8"], at_032["bapo@0.4"]
    assert (
        f"{40 * fails[0]:.0f} of 40 runs fail with `c_low` fixed at 0.8 and {40 * fails[1]:.0f} of 40 without" in text
    )
    rows = everything[np.isclose(everything["learning_rate"], 0.016)]
    assert (rows.groupby("method").size() == 40).all() and rows["failed"].mean() < 0.01
    means = rows.groupby("method")[["mean_reward", "entropy", "at_once", "on_the_way", "rho_start"]].mean()
    for name, method in GUIDE.items():
        row = means.loc[method]
        shares = (f"{row.at_once:.2f}", f"{row.on_the_way:.2f}") if row.notna().all() else ("-", "-")
        assert f"| {name} | {row.mean_reward:.3f} | {row.entropy:.2f} | {' | '.join(shares)} |" in page
    assert f"0.35 ends {means.entropy['bapo@0.35'] - means.entropy['bapo@0.5']:.2f} nats above 0.5" in text
    others = ("0.19 to 0.27", "0.25 against 0.17", "2 of 1,800", "183 of 1,800", "78 and 892 of 7,800")
    for said in others:  # other tests compute these
        assert said in text and said.replace(" against ", " of the runs against ") in TEXT
    starts = means.rho_start["bapo@0.4"], means.rho_start["bapo_gradient@0.4"]
    assert f"rho starts at {starts[0]:.2f} by value and at {starts[1]:.2f} by gradient" in text
