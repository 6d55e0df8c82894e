# SPDX-License-Identifier: Apache-2.0
"""What is written to a record is read again, and a record that cannot be written does not end a run."""

import json
import math
from datetime import UTC, datetime, timedelta
from unittest.mock import Mock

import pytest
import torch
from support.records import make_tokens, measure, write_start

from bapo import BAPOConfig
from recipe.bapo import record as record_module
from recipe.bapo.own_clip import OwnClip
from recipe.bapo.record import Record, read_record

CONFIG = BAPOConfig(0.45, ratio_upper_max=2.0, contribution="gradient", token_weight="uniform")


def test_sums_and_values_are_read_back_to_the_bit(tmp_path):
    record, written = Record(tmp_path / "new" / "folder", CONFIG, {"applied": False}), []
    for seed in range(3):
        written.append(measure(make_tokens(seed), CONFIG))
        record.write(*written[-1], call=seed, update=0, step=None)
    start = read_record(record.path)
    assert start.config == CONFIG and start.about["applied"] is False and start.about["utc"]
    for seed, (update, (stats, values)) in enumerate(zip(start.updates, written, strict=True)):
        assert update.values == values and update.stats.config == CONFIG
        assert all(torch.equal(a, b) for a, b in zip(update.stats.sums, stats.sums, strict=True))
        assert update.numbers.keys() == {"call", "update", "time"} and update.numbers["call"] == seed


def test_numbers_that_are_not_finite_are_null(tmp_path):
    old, log_prob, advantages, mask = make_tokens(0)
    log_prob[mask] = math.nan
    about = {"own_clip": {"dual_clip": OwnClip("cap", 0.8, 1.2).dual_clip}}  # infinite
    record = Record(tmp_path, CONFIG, about)
    stats, values = measure((old, log_prob, advantages, mask), CONFIG)
    record.write(stats, values | {"ratio": math.inf})
    first, line = map(json.loads, record.path.read_text().splitlines())
    assert first["own_clip"] == {"dual_clip": None}
    assert line["sums"]["gradient"] is None and line["values"]["ratio"] is None
    (update,) = read_record(record.path).updates
    assert update.stats.sums.gradient.isnan() and math.isnan(update.values["ratio"])
    finite = stats.sums.positive_tokens
    assert torch.equal(update.stats.sums.positive_tokens, finite) and finite.isfinite().all()


def test_a_folder_that_cannot_be_written_warns_once(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    record = Record(tmp_path / "file", CONFIG, {})
    for seed in range(3):
        record.write(*measure(make_tokens(seed), CONFIG))
    (message,) = capsys.readouterr().err.splitlines()
    assert "BAPO: no record is written from now on" in message and str(tmp_path / "file") in message


def test_nothing_is_written_after_a_failed_write(tmp_path, capsys):
    record, update = Record(tmp_path, CONFIG, {}), measure(make_tokens(0), CONFIG)
    record.write(*update)
    file = record.path.rename(tmp_path / "kept")
    record.path.mkdir()  # appending to it fails
    record.write(*update)
    record.path.rmdir()
    file.rename(record.path)
    record.write(*update)
    assert len(read_record(record.path).updates) == 1 and capsys.readouterr().err.count("BAPO") == 1


def test_a_record_that_ends_inside_a_line_is_read_up_to_there(tmp_path):
    path, _ = write_start(tmp_path, steps=[1, 2])
    whole = path.read_text()
    path.write_text(whole[:-10])
    assert len(read_record(path).updates) == 3
    path.write_text(whole)
    assert len(read_record(path).updates) == 4


@pytest.mark.parametrize(
    "content",
    ["no record\n", '{"a": 1}\n', "[]\n", '{"options": {"unknown": 1}}\n', '{"options": {}}\n{"sums": 1}\n'],
)
def test_another_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "record.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"record.jsonl is not a record of this version \("):
        read_record(tmp_path / "record.jsonl")


@pytest.mark.parametrize("seconds", [1, 0, -3600])
def test_each_start_writes_a_file_that_comes_after_the_others(tmp_path, monkeypatch, seconds):
    """A run may be resumed on a host whose clock is behind, or be started twice within the clock's resolution."""
    now = datetime(2026, 11, 27, tzinfo=UTC)
    clock = (now + number * timedelta(seconds=seconds) for number in range(3))
    monkeypatch.setattr(record_module, "datetime", Mock(wraps=datetime, now=lambda zone: next(clock)))
    (tmp_path / "record-mine.jsonl").touch()
    paths = [write_start(tmp_path, steps=[1])[0] for _ in range(3)]
    assert [*paths, tmp_path / "record-mine.jsonl"] == sorted(tmp_path.glob("record-*.jsonl"))
    told = [datetime.fromisoformat(read_record(path).about["utc"]) for path in paths]
    assert told == [now + number * timedelta(seconds=seconds) for number in range(3)]


def test_a_record_of_a_scope_that_is_gone_stays_readable(tmp_path):
    """Version 0.2 had one more scope, and one sum less."""
    path, _ = write_start(tmp_path, steps=[1])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["options"]["bound_scope"] = "previous_batch"
    for line in lines[1:]:
        del line["sums"]["dual_clipped_weight"]
    old = tmp_path / "old.jsonl"
    old.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for found, expected in zip(read_record(old).updates, read_record(path).updates, strict=True):
        assert found.values == expected.values and found.stats.sums.dual_clipped_weight == 0
        assert torch.equal(found.stats.sums.negative_weight, expected.stats.sums.negative_weight)
