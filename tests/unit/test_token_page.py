# SPDX-License-Identifier: Apache-2.0
"""Tokens that a run wrote, and the page on what losses cut of them."""

import re
from dataclasses import asdict, replace
from html import unescape

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.actor import actor_config
from support.batches import make_batch
from support.records import read_updates
from support.stand_in import make_worker, train_call

from recipe.bapo.hook.own_clip import OwnClip
from recipe.bapo.hook.tokens import KEY, TokenFiles
from recipe.bapo.policy_loss import MonitorConfig
from recipe.bapo.report import __main__, token_page
from recipe.bapo.report.losses import BAPO, LOSSES, cut_by_each
from recipe.bapo.report.tokens import count_cuts
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import PolicyLossConfig

# The loss of verl that stands behind each name, with the keys of a run's command.
OF_VERL = {
    "PPO [0.8, 1.2]": ("vanilla", dict(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0)),
    "DAPO [0.8, 1.28]": ("vanilla", dict(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=10.0)),
    "GSPO [0.9997, 1.0004]": ("gspo", dict(clip_ratio_low=0.0003, clip_ratio_high=0.0004)),
    "DPPO-TV 0.15": ("dppo_tv", dict(clip_ratio_low=0.15, clip_ratio_high=0.15, clip_ratio_c=1e4)),
    "DPPO-KL 0.05": ("dppo_kl", dict(clip_ratio_low=0.05, clip_ratio_high=0.05, clip_ratio_c=1e4)),
    "CISPO, capped at 1.2": ("cispo", dict(clip_ratio_low=10, clip_ratio_high=0.2)),
    BAPO: ("vanilla", dict(clip_ratio_low=0.34, clip_ratio_high=0.7, clip_ratio_c=2.5)),
}


@pytest.mark.parametrize("name", [*LOSSES, BAPO])
def test_tokens_without_gradient_are_those_of_verls_function(name):
    mode, settings = OF_VERL[name]
    loss_fn, config = get_policy_loss_fn(mode), actor_config(PolicyLossConfig(loss_mode=mode), **settings)
    of_signs = {1: torch.zeros(2), -1: torch.zeros(2)}  # the tokens cut, and all
    for seed in range(500):
        spread = (0.001, 0.1, 0.8, 2.0)[seed % 4]
        old, log_prob, advantages, mask = make_batch(seed, rows=12, spread=spread, zero_advantage=0)
        cut = cut_by_each(old, log_prob, advantages, mask, 0.66, 1.7, 2.5)[name][mask]
        leaf = log_prob.clone().requires_grad_()
        loss, _ = loss_fn(old, leaf, advantages, mask.float(), "seq-mean-token-sum", config)
        gradient = -len(old) * torch.autograd.grad(loss, leaf)[0][mask]
        advantages = advantages[mask]
        if mode == "cispo":
            assert gradient.all()
            by_autograd = torch.isclose(gradient / advantages, torch.tensor(1.2), rtol=1e-6)
        else:
            by_autograd = gradient == 0
        assert torch.equal(cut, by_autograd)
        for sign, counts in of_signs.items():
            counts += torch.stack([(cut & (advantages * sign > 0)).sum(), (advantages * sign > 0).sum()])
    assert all(0 < cut < tokens for cut, tokens in of_signs.values())


OWN = OwnClip("clip", 0.7, 1.3, 3.0)


def write(folder, batches, own=OWN, step=1, tokens=None, bounds=(0.7, 1.9), **about):
    """Write an update for each batch, as a rank of a monitored run does that began just now."""
    known = {"loss_mode": "vanilla", "applied": False, "clip_ratio_c": 3.0, "own_clip": own and asdict(own), **about}
    files = TokenFiles(folder, known, 0)
    for update, batch in enumerate(batches):
        numbers = torch.arange(batch[0].numel()).view(batch[0].shape) if tokens is None else tokens
        files.begin(step)
        files.add(numbers, *batch, own and own(*batch)[1], None)
        files.write(step, update, bounds)
    return sorted(folder.glob("tokens-*"))


def run(monkeypatch, capsys, *arguments):
    """Run the command. Returns its output and its exit code."""
    monkeypatch.setattr("sys.argv", ["report", "tokens", *map(str, arguments)])
    try:
        __main__.main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    return "".join(capsys.readouterr()), code


def test_the_page_counts_what_the_record_counts(monkeypatch, tmp_path):
    loss = MonitorConfig(record_dir=str(tmp_path), token_dir=str(tmp_path), positive_contribution_target=0.47)
    worker = make_worker(actor_config(loss, clip_ratio_c=3.0), monkeypatch, learning_rate=0.1)
    for step in (1, 2, 4):
        train_call(worker, *(make_batch(10 * step + k, rows=12) for k in range(3)), bapo_step=step)
    expected, tokens = torch.zeros(2, 2), torch.zeros(2)
    for update in read_updates(next(tmp_path.glob("record-*"))):
        sums, bounds = update.stats.sums, [update.values[name] for name in ("low", "high")]
        clipped = update.stats.clipped_tokens(*torch.tensor(bounds, dtype=torch.float64))
        of_bapo = clipped[0], clipped[1] + sums.dual_clipped_tokens
        of_loss = sums.own_clipped_positive, sums.own_clipped_negative
        expected += torch.stack([torch.stack(of_loss), torch.stack(of_bapo)])
        tokens += torch.stack(update.stats.tokens_by_sign)
    cuts = count_cuts(tmp_path)
    assert cuts.losses[:2] == ["this run: PPO [0.8, 1.2]", BAPO] and len(cuts.updates) == 9
    found = [cuts.by_sign[name][[1, -1]].tolist() for name in cuts.losses[:2]]
    assert found == expected.tolist() and cuts.by_sign["tokens"][[1, -1]].tolist() == tokens.tolist()
    assert cuts.both.loc[BAPO, BAPO] == expected[1].sum() and cuts.by_token[BAPO].sum() == expected[1].sum()


def test_responses_of_several_kinds_are_told_apart(tmp_path):
    """Six tokens: p = 0.005 with A > 0 and ratio 2, p = 0.6 with A > 0, A < 0 and A = 0, one without a log-prob."""
    old = torch.tensor([[0.005, 0.6], [0.6, 0.995], [0.6, 0.6]]).log()
    new = old + torch.tensor([[2.0, 1.0], [0.5, 1.0], [1.0, 1.0]]).log()
    old[1, 1] = -torch.inf
    advantages = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]])
    write(tmp_path, [(old, new, advantages, torch.ones(3, 2))], tokens=torch.tensor([[7, 8], [7, 9], [8, 8]]))
    cuts = count_cuts(tmp_path)
    own = cuts.losses[0]
    assert own == "this run: vanilla [0.7, 1.3]" and (cuts.responses, cuts.no_advantage) == (3, 2)
    assert cuts.by_probability[["tokens", own]].to_dict("index") == {
        (-1, 5): {"tokens": 1, own: 1},
        (1, 1): {"tokens": 1, own: 1},
        (1, 5): {"tokens": 1, own: 0},
    }
    assert cuts.by_token[["tokens", own]].to_dict("index") == {
        (7, -1): {"tokens": 1, own: 1},
        (7, 1): {"tokens": 1, own: 1},
        (8, 1): {"tokens": 1, own: 0},
    }
    assert cuts.by_token["probability"].tolist() == pytest.approx([0.6, 0.005, 0.6])
    assert cuts.left_out["tokens with a log-prob or an advantage that cannot be used"] == 1


def test_the_responses_shown_are_those_cut_most(tmp_path):
    write(tmp_path, [make_batch(seed, rows=20) for seed in range(5)])
    cuts = count_cuts(tmp_path)
    for sign, shown in cuts.examples.items():
        counts = []
        for path in sorted(tmp_path.glob("tokens-*")):
            rows = pq.read_table(path).to_pandas()
            counts += rows[rows["advantage"] * sign > 0].groupby("response")["cut"].sum().tolist()
        assert [one["cut"].sum() for one in shown] == sorted(counts)[:-4:-1] != [0, 0, 0]


def test_texts_of_a_run_cannot_change_the_page(monkeypatch, capsys, tmp_path):
    texts = ["<script>alert(1)</script>", "\x1b[31m", "\u202e", "\ud800", "&amp;", '"\n', "</p>", "\x00"]
    monkeypatch.setattr(token_page, "_decoder", lambda path: lambda token: texts[token % len(texts)])
    write(tmp_path, [make_batch(1)], loss_mode="<b>$x$")
    output, code = run(monkeypatch, capsys, tmp_path, "--tokenizer", "any")
    assert (output, code) == (f"Page: {tmp_path}/tokens.html\n", 0)
    page = (tmp_path / "tokens.html").read_text()
    assert all(c.isprintable() or c == "\n" for c in page)
    tags = set(re.findall(r"<(\w+)", re.sub(r"(?s)<svg.*?</svg>|<style>.*?</style>", "", page)))
    assert tags <= set("html meta title style body h1 h2 p figure figcaption div table tr th td mark u".split())
    assert "<b>" not in page and not re.search(r"(?:src|href)=.(?!#)|@import|url\((?!#)", page)
    for shown in ("&lt;script&gt;alert(1)&lt;/script&gt;", r"\x1b[31m", r"\u202e", r"\ud800", "&amp;amp;", "↵"):
        assert shown in page


@pytest.mark.parametrize("tokenizer", [None, "/no/tokenizer"])
def test_without_a_tokenizer_numbers_are_shown(monkeypatch, capsys, tmp_path, tokenizer):
    write(tmp_path, [make_batch(1)])
    output, code = run(monkeypatch, capsys, tmp_path, *(["--tokenizer", tokenizer] if tokenizer else []))
    page = (tmp_path / "tokens.html").read_text()
    assert code == 0 and "<td>#" in page
    assert ("/no/tokenizer" in output) == ("/no/tokenizer" in page) == bool(tokenizer)


def spoil(path, kind):
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif kind == "damaged":
        content = bytearray(path.read_bytes())
        content[4:600] = bytes(596)
        path.write_bytes(content)
    elif kind == "foreign":
        pq.write_table(pa.table({"x": [1]}), path)
    else:
        table = pq.read_table(path)
        metadata = {KEY: table.schema.metadata[KEY].replace(b'"version": 1', b'"version": 9')}
        pq.write_table(table.replace_schema_metadata(metadata), path)


@pytest.mark.parametrize("kind", ["cut", "damaged", "foreign", "other version"])
def test_files_that_cannot_be_read_are_counted(monkeypatch, capsys, tmp_path, kind):
    paths = write(tmp_path, [make_batch(seed) for seed in range(3)])
    spoil(paths[1], kind)
    what = "of version 9" if kind == "other version" else "that are cut off"
    assert run(monkeypatch, capsys, tmp_path)[1] == 0
    assert f"Not counted: 1 files {what}" in (tmp_path / "tokens.html").read_text()
    for path in (paths[0], paths[2]):
        spoil(path, kind)
    output, code = run(monkeypatch, capsys, tmp_path)
    assert code == 1 and output.count("\n") == 1 and f"3 files {what}" in output


def test_what_has_no_page_is_named_in_a_line(monkeypatch, capsys, tmp_path):
    old, new, advantages, mask = make_batch(1)
    useless = [(old, new, advantages * 0, mask), (old, new, advantages, mask & False)]
    for batches, own, said in (
        ([], OWN, f"train with token_dir={tmp_path}"),
        (useless, OWN, "no token with an advantage that can be used"),
        ([make_batch(1)], replace(OWN, high=1.5), "runs with different losses"),
    ):
        write(tmp_path, batches, own=own, step=1 + len(batches))
        output, code = run(monkeypatch, capsys, tmp_path)
        assert code == 1 and said in output and output.count("\n") == 1


def test_updates_of_a_resumed_run_count_once(tmp_path):
    write(tmp_path, [make_batch(1), make_batch(2)])
    write(tmp_path, [make_batch(3)])  # a later start makes the first update again
    write(tmp_path / "alone", [make_batch(3), make_batch(2)])
    found, expected = count_cuts(tmp_path), count_cuts(tmp_path / "alone")
    assert found.by_probability.equals(expected.by_probability) and found.responses == expected.responses


def test_updates_without_bounds_are_counted_apart(tmp_path):
    write(tmp_path, [make_batch(1)])
    batch = make_batch(2)
    write(tmp_path, [batch], step=2, bounds=None)
    assert count_cuts(tmp_path).left_out["tokens of updates that were not measured"] == batch[3].sum()


GSPO = "GSPO [0.9997, 1.0004]"


@pytest.mark.parametrize(
    "own, about, first, rule, losses",
    [
        (None, {"loss_mode": "sapo"}, BAPO, "[0.7, 1.9] in 1 of the 1 updates", 7),
        (LOSSES[GSPO], {"loss_mode": "gspo"}, f"this run: {GSPO}", "whole responses", 7),
        (OwnClip("cap", 0.8, 1.2), {"loss_mode": "cispo"}, "this run: cispo, which caps [0.8, 1.2]", "it caps", 8),
        (OWN, {"loss_mode": "bapo", "applied": True, "own_clip": None}, "this run: bapo", "[0.7, 1.9] in 1", 7),
    ],
)
def test_each_loss_is_on_the_page_once(monkeypatch, capsys, tmp_path, own, about, first, rule, losses):
    write(tmp_path, [make_batch(1)], own=own, **about)
    cuts = count_cuts(tmp_path)
    assert cuts.losses[0] == first and len(cuts.losses) == len(set(cuts.losses)) == losses
    assert (BAPO in cuts.losses) != bool(about.get("applied"))
    assert run(monkeypatch, capsys, tmp_path)[1] == 0
    page = unescape((tmp_path / "tokens.html").read_text())
    rules = page.partition("What each loss compares")[2].partition("</table>")[0]
    assert cuts.losses == re.findall(r"<tr><td>(.*?)</td>", rules)
    assert rule in re.search(rf"<td>{re.escape(first)}</td><td>(.*?)</td>", rules)[1]


def test_bounds_of_micro_batches_are_all_named(monkeypatch, capsys, tmp_path):
    about = {"loss_mode": "bapo", "applied": True, "clip_ratio_c": 3.0, "own_clip": None}
    files = TokenFiles(tmp_path, about, 0)
    files.begin(1)
    for seed, high in enumerate((1.2, 1.3, 1.4, 1.4, 1.5)):
        batch = make_batch(seed)
        files.add(torch.ones(batch[0].shape).long(), *batch, OWN(*batch)[1], (0.7, high))
    files.write(1, 0, None)
    assert count_cuts(tmp_path).updates == {(1, 0): {(0.7, 1.2), (0.7, 1.3), (0.7, 1.4), (0.7, 1.5)}}
    assert run(monkeypatch, capsys, tmp_path)[1] == 0
    assert "of the 4 pairs found, the most common ones, [" in (tmp_path / "tokens.html").read_text()


def test_a_hundred_thousand_responses_fit_on_a_page(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("recipe.bapo.hook.tokens.RESPONSES", 200_000)
    write(tmp_path, [make_batch(1, rows=100_000, columns=3, masked=0)], tokens=torch.ones(100_000, 3).long())
    assert run(monkeypatch, capsys, tmp_path)[1] == 0
    page = (tmp_path / "tokens.html").read_text()
    assert "on 100,000 responses" in page and len(page) < 300_000
