# SPDX-License-Identifier: Apache-2.0
"""What the pages say of the language model follows from its stored runs."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from scripts.study.figures import draw_language_model
from scripts.study.language_model_tables import METHOD_NAMES, comparison, print_tables, table_row, with_advantages

SEEDS = (12, 13, 14)  # the whole seeds of the comparison
DOCS = Path(__file__).parents[2] / "docs"
RAW = DOCS / "results" / "language_model"
RESULTS, PAGE, REPORT, RUNNING = (
    " ".join((DOCS / f"{name}.md").read_text().split())
    for name in ("results", "results/language_model", "clip_report", "running")
)


def values(run, name):
    """Return a metric of a run of the real stack, step by step."""
    lines = (json.loads(line)["data"] for line in (RAW / f"stack_{run}.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def rows_of(method, seed, learning_rate="1e-5"):
    """Return the rows of a run of the study with four epochs."""
    return pd.read_parquet(RAW / f"{method}-epochs-{learning_rate}-seed{seed}.parquet")


def interval(differences, confidence=0.95):
    """Return the ends of the interval of a mean by Student's t."""
    return stats.t.interval(confidence, len(differences) - 1, np.mean(differences), stats.sem(differences))


def test_the_rewards_of_the_real_stack():
    held_out = values("bapo", "val-core/bapo/sort/acc/mean@1")
    for page in (RESULTS, PAGE):
        assert f"held-out reward went from {held_out[0]:.2f} to {held_out[-1]:.2f} in 80 updates" in page
    short = values("bapo_6_steps", "val-core/bapo/sort/acc/mean@1")
    assert f"In a second run it went from {short[0]:.2f} to {short[-1]:.2f} in 48 updates" in PAGE
    for name in ("critic/rewards/mean", "actor/entropy"):
        first, _, third, *_, last = values("bapo_6_steps", name)
        assert f"| {first:.2f} | {third:.2f} | {last:.2f} |" in RUNNING
    assert f"| {short[0]:.2f} | | {short[-1]:.2f} |" in RUNNING
    reward, entropy = values("bapo", "critic/rewards/mean"), values("bapo", "actor/entropy")
    assert f"fell from {entropy[0]:.2f} to {entropy[-1]:.2f} nats" in PAGE
    grpo = values("grpo", "critic/rewards/mean")
    said = f"went from {grpo[0]:.2f} to {grpo[-1]:.2f} ([metrics](language_model/stack_grpo.jsonl)), BAPO's"
    assert f"{said} from {reward[0]:.2f} to {reward[2]:.2f}" in PAGE and len(grpo) == 3


def test_the_bounds_stood_at_the_ends_of_their_ranges():
    met, missed = values("bapo", "actor/bapo/met_at_once"), values("bapo", "actor/bapo/saturated")
    assert all(at_once + out == 1 for at_once, out in zip(met, missed, strict=True))  # "between in none"
    said = f"In {8 * sum(met):.0f} of the 80 updates the target of 0.4 was already met"
    assert said in PAGE and f"in {8 * sum(missed):.0f} it was out of reach" in PAGE
    met, missed = values("bapo_6_steps", "actor/bapo/met_at_once"), values("bapo_6_steps", "actor/bapo/saturated")
    counts = 8 * sum(met), 8 * sum(missed), 8 * (6 - sum(met) - sum(missed))
    said = "In {:.0f} of the 48 updates the target was already met and the bounds stood at [0.6, 1.2], in {:.0f} it was"
    assert f"{said} out of reach".format(*counts) in RUNNING and round(counts[2]) == 1  # "in one they stood between"
    shares = [values("bapo_6_steps", f"actor/bapo/clipfrac_{sign}") for sign in ("positive", "negative")]
    said = "BAPO clipped {:.1f} % of the positive and {:.1f} % of the negative tokens (means over"
    assert said.format(*(100 * sum(share) / 6 for share in shares)) in RUNNING
    clipped = values("bapo", "actor/bapo/clipfrac_positive")
    assert f"clipped {100 * min(clipped):.0f} to {100 * max(clipped):.1f} % of the positive tokens a step" in PAGE


def test_sixteen_updates_on_the_stack_and_in_the_loop():
    held_out = [values(f"{name}_4_epochs", "val-core/bapo/sort/acc/mean@1") for name in ("grpo", "bapo")]
    said = "went from {:.2f} to {:.2f} with GRPO and from {:.2f} to {:.2f} with BAPO"
    assert said.format(*held_out[0], *held_out[1]) in PAGE
    clipped = [100 * values("grpo_4_epochs", f"actor/bapo/clipfrac_{sign}")[0] for sign in ("positive", "negative")]
    assert "GRPO clipped {:.1f} % of the positive and {:.1f} % of the negative tokens. The".format(*clipped) in PAGE
    loop = [rows_of("grpo", seed).iloc[:16] for seed in (1, 2, *SEEDS)]
    rewards = [rows["held_out_reward"].iloc[-1] for rows in loop]
    shares = [100 * rows["clipfrac_positive"].mean() for rows in loop]
    said = f"16 updates of GRPO at {min(rewards):.2f} to {max(rewards):.2f} with five seeds in float32, and clipped"
    assert f"{said} {min(shares):.1f} to {max(shares):.1f} % of the positive tokens" in PAGE


def test_the_clip_report():
    report = json.loads((RAW / "clip_report.json").read_text())
    assert report["dump"]["updates"] == 24
    methods = {row["method"]: row["without_gradient"] for row in report["methods"]}
    grpo = methods["GRPO"]
    said = f"leave {grpo['positive']:.1%} of the tokens with A > 0 and {grpo['negative']:.1%}".replace("%", " %")
    assert said in REPORT
    said = "GRPO clipped {:.1f} % of the positive tokens** and {:.1f} % of the negative ones"
    assert said.format(100 * grpo["positive"], 100 * grpo["negative"]) in PAGE
    clipped = [row["clipped_by_grpo"] for row in report["by_update"]]
    assert clipped[0] == 0 and f"{100 * clipped[3]:.1f} % in the fourth" in REPORT
    assert 0.045 < min(clipped[4:]) <= max(clipped) < 0.065  # "5 to 6 % from the fifth on"
    value, gradient = report["rho"]
    assert f"{value['before']:.3f} before the search" in REPORT and max(value["met_by_moving"]) == 0
    assert value["highest"] - value["lowest"] < 0.001
    assert f"from {gradient['lowest']:.3f} to {gradient['highest']:.3f}" in REPORT
    assert f"in {max(gradient['met_by_moving']):.0%} of the updates".replace("%", " %") in REPORT
    said = "GSPO with its published settings leaves {:.0f} % without a gradient, DPPO {:.1f} %, SAPO and CISPO none"
    shares = [100 * methods[name]["all"] for name in ("GSPO", "DPPO-KL", "SAPO", "CISPO")]
    assert said.format(*shares) in REPORT and shares[2:] == [0, 0]
    bapo = methods["BAPO 0.4"]
    said = "leaves {:.1f} % of the tokens with A > 0 and {:.1f} % of those with A < 0 without a gradient"
    assert said.format(100 * bapo["positive"], 100 * bapo["negative"]) in REPORT


def test_how_much_grpo_clips_in_the_study():
    epochs, batches = (pd.read_parquet(RAW / f"grpo-{source}-1e-5-seed1.parquet") for source in ("epochs", "batches"))
    positive, negative = (
        [100 * with_advantages(rows[rows["place"] > 0])[f"clipfrac_{sign}"].mean() for rows in (epochs, batches)]
        for sign in ("positive", "negative")
    )
    said = f"GRPO clipped {positive[0]:.1f} % of the positive and {negative[0]:.1f} % of the negative tokens**, with"
    assert f"{said} one epoch {positive[1]:.1f} and {negative[1]:.1f} %" in PAGE
    said = "{:.1f} % with four epochs of 4 mini-batches on a rollout batch, and {:.1f} % with one epoch of 16"
    assert said.format(*positive) in RESULTS
    by_place = with_advantages(batches).groupby("place")["clipfrac_positive"].mean()
    assert by_place[0] == 0 and f"grows from 0 to {100 * by_place[13:].mean():.0f} %" in PAGE


def test_what_baposs_search_would_have_found_in_the_study():
    rows = [table_row(pd.read_parquet(RAW / f"grpo-{source}-1e-5-seed1.parquet")) for source in ("epochs", "batches")]
    assert [row["met by moving"] for row in rows] == ["0.00", "0.00"]
    met, missed = ([100 * float(row[name]) for row in rows] for name in ("target met", "out of reach"))
    assert f"met in {met[0]:.0f} % of the updates and out of reach in {missed[0]:.0f} %; with one epoch in" in PAGE
    assert f"with one epoch in {met[1]:.0f} and {missed[1]:.0f} %" in PAGE
    said = "the second pair in {:.0f} % of the updates with four epochs, and in {:.0f} % with one"
    assert said.format(*missed) in RESULTS


def test_the_upper_bound_alone_against_grpo():
    said = {}
    for seed in (2, 11, *SEEDS):
        raised, grpo = (rows_of(method, seed)["held_out_reward"].dropna() for method in ("high_only", "grpo"))
        both = min(len(raised), len(grpo))
        assert raised.iloc[:both].mean() > grpo.iloc[:both].mean()  # "with each of five seeds"
        said[seed] = f"{raised.iloc[:both].mean():.2f} against {grpo.iloc[:both].mean():.2f}"
    assert f"{said[2]} (seed 2, two batches), {said[11]} (seed 11)" in PAGE
    assert f"{said[12]} (seed 12), {said[13]} (seed 13) and {said[14]} (seed 14)" in PAGE
    before = {seed: rows_of("grpo", seed)["held_out_before"][0] for seed in (11, *SEEDS)}
    assert f"reward was {before[11]:.2f} with seed 11, and {before[12]:.2f} with the seeds 12, 13 and 14" in PAGE
    assert before[12] == before[13] == before[14]


def test_the_comparison_of_four_methods():
    found = comparison()
    assert set(found["seeds"]) == {len(SEEDS)}
    names = ["high_only", "bapo", "grpo", "gspo"]  # the first learned fastest
    said = "{:.2f} with [0.8, 3.0], {:.2f} with BAPO, {:.2f} with GRPO and {:.2f} with GSPO, in this order with each"
    assert said.format(*found["reward"][names]) in RESULTS
    ahead, over_bapo = [], []
    for seed in SEEDS:
        rewards = [rows_of(name, seed)["held_out_reward"].mean() for name in names]
        assert rewards == sorted(rewards, reverse=True)  # "in this order with each seed"
        ahead.append(rewards[1] - rewards[2])
        over_bapo.append(rewards[0] - rewards[1])
    assert "by {:.3f}, {:.3f} and {:.3f}".format(*ahead) in PAGE
    intervals = {}
    for name, row in found.iterrows():
        ends = row["difference"] - row["half_width"], row["difference"] + row["half_width"]
        intervals[name] = "{:+.3f}, with a 95 % interval from {:+.3f} to {:+.3f}".format(row["difference"], *ends)
        if name == "bapo":
            assert interval(ahead) == pytest.approx(ends)  # the test's own computation
    assert abs(found["difference"]["gspo"]) < found["half_width"]["gspo"]  # "no difference from GRPO was shown"
    for page in (RESULTS, PAGE):
        assert f"BAPO minus GRPO is {intervals['bapo']}" in page
    assert found["difference"]["bapo"] > found["half_width"]["bapo"]  # "ahead of GRPO"
    assert f"[0.8, 3.0] minus GRPO is {intervals['high_only']}" in PAGE
    hours = sum(pd.read_parquet(path)["seconds"].sum() for path in RAW.glob("*.parquet")) / 3600
    per_seed = [sum(rows_of(name, seed)["seconds"].sum() for name in names) / 3600 for seed in SEEDS]
    seed_takes = f"{min(per_seed):.1f} to {max(per_seed):.1f}"
    assert f"updates of all stored runs took {hours:.1f}; a fourth seed takes {seed_takes}." in PAGE
    said = "had looked once before, at two seeds ({:+.3f}, from {:+.3f} to {:+.3f})"
    assert said.format(np.mean(ahead[:2]), *interval(ahead[:2])) in PAGE
    assert "half the error for each look it is {:+.3f} to {:+.3f}".format(*interval(ahead, 0.975)) in PAGE
    said = "{:.3f}, has an interval that reaches 0, from {:+.3f} to {:+.3f}"
    assert said.format(np.mean(over_bapo), *interval(over_bapo)) in PAGE
    said = "less entropy**: {:.2f} nats with [0.8, 3.0], {:.2f} with BAPO, {:.2f} with GRPO, {:.2f} with GSPO"
    for page in (RESULTS, PAGE):
        assert said.format(*found["entropy"][names]) in page
    clipped = 100 * found.loc["grpo", "without_gradient_positive"]
    assert f"GRPO clipped {clipped:.0f} % of the positive tokens" in RESULTS
    shares = [100 * found.loc["gspo", f"without_gradient_{sign}"] for sign in ("positive", "negative")]
    assert "left {:.0f} % of the positive and {:.0f} % of the negative tokens without".format(*shares) in PAGE


def test_rewards_and_entropies_within_the_runs():
    def after(method, batches):
        """Return the mean held-out reward after a number of rollout batches, and the entropy in the last of them."""
        runs = pd.concat(rows_of(method, seed) for seed in SEEDS)
        last = runs[runs["rollout"] == batches - 1]
        return last["held_out_reward"].mean(), last["entropy"].mean()

    assert "[0.8, 3.0] had a reward of {:.2f} and an entropy of {:.2f};".format(*after("high_only", 2)) in PAGE
    assert "GRPO had {:.2f} and {:.2f} after four".format(*after("grpo", 4)) in PAGE


def test_grpo_at_twice_the_learning_rate():
    doubled = [rows_of("grpo", seed, "2e-5") for seed in (12, 13)]
    others = [[rows_of(name, seed) for seed in (12, 13)] for name in ("grpo", "bapo", "high_only")]
    rewards = [[rows["held_out_reward"].mean() for rows in runs] for runs in (doubled, *others)]
    said = "{:.3f} and {:.3f} with the seeds 12 and 13. At 1e-5 it had {:.3f} and {:.3f}, BAPO {:.3f} and {:.3f}, and"
    said = f"{said} [0.8, 3.0] {{:.3f}} and {{:.3f}}."
    assert said.format(*(reward for pair in rewards for reward in pair)) in PAGE
    assert max(rewards[0]) < min(rewards[2])  # "does not explain the difference", by the plan's rule
    assert "ended at {:.2f} and {:.2f} nats".format(*(rows["entropy"].iloc[-16:].mean() for rows in doubled)) in PAGE


def test_bapos_bounds_in_the_comparison():
    runs = pd.concat(rows_of("bapo", seed) for seed in SEEDS)
    counts = runs[["low", "high"]].value_counts()
    between = len(runs) - counts[0.6, 1.2] - counts[0.9, 3.0]
    said = f"Of its {len(runs)} updates {counts[0.6, 1.2]} had [0.6, 1.2], {counts[0.9, 3.0]} had [0.9, 3.0], and two"
    assert said in PAGE and between == 2 and f"In {len(runs)} updates of BAPO other bounds were used twice" in RESULTS


def test_the_tables_are_those_of_the_command(capsys):
    print_tables()
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    lines = (DOCS / "results" / "language_model.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("|")] == printed


def test_the_picture_shows_each_seed_and_the_mean_of_the_comparison():
    rewards, entropies = draw_language_model().axes
    found = comparison()
    means = {line.get_label(): line.get_ydata() for line in rewards.lines if not line.get_label().startswith("_")}
    assert set(means) == set(METHOD_NAMES.values())
    for method, name in METHOD_NAMES.items():
        assert means[name][1:].mean() == pytest.approx(found.loc[method, "reward"])  # the first is before training
    for axis in (rewards, entropies):
        assert len(axis.lines) == len(METHOD_NAMES) * (found["seeds"].iloc[0] + 1)
    last = {line.get_label(): line.get_ydata()[-1] for line in entropies.lines}
    assert all(last[name] == pytest.approx(found.loc[method, "entropy"]) for method, name in METHOD_NAMES.items())
