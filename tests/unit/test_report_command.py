# SPDX-License-Identifier: Apache-2.0
"""The token dump, and the command that reads it."""

import sys
from functools import partial

import pytest
import torch
from safetensors.torch import save, save_file
from support.batches import make_batch
from support.oracle import sequential_search

from bapo import BAPOConfig
from docs.examples.slime_dump import import_slime
from recipe.bapo.records import tokens
from recipe.bapo.records.tokens import OPTIONAL, TENSORS, about_dump, read_dump, write_dump
from recipe.bapo.report.__main__ import main
from recipe.bapo.report.measure import measure
from recipe.bapo.report.methods import Method, clipped


def dump(folder, seeds, cuts=1, ranks=1):
    """Dump updates of 8 sequences, split into micro-batches and over ranks, as these ranks would write them."""
    for rank in range(ranks):
        tokens._written.clear()  # each rank is a separate process
        for seed in seeds:
            part = [tensor.chunk(ranks)[rank] for tensor in make_batch(seed, rows=8, zero_advantage=0.0)]
            for micro_batch in zip(*(t.chunk(cuts) for t in part), strict=True):
                known = {"dp_size": ranks, "global_batch_size": 8}
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(torch.distributed, "is_initialized", lambda: True)
                    patch.setattr(torch.distributed, "get_rank", partial(int, rank))
                    write_dump(folder, *micro_batch, known)


@pytest.mark.parametrize("cuts, ranks", [(1, 1), (2, 2)])
@pytest.mark.parametrize("contribution", ["value", "gradient"])
@pytest.mark.parametrize("token_weight", ["rollout_prob", "uniform"])
def test_the_report_finds_the_bounds_of_algorithm_1(tmp_path, cuts, ranks, contribution, token_weight):
    dump(tmp_path, seeds=(1, 2, 3), cuts=cuts, ranks=ranks)
    config = BAPOConfig(0.45, contribution=contribution, token_weight=token_weight)
    statistics = measure(tmp_path, config, 3.0, []).statistics
    for of_update, seed in zip(statistics, (1, 2, 3), strict=True):
        found = Method(clipped, {"clip_ratio_c": 3.0}, config).in_update(of_update, 0).keywords
        expected = sequential_search(*make_batch(seed, rows=8, zero_advantage=0.0), config, clip_ratio_c=3.0)
        assert (found["low"], found["high"]) == expected[:2]


def test_a_second_run_does_not_mix_with_an_earlier_dump(tmp_path):
    dump(tmp_path, seeds=(1,))
    with pytest.raises(ValueError, match="token_dump_dir=.* holds an earlier dump: remove it"):
        dump(tmp_path, seeds=(2,))
    assert len(list(tmp_path.iterdir())) == 1


def test_an_incomplete_dump_is_named(tmp_path):
    dump(tmp_path, seeds=(1, 2), ranks=2, cuts=2)
    for path in [*tmp_path.glob("rank?-000003*"), tmp_path / "rank0-000002.safetensors"]:
        path.unlink()
    assert [len(update) for update in read_dump(tmp_path)] == [4]  # the incomplete update is left out
    for path in tmp_path.glob("rank1-*"):
        path.unlink()
    with pytest.raises(ValueError, match="holds 4 sequences of update 0, but this update has 8: put the files"):
        list(read_dump(tmp_path))
    (tmp_path / "rank0-000001.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no complete update yet"):
        list(read_dump(tmp_path))


def test_files_of_another_origin_are_an_update_each(tmp_path):
    for seed, name in ((1, "a"), (2, "b")):
        batch = make_batch(seed)
        names = ("old_log_prob", "log_prob", "advantages")
        flat = {key: part[batch[3]] for key, part in zip(names, batch, strict=False)}
        save_file(flat, tmp_path / f"{name}.safetensors")
    updates = list(read_dump(tmp_path))
    assert [len(update) for update in updates] == [1, 1]
    assert torch.equal(updates[1][0]["log_prob"], batch[1][batch[3]])


def test_ranks_that_dump_unequal_numbers_are_named(tmp_path, monkeypatch):
    batch = make_batch(1, rows=6, zero_advantage=0.0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank, rows in enumerate((slice(0, 4), slice(4, 6))):
        tokens._written.clear()
        monkeypatch.setattr(torch.distributed, "get_rank", partial(int, rank))
        for _ in range(2):
            write_dump(tmp_path, *(tensor[rows] for tensor in batch), {"dp_size": 2, "global_batch_size": 6})
    with pytest.raises(ValueError, match="holds 8 sequences of update 0, but this update has 6: .* the same number"):
        list(read_dump(tmp_path))


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
    expected["trainer_version"] = [9]
    assert {name: updates[0][0][name].tolist() for name in expected} == expected


def test_rollout_data_of_slimes_have_nothing_to_compare(tmp_path):
    torch.save({"samples": [{"rollout_log_probs": [-1.0], "reward": 1.0}]}, tmp_path / "0.pt")
    with pytest.raises(ValueError, match="0.pt lacks log_probs, advantages, loss_masks: run slime with"):
        import_slime([tmp_path / "0.pt"], tmp_path / "dump")


def test_a_dump_loses_nothing(tmp_path):
    *tensors, mask = make_batch(1)
    names = (*TENSORS, *OPTIONAL)
    given = dict(zip(names, [*tensors, *(torch.rand(mask.shape) for _ in OPTIONAL)], strict=True))
    about = {"loss_mode": "vanilla", "clip_ratio_c": 1e9, "clip_ratio_low": None}
    write_dump(tmp_path, **given, response_mask=mask, about=about, update=1, trainer_version=7)
    ((found,),) = read_dump(tmp_path)
    assert all(torch.equal(found[name], given[name][mask]) for name in names)
    assert torch.equal(found["lengths"], mask.sum(1)) and (found["update"], found["trainer_version"]) == (1, 7)
    assert about_dump(tmp_path) == {"sequences": "5", "loss_mode": "vanilla", "clip_ratio_c": "1000000000.0"}


def file_of(**changes):
    return save({name: torch.zeros(3) for name in TENSORS} | changes)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"x" * 50, "a.safetensors is not a readable safetensors file"),
        (
            save({"log_prob": torch.zeros(3)}),
            "a.safetensors needs the tensors old_log_prob, log_prob, advantages, and all tensors",
        ),
        (file_of(version=torch.zeros(2)), "'version': (2,)"),
        (file_of(lengths=torch.tensor([2, 2])), "a.safetensors: lengths add up to 4, not 3 tokens."),
        (file_of(log_prob=torch.full((3,), torch.nan)), "has non-finite values in log_prob"),
        (
            file_of(old_log_prob=torch.tensor([0.2, 1.5, 0.0])),
            "no log-prob is below 0, and the largest is 1.5: was the",
        ),
    ],
)
def test_bad_input_is_named(tmp_path, monkeypatch, capsys, content, message):
    (tmp_path / "a.safetensors").write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1 and message in capsys.readouterr().err


def test_numbers_and_page_do_not_share_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path), "--html", f"{tmp_path}/r", "--json", f"{tmp_path}/r"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1 and "/r is where the page goes: give the numbers another" in capsys.readouterr().err
