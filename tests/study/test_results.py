# SPDX-License-Identifier: Apache-2.0
"""What docs/results.md and the tables that decide say follows from the third study's raw table."""

import json
from pathlib import Path

import numpy as np
import pytest

from scripts.study import analysis
from scripts.study.plan import DELAY, EPOCHS, EPOCHS_FREE, HARD_EPOCHS, PARTIAL, RESULTS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "results.md").read_text()
TEXT, README, CHOOSING = (
    " ".join(path.read_text().split())
    for path in (DOCS / "results.md", DOCS.parent / "README.md", DOCS / "choosing.md")
)
PLACES = (EPOCHS, DELAY, PARTIAL)


@pytest.fixture(scope="module")
def frame():
    return analysis.read_table()


@pytest.fixture(scope="module")
def tests(frame):
    return analysis.primary_tests(frame).set_index(["place", "method", "other", "measure", "claim"])


def ratios(tests, method, other, places=PLACES):
    """Updates that a method needs for one of another's, by place, and Holm's p of their difference."""
    rows = [tests.loc[(place.name, method, other, "speed", "difference")] for place in places]
    return [f"{np.exp(row['difference']):.2f}" for row in rows], [row["holm"] for row in rows]


def failed(frame, place, method):
    rows = analysis.at_place(frame, place, method)["failed"]
    return int(rows.sum()), len(rows)


def ends_above(frame, place, method):
    """Whether a method ends with a higher entropy than GRPO, each at its best rate; not where it was not run."""
    rows = [analysis.at_place(frame, place, name) for name in (method, "grpo")]
    if rows[0].empty:
        return False
    ours, grpos = (analysis.at_best_rate(part, "entropy").mean() for part in rows)
    return ours > grpos


def test_the_tables(frame):
    for line in (*analysis.ratio_table(frame), *analysis.failure_table(frame)):
        assert not line or line in PAGE.splitlines(), line


def test_bapo_is_faster_than_grpo(tests):
    (epochs, delay, partial), corrected = ratios(tests, "bapo@0.4", "grpo")
    said = f"BAPO 0.40 needs {epochs} (epochs), {delay} (delay) and {partial} (partial rollout) of GRPO's updates;"
    (hard,), of_hard = ratios(tests, "bapo@0.38", "grpo", [HARD_EPOCHS])
    assert f"on a harder one to 0.35 in {100 * (1 - float(hard)):.0f} % fewer" in TEXT
    assert f"{said} on the hard task with epochs BAPO 0.38 needs {hard}" in TEXT
    assert max(corrected + of_hard) < 0.05  # "all four hold after correction"
    fewer = sorted(round(100 * (1 - float(ratio))) for ratio in (epochs, delay, partial))
    assert f"in {fewer[0]} to {fewer[-1]} % fewer updates than GRPO" in TEXT


def test_the_upper_bound_alone_is_as_good(tests):
    (epochs, delay, partial), corrected = ratios(tests, "bapo@0.4", "high_only")
    assert f"needs {epochs}, {delay} and {partial} times the updates of [0.8, 3.0]; the second holds" in TEXT
    assert [p < 0.05 for p in corrected] == [False, True, False]
    equal = [tests.loc[(place.name, "bapo@0.4", "high_only", "speed", "equivalence")]["holm"] for place in PLACES]
    assert min(equal) > 0.05  # "equivalence within 5 % is shown nowhere"
    (hard,), _ = ratios(tests, "bapo@0.38", "high_only", [HARD_EPOCHS])
    assert f"On the hard task BAPO 0.38 needs {hard} times as many" in TEXT


def test_what_the_search_is_worth(tests):
    rows = [tests.loc[(place.name, "bapo@0.4", "other_seed:bapo@0.4", "speed", "equivalence")] for place in PLACES]
    hard = tests.loc[(HARD_EPOCHS.name, "bapo@0.38", "other_seed:bapo@0.38", "speed", "equivalence")]
    epochs, delay, partial, of_hard = (f"{np.exp(row['difference']):.2f}" for row in (*rows, hard))
    assert (
        f"ratios of {epochs}, {delay} (equivalent after correction) and {partial}, on the hard task {of_hard}" in TEXT
    )
    assert [row["holm"] < 0.05 for row in rows] == [False, True, False]
    assert f"the {partial} is {np.exp(rows[2]['conditional']):.2f} where both got there" in TEXT
    (epochs, delay, partial), corrected = ratios(tests, "bapo@0.4", "own_mean:bapo@0.4")
    assert f"as fixed bounds BAPO needs {epochs}, {delay} and {partial} of the updates; the first and third" in TEXT
    assert [p < 0.05 for p in corrected] == [True, False, True]
    (schedule,), _ = ratios(tests, "bapo@0.4", "schedule", [EPOCHS])
    assert f"BAPO needs {schedule} of its updates" in TEXT


def test_other_losses(frame, tests):
    (epochs, delay, partial), _ = ratios(tests, "bapo@0.4", "topr")
    assert f"BAPO needs {epochs}, {delay} and {partial} times its updates" in TEXT
    rewards = (
        analysis.at_best_rate(analysis.at_place(frame, EPOCHS, m), "final_reward").mean() for m in ("topr", "bapo@0.4")
    )
    assert "ends at a reward of {:.2f}, BAPO at {:.2f}".format(*rewards) in TEXT
    shares = sorted(1 / float(ratio) for ratio in (epochs, delay, partial))
    assert f"TOPR needs {100 * shares[0]:.0f} to {100 * shares[-1]:.0f} % of BAPO's updates" in TEXT
    against_grpo = [f"{np.exp(analysis.against_grpo(frame, place, 'gspo').mean()):.2f}" for place in PLACES]
    assert f"needs {against_grpo[0]}, {against_grpo[1]} and {against_grpo[2]} of GRPO's updates. DPPO" in TEXT
    late = [ratios(tests, "bapo@0.4", method, [DELAY])[0][0] for method in ("dppo_tv", "dppo_kl")]
    assert f"(BAPO needs {late[0]} and {late[1]} times the updates of DPPO-TV and DPPO-KL)" in TEXT
    total = {m: sum(failed(frame, place, m)[0] for place in PLACES) for m in ("gspo", "cispo", "sapo")}
    runs = sum(failed(frame, place, "gspo")[1] for place in PLACES)
    assert total["gspo"] == 0 and f"fails in none of {runs} runs" in TEXT
    assert f"CISPO and SAPO fail in {total['cispo']} and {total['sapo']} of {runs}" in TEXT
    tv, kl, bapo, grpo = (failed(frame, PARTIAL, m)[0] for m in ("dppo_tv", "dppo_kl", "bapo@0.4", "grpo"))
    assert f"{tv} and {kl} of 240 runs with partial rollout, where BAPO fails in {bapo} and GRPO in {grpo}" in TEXT


def test_safety(frame, tests):
    rows = [tests.loc[(place.name, "bapo@0.4", "grpo", "failing", "difference")] for place in PLACES]
    differences = "{:+.3f}, {:+.3f} and {:+.3f}".format(*(row["difference"] for row in rows))
    assert f"minus GRPO's is {differences}; none holds after correction" in TEXT
    assert min(row["holm"] for row in rows) > 0.05
    assert [failed(frame, HARD_EPOCHS, method) for method in ("bapo@0.38", "high_only")] == [(0, 120)] * 2
    by_rate = analysis.at_place(frame, HARD_EPOCHS, "grpo").groupby("learning_rate")["failed"].sum()
    assert f"none of 120 runs, GRPO in {by_rate.sum()}, {by_rate.iloc[0]} of them at the lowest" in TEXT


def test_entropy(frame):
    said = []
    for place in PLACES:
        rows = (analysis.at_place(frame, place, method) for method in ("bapo@0.4", "high_only", "grpo"))
        said.append([f"{analysis.at_best_rate(part, 'entropy').mean():.2f}" for part in rows])
    epochs, delay, partial = said
    of_gspo = [f"{analysis.at_best_rate(analysis.at_place(frame, p, 'gspo'), 'entropy').mean():.2f}" for p in PLACES]
    assert f"GSPO ends above GRPO at all three: {of_gspo[0]}, {of_gspo[1]} and {of_gspo[2]}" in TEXT
    others = set(frame["method"]) - {"gspo", "grpo"}
    assert not [m for m in others if all(ends_above(frame, place, m) for place in PLACES)]
    nats = (
        f"GSPO {of_gspo[0]} nats a token, GRPO {epochs[2]}, [BAPO](#in-your-own-verl-run) {epochs[0]}, the upper bound"
    )
    assert f"{nats} alone {epochs[1]}" in README
    assert (
        f"not against GRPO ({epochs[0]} and {epochs[2]} nats with epochs); against [0.8, 3.0] with epochs ({epochs[1]})"
        in TEXT
    )
    first = f"ends with {epochs[0]} nats with epochs, [0.8, 3.0] with {epochs[1]}, GRPO with {epochs[2]}"
    assert first in TEXT
    assert (
        f"with delay {delay[0]}, {delay[1]} and {delay[2]}; with partial rollout {', '.join(partial[:2])} and" in TEXT
    )
    rows = frame[(frame["source"] == "epochs") & (frame["task"] == "chain") & (frame["dual_clip"] == 3)]
    rows = rows[np.isclose(rows["learning_rate"], 0.008)]
    at_target = rows.groupby(["method", "staleness"])["entropy_at_target"].mean()
    (bapo, wide) = ([f"{at_target[method, s]:.2f}" for s in (4, 16)] for method in ("bapo@0.4", "high_only"))
    assert f"BAPO has {bapo[0]} and {bapo[1]} nats with 4 and 16 epochs, [0.8, 3.0] {wide[0]} and {wide[1]}" in TEXT


def test_how_often_bounds_move(frame):
    by_cell = ["source", "staleness", "learning_rate"]
    rows = frame[(frame["task"] == "chain") & (frame["method"] == "bapo@0.4") & (frame["dual_clip"] == 3)]
    moved = rows.groupby(by_cell)["on_the_way"].mean()
    assert f"by moving in {moved.min():.2f} to {moved.max():.2f} of the updates of a cell" in TEXT
    assert f"{moved.min():.2f} to {moved.max():.2f} is what the third study's retry task had" in CHOOSING
    rows = analysis.at_place(frame, HARD_EPOCHS, "bapo@0.48")
    never = rows.groupby(by_cell)["out_of_reach"].mean()
    assert f"out of reach in {never.min():.2f} to {never.max():.2f} of them" in TEXT


def test_the_readme_and_the_guide(frame, tests):
    (epochs, delay, partial), _ = ratios(tests, "bapo@0.4", "high_only")
    (hard,), _ = ratios(tests, "bapo@0.38", "high_only", [HARD_EPOCHS])
    times = (
        f"{epochs} (epochs), {delay} (late weights), {partial} (partial rollout) times its updates, {hard} on a harder"
    )
    assert f"BAPO needed {times} task" in README
    wide, grpo = (failed(frame, PARTIAL, method) for method in ("high_only", "grpo"))
    assert f"with partial rollout {wide[0]} of {wide[1]} runs failed, of GRPO's {grpo[0]}" in README
    (gspo,), _ = ratios(tests, "bapo@0.4", "gspo", [EPOCHS])
    assert f"GSPO needed {100 * (1 / float(gspo) - 1):.0f} % more updates than BAPO" in README
    low, middle = (
        (f"{np.exp(analysis.against_grpo(frame, HARD_EPOCHS, m).mean()):.2f}", failed(frame, HARD_EPOCHS, m)[0])
        for m in ("bapo@0.28", "bapo@0.38")
    )
    assert f"0.28 needs {low[0]} of GRPO's updates and fails in {low[1]} of 120 runs" in CHOOSING
    assert (
        f"(GRPO {failed(frame, HARD_EPOCHS, 'grpo')[0]}), 0.38 needs {middle[0]} and fails in none" in CHOOSING
        and middle[1] == 0
    )
    clipped, free = (failed(frame, place, "bapo@0.4")[0] for place in (EPOCHS, EPOCHS_FREE))
    assert f"(BAPO {clipped} and {free} of 240 runs fail with and without)" in CHOOSING


def test_rho_before_the_search(frame):
    rows = frame[(frame["task"] == "chain") & (frame["method"] == "bapo@0.4") & (frame["dual_clip"] == 3)]
    means = rows.groupby(["source", "staleness", "learning_rate"])["rho_start"].mean()
    assert f"{means.min():.2f} to {means.max():.2f} in the means of the retry task's cells" in TEXT
    grpo = analysis.at_place(frame, EPOCHS, "grpo")
    drift = {s: np.stack(grpo[grpo["staleness"] == s]["rho_series"].to_list()).mean(0) for s in (4, 16)}
    begin, middle, end = (f"{drift[4][window]:.2f}" for window in (0, 7, -1))
    assert f"is {begin} in the first 16 updates, {middle} in updates 113 to 128 and {end} at the end" in TEXT
    assert "with 16 epochs {:.2f}, {:.2f} and {:.2f}".format(*drift[16][[0, 7, -1]]) in TEXT


def test_what_grpo_clips_and_where_runs_fail(frame):
    grpo = frame[(frame["method"] == "grpo") & (frame["source"] != "fresh")].groupby("cell")["no_gradient_positive"]
    least, most = (f"{100 * share:.0f}" for share in (grpo.mean().min(), grpo.mean().max()))
    assert f"GRPO clips {least} to {most} % of the positive tokens here" in TEXT
    assert f"less than {least} % of the positive tokens clipped" in README
    rows = [analysis.at_place(frame, place, m) for place in PLACES for m in ("grpo", "bapo@0.4", "high_only")]
    by_rate = sum(part.groupby("learning_rate")["failed"].sum() for part in rows)
    assert by_rate.iloc[-1] > 0.95 * by_rate.sum()  # "nearly all failures were at the highest of three"


def test_the_real_stack():
    runs = [json.loads(line) for line in (RESULTS / "anchors_stack.jsonl").read_text().splitlines()]
    of = {m: [run["final_reward"] for run in runs if run["method"] == m] for m in ("bapo@0.4", "grpo", "widest")}
    bapo, grpo, wide = (f"{np.mean(rewards):.2f}" for rewards in of.values())
    assert f"was {bapo} against GRPO's {grpo} and {wide} of [0.9, 3.0]" in TEXT
    nats = {m: [run["series"]["entropy"][-1] for run in runs if run["method"] == m] for m in of}
    assert max(nats["bapo@0.4"]) < min(nats["grpo"])  # "BAPO's entropy ends below GRPO's in all three"
    clipped = [share for run in runs if run["method"] == "grpo" for share in run["series"]["clipfrac_positive"]]
    assert f"GRPO clipped {100 * min(clipped):.0f} to {100 * max(clipped):.0f} % of the positive tokens there" in TEXT
    at_start = [low == 0.6 for run in runs if run["method"] == "bapo@0.4" for low in run["series"]["clip_low"]]
    assert np.mean(at_start) > 0.5  # "mostly stood at [0.6, 1.2]"
    seeds = [", ".join(f"{reward:.2f}" for reward in rewards) for rewards in of.values()]
    assert f"by seed {seeds[0]} against {seeds[1]} and {seeds[2]}" in TEXT


def test_the_page_is_short():
    assert len(PAGE.splitlines()) <= 150 and PAGE.count("![") <= 4
