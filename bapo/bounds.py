# SPDX-License-Identifier: Apache-2.0
"""The bounds of one optimizer update from its tokens, and the one transfer of the results to the host.

``find_clip_bounds`` is for callers that hold the whole mini-batch at once. Others collect the statistics of each
micro-batch and take the same steps one by one (``bapo/README.md``; in verl ``recipe.bapo.hook.scopes``).
``read_and_validate`` is the only place in ``bapo`` that raises for non-finite input. It raises on every rank alike,
because it looks at counts that were added over all ranks.
"""

import torch
from torch import Tensor

from bapo.clip_statistics import collect_clip_statistics
from bapo.config import BAPOConfig
from bapo.diagnostics import Diagnostics, diagnose
from bapo.ratio import MAX_OLD_LOG_PROB
from bapo.search import ClipBounds, search_clip_bounds

# Share of an update's tokens that may lack a usable old log-prob. A rollout in which more do is broken.
MAX_MASKED_FRACTION = 1e-3


def find_clip_bounds(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: BAPOConfig,
    process_group: torch.distributed.ProcessGroup | None = None,
    clip_ratio_c: float | None = None,
) -> tuple[ClipBounds, Diagnostics]:
    """Find the clip bounds of one optimizer update from its whole mini-batch (Eq. 8, Algorithm 1).

    Args:
        old_log_prob, log_prob, advantages, response_mask: as in ``collect_clip_statistics``, in one of its shapes.
        config: the options of the search.
        process_group: the ranks that share the mini-batch; all of them must call this once. None: no communication.
        clip_ratio_c: the dual clip, which ``contribution="gradient"`` respects. None: no dual clip.

    Returns:
        The bounds, and the diagnostics of the same tokens. Both stay on the device until ``read_and_validate``.

    Raises:
        ValueError: the tensors have other shapes, or ``clip_ratio_c`` is not above 1. Non-finite input raises later,
            in ``read_and_validate``.
    """
    stats = collect_clip_statistics(old_log_prob, log_prob, advantages, response_mask, config, clip_ratio_c)
    if process_group is not None:
        stats = stats.all_reduce(process_group)
    bounds = search_clip_bounds(stats, config)
    return bounds, diagnose(stats, bounds)


def read_and_validate(
    bounds: ClipBounds, diagnostics: Diagnostics, max_masked_fraction: float = MAX_MASKED_FRACTION
) -> dict[str, float]:
    """Copy bounds and diagnostics to the host in one transfer, and refuse invalid input.

    Returns:
        Floats by field name, without the counts of invalid input.

    Raises:
        ValueError: log-probs or advantages of response tokens are not finite, or more than ``max_masked_fraction`` of
            the tokens have no usable old log-prob. The message names each such tensor and the number of its tokens.
    """
    values = read_scalars(vars(bounds) | vars(diagnostics))
    counts = {
        "old_log_prob": values.pop("invalid_old_log_probs"),
        "log_prob": values.pop("invalid_log_probs"),
        "advantages": values.pop("invalid_advantages"),
    }
    if values["masked_token_fraction"] <= max_masked_fraction:
        counts["old_log_prob"] = 0
    invalid = ", ".join(f"{count:.0f} in {name}" for name, count in counts.items() if count)
    if invalid:
        raise ValueError(
            f"Non-finite values, or old log-probs above {MAX_OLD_LOG_PROB}, on response tokens: {invalid}. "
            "No optimizer step was made. Look for a diverged model, or for a broken rollout or reward. Where old "
            "log-probs come from the rollout engine, look there."
        )
    return values


def read_scalars(scalars: dict[str, Tensor]) -> dict[str, float]:
    """Copy 0-d tensors of any type to the host in one transfer, as Python numbers under the same names."""
    packed = torch.stack([scalar.detach().double() for scalar in scalars.values()])
    return dict(zip(scalars, packed.tolist(), strict=True))
