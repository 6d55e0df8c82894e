# SPDX-License-Identifier: Apache-2.0
"""Write down, outside of our code, which tokens and bounds the loss of each micro-batch got.

There is a file for each update of each rank. In this process, call ``capture_to(folder)``. In a run of the real stack,
set ``actor_rollout_ref.model.external_lib=support.capture`` and the variables of ``environment_of_capture(folder)``.
"""

import os
from dataclasses import replace
from functools import wraps
from pathlib import Path

import torch
from torch.nn.functional import pad

from bapo import find_clip_bounds, read_and_validate

TOKENS = ("old_log_prob", "log_prob", "advantages", "response_mask")
target: Path | None = None  # the folder to write to


def environment_of_capture(folder) -> dict[str, str]:
    """Return the environment variables with which the processes of a run write their updates to a folder."""
    return {"CAPTURE_FOLDER": str(folder), "PYTHONPATH": str(Path(__file__).parents[1])}


def capture_to(folder) -> None:
    """Write the updates of this process to a folder from now on."""
    global target
    if target is None:
        patch_verl()
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)


def patch_verl() -> None:
    # Not at the top, because verl chooses its platform and looks for Megatron when it is imported.
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils import losses

    verl_get_policy_loss_fn, verl_train_batch = losses.get_policy_loss_fn, TrainingWorker.train_batch
    micro_batches = []  # of the current update

    def get_policy_loss_fn(name):
        loss_fn = verl_get_policy_loss_fn(name)

        def compute(*, config, **arguments):
            if arguments["log_prob"].requires_grad:
                tokens = {field: arguments[field].detach().cpu().clone() for field in TOKENS}
                micro_batches.append(tokens | {"bounds": getattr(config.policy_loss, "current_bounds", None)})
            return loss_fn(config=config, **arguments)

        return compute

    def keep_the_last_pass(worker):
        """Have our worker forget the micro-batches of a pass that it makes again."""
        one_pass = worker.verl_forward_backward_batch

        @wraps(one_pass)
        def clear_and_pass(*args, **kwargs):
            micro_batches.clear()
            return one_pass(*args, **kwargs)

        worker.verl_forward_backward_batch = clear_and_pass

    @wraps(verl_train_batch)
    def train_batch(worker, data):
        micro_batches.clear()
        passes = getattr(worker, "verl_forward_backward_batch", None)  # verl's own worker has none
        if passes is not None and not hasattr(passes, "__wrapped__"):
            keep_the_last_pass(worker)
        output = verl_train_batch(worker, data)
        logged = getattr(worker, "logged", {})  # verl's own worker has none
        logged = {name.removeprefix("actor/bapo/"): value for name, value in logged.items()}
        source = worker.engine.is_mp_src_rank_with_outputs()
        rank = torch.distributed.get_rank()
        number = len(list(target.glob(f"rank{rank}-*")))
        update = {"micro_batches": micro_batches, "source": source, "logged": logged}
        torch.save(update, target / f"rank{rank}-{number:04d}.pt")
        return output

    losses.get_policy_loss_fn, TrainingWorker.train_batch = get_policy_loss_fn, train_batch


def read_updates(folder, rank=0) -> list[dict]:
    """Return the updates of a rank.

    Each is a dict: ``logged`` has the metrics of the bounds, without ``actor/bapo/``; ``micro_batches`` has the tokens
    and the ``bounds`` of each call of the loss; ``source`` says whether the outputs of this rank count.
    """
    return [torch.load(file) for file in sorted(Path(folder).glob(f"rank{rank}-*"))]


def bounds_of(update) -> tuple[float, float]:
    """Return the bounds that an update logged."""
    return update["logged"]["clip_low"], update["logged"]["clip_high"]


def bounds_used(update) -> list[tuple[float, float]]:
    """Return the bounds that the loss of each micro-batch got."""
    return [micro_batch["bounds"] for micro_batch in update["micro_batches"]]


def tokens_of_updates(folder) -> list[list[torch.Tensor]]:
    """Return the tokens of each update over all ranks, as ``find_clip_bounds`` takes them, ``(B, T)`` each."""
    ranks = range(len(list(Path(folder).glob("rank*-0000.pt"))))
    found = []
    for of_ranks in zip(*(read_updates(folder, rank) for rank in ranks), strict=True):
        parts = [part for update in of_ranks if update["source"] for part in update["micro_batches"]]
        width = max(part["log_prob"].shape[1] for part in parts)
        found.append(
            [torch.cat([pad(part[name], (0, width - part[name].shape[1])) for part in parts]) for name in TOKENS]
        )
    return found


def values_of_updates(folder, config) -> list[dict[str, float]]:
    """Search on the tokens of each update over all ranks, with a dual clip of 3. Returns the values as logged."""
    found = [
        read_and_validate(*find_clip_bounds(*tokens, config, clip_ratio_c=3.0)) for tokens in tokens_of_updates(folder)
    ]
    return [
        {"clip_low": values.pop("low"), "clip_high": values.pop("high"), "applied": 1.0, **values} for values in found
    ]


def assert_rounding_changes_no_bounds(folder, config):
    """Check that no pair's rho is so near the target that another order of the sums could choose another pair."""
    found = [
        [(values["clip_low"], values["clip_high"]) for values in values_of_updates(folder, shifted)]
        for margin in (-1e-4, 1e-4)
        for shifted in [replace(config, positive_contribution_target=config.positive_contribution_target + margin)]
    ]
    assert found[0] == found[1], "use another seed for the data"


if "CAPTURE_FOLDER" in os.environ:
    capture_to(os.environ["CAPTURE_FOLDER"])
