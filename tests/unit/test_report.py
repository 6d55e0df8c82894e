# SPDX-License-Identifier: Apache-2.0
"""The clip report shows planted facts exactly, in the JSON and on the page."""

import json
import re
import sys
from math import log

import pytest
import torch
from markupsafe import escape
from safetensors.torch import load_file, save_file

from bapo import BAPOConfig
from recipe.bapo.report.__main__ import main, page
from recipe.bapo.report.facts import report_on
from recipe.bapo.report.verdict import staleness

# One update by hand: (tokens, probability under the old policy, ratio, advantage). Sizes of the gradient r*|A|:
#   A > 0: 10 * 1.0 * 1 = 10, 4 * 1.25 * 1 = 5, 2 * 2.5 * 1 = 5: together 20, 16 tokens
#   A < 0: 8 * 0.5 * 1 = 4, 4 * 1.0 * 1 = 4, 3 * 4.0 * 1 = 12, 1 * 20 * 1 = 20: together 40, 16 tokens
#   A = 0: 8 tokens
PLANTED = [
    (10, 0.5, 1.0, 1.0),
    (4, 0.25, 1.25, 1.0),
    (2, 0.125, 2.5, 1.0),
    (8, 0.5, 0.5, -1.0),
    (4, 0.5, 1.0, -1.0),
    (3, 0.125, 4.0, -1.0),
    (1, 0.0625, 20.0, -1.0),
    (8, 0.5, 1.0, 0.0),
]
LENGTHS = [10, 6, 12, 4, 8]  # the responses have A > 0, A > 0, A < 0, A < 0, A = 0


def plant(folder, updates=(0, 1), **metadata):
    old = torch.cat([torch.full((n,), log(p), dtype=torch.float64) for n, p, _, _ in PLANTED])
    ratio = torch.cat([torch.full((n,), r, dtype=torch.float64) for n, _, r, _ in PLANTED])
    advantages = torch.cat([torch.full((n,), a) for n, _, _, a in PLANTED])
    for number, update in enumerate(updates):
        # All ratios of the first update are 1.
        log_prob = old + (ratio.log() if update else 0)
        tensors = {"old_log_prob": old.float(), "log_prob": log_prob.float(), "advantages": advantages}
        tensors |= {"lengths": torch.tensor(LENGTHS, dtype=torch.int32), "update": torch.tensor([update])}
        save_file(tensors, folder / f"rank0-{number:06d}.safetensors", metadata={"clip_ratio_c": "3.0", **metadata})
    return folder


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Make the report on the second update alone."""
    return report_on(plant(tmp_path_factory.mktemp("planted"), updates=[1]))


def method(report, name):
    return next(row for row in report["methods"] if row["method"] == name)


def close(value):
    return pytest.approx(value, rel=1e-6, abs=1e-9)


def test_shares_of_tokens_and_gradient(report):
    assert report["dump"]["tokens"] == 40
    assert report["signs"] == {
        "positive": {"tokens": close(16 / 40), "gradient": close(20 / 60)},
        "negative": {"tokens": close(16 / 40), "gradient": close(40 / 60)},
    }
    ratios = torch.cat([torch.full((n,), r, dtype=torch.float64) for n, _, r, _ in PLANTED])
    assert report["unbounded"] == {
        "clipped_by_grpo": close(14 / 32),
        "effective_sample_size": close((ratios.sum() ** 2 / (40 * (ratios**2).sum())).item()),
        "negative_above_3": close(4 / 16),
        "gradient_above_3": close(32 / 60),
        "largest_ratio": close(20),
    }


def test_the_advantage_is_in_the_size_of_a_gradient(tmp_path):
    # r*|A| of 15, 2 and 8; GRPO's upper bound takes the first, the dual clip the last.
    log_prob, advantages = torch.tensor([log(5), 0.0, log(4)]) - 9, torch.tensor([3.0, -2.0, -2.0])
    tensors = {"old_log_prob": torch.full((3,), -9.0), "log_prob": log_prob, "advantages": advantages}
    save_file(tensors, tmp_path / "a.safetensors")
    found = report_on(tmp_path)
    assert found["signs"]["positive"]["gradient"] == close(15 / 25)
    assert found["unbounded"]["gradient_above_3"] == close(8 / 25)
    assert found["unbounded"]["largest_ratio"] == close(4)  # only tokens with A < 0 count
    assert method(found, "GRPO")["gradient_left"]["all"] == close(2 / 25)
    names = [row["method"] for row in found["methods"]]
    assert "GSPO" not in names and "SAPO" in names  # GSPO needs to know where responses begin


# For A > 0, then for A < 0: the number of tokens without a gradient, and the sum of r*|A| of the others. The dual clip
# at 3 takes the gradient of four tokens, whose r*|A| add up to 32.
BY_HAND = {
    "GRPO": (6, 10, 12, 4),
    "upper bound alone": (0, 20, 12, 4),
    # The means of log r: A > 0: 0 and (4 log 1.25 + 2 log 2.5) / 6. A < 0: 8 log 0.5 / 12, (3 log 4 + log 20) / 4.
    "GSPO": (6, 10, 12, 4 * 20**0.25 * 4**0.75),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_each_method_leaves(report, name):
    tokens, size, negative_tokens, negative_size = BY_HAND[name]
    row = method(report, name)
    without = {"positive": close(tokens / 16), "negative": close(negative_tokens / 16)}
    assert row["without_gradient"] == {**without, "all": close((tokens + negative_tokens) / 32)}
    left = {"positive": close(size / 20), "negative": close(negative_size / 40)}
    assert row["gradient_left"] == {**left, "all": close((size + negative_size) / 60)}


def test_which_targets_are_in_reach_by_hand(tmp_path):
    # value: P = 10 + 4 * min(1.25, c_high) + 2 * min(2.5, c_high), N = 8 * c_low + 4 + 12 + 20. gradient: P = 10,
    # 15 from c_high = 1.3, 20 from 2.55; N = 4 + 12: r = 0.5 is below c_low, r = 20 above the dump's dual clip.
    ratio, advantages = (torch.cat([torch.full((row[0],), row[k]) for row in PLANTED]) for k in (2, 3))
    tensors = {"old_log_prob": torch.full_like(ratio, -1.0), "log_prob": ratio.log() - 1, "advantages": advantages}
    save_file(tensors, tmp_path / "rank0-000000.safetensors", metadata={"clip_ratio_c": "5.0"})
    value, gradient = report_on(tmp_path)["rho"]
    before = {"before": 17.2 / 58, "lowest": 17.2 / 58, "highest": 20 / 60.8}
    assert {key: value[key] for key in before} == close(before)
    before = {"before": 10 / 26, "lowest": 10 / 26, "highest": 20 / 36}
    assert {key: gradient[key] for key in before} == close(before)
    expected = {0.29: (1, 0, 0), 0.3: (0, 1, 0), 0.32: (0, 1, 0), 0.33: (0, 0, 1)}
    expected_of_gradient = {0.38: (1, 0, 0), 0.39: (0, 1, 0), 0.55: (0, 1, 0), 0.56: (0, 0, 1)}
    for rho, ends in ((value, expected), (gradient, expected_of_gradient)):
        at = {target: rho["target"].index(target) for target in ends}
        keys = ("already_met", "met_by_moving", "out_of_reach")
        assert {target: tuple(rho[key][at[target]] for key in keys) for target in ends} == ends


def test_by_update_and_is_it_the_staleness(tmp_path):
    report = report_on(plant(tmp_path))
    first, second = report["by_update"]
    assert (first["update"], first["tokens"], first["clipped_by_grpo"]) == (1, 40, 0)
    assert first["effective_sample_size"] == close(1) and second["effective_sample_size"] < 0.9
    assert (second["clipped_by_grpo"], second["negative_above_3"]) == (close(14 / 32), close(4 / 16))
    said = "[0.8, 1.2] clips 0 % of the tokens at update 1, 44 % at update 2: it grows with staleness."
    assert report["staleness"] == said
    assert report["by_age"] is None
    assert report["unbounded"]["largest_ratio"] == close(20)  # over both updates


GROWS, FLAT, NOTHING = (0.1, 0.3), (0.1, 0.15), (0.0, 0.0005)
SAID = ["30 % at update 2: it grows", "15 % at age 2: staleness is not the main cause", "hardly anything is clipped"]


@pytest.mark.parametrize(
    "by_age, by_update, said", [(FLAT, GROWS, SAID[0]), (FLAT, FLAT, SAID[1]), (NOTHING, NOTHING, SAID[2])]
)
def test_what_is_said_of_staleness(by_age, by_update, said):
    report = {"by_age": [{"age": k + 1, "clipped_by_grpo": by_age[k]} for k in (0, 1)]}
    report["by_update"] = [{"update": k + 1, "clipped_by_grpo": by_update[k]} for k in (0, 1)]
    assert said in staleness(report)


def test_the_age_of_the_weights_where_the_files_have_it(tmp_path):
    tensors = {
        "old_log_prob": torch.full((3,), -1.0),
        "log_prob": torch.tensor([-1.0, -1.0, 0.0]),
        "advantages": torch.tensor([-1.0, -1.0, 1.0]),
        "version": torch.tensor([7, 7, 3], dtype=torch.int32),
        "trainer_version": torch.tensor([9]),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    rows = report_on(tmp_path)["by_age"]
    assert [(row["age"], row["tokens"], row["clipped_by_grpo"]) for row in rows] == [(2, 2, 0.0), (6, 1, 1.0)]


def options_of(**changes):
    return {"switches": json.dumps(vars(BAPOConfig(**changes)))}


EPSILONS = {"loss_mode": "vanilla", "clip_ratio_low": "0.2", "clip_ratio_high": "0.2"}


def test_the_verdict_is_about_the_search_of_the_run(tmp_path):
    metadata = options_of(contribution="gradient", token_weight="uniform") | {"bound_scope": "micro_batch"}
    verdict = report_on(plant(tmp_path, updates=[1], **metadata))["verdict"]
    assert verdict[0].startswith("This run's own loss (target 0.4, gradient, uniform, c_low 0.6 to 0.9, c_high 1.2 to")
    assert "leaves 56 % of" in verdict[0]
    # 10 / 14 = 0.714 before the search, 20 / 24 from c_high = 2.55: every target between them is met by moving.
    assert "rho (gradient, uniform) is 0.714 before" in verdict[2] and "BAPO can adapt here" in verdict[2]
    assert "0.77 is met by moving them in the most updates, 100 %" in verdict[2]  # the middle of these targets
    assert verdict[3].startswith("The run found its bounds per micro-batch")


def test_the_row_of_a_run_with_previous_batch_uses_the_bounds_of_the_batch_before(tmp_path):
    # The target is met at the start in the first update, at ratio 1, and in the second by moving c_high to 1.35.
    config = BAPOConfig(positive_contribution_target=0.4792, bound_scope="previous_batch")
    metadata = {"bound_scope": "previous_batch", "switches": json.dumps(vars(config))}
    report = report_on(plant(tmp_path, updates=[0, 1, 0, 1], **metadata))
    assert report["verdict"][3].startswith("The run took the bounds of each update from the same update")
    # Of 16 tokens with A > 0 and 16 with A < 0. In the second update c_high = 1.2 clips 4 + 2 tokens and 1.35 clips 2;
    # c_low = 0.6 clips 8, and the dual clip 4. No search has been made before the first update.
    used = [(0, 0), (6, 12), (0, 0), (2, 12)]
    own = report["methods"][0]["without_gradient"]
    assert own["positive"] == close(sum(positive for positive, _ in used) / 64)
    assert own["negative"] == close(sum(negative for _, negative in used) / 64)


def test_a_run_without_a_dual_clip_is_not_said_to_have_one(tmp_path):
    plant(tmp_path, updates=[1], **EPSILONS)
    for path in tmp_path.iterdir():
        save_file(load_file(path), path, metadata=EPSILONS)
    report = report_on(tmp_path)
    assert [row["settings"] for row in report["methods"][:2]] == ["[0.8, 1.2]", "[0.8, 1.2]"]
    # With contribution=gradient P = 10, because c_high = 1.2 clips the other six tokens, and N = 4 + 12 + 20: without a
    # dual clip the tokens with r > 3 count, too.
    own = options_of(contribution="gradient", token_weight="uniform")
    for path in tmp_path.iterdir():
        save_file(load_file(path), path, metadata=own)
    assert report_on(tmp_path)["rho"][0]["before"] == close(10 / 46)


def test_a_target_is_found_where_rho_is_low(tmp_path):
    tensors = {
        "old_log_prob": torch.full((40,), -1.0),
        "log_prob": torch.tensor([1.5] * 2 + [1.0] * 38).log() - 1,
        "advantages": torch.tensor([1.0] * 2 + [-1.0] * 38),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    # P from 2 * 1.2 to 2 * 1.5, N = 38: rho from 0.0594 to 0.0732
    assert "0.06 is met by moving them in the most updates, 100 %" in report_on(tmp_path)["verdict"][2]


def test_updates_without_a_token_are_left_out(tmp_path):
    plant(tmp_path, updates=[1])
    nothing = {name: torch.zeros(0) for name in ("old_log_prob", "log_prob", "advantages")}
    save_file(nothing, tmp_path / "rank0-000001.safetensors")
    assert report_on(tmp_path)["dump"]["updates"] == 1
    (tmp_path / "rank0-000000.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no response token"):
        report_on(tmp_path)


def test_a_dump_with_options_that_this_version_does_not_know_is_named(tmp_path):
    plant(tmp_path, updates=[1], switches=json.dumps({"target_of_another_version": 0.4}))
    with pytest.raises(ValueError, match="options of BAPO are of another version: .*target_of_another_version"):
        report_on(tmp_path)


def test_a_file_in_bfloat16_is_summed_in_float32(tmp_path):
    tensors = {"old_log_prob": torch.full((4000,), -1.0), "log_prob": torch.full((4000,), -0.99)}
    tensors = {name: tensor.bfloat16() for name, tensor in (tensors | {"advantages": torch.ones(4000)}).items()}
    save_file(tensors | {"lengths": torch.tensor([4000])}, tmp_path / "a.safetensors")
    left = method(report_on(tmp_path), "GSPO")["without_gradient"]["all"]
    assert left == 1.0  # the mean log-ratio of 0.008 is above GSPO's bound, and would be 0 in bfloat16


@pytest.mark.parametrize(
    "updates, said",
    [
        ([0], "no target is met by moving them: BAPO has nothing to adapt here."),
        ([0, 1, 0], "is met by moving them in the most updates, 33 %: BAPO can adapt here."),
        ([0] * 5 + [1], "is met by moving them in the most updates, 17 %: BAPO would mostly be a "),
    ],
)
def test_the_verdict_without_a_loss_of_its_own(tmp_path, updates, said):
    clip, _, reach = report_on(plant(tmp_path, updates))["verdict"]
    assert clip.startswith("GRPO ([0.8, 1.2], dual clip 3) would leave ") and said in reach


def test_the_pages_numbers_are_the_jsons(tmp_path, monkeypatch, capsys):
    plant(tmp_path)
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path), "--json", str(tmp_path / "report.json")])
    main()
    report, html = json.loads((tmp_path / "report.json").read_text()), (tmp_path / "report.html").read_text()
    assert report == report_on(tmp_path) and html == page(report, tmp_path.name)
    printed = capsys.readouterr().out.splitlines()
    assert printed == [*report["verdict"], report["staleness"], f"Report: {tmp_path}/report.html"]
    for rho, *shapes in zip(report["rho"], *(polygons(html, name) for name in ("met", "missed")), strict=True):
        below = [(target, 1 - share) for target, share in zip(rho["target"], rho["already_met"], strict=True)]
        above = list(zip(rho["target"], rho["out_of_reach"], strict=True))
        assert [shape[1:-1] for shape in shapes] == [below, above]
        assert [(shape[0], shape[-1]) for shape in shapes] == [((0.01, y), (0.99, y)) for y in (1, 0)]
    assert all(escape(sentence) in html for sentence in report["verdict"])
    assert len(html) < 3_000_000 and not re.search(r"(src|href)=|@import|url\(|<script", html)


def polygons(html, name):
    """Return the points of each drawing with this name."""
    drawings = re.findall(f'<polygon class="{name}" points="([^"]+)"', html)
    return [[tuple(map(float, point.split(","))) for point in points.split()] for points in drawings]
