# SPDX-License-Identifier: Apache-2.0
"""The claims of docs/results/small_networks.md and of its tables follow from the third study's raw table."""

import json
from pathlib import Path

import numpy as np
import pytest

from scripts.study import analysis
from scripts.study.plan import DELAY, DELAY_FREE, EPOCHS, EPOCHS_FREE, HARD_EPOCHS, LARGER, PARTIAL, RESULTS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "results" / "small_networks.md").read_text()
TEXT, OVERVIEW, README, CHOOSING = (
    " ".join(path.read_text().split())
    for path in (
        DOCS / "results" / "small_networks.md",
        DOCS / "results.md",
        DOCS.parent / "README.md",
        DOCS / "choosing.md",
    )
)
PLACES = (EPOCHS, DELAY, PARTIAL)
DEFAULT_GSPO = "gspo@clip_ratio_low=0.2,clip_ratio_high=0.2"  # verl's default bounds


@pytest.fixture(scope="module")
def frame():
    return analysis.read_table()


@pytest.fixture(scope="module")
def tests(frame):
    return analysis.primary_tests(frame).set_index(["place", "method", "other", "measure", "claim"])


def rows(tests, method, other, places=PLACES, measure="speed", claim="difference"):
    """Return the declared tests of a method against another, by place."""
    return tests.loc[[(place.name, method, other, measure, claim) for place in places]]


def ratios(rows):
    """Return the ratio of a method's updates to another's, by place."""
    return [f"{ratio:.2f}" for ratio in np.exp(rows["difference"])]


def failed(frame, place, method):
    rows = analysis.at_place(frame, place, method)["failed"]
    return int(rows.sum()), len(rows)


def against_grpo(frame, place, method):
    return f"{np.exp(analysis.against_grpo(frame, place, method).mean()):.2f}"


def final(frame, place, method, measure):
    """Average a measure of a method at its best rate over all seeds."""
    return analysis.at_best_rate(analysis.at_place(frame, place, method), measure).mean()


def test_the_stored_tables_follow_from_the_raw_table(capsys):
    analysis.print_tables()
    assert capsys.readouterr().out.strip() in (RESULTS / "third_study.md").read_text()


def test_the_tables(frame):
    for line in (*analysis.ratio_table(frame), *analysis.failure_table(frame)):
        assert not line or line in PAGE.splitlines(), line


def test_bapo_is_faster_than_grpo(tests):
    found, hard = rows(tests, "bapo@0.4", "grpo"), rows(tests, "bapo@0.38", "grpo", [HARD_EPOCHS])
    assert max(*found["holm"], *hard["holm"]) < 0.05  # "all four hold after correction"
    said = "BAPO 0.40 needs {} (epochs), {} (delay) and {} (partial rollout) of GRPO's updates; on the hard task with"
    assert f"{said} epochs BAPO 0.38 needs {{}}".format(*ratios(found), *ratios(hard)) in TEXT
    fewer = sorted(round(100 * (1 - float(ratio))) for ratio in ratios(found))
    assert f"in {fewer[0]} to {fewer[-1]} % fewer updates than GRPO" in TEXT
    assert f"on a harder one to 0.35 in {100 * (1 - float(*ratios(hard))):.0f} %, with" in TEXT
    larger = ratios(rows(tests, "bapo@0.47", "grpo", [LARGER]))
    fewer = sorted(round(100 * (1 - float(ratio))) for ratio in [*ratios(found), *ratios(hard), *larger])
    assert (
        "needed a third to a half fewer updates than GRPO with targets that fit" in README
        and 33 <= fewer[0] < fewer[-1] <= 50
    )
    least, *_, most = sorted(ratios(found))
    assert f"It needs {least} to {most} of GRPO's updates to reach the target reward" in OVERVIEW


def test_the_larger_model(frame, tests):
    assert analysis.at_place(frame, LARGER)["learning_rate"].unique().tolist() == [0.001]
    fresh = frame[(frame["task"] == "larger_model") & (frame["source"] == "fresh")].groupby("learning_rate")["failed"]
    assert fresh.sum().tolist() == [0, 1]  # "one run fails, of ten of the larger model at 0.002"
    assert frame.loc[(frame["source"] == "fresh") & (frame["task"] != "larger_model"), "failed"].sum() == 0
    others = ("grpo", "high_only", "topr", "dppo_tv")
    found = tests.loc[[(LARGER.name, "bapo@0.47", other, "speed", "difference") for other in others]]
    said = (
        "BAPO 0.47 needs {} of GRPO's updates, which holds after correction, and {}, {} and {} of those of [0.8, 3.0],"
    )
    assert said.format(*ratios(found)) in TEXT and (found["holm"] < 0.05).tolist() == [True, False, False, False]
    assert f"with a larger model to 0.6 in {100 * (1 - float(ratios(found)[0])):.0f} % fewer" in TEXT
    assert f"A target below rho (0.40) needs {against_grpo(frame, LARGER, 'bapo@0.4')} of GRPO's" in TEXT
    failures = (failed(frame, LARGER, method) for method in ("cispo", "dppo_tv", "topr"))
    said = "CISPO fails in {} of {} runs, DPPO-TV in {}, TOPR in {}"
    (cispo, runs), (dppo, _), (topr, _) = failures
    assert said.format(cispo, runs, dppo, topr) in TEXT
    nats = {m: f"{final(frame, LARGER, m, 'entropy'):.2f}" for m in ("grpo", "high_only", "bapo@0.4", "bapo@0.47")}
    assert "GRPO {}, [0.8, 3.0] {}, BAPO 0.40 {}, BAPO 0.47 {}".format(*nats.values()) in TEXT
    assert f"and {ratios(found)[1]} times on a larger model (target 0.47)" in CHOOSING
    targets = [analysis.at_place(frame, LARGER, f"bapo@{target}") for target in (0.4, 0.47, 0.5)]
    assert {round(float(rows["on_the_way"].mean()), 2) for rows in targets} == {0.01}
    drift = np.stack(analysis.at_place(frame, LARGER, "grpo")["rho_series"].to_list()).mean(0)
    assert f"on the larger model {drift[0]:.2f} in the first 20 and {drift[-1]:.2f} at the end" in TEXT
    speeds = [against_grpo(frame, LARGER, f"bapo@{target}") for target in (0.4, 0.47, 0.5)]
    assert "0.40, 0.47 and 0.50 need {}, {} and {} of GRPO's updates".format(*speeds) in CHOOSING


def test_the_upper_bound_alone_is_as_good(tests):
    found = rows(tests, "bapo@0.4", "high_only")
    said = "needs {}, {} and {} times the updates of [0.8, 3.0]; the second holds".format(*ratios(found))
    assert said in TEXT and (found["holm"] < 0.05).tolist() == [False, True, False]
    # "equivalence within 5 % is shown nowhere"
    assert rows(tests, "bapo@0.4", "high_only", claim="equivalence")["holm"].min() > 0.05
    hard = rows(tests, "bapo@0.38", "high_only", [HARD_EPOCHS])
    assert hard["holm"].min() > 0.05  # "Neither of the two differences holds after correction"
    hard = ratios(hard)
    assert "On the hard task BAPO 0.38 needs {} times as many".format(*hard) in TEXT
    assert "needs {2} to {1} times their updates".format(*ratios(found)) in OVERVIEW
    assert "needs {}, {} and {} times the updates of [0.8, 3.0] with epochs".format(*ratios(found)) in OVERVIEW
    said = "BAPO needed {} (epochs), {} (late weights) and {} (partial rollout) times their updates. With targets that "
    said += "fit the task BAPO needed {} times their updates on a harder task with epochs (target 0.38)"
    assert said.format(*ratios(found), *hard) in CHOOSING


def test_what_the_search_is_worth(tests):
    found = rows(tests, "bapo@0.4", "other_seed:bapo@0.4", claim="equivalence")
    hard = rows(tests, "bapo@0.38", "other_seed:bapo@0.38", [HARD_EPOCHS], claim="equivalence")
    said = "ratios of {}, {} (equivalent after correction) and {}, on the hard task {}; the {} is {:.2f} where both got"
    values = *ratios(found), *ratios(hard), ratios(found)[2], np.exp(found["conditional"].iloc[2])
    assert said.format(*values) in TEXT and (found["holm"] < 0.05).tolist() == [False, True, False]
    found = rows(tests, "bapo@0.4", "own_mean:bapo@0.4")
    said = "as fixed bounds BAPO needs {}, {} and {} of the updates; the first and third".format(*ratios(found))
    assert said in TEXT and (found["holm"] < 0.05).tolist() == [True, False, True]
    assert "mean as fixed bounds BAPO needs {}, {} and {} of the updates".format(*ratios(found)) in OVERVIEW
    schedule = ratios(rows(tests, "bapo@0.4", "schedule", [EPOCHS]))
    assert "BAPO needs {} of its updates".format(*schedule) in TEXT


def test_other_losses(frame, tests):
    topr = ratios(rows(tests, "bapo@0.4", "topr"))
    assert "BAPO needs {}, {} and {} times its updates".format(*topr) in TEXT
    rewards = (final(frame, EPOCHS, method, "final_reward") for method in ("topr", "bapo@0.4"))
    assert "ends at a reward of {:.2f}, BAPO at {:.2f}".format(*rewards) in TEXT
    shares = sorted(100 / float(ratio) for ratio in topr)
    assert f"TOPR needs {shares[0]:.0f} to {shares[-1]:.0f} % of BAPO's updates" in TEXT
    gspo = [against_grpo(frame, place, "gspo") for place in PLACES]
    assert "needs {}, {} and {} of GRPO's updates; with verl's default bounds".format(*gspo) in TEXT
    of_default = [against_grpo(frame, place, DEFAULT_GSPO) for place in (EPOCHS, DELAY)]
    count, runs = map(sum, zip(*(failed(frame, place, DEFAULT_GSPO) for place in (EPOCHS, DELAY)), strict=True))
    assert "{} and {} with epochs and delay, in none of {} runs".format(*of_default, runs) in TEXT and not count
    late = [*ratios(rows(tests, "bapo@0.4", "dppo_tv", [DELAY])), *ratios(rows(tests, "bapo@0.4", "dppo_kl", [DELAY]))]
    assert "(BAPO needs {} and {} times the updates of DPPO-TV and DPPO-KL)".format(*late) in TEXT
    total = {m: sum(failed(frame, place, m)[0] for place in PLACES) for m in ("gspo", "cispo", "sapo")}
    runs = sum(failed(frame, place, "gspo")[1] for place in PLACES)
    assert total["gspo"] == 0 and f"fails in none of {runs} runs" in TEXT
    assert f"CISPO and SAPO fail in {total['cispo']} and {total['sapo']} of {runs}" in TEXT
    late = [failed(frame, PARTIAL, m)[0] for m in ("dppo_tv", "dppo_kl", "bapo@0.4", "grpo")]
    said = "{} and {} of 240 runs with partial rollout, where BAPO fails in {} and GRPO in {}"
    assert said.format(*late) in TEXT


def test_safety(frame, tests):
    found = rows(tests, "bapo@0.4", "grpo", measure="failing")
    said = "minus GRPO's is {:+.3f}, {:+.3f} and {:+.3f}; none holds after correction"
    assert said.format(*found["difference"]) in TEXT and found["holm"].min() > 0.05
    assert [failed(frame, HARD_EPOCHS, method) for method in ("bapo@0.38", "high_only")] == [(0, 120)] * 2
    by_rate = analysis.at_place(frame, HARD_EPOCHS, "grpo").groupby("learning_rate")["failed"].sum()
    assert f"none of 120 runs, GRPO in {by_rate.sum()}, {by_rate.iloc[0]} of them at the lowest" in TEXT
    low = against_grpo(frame, HARD_EPOCHS, "bapo@0.28"), failed(frame, HARD_EPOCHS, "bapo@0.28")[0]
    assert "0.28 needs {} of GRPO's updates and fails in {} of 120 runs".format(*low) in CHOOSING
    middle = by_rate.sum(), against_grpo(frame, HARD_EPOCHS, "bapo@0.38")
    assert "(GRPO {}), 0.38 needs {} and fails in none".format(*middle) in CHOOSING
    clipped, free = (failed(frame, place, "bapo@0.4")[0] for place in (EPOCHS, EPOCHS_FREE))
    late = frame[(frame["source"] == "delay") & frame["staleness"].isin(DELAY.stalenesses) & frame["stable"]]
    late = late.groupby(["method", "dual_clip"])["failed"].sum()
    said = f"Failed runs of 240 on the retry task, with and without it: with epochs BAPO {clipped} and {free};"
    of_bapo, of_grpo = (f"{late[method, 3]} and {late[method, 0]}" for method in ("bapo@0.4", "grpo"))
    assert f"{said} with a delay of 32 or 128 updates BAPO {of_bapo}, GRPO {of_grpo}." in CHOOSING
    found = rows(tests, "bapo@0.4", "grpo", (EPOCHS_FREE, DELAY_FREE), "failing")
    said = "Without a dual clip it is {:+.3f} with epochs and {:+.3f} with delay"
    assert said.format(*found["difference"]) in TEXT and found["holm"].min() > 0.05


def test_entropy(frame, tests):
    methods = ("bapo@0.4", "high_only", "grpo", "gspo")
    nats = {method: [f"{final(frame, place, method, 'entropy'):.2f}" for place in PLACES] for method in methods}
    bapo, wide, grpo, gspo = nats.values()
    assert f"ends with {bapo[0]} nats with epochs, [0.8, 3.0] with {wide[0]}, GRPO with {grpo[0]}" in TEXT
    assert f"with delay {bapo[1]}, {wide[1]} and {grpo[1]}; with partial rollout {bapo[2]}, {wide[2]} and" in TEXT
    assert f"more entropy with epochs, {bapo[0]} against {wide[0]} nats" in OVERVIEW
    of_default = [f"{final(frame, place, DEFAULT_GSPO, 'entropy'):.2f}" for place in (EPOCHS, DELAY)]
    said = "GSPO ends above GRPO at all three: {}, {} and {}; with [0.8, 1.2] at {} and {}"
    assert said.format(*gspo, *of_default) in TEXT
    assert float(against_grpo(frame, EPOCHS, DEFAULT_GSPO)) < float(against_grpo(frame, EPOCHS, "bapo@0.4"))
    everywhere = set.intersection(*(set(analysis.at_place(frame, place)["method"]) for place in PLACES)) - {"grpo"}
    above = {
        m for m in everywhere if all(final(frame, p, m, "entropy") > final(frame, p, "grpo", "entropy") for p in PLACES)
    }
    assert above == {"gspo"}
    said = f"not against GRPO ({bapo[0]} and {grpo[0]} nats with epochs); against [0.8, 3.0] with epochs ({wide[0]})"
    assert said in TEXT
    of_rate = frame[(frame["source"] == "epochs") & (frame["task"] == "chain") & (frame["dual_clip"] == 3)]
    of_rate = of_rate[np.isclose(of_rate["learning_rate"], 0.008)]
    at_target = of_rate.groupby(["method", "staleness"])["entropy_at_target"].mean()
    (bapo, wide) = ([f"{at_target[method, s]:.2f}" for s in (4, 16)] for method in ("bapo@0.4", "high_only"))
    assert f"BAPO has {bapo[0]} and {bapo[1]} nats with 4 and 16 epochs, [0.8, 3.0] {wide[0]} and {wide[1]}" in TEXT


def test_how_often_bounds_move(frame):
    by_cell = ["source", "staleness", "learning_rate"]
    rows = frame[(frame["task"] == "chain") & (frame["method"] == "bapo@0.4") & (frame["dual_clip"] == 3)]
    moved = rows.groupby(by_cell)["on_the_way"].mean()
    assert f"in {100 * moved.min():.0f} to {100 * moved.max():.0f} % of the updates, depending" in OVERVIEW
    assert f"by moving in {moved.min():.2f} to {moved.max():.2f} of the updates of a cell" in TEXT
    assert f"{moved.min():.2f} to {moved.max():.2f} is what the third study's retry task had" in CHOOSING
    rows = analysis.at_place(frame, HARD_EPOCHS, "bapo@0.48")
    never = rows.groupby(by_cell)["out_of_reach"].mean()
    assert f"out of reach in {never.min():.2f} to {never.max():.2f} of them" in TEXT


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
    assert f"GRPO clips {least} to {most} % of the positive tokens, where" in OVERVIEW
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
