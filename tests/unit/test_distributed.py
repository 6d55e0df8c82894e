# SPDX-License-Identifier: Apache-2.0
"""On 2 and 4 gloo processes, with uneven and empty ranks, every rank finds the bounds of a single process."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.batches import make_batch, values_found

from bapo import BAPOConfig, collect_clip_statistics

CONFIGS = [
    BAPOConfig(positive_contribution_target=0.45),
    BAPOConfig(positive_contribution_target=0.55, contribution="gradient", token_weight="uniform"),
    BAPOConfig(positive_contribution_target=0.5, search_order="lower_first"),
]
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
