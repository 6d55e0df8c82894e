# SPDX-License-Identifier: Apache-2.0
"""On gloo processes, with uneven and empty ranks, bounds and gradients are those of a single process."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.batches import make_batch, values_found

from bapo import BAPOConfig, clipped_surrogate_loss, collect_clip_statistics, find_clip_bounds

CONFIGS = [
    BAPOConfig(positive_contribution_target=0.45),
    BAPOConfig(positive_contribution_target=0.55, contribution="gradient", token_weight="uniform"),
    BAPOConfig(positive_contribution_target=0.5, search_order="lower_first"),
]
PAGE = Path(__file__).parents[2] / "bapo" / "README.md"
LOOP_CONFIG = BAPOConfig(positive_contribution_target=0.45)
# The rows that each rank has of a batch of 8.
SPLITS = {2: [[4, 4], [7, 1], [0, 8]], 4: [[2, 2, 2, 2], [0, 5, 0, 3]]}
SEEDS = range(6)


def batch_of(seed):
    """Make a batch of 8 rows in float64.

    On some machines the last bits of a vectorised ``exp`` depend on the place of a token, which differs between the
    ranks and a single process. In float32 this is more than the rounding of the sums.
    """
    return make_batch(seed, rows=8, dtype=torch.float64)


def bounds_of_rank(rank, size, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    found = []
    for seed in SEEDS:
        for split in SPLITS[size]:
            rows = slice(sum(split[:rank]), sum(split[: rank + 1]))
            part = [tensor[rows] for tensor in batch_of(seed)]
            for config in CONFIGS:
                values = values_found(*part, config, process_group=dist.group.WORLD, clip_ratio_c=3.0)
                found.append([value.hex() for value in values.values()])
    # The reduction does not change a rank's own statistics.
    own = collect_clip_statistics(*make_batch(rank, rows=2), CONFIGS[0])
    before = [tensor.clone() for tensor in own.sums]
    own.all_reduce(dist.group.WORLD)
    assert all(map(torch.equal, own.sums, before))
    # If one rank has bad data, every rank raises.
    part = [tensor.clone() for tensor in make_batch(0, rows=2, masked=0)]
    if rank == size - 1:
        part[0][0, :3] = part[1][0, 3] = part[2][0, 4:6] = float("nan")
    try:
        values_found(*part, CONFIGS[0], process_group=dist.group.WORLD)
        error = None
    except ValueError as raised:
        error = str(raised)
    torch.save((found, error), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("size", SPLITS)
def test_every_rank_holds_the_bounds_of_one_process(size, tmp_path):
    mp.spawn(bounds_of_rank, args=(size, str(tmp_path)), nprocs=size)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(size)]
    assert all(rank == ranks[0] for rank in ranks)
    found, error = ranks[0]
    assert "3 in old_log_prob, 1 in log_prob, 2 in advantages." in error

    alone = iter(found)
    for seed in SEEDS:
        for _ in SPLITS[size]:
            for config in CONFIGS:
                expected = values_found(*batch_of(seed), config, clip_ratio_c=3.0)
                low, high, *rest = next(alone)
                assert (low, high) == (expected["low"].hex(), expected["high"].hex())
                others = [float.fromhex(value) for value in rest]
                assert others == pytest.approx(list(expected.values())[2:], rel=1e-12, abs=1e-15)


def tiny_model():
    """Make a language model of 11 words in float64, and the function that returns its log-probs of words ``(B, T)``."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11)).double()

    def log_probs(model, words):
        return model(words[:, :-1]).log_softmax(-1).gather(-1, words[:, 1:, None]).squeeze(-1)

    return model, log_probs


def mini_batch():
    """Make 12 responses of 1 to 16 tokens: words, old log-probs, advantages ``(B, 1)`` and mask."""
    model, log_probs = tiny_model()
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(11, (12, 17), generator=generator)
    advantages = torch.randn(12, 1, generator=generator, dtype=torch.float64) - 0.1
    mask = torch.arange(16) < torch.randint(1, 17, (12, 1), generator=generator)
    with torch.no_grad():
        new = log_probs(model, words)
    return words, new - 0.4 * torch.randn(new.shape, generator=generator, dtype=torch.float64), advantages, mask


# The rows of each micro-batch, for each rank.
MICRO_BATCHES = [[5, 1, 2], [1, 2, 1]]


def loop_of_rank(rank, size, folder):
    """Run the loop of bapo/README.md with DDP."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    page = {}
    exec(code, page)
    model, log_probs = tiny_model()
    of_ranks = [tensor.split([sum(rows) for rows in MICRO_BATCHES])[rank] for tensor in mini_batch()]
    micro_batches = list(zip(*(tensor.split(MICRO_BATCHES[rank]) for tensor in of_ranks), strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    page["config"] = LOOP_CONFIG
    metrics = page["update"](torch.nn.parallel.DistributedDataParallel(model), optimizer, micro_batches, log_probs)
    gradient = [parameter.grad for parameter in model.parameters()]
    torch.save((metrics["low"], metrics["high"], gradient), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def test_the_loop_on_the_page_has_the_gradient_of_the_whole_batch(tmp_path):
    model, log_probs = tiny_model()
    words, old, advantages, mask = mini_batch()
    batch = old, log_probs(model, words), advantages, mask
    bounds, _ = find_clip_bounds(*(tensor.detach() for tensor in batch), LOOP_CONFIG, clip_ratio_c=3.0)
    assert bounds.met_by_moving
    result = clipped_surrogate_loss(*batch, bounds.low, bounds.high, clip_ratio_c=3.0)
    assert result.pg_clipfrac > 0.1
    result.loss.backward()

    mp.spawn(loop_of_rank, args=(len(MICRO_BATCHES), str(tmp_path)), nprocs=len(MICRO_BATCHES))
    for rank in range(len(MICRO_BATCHES)):
        low, high, gradient = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        assert (low, high) == (bounds.low.item(), bounds.high.item())
        for found, parameter in zip(gradient, model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-14)
