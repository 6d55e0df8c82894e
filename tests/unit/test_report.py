# SPDX-License-Identifier: Apache-2.0
"""The clip report: planted facts come back exactly, in the JSON and on the page."""

import json
import re
import subprocess
import sys
from math import log

import pytest
import torch
from safetensors.torch import save_file

from bapo import BAPOConfig
from recipe.bapo.records.tokens import TENSORS
from recipe.bapo.report.facts import report_on
from recipe.bapo.report.page import FORMATS, HEIGHT, WIDTH, areas, look_up, page
from recipe.bapo.report.verdict import staleness

# One update by hand: (tokens, probability under the old policy, ratio, advantage). Sizes of the gradient r*|A|:
#   A > 0: 10 * 1.0 * 1 = 10, 4 * 1.25 * 1 = 5, 2 * 2.5 * 1 = 5: 20 of 16 tokens
#   A < 0: 8 * 0.5 * 1 = 4, 4 * 1.0 * 1 = 4, 3 * 4.0 * 1 = 12, 1 * 20 * 1 = 20: 40 of 16 tokens;   A = 0: 8 tokens
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
LENGTHS = [10, 6, 12, 4, 8]  # of responses with A > 0, A > 0, A < 0, A < 0, A = 0


def plant(folder, updates=2, **changes):
    old = torch.cat([torch.full((n,), log(p), dtype=torch.float64) for n, p, _, _ in PLANTED])
    ratio = torch.cat([torch.full((n,), r, dtype=torch.float64) for n, _, r, _ in PLANTED])
    advantages = torch.cat([torch.full((n,), a) for n, _, _, a in PLANTED])
    for update in range(updates):
        # The first update is at ratio 1.
        log_prob = old + (ratio.log() if update else 0)
        tensors = {"old_log_prob": old.float(), "log_prob": log_prob.float(), "advantages": advantages}
        tensors |= {"lengths": torch.tensor(LENGTHS, dtype=torch.int32), "update": torch.tensor([update])}
        tensors |= changes.get("tensors", {})
        metadata = {"clip_ratio_c": "3.0", **changes.get("metadata", {})}
        save_file(tensors, folder / f"rank0-{update:06d}.safetensors", metadata=metadata)
    return folder


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Of the second update alone."""
    folder = plant(tmp_path_factory.mktemp("planted"))
    (folder / "rank0-000000.safetensors").unlink()
    return report_on(folder)[0]


def method(report, name):
    return next(row for row in report["methods"] if row["method"] == name)


def close(value):
    return pytest.approx(value, rel=1e-6, abs=1e-9)


def test_shares_of_tokens_and_gradient_by_sign(report):
    assert report["dump"]["tokens"] == 40
    signs = report["signs"]
    assert signs["positive"]["tokens"] == signs["negative"]["tokens"] == close(16 / 40)
    assert signs["zero"]["tokens"] == close(8 / 40)
    assert (signs["positive"]["gradient"], signs["negative"]["gradient"]) == (close(20 / 60), close(40 / 60))


def test_the_unbounded_side(report):
    rows = {row["ratio"]: row for row in report["unbounded"]["above"]}
    for ratio, tokens, size in ((1.0, 4, 32), (2.0, 4, 32), (3.0, 4, 32), (10.0, 1, 20)):
        expected = {"negative_tokens": close(tokens / 16), "negative_gradient": close(size / 40)}
        assert rows[ratio] == {"ratio": ratio, **expected, "gradient": close(size / 60)}
    assert report["unbounded"]["largest_ratio"] == close(20)
    ratios = torch.cat([torch.full((n,), r, dtype=torch.float64) for n, _, r, _ in PLANTED])
    size = ratios.sum() ** 2 / (40 * (ratios**2).sum())
    assert report["unbounded"]["effective_sample_size"] == {"mean": close(size.item()), "lowest": close(size.item())}
    assert report["unbounded"]["second_moment_of_log_ratio"] == close((ratios.log() ** 2).mean().item())


def test_the_advantage_is_in_the_size_of_a_gradient(tmp_path):
    # r*|A| of 15, 1 and 8; GRPO's upper bound takes the first, the dual clip the last.
    log_prob, advantages = torch.tensor([log(5), 0.0, log(4)]) - 9, torch.tensor([3.0, -1.0, -2.0])
    tensors = {"old_log_prob": torch.full((3,), -9.0), "log_prob": log_prob, "advantages": advantages}
    save_file(tensors, tmp_path / "a.safetensors")
    found, _ = report_on(tmp_path)
    assert found["signs"]["positive"]["gradient"] == close(15 / 24)
    assert found["unbounded"]["above"][2]["gradient"] == close(8 / 24)
    assert found["unbounded"]["largest_ratio"] == close(4)  # of a token with A < 0
    assert method(found, "GRPO")["gradient_left"]["all"] == close(1 / 24)


# Tokens without a gradient and what is left of r*|A|, A > 0 and A < 0. The dual clip at 3 takes four tokens with 32.
BY_HAND = {
    "GRPO": (6, 10, 12, 4),
    "clip-higher (DAPO)": (6 - 4, 15, 12, 4),
    "upper bound alone": (0, 20, 12, 4),
    # The means of log r: A > 0: 0 and (4 log 1.25 + 2 log 2.5) / 6. A < 0: 8 log 0.5 / 12, (3 log 4 + log 20) / 4.
    "GSPO": (6, 10, 12, 4 * 20**0.25 * 4**0.75),
    "CISPO": (0, 10 + 4 * 1.2 + 2 * 1.2, 0, 4 + 4 + 4 * 1.2),
    # Probabilities rise by 0.0625 and 0.1875, and fall by 0.25.
    "DPPO-TV": (2, 15, 8, 36),
    # Away from the sampler: 4 of 1.25, 2 of 2.5 and 8 of 0.5, (log r)^2 of 0.0498, 0.84, 0.48: none averages 0.04.
    "M2PO": (6, 10, 8, 36),
    # A < 0: 3 of 4.0 and 1 of 20 become 1 each.
    "TOPR": (0, 16, 0, 4 + 4 + 4),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_each_method_leaves(report, name):
    tokens, size, negative_tokens, negative_size = BY_HAND[name]
    row = method(report, name)
    without = {"positive": close(tokens / 16), "negative": close(negative_tokens / 16)}
    assert row["without_gradient"] == {**without, "all": close((tokens + negative_tokens) / 32)}
    left = {"positive": close(size / 20), "negative": close(negative_size / 40)}
    assert row["gradient_left"] == {**left, "all": close((size + negative_size) / 60)}
    assert row["positive_share"] == close(size / (size + negative_size))


def test_gspo_needs_to_know_where_responses_begin(tmp_path):
    tensors = {name: torch.full((3,), -1.0) for name in TENSORS}
    save_file(tensors, tmp_path / "a.safetensors")
    names = [row["method"] for row in report_on(tmp_path)[0]["methods"]]
    assert "GSPO" not in names and "SAPO" in names


@pytest.mark.parametrize("written, read", [("3.0", 3.0), ("1e9", None)])
def test_a_dual_clip_without_effect_is_none(tmp_path, written, read):
    found, _ = report_on(plant(tmp_path, metadata={"clip_ratio_c": written}))
    assert found["dump"]["clip_ratio_c"] == read


def test_rho_and_its_reach(report):
    # value, uniform: P(c_high) = 10 + 4*min(1.25, c) + 2*min(2.5, c), N(c_low) = 8*c_low + 4 + 12 + 20
    rho = report["rho"][1]
    p, n = {1.2: 10 + 4 * 1.2 + 2 * 1.2, 3.0: 20.0}, {0.6: 8 * 0.6 + 36, 0.9: 8 * 0.9 + 36}
    assert (rho["contribution"], rho["token_weight"]) == ("value", "uniform")
    assert rho["before"]["mean"] == close(p[1.2] / (p[1.2] + n[0.6]))
    assert rho["reach"] == {"from": rho["before"]["mean"], "to": close(p[3.0] / (p[3.0] + n[0.6]))}
    assert [row["out_of_reach"] for row in rho["targets"]] == [1.0] * 4
    # gradient, uniform: P = 10 of r < 1.2, 15 from c_high = 1.3, 20 from 2.55; N = 4: the rest is dual-clipped or low
    rho = report["rho"][3]
    assert rho["before"]["mean"] == close(10 / 14) and rho["reach"] == {"from": close(10 / 14), "to": close(20 / 24)}
    shares = {"already_met": 1.0, "met_by_moving": 0.0, "out_of_reach": 0.0}
    assert rho["targets"][0] == {"target": 0.4, **shares, "c_low": close(0.6), "c_high": close(1.2)}


def test_by_update_and_is_it_the_staleness(tmp_path):
    report, _ = report_on(plant(tmp_path))
    first, second = report["by_update"]
    assert (first["update"], first["tokens"], first["clipped_by_grpo"]) == (1, 32, 0)
    assert (first["effective_sample_size"], first["second_moment_of_log_ratio"]) == (close(1), close(0))
    assert (second["clipped_by_grpo"], second["negative_above_3"]) == (close(14 / 32), close(4 / 16))
    assert (
        report["staleness"]
        == "[0.8, 1.2] clips 0 % of the tokens at update 1, 44 % at update 2: it grows with staleness."
    )
    assert report["by_age"] is None
    assert report["unbounded"]["largest_ratio"] == close(20)  # of both updates


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
        "old_log_prob": torch.full((2, 2), -1.0),
        "log_prob": torch.tensor([[-1.0, -1.0], [0.0, 7.0]]),
        "advantages": torch.tensor([[-1.0, -1.0], [1.0, 1.0]]),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
        "version": torch.tensor([[7, 7], [3, 3]], dtype=torch.int32),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    report, _ = report_on(tmp_path)
    assert [(row["age"], row["tokens"], row["clipped_by_grpo"]) for row in report["by_age"]] == [
        (0, 2, 0.0),
        (4, 1, 1.0),
    ]
    save_file({**tensors, "trainer_version": torch.tensor([9])}, tmp_path / "a.safetensors")
    assert [row["age"] for row in report_on(tmp_path)[0]["by_age"]] == [2, 6]


def bapo_switches(**changes):
    return {"switches": json.dumps(vars(BAPOConfig(**changes)))}


FIXED = bapo_switches(ratio_lower_start=0.8, ratio_lower_max=0.8, ratio_upper_start=1.2, ratio_upper_max=1.2)
EPSILONS = {"loss_mode": "vanilla", "clip_ratio_low": "0.2", "clip_ratio_high": "0.2"}


def second_update(folder, **metadata):
    plant(folder, metadata=metadata)
    (folder / "rank0-000000.safetensors").unlink()
    return report_on(folder)


@pytest.mark.parametrize("metadata", [FIXED, EPSILONS])
def test_the_verdict_is_about_the_bounds_of_the_run(tmp_path, metadata):
    found, config = second_update(tmp_path, **metadata)
    assert found["verdict"] == [
        "This run's own loss ([0.8, 1.2], dual clip 3) leaves 56 % of the tokens without a gradient (A > 0: 38 %, "
        "A < 0: 75 %) and 23 % of the gradient's size before clipping.",
        "Tokens with A < 0 are 40 % of the tokens and carry 67 % of the gradient's size before clipping; those of them "
        "with r > 3, which no bound of PPO or BAPO touches, carry 53 %.",
        # rollout_prob: P from 5 + 1.2 + 0.3 to 5 + 1.25 + 0.625, N from 2.4 + 4.75 to 3.6 + 4.75
        "rho (value, rollout_prob) is 0.476 before the search, and bounds move it from 0.452 to 0.490 on average; "
        "target 0.48 is met by moving them in 100 % of the updates, more than any other: BAPO can adapt here.",
    ]
    assert config == BAPOConfig()  # its own have nothing to search


def test_the_verdict_is_about_the_search_of_the_run(tmp_path):
    metadata = bapo_switches(contribution="gradient", token_weight="uniform") | {"bound_scope": "micro_batch"}
    verdict = second_update(tmp_path, **metadata)[0]["verdict"]
    assert verdict[0].startswith("This run's own loss (target 0.4, gradient, uniform, dual clip 3) leaves 56 % of")
    # 10 / 14 = 0.714 before the search, 15 / 19 from c_high = 1.3: every target between them is met by moving.
    assert "rho (gradient, uniform) is 0.714 before" in verdict[2] and "BAPO can adapt here" in verdict[2]
    assert "target 0.72 is met by moving them in 100 % of the updates" in verdict[2]
    assert verdict[3].startswith("The run found its bounds per micro-batch")


def test_a_run_of_another_loss_has_a_row_of_its_own(tmp_path):
    found = second_update(tmp_path, **EPSILONS | {"loss_mode": "cispo"})[0]
    own = method(found, "this run's own")
    assert own["settings"] == "clip_ratio_low=0.2, clip_ratio_high=0.2"
    assert own["gradient_left"]["negative"] == close((8 * 0.8 + 4 + 4 * 1.2) / 40)


def test_the_verdict_where_a_few_updates_can_be_moved(tmp_path):
    plant(tmp_path)
    (tmp_path / "rank0-000002.safetensors").write_bytes((tmp_path / "rank0-000000.safetensors").read_bytes())
    verdict = report_on(tmp_path)[0]["verdict"][2]
    assert "is met by moving them in 33 % of the updates, more than any other: BAPO can adapt here" in verdict


def test_the_verdict_where_nothing_is_clipped(tmp_path):
    clip, _, reach = report_on(plant(tmp_path, updates=1))[0]["verdict"]
    assert clip.startswith(
        "GRPO ([0.8, 1.2], dual clip 3) would leave 0 % of the tokens without a gradient (A > 0: 0 %,"
    )
    assert reach.endswith("no target is met by moving them: BAPO has nothing to adapt here.")


def test_the_picture_draws_the_shares_by_target(tmp_path):
    for name, ratio in (("a", 1.25), ("b", 1.0)):  # rho moves from 0.5455 to 0.5556, and from 0.5 to 0.5
        tensors = {"old_log_prob": torch.full((20,), -1.0), "advantages": torch.tensor([1.0, -1.0]).repeat(10)}
        log_prob = torch.where(tensors["advantages"] > 0, log(ratio), 0.0) - 1
        save_file({**tensors, "log_prob": log_prob}, tmp_path / f"{name}.safetensors")
    report, _ = report_on(tmp_path)
    curve, before = report["curve"], (12 / 22 + 0.5) / 2
    assert report["rho"][0]["before"] == {"mean": close(before), "lowest": 0.5, "highest": close(12 / 22)}
    assert curve["before"] == close(before)
    expected = {0.4: (1, 0, 0), 0.52: (0.5, 0, 0.5), 0.55: (0, 0.5, 0.5), 0.6: (0, 0, 1)}
    drawn = {name: [point.split(",") for point in points.split()] for name, points in areas(curve).items()}
    for target, (met, moving, missed) in expected.items():
        at = curve["target"].index(target)
        assert [curve[key][at] for key in ("already_met", "met_by_moving", "out_of_reach")] == [met, moving, missed]
        x = WIDTH * (target - 0.25) / 0.5
        for name, y in (("already_met", HEIGHT * (1 - met)), ("out_of_reach", HEIGHT * missed)):
            assert [float(value) for value in drawn[name][at + 1]] == pytest.approx([x, y], abs=0.06)


def test_the_pages_numbers_are_the_jsons(tmp_path):
    plant(tmp_path)
    out = {kind: tmp_path / f"report.{kind}" for kind in ("html", "json")}
    command = [sys.executable, "-m", "recipe.bapo.report", tmp_path, "--html", out["html"], "--json", out["json"]]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    report, html = json.loads(out["json"].read_text()), out["html"].read_text()
    assert html == page(report, tmp_path.name)
    found = re.findall(r'<data data-at="([^"]+)" value="([^"]+)">([^<]+)</data>', html)
    assert len(found) > 250
    for path, value, text in found:
        assert float(value) == look_up(report, path), path
        assert text in [format_of(look_up(report, path)) for format_of in FORMATS.values()], path
    # All that the JSON says is on the page, but what is drawn.
    shown = {path for path, _, _ in found}
    missing = [path for path in leaves(report) if path not in shown and not path.startswith("curve.")]
    assert not [path for path in missing if not re.fullmatch(r"by_update\.\d+\.updates", path)], missing
    assert all(
        sentence.replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#39;") in html
        for sentence in report["verdict"]
    )
    assert len(html) < 3_000_000 and not re.search(r"(src|href)=|@import|url\(|<script", html)
    assert "prefers-color-scheme: dark" in html and "@media print" in html and 'name="viewport"' in html


def leaves(value, path=""):
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, f"{path}.{key}" if path else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def other_clip(folder):
    plant(folder)
    plant(folder, updates=1, metadata={"clip_ratio_c": "9.0"})


def truncated(folder):
    plant(folder)
    path = folder / "rank0-000001.safetensors"
    path.write_bytes(path.read_bytes()[:-20])


def empty(folder):
    plant(folder)
    (folder / "rank0-000001.safetensors").write_bytes(b"")


def wrong_lengths(folder):
    plant(folder, tensors={"lengths": torch.tensor([3], dtype=torch.int32)})


@pytest.mark.parametrize(
    "make, message",
    [
        (
            other_clip,
            r"rank0-000001.safetensors is of another run than rank0-000000.safetensors \(clip_ratio_c differ\)",
        ),
        (truncated, "rank0-000001.safetensors is not a readable"),
        (empty, "rank0-000001.safetensors is not a readable"),
        (wrong_lengths, r"rank0-000000.safetensors: lengths add up to 3, not 40"),
    ],
)
def test_a_spoiled_dump_names_the_file(tmp_path, make, message):
    make(tmp_path)
    with pytest.raises(ValueError, match=message):
        report_on(tmp_path)


def test_rho_with_the_weights_of_rollout_correction(tmp_path, report):
    assert report["corrected"] is None
    advantages = torch.cat([torch.full((n,), a) for n, _, _, a in PLANTED])
    plant(tmp_path, tensors={"rollout_is_weights": torch.where(advantages > 0, 2.0, 1.0)})
    (tmp_path / "rank0-000000.safetensors").unlink()
    found = report_on(tmp_path)[0]
    # At [0.6, 1.2]: P = 10 + (4 + 2) * 1.2 = 17.2, N = 8 * 0.6 + 4 + 3 * 4 + 20 = 40.8.
    assert found["corrected"] == {"without": close(17.2 / 58), "with": close(34.4 / 75.2)}
    assert "rollout correction was on" in page(found, "a") and "rollout correction was on" not in page(report, "a")
