# SPDX-License-Identifier: Apache-2.0
"""The token dump and what the bound replay reads from it."""

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
from recipe.bapo.records.tokens import about_dump, read_dump, write_dump
from recipe.bapo.replay import DEFINITIONS, outcomes, search, statistics_of

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
def test_the_replay_finds_the_bounds_of_algorithm_1(tmp_path, cuts, ranks, contribution, token_weight):
    dump(tmp_path, seeds=(1, 2, 3), cuts=cuts, ranks=ranks)
    config = replace(CONFIG, contribution=contribution, token_weight=token_weight)
    found = search(statistics_of(tmp_path, CONFIG, 3.0)[contribution, token_weight], config)
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


def test_the_dump_knows_the_runs_dual_clip(tmp_path):
    dump(tmp_path, seeds=(1,), clip_ratio_c=1e9, bound_scope="mini_batch")
    assert float(about_dump(tmp_path)["clip_ratio_c"]) == 1e9


def test_outcomes_are_shares_of_the_updates():
    found = {"search_steps": [0.0, 3.0, 51.0, 0.0], "saturated": [0.0, 0.0, 1.0, 1.0]}
    assert outcomes(found) == (0.25, 0.25, 0.5)


def run_replay(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "recipe.bapo.replay", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def test_the_command_prints_a_table_and_draws(tmp_path):
    dump(tmp_path, seeds=(1, 2), clip_ratio_c=1e9, bound_scope="micro_batch")
    run = run_replay(tmp_path, "--targets", 0.4, 0.6, "--lower", 0.8, 0.9, 0.05)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].startswith("The run found its bounds per micro-batch")
    assert lines[1].startswith("2 updates.") and len(lines) == 3 + 4 * 2 + 1
    assert (tmp_path / "replay.png").stat().st_size > 10_000


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
    ],
)
def test_bad_input_is_named(tmp_path, make, arguments, message):
    make(tmp_path)
    run = run_replay(tmp_path, *arguments)
    assert run.returncode == 1 and message in run.stderr and "Traceback" not in run.stderr
