# SPDX-License-Identifier: Apache-2.0
"""What is written to a record is read again, and a record that cannot be written does not end a run."""

import json
import math
from datetime import datetime, timedelta, timezone
from unittest.mock import Mock

import pytest
import torch
from support.records import make_tokens, measure, read_updates, write_start

from bapo import BAPOConfig
from recipe.bapo.hook import record as record_module
from recipe.bapo.hook.own_clip import OwnClip
from recipe.bapo.hook.record import NOT_RECORDED, Record, read_start

CONFIG = BAPOConfig(0.45, ratio_upper_max=2.0, contribution="gradient", token_weight="uniform")


def test_sums_and_values_are_read_back_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(record_module.time, "time", lambda: 1.8e9)
    record, written = Record(tmp_path / "new" / "folder", CONFIG, {"applied": False}), []
    for seed in range(3):
        written.append(measure(make_tokens(seed), CONFIG))
        record.write(*written[-1], call=seed, update=0, step=None)
    start = read_start(record.path)
    assert start.config == CONFIG and start.about["applied"] is False and start.about["utc"]
    for seed, (update, (stats, values)) in enumerate(zip(read_updates(record.path), written, strict=True)):
        assert update.values == values and update.stats.config == CONFIG
        for name, one, other in zip(stats.sums._fields, update.stats.sums, stats.sums, strict=True):
            assert one.isnan().all() if name in NOT_RECORDED else torch.equal(one, other), name
        assert update.numbers == {"call": seed, "update": 0, "time": 1.8e9}


def test_numbers_that_are_not_finite_are_null(tmp_path):
    old, log_prob, advantages, mask = make_tokens(0)
    log_prob[mask] = math.nan
    record = Record(tmp_path, CONFIG, {"own_clip": vars(OwnClip("cap", 0.8, 1.2))})  # its dual clip is infinite
    stats, values = measure((old, log_prob, advantages, mask), CONFIG)
    record.write(stats, values | {"ratio": math.inf})
    first, line = map(json.loads, record.path.read_text().splitlines())
    assert first["own_clip"]["dual_clip"] is None
    assert line["sums"]["gradient"] is None and line["values"]["ratio"] is None
    (update,) = read_updates(record.path)
    assert update.stats.sums.gradient.isnan() and update.values == values
    finite = stats.sums.positive_tokens
    assert torch.equal(update.stats.sums.positive_tokens, finite) and finite.isfinite().all()


def test_a_failed_write_is_told_once_and_ends_the_record(tmp_path, capsys):
    record, update = Record(tmp_path, CONFIG, {}), measure(make_tokens(0), CONFIG)
    record.write(*update)
    file = record.path.rename(tmp_path / "kept")
    record.path.mkdir()  # appending to it fails
    record.write(*update)
    record.path.rmdir()
    file.rename(record.path)
    record.write(*update)
    (message,) = capsys.readouterr().err.splitlines()
    assert len(read_updates(record.path)) == 1 and str(record.path) in message


def test_a_record_that_ends_inside_a_line_is_read_up_to_there(tmp_path):
    path, _ = write_start(tmp_path, steps=[1, 2])
    whole = path.read_text()
    path.write_text(whole[:-10])
    assert len(read_updates(path)) == 3
    path.write_text(whole)
    assert len(read_updates(path)) == 4
    path.write_text(whole.splitlines()[0])
    assert read_start(path) is None


def test_a_record_is_read_no_further_than_it_is_used(tmp_path):
    path, _ = write_start(tmp_path, steps=[1, 2], updates=1)
    path.write_text(path.read_text() + "no record\n")
    chunks = read_start(path).updates(at_once=1)
    assert [next(chunks).numbers[0]["step"] for _ in range(2)] == [1, 2]
    with pytest.raises(ValueError, match="line 4: no JSON object"):
        next(chunks)


def change(part, **names):
    """Return a function that sets what is in a part of a line, or removes it."""

    def do(line):
        for name, value in names.items():
            line[part].pop(name) if value is None else line[part].update({name: value})
        return line

    return do


@pytest.mark.parametrize(
    "number, broken, message",
    [
        (1, lambda line: "[" * 100_000, "no JSON object"),
        (1, lambda line: {}, "no options"),
        (1, change("options", new_option=1, another=2), "unknown options another, new_option"),
        (1, change("options", ratio_lower_step=0), "invalid ratio_lower_step=0"),
        (1, change("options", ratio_lower_start=10**400), "int too large"),
        (1, change("own_clip", low=None, dual_clip=None), "an own_clip without dual_clip, low"),
        (1, change("own_clip", high="1.2", dual_clip="3"), "no numbers in own_clip as dual_clip, high"),
        (3, lambda line: [line], "no JSON object"),
        (3, lambda line: line | {"values": []}, "no values"),
        (4, change("sums", gradient=None, tokens=None), "missing sums gradient, tokens"),
        (4, change("sums", new=1.0), "unknown sums new"),
        (4, change("sums", positive_weight=[0.5] * 40), "40 numbers in the sum positive_weight, and 38 with"),
        (4, change("sums", negative_weight=[[1.0]] * 17), "something else than numbers in the sum negative_weight"),
        (4, change("sums", gradient=1e308, ratio=-1e301), "no usable numbers in gradient, ratio"),
        (4, lambda line: line | {"sums": line["sums"] | {"tokens": None}}, "no usable numbers in tokens"),
        (5, change("values", redone=1.0), "no numbers as the values extra_forward"),
        (5, change("values", saturated=None, clipfrac_positive="a"), "no numbers as the values clipfrac_positive, sat"),
    ],
)
def test_what_is_wrong_in_a_record_is_named_with_its_line(tmp_path, number, broken, message):
    path, _ = write_start(tmp_path, steps=[1, 2])
    lines = path.read_text().splitlines()
    changed = broken(json.loads(lines[number - 1]))
    lines[number - 1] = changed if isinstance(changed, str) else json.dumps(changed)
    path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(ValueError) as raised:
        read_updates(path)
    assert str(raised.value).startswith(f"{path} is not a record of this version (line {number}: {message}")


@pytest.mark.parametrize("seconds", [1, 0, -3600])
def test_each_start_writes_a_file_that_comes_after_the_others(tmp_path, monkeypatch, seconds):
    """A run may be resumed on a host whose clock is behind, or be started twice within the clock's resolution."""
    now = datetime(2026, 11, 27, tzinfo=timezone.utc)
    clock = (now + number * timedelta(seconds=seconds) for number in range(3))
    monkeypatch.setattr(record_module, "datetime", Mock(wraps=datetime, now=lambda zone: next(clock)))
    (tmp_path / "record-mine.jsonl").touch()
    paths = [write_start(tmp_path, steps=[1])[0] for _ in range(3)]
    assert [*paths, tmp_path / "record-mine.jsonl"] == sorted(tmp_path.glob("record-*.jsonl"))
    told = [datetime.fromisoformat(read_start(path).about["utc"]) for path in paths]
    assert told == [now + number * timedelta(seconds=seconds) for number in range(3)]


def test_limits_that_are_infinite_are_read_back(tmp_path):
    own_clip = OwnClip("clip", -math.inf, math.inf)  # clip_ratio_low=inf and clip_ratio_high=inf are valid in verl
    path, _ = write_start(tmp_path, steps=[1], own_clip=own_clip)
    assert read_start(path).about["own_clip"] == vars(own_clip)


def test_a_record_of_a_scope_that_is_gone_stays_readable(tmp_path):
    """Version 0.2 had one more scope, and fewer sums."""
    new = ("dual_clipped_weight", "ratio_log_prob", "own_gradient", "own_gradient_log_prob")
    path, _ = write_start(tmp_path, steps=[1])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["options"]["bound_scope"] = "previous_batch"
    for line in lines[1:]:
        line["sums"] = {name: sums for name, sums in line["sums"].items() if name not in new}
    old = tmp_path / "old.jsonl"
    old.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for found, expected in zip(read_updates(old), read_updates(path), strict=True):
        assert found.values == expected.values and found.stats.sums.dual_clipped_weight == 0
        assert all(getattr(found.stats.sums, name).isnan() for name in new[1:])
        assert torch.equal(found.stats.sums.negative_weight, expected.stats.sums.negative_weight)
