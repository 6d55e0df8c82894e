# SPDX-License-Identifier: Apache-2.0
"""The tokens that a run writes: which they are, that they agree with the record, and that the run stays as it was."""

import errno
import json
import sys
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from support.actor import actor_config
from support.batches import make_batch
from support.records import read_updates
from support.stand_in import make_worker, train_call, update

from recipe.bapo.hook import tokens
from recipe.bapo.policy_loss import BAPOPolicyLossConfig, MonitorConfig

LOSSES = {
    "vanilla": MonitorConfig,
    "gspo": partial(MonitorConfig, loss_mode="gspo"),
    "cispo": partial(MonitorConfig, loss_mode="cispo"),
    "bapo": BAPOPolicyLossConfig,
    "bapo, micro_batch": partial(BAPOPolicyLossConfig, bound_scope="micro_batch"),
}


def train(monkeypatch, loss, steps):
    """Make two updates in each step; in every third, ratios are far apart. Returns their metrics and the weight."""
    worker = make_worker(actor_config(loss, clip_ratio_c=3.0), monkeypatch, rows=4, learning_rate=0.1)
    metrics = []
    for step in steps:
        batches = [make_batch(10 * step + k, rows=12, spread=0.3 if step % 3 else 1.5) for k in range(2)]
        metrics += train_call(worker, *batches, bapo_step=step)
    return metrics, worker.engine.module.weight.item()


def files_in(folder):
    """Return the metadata and the tokens of each file."""
    tables = [pq.read_table(path) for path in sorted(Path(folder).glob("tokens-*.parquet"))]
    return [(json.loads(table.schema.metadata[tokens.KEY]), table.to_pandas()) for table in tables]


@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo", "bapo"])
def test_cut_tokens_are_as_many_as_in_the_record(monkeypatch, tmp_path, name):
    begin = tokens.TokenFiles.begin
    monkeypatch.setattr(tokens.TokenFiles, "begin", lambda files, step: begin(files, 1))  # as in a step that is written
    loss = LOSSES[name](record_dir=str(tmp_path), token_dir=str(tmp_path), positive_contribution_target=0.47)
    metrics, _ = train(monkeypatch, loss, range(1, 13))
    (path,) = tmp_path.glob("record-*")
    files, records = files_in(tmp_path), read_updates(path)
    assert len(files) == len(records) == 24
    for (about, rows), record in zip(files, records, strict=True):
        sums, low, high = record.stats.sums, record.values["low"], record.values["high"]
        assert (about["step"], about["update"]) == (record.numbers["step"], record.numbers["update"])
        expected = [sums.own_clipped_positive, sums.own_clipped_negative]
        if name == "bapo":
            positive, negative = record.stats.clipped_tokens(*torch.tensor([low, high], dtype=torch.float64))
            expected = [positive, negative + sums.dual_clipped_tokens]
        else:
            assert set(rows["c_low"]) == {low} and set(rows["c_high"]) == {high}
        assert [(rows["cut"] & (rows["advantage"] * sign > 0)).sum() for sign in (1, -1)] == expected
        assert len(rows) == sums.tokens and rows["cut"].sum() == sum(expected)
    assert name != "bapo" or any(update["actor/bapo/redone"] == [1] for update in metrics)


def test_the_rows_are_the_tokens_of_the_responses(monkeypatch, tmp_path):
    loss = BAPOPolicyLossConfig(token_dir=str(tmp_path), bound_scope="micro_batch")
    worker = make_worker(actor_config(loss, clip_ratio_c=3.0), monkeypatch, rows=4)
    old, log_prob, advantages, mask = make_batch(1, rows=12)
    metrics = update(worker, (old, log_prob, advantages, mask))
    ((about, rows),) = files_in(tmp_path)
    at = rows["response"].to_numpy(), rows["position"].to_numpy()
    assert torch.equal(torch.stack([torch.tensor(index) for index in at], 1), mask.nonzero().int())
    for name, tensor in (("old_log_prob", old), ("log_prob", log_prob), ("advantage", advantages)):
        assert rows[name].tolist() == tensor[at].tolist()
    assert set(rows["token"]) == {1} and not rows.isna().any(axis=None)
    bounds = rows.groupby(rows["response"] // 4)[["c_low", "c_high"]].agg(["nunique", "first"])
    assert (bounds.xs("nunique", axis=1, level=1) == 1).all(axis=None)  # each micro-batch has its own
    assert bounds["c_high"]["first"].mean() == pytest.approx(metrics["actor/bapo/clip_high"][0])
    assert about["loss_mode"] == "bapo" and about["version"] == tokens.VERSION


def test_steps_and_responses_of_the_sample(monkeypatch, tmp_path):
    monkeypatch.setattr(tokens, "RESPONSES", 6)
    train(monkeypatch, MonitorConfig(token_dir=str(tmp_path)), range(1, 10))
    files = files_in(tmp_path)
    assert [(about["step"], about["update"]) for about, _ in files] == [(n, k) for n in (1, 2, 4, 8) for k in (0, 1)]
    assert all(set(rows["response"]) == set(range(6)) for _, rows in files)


def full_disk(path, content):
    raise OSError(errno.ENOSPC, "No space left on device")


def unable(*args, **kwargs):
    raise RuntimeError("cannot")


FAULTS = {
    "full disk": ("pathlib.Path.write_bytes", full_disk, "no tokens are written from now on, because [Errno 28]"),
    "no pyarrow": ("sys.modules['recipe.bapo.hook.tokens']", None, "preparing to write tokens failed"),
    "in reading": ("recipe.bapo.hook.tokens.TokenFiles.add", unable, "reading tokens failed (RuntimeError: cannot)"),
    "in writing": ("recipe.bapo.hook.tokens.pq.write_table", unable, "writing tokens failed (RuntimeError: cannot)"),
    "size": ("recipe.bapo.hook.tokens.MAX_BYTES", 1, "rank 0 writes no more tokens in this run"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_run_that_writes_tokens_is_the_run_without(monkeypatch, capsys, tmp_path, name, fault):
    without = train(monkeypatch, LOSSES[name](), range(1, 6))
    capsys.readouterr()
    with monkeypatch.context() as patch:
        if fault == "no pyarrow":
            patch.setitem(sys.modules, "recipe.bapo.hook.tokens", None)
        elif fault:
            patch.setattr(*FAULTS[fault][:2])
        state = torch.get_rng_state()
        assert train(monkeypatch, LOSSES[name](token_dir=str(tmp_path / "new")), range(1, 6)) == without
        assert torch.equal(torch.get_rng_state(), state)
    told = capsys.readouterr().err
    if fault is None:
        assert len(files_in(tmp_path / "new")) == 6 and "token" not in told
    else:
        (line,) = [line for line in told.splitlines() if "token" in line]
        assert FAULTS[fault][2] in line
        assert len(list(tmp_path.glob("new/*"))) == (fault == "size")
