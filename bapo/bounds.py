# SPDX-License-Identifier: Apache-2.0
"""The bounds of one optimizer update from first to last: collect, reduce, search, diagnose, and the one host read.

``find_clip_bounds`` is for callers that hold the whole mini-batch at once; a verl run takes the same steps, micro-batch
by micro-batch, in ``recipe.bapo.worker``. The loss and the worker rely on ``read_values`` being the only place in
``bapo`` where the host waits for the device, and the only place that raises for non-finite input: on every rank alike,
because the counts it looks at are those of all ranks.
"""

import torch
from torch import Tensor

from bapo.config import BAPOConfig
from bapo.diagnostics import Diagnostics, diagnose
from bapo.search import ClipBounds, search_clip_bounds
from bapo.statistics import MAX_OLD_LOG_PROB, collect_clip_statistics


def find_clip_bounds(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: BAPOConfig,
    process_group=None,
    clip_ratio_c: float | None = None,
) -> tuple[ClipBounds, Diagnostics]:
    """Find the clip bounds of one optimizer update from its whole mini-batch (Eq. 8, Algorithm 1).

    Args:
        old_log_prob, log_prob, advantages, response_mask: ``(B, T)``, as in ``collect_clip_statistics``.
        config: the switches.
        process_group: the ranks that share the mini-batch; None: no communication. All of them must call this once.
        clip_ratio_c: verl's dual clip, which ``contribution="gradient"`` respects; None: no dual clip.

    Returns:
        The bounds, and the diagnostics of the same tokens; both stay on the device until ``read_values``.

    Raises:
        ValueError: the shapes differ, or ``clip_ratio_c`` is not above 1. Non-finite input raises in ``read_values``.
    """
    statistics = collect_clip_statistics(old_log_prob, log_prob, advantages, response_mask, config, clip_ratio_c)
    if process_group is not None:
        statistics = statistics.all_reduce(process_group)
    bounds = search_clip_bounds(statistics, config)
    return bounds, diagnose(statistics, bounds)


def read_values(bounds: ClipBounds, diagnostics: Diagnostics, **others: Tensor) -> dict[str, float]:
    """The fields of both, and ``others`` beside them, as Python numbers by name, in one transfer to the host.

    Raises:
        ValueError: names each tensor with a value on a response token that is not finite or, as an old log-prob,
            above ``MAX_OLD_LOG_PROB``, and how many.
    """
    tensors = vars(bounds) | vars(diagnostics) | others
    packed = torch.stack([tensor.detach().double() for tensor in tensors.values()])
    values = dict(zip(tensors, packed.tolist(), strict=True))
    counts = {
        "old_log_prob": values.pop("invalid_old_log_probs"),
        "log_prob": values.pop("invalid_log_probs"),
        "advantages": values.pop("invalid_advantages"),
    }
    invalid = ", ".join(f"{count:.0f} in {name}" for name, count in counts.items() if count)
    if invalid:
        raise ValueError(
            f"Non-finite values, or old log-probs above {MAX_OLD_LOG_PROB}, on response tokens of this mini-batch: "
            f"{invalid}. No clip bounds were found and no update was made; look for a diverged model or a broken "
            "rollout or reward."
        )
    return values
