# SPDX-License-Identifier: Apache-2.0
"""The token dump, and the command that reads it."""

import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from support.batches import make_batch
from support.oracle import sequential_search

from bapo import BAPOConfig
from recipe.bapo.records import tokens
from recipe.bapo.records.tokens import TENSORS, about_dump, read_dump, write_dump
from recipe.bapo.report.command import main
from recipe.bapo.report.facts import report_on
from recipe.bapo.report.measure import DEFINITIONS, measure, search
from recipe.bapo.report.slime import import_slime

CONFIG = BAPOConfig(positive_contribution_target=0.45)


def dump(folder, seeds, cuts=1, ranks=1, **about):
    """Updates of 8 sequences, each cut into micro-batches and spread over ranks, as those ranks would write them."""
    for rank in range(ranks):
        tokens._written.clear()  # each rank is a process of its own
        for seed in seeds:
            part = [tensor.chunk(ranks)[rank] for tensor in make_batch(seed, rows=8, zero_advantage=0.0)]
            for micro_batch in zip(*(t.chunk(cuts) for t in part), strict=True):
                known = {"dp_size": ranks, "global_batch_size": 8, **about}
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(torch.distributed, "is_initialized", lambda: True)
                    patch.setattr(torch.distributed, "get_rank", partial(int, rank))
                    write_dump(folder, *micro_batch, known)


@pytest.mark.parametrize("cuts, ranks", [(1, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("contribution, token_weight", DEFINITIONS)
def test_the_report_finds_the_bounds_of_algorithm_1(tmp_path, cuts, ranks, contribution, token_weight):
    dump(tmp_path, seeds=(1, 2, 3), cuts=cuts, ranks=ranks)
    config = replace(CONFIG, contribution=contribution, token_weight=token_weight)
    found = search(measure(tmp_path, CONFIG, 3.0).statistics[contribution, token_weight], config)
    for update, seed in enumerate((1, 2, 3)):
        batch = make_batch(seed, rows=8, zero_advantage=0.0)
        expected = sequential_search(*batch, config, clip_ratio_c=3.0)
        assert (found["low"][update], found["high"][update]) == expected[:2]


def test_an_update_that_was_cut_off_is_left_out(tmp_path):
    dump(tmp_path, seeds=(1, 2), cuts=4)
    max(tmp_path.glob("*")).unlink()
    assert [len(update) for update in read_dump(tmp_path)] == [4]


def test_a_second_run_does_not_mix_with_an_earlier_dump(tmp_path):
    dump(tmp_path, seeds=(1,))
    with pytest.raises(ValueError, match="token_dump_dir=.* holds an earlier dump: remove it"):
        dump(tmp_path, seeds=(2,))
    assert len(list(tmp_path.iterdir())) == 1


def remove_rank_1(folder):
    dump(folder, seeds=(1,), ranks=2)
    for path in folder.glob("rank1-*"):
        path.unlink()


def leave_part_of_an_update(folder):
    dump(folder, seeds=(1,), cuts=4)
    max(folder.glob("*")).unlink()


@pytest.mark.parametrize(
    "make, message",
    [(remove_rank_1, "holds 4 of the 8 sequences of update 0"), (leave_part_of_an_update, "holds no whole update yet")],
)
def test_an_incomplete_dump_is_named(tmp_path, make, message):
    make(tmp_path)
    with pytest.raises(ValueError, match=message):
        list(read_dump(tmp_path))


def test_files_of_another_origin_are_an_update_each(tmp_path):
    for seed, name in ((1, "a"), (2, "b")):
        batch = make_batch(seed)
        names = ("old_log_prob", "log_prob", "advantages", "response_mask")
        save_file(dict(zip(names, map(torch.Tensor.contiguous, batch), strict=True)), tmp_path / f"{name}.safetensors")
    updates = list(read_dump(tmp_path))
    assert [len(update) for update in updates] == [1, 1]
    assert torch.equal(updates[1][0]["log_prob"], batch[1][batch[3]])


def test_ranks_with_the_same_tokens_count_once(tmp_path):
    dump(tmp_path, seeds=(1, 2), ranks=2)
    before = [[len(micro_batch["log_prob"]) for micro_batch in update] for update in read_dump(tmp_path)]
    for path in list(tmp_path.glob("rank1-*")):  # as two ranks of a tensor parallel group write them
        (tmp_path / path.name.replace("rank1", "rank2")).write_bytes(path.read_bytes())
    assert [[len(micro_batch["log_prob"]) for micro_batch in update] for update in read_dump(tmp_path)] == before


SLIME = {
    "rollout_log_probs": [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])],
    "log_probs": [torch.tensor([-1.5, -2.5]), torch.tensor([-3.5])],
    "advantages": [torch.tensor([1.0, 1.0]), torch.tensor([-1.0])],
    "loss_masks": [torch.tensor([1, 0]), torch.tensor([1])],
    "weight_versions": [["7", "8"], ["9"]],
}


@pytest.mark.parametrize("by_response", [False, True])
def test_a_rollout_of_slimes_is_an_update(tmp_path, by_response):
    content = {"rollout_data": SLIME}
    if by_response:
        content = {"samples": [{name: column[row] for name, column in SLIME.items()} for row in (0, 1)]}
    torch.save({"rollout_id": 0, **content}, tmp_path / "0.pt")
    import_slime([tmp_path / "0.pt"] * 2, tmp_path / "dump")
    updates = list(read_dump(tmp_path / "dump"))
    assert len(updates) == 2
    expected = {"old_log_prob": [-1, -3], "log_prob": [-1.5, -3.5], "advantages": [1, -1], "version": [7, 9]}
    assert {name: updates[0][0][name].tolist() for name in expected} == expected


def test_rollout_data_of_slimes_have_nothing_to_compare(tmp_path):
    torch.save({"samples": [{"rollout_log_probs": [-1.0], "reward": 1.0}]}, tmp_path / "0.pt")
    with pytest.raises(ValueError, match="0.pt lacks log_probs, advantages, loss_masks: run slime with"):
        import_slime([tmp_path / "0.pt"], tmp_path / "dump")


def test_a_dump_loses_nothing(tmp_path):
    batch = make_batch(1)
    write_dump(tmp_path, *batch, {})
    ((found,),) = read_dump(tmp_path)
    for name, tensor in zip(TENSORS, batch, strict=False):
        assert torch.equal(found[name], tensor[batch[3].bool()])


def test_the_dump_knows_the_runs_dual_clip(tmp_path):
    dump(tmp_path, seeds=(1,), clip_ratio_c=1e9, bound_scope="mini_batch")
    assert float(about_dump(tmp_path)["clip_ratio_c"]) == 1e9


def test_what_the_search_finds_at_each_target_by_hand(tmp_path):
    # value: P = 10 + 4 * min(1.25, c_high) + 2 * min(2.5, c_high), N = 8 * c_low + 4 + 12 + 20. gradient: P = 10,
    # 15 from c_high = 1.5, 20 from 2.7; N = 4 + 12: r = 0.5 is below c_low, r = 20 above the dump's dual clip.
    planted = [(10, 1.0, 1.0), (4, 1.25, 1.0), (2, 2.5, 1.0), (8, 0.5, -1.0), (4, 1.0, -1.0), (3, 4.0, -1.0)]
    planted += [(1, 20.0, -1.0)]
    ratio, advantages = (torch.cat([torch.full((row[0],), row[k]) for row in planted]) for k in (1, 2))
    tensors = {"old_log_prob": torch.full_like(ratio, -1.0), "log_prob": ratio.log() - 1, "advantages": advantages}
    save_file(tensors, tmp_path / "rank0-000000.safetensors", metadata={"clip_ratio_c": "5.0"})
    report, _ = report_on(tmp_path, (0.3, 0.45, 0.55, 0.6), {"ratio_upper_step": 0.3})
    already, moved, missed = (1, 0, 0), (0, 1, 0), (0, 0, 1)
    value = [(*moved, 0.6, 1.5), *[(*missed, 0.9, 3.0)] * 3]
    gradient = [(*already, 0.6, 1.2), (*moved, 0.6, 1.5), (*moved, 0.6, 2.7), (*missed, 0.9, 3.0)]
    keys = ("already_met", "met_by_moving", "out_of_reach", "c_low", "c_high")
    for rho in report["rho"]:  # the same by both weights: all tokens are as probable
        expected, before = (value, 17.2 / 58) if rho["contribution"] == "value" else (gradient, 10 / 26)
        assert list(rho["before"].values()) == [pytest.approx(before)] * 3
        assert [tuple(row[key] for key in keys) for row in rho["targets"]] == [pytest.approx(row) for row in expected]
    fixed = {"ratio_lower_max": 0.6, "ratio_upper_max": 1.2}  # nothing to move: 0.297 by value
    (row,) = report_on(tmp_path, (0.3,), fixed)[0]["rho"][0]["targets"]
    assert [row[key] for key in keys] == [0, 0, 1, 0.6, 1.2]


def test_the_command_prints_the_verdict_and_writes_the_page_into_the_dump(tmp_path, monkeypatch, capsys):
    dump(tmp_path, (1,))
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == report_on(tmp_path)[0]["verdict"] and lines[-1] == f"Report: {tmp_path}/report.html"
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    "make, arguments, message",
    [
        (lambda folder: None, [], "holds no .safetensors file"),
        (lambda folder: (folder / "a.safetensors").write_bytes(b"x" * 50), [], "is not a readable safetensors file"),
        (lambda folder: save_file({"log_prob": torch.zeros(3)}, folder / "a.safetensors"), [], "lacks old_log_prob"),
        (
            lambda folder: save_file(
                {"log_prob": torch.zeros(3), "old_log_prob": torch.zeros(3), "advantages": torch.zeros(2)},
                folder / "a.safetensors",
            ),
            [],
            "the shapes differ",
        ),
        (
            lambda folder: save_file(
                {name: torch.full((3,), torch.nan) for name in ("log_prob", "old_log_prob", "advantages")},
                folder / "a.safetensors",
            ),
            [],
            "Non-finite values",
        ),
        (lambda folder: dump(folder, (1,)), ["--targets", 1.5], "positive_contribution_target=1.5 is not usable"),
        (lambda folder: dump(folder, (1,)), ["--lower", 0.9, 0.8, 0.1], "ratio_lower"),
        (lambda folder: dump(folder, (1,)), ["--clip-ratio-c", 0], "clip_ratio_c=0.0 is not usable"),
        (lambda folder: dump(folder, (1,)), ["--html", "/no/folder/a.html"], "there is no folder /no/folder"),
    ],
)
def test_bad_input_is_named(tmp_path, monkeypatch, capsys, make, arguments, message):
    make(tmp_path)
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path), *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1 and message in capsys.readouterr().err


def test_the_old_name_of_the_command_still_works(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "recipe.bapo.replay", str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1  # there is no dump
    assert done.stderr.splitlines()[0] == "python -m recipe.bapo.replay is now python -m recipe.bapo.report."
