# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a batch get no gradient from each of some well-known losses."""

import math

from torch import Tensor

from bapo import is_clipped
from recipe.bapo.hook.own_clip import OwnClip

BAPO = "BAPO, the update's bounds"
# By name, with the limits that configs/method and verl's examples have (docs/losses.md). Where A < 0, PPO and DAPO also
# have verl's dual clip. CISPO caps the weight of a token, which keeps its gradient.
LOSSES = {
    "PPO [0.8, 1.2]": OwnClip("clip", 1 - 0.2, 1 + 0.2, dual_clip=3.0),
    "DAPO [0.8, 1.28]": OwnClip("clip", 1 - 0.2, 1 + 0.28, dual_clip=10.0),
    "GSPO [0.9997, 1.0004]": OwnClip("clip", 1 - 0.0003, 1 + 0.0004, of="sequence ratio"),
    "DPPO-TV 0.15": OwnClip("clip", -0.15, 0.15, of="probability"),
    "DPPO-KL 0.05": OwnClip("clip", -0.05, 0.05, of="divergence"),
    "CISPO, capped at 1.2": OwnClip("cap", -9.0, 1 + 0.2),
}
# Shares of all response tokens that others report (docs/results/published.md, which has the sources).
REPORTED = {"PPO [0.8, 1.2]": "0.03–2%", "DAPO [0.8, 1.28]": "0.03–2%", "GSPO [0.9997, 1.0004]": "0–44%"}
# What a loss compares with its limits, for a reader of the page (OwnClip.of).
COMPARED = {
    "ratio": "the ratio of the new to the old probability",
    "sequence ratio": "the geometric mean of a response's ratios, for whole responses; in short ones it varies more",
    "log-ratio": "the logarithm of the ratio of the new to the old probability",
    "probability": "the change of the probability",
    "divergence": "the KL divergence between “this token” and “another one”, with the sign of the change",
}


def what_it_compares(loss: OwnClip) -> str:
    """Say in a clause which tokens a loss cuts, or caps."""
    if loss.kind == "cap":
        least = f" or below {loss.low:g}" * (loss.low > 0)
        return f"{COMPARED['ratio']} above {loss.high:g}{least}: it caps that ratio, and the token keeps its gradient"
    dual_clip = f" or above {loss.dual_clip:g} (the dual clip)" * (loss.of == "ratio" and loss.dual_clip < math.inf)
    return f"{COMPARED[loss.of]}: above {loss.high:g} if A > 0, below {loss.low:g}{dual_clip} if A < 0"


def cut_by_each(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    low: Tensor | float,
    high: Tensor | float,
    clip_ratio_c: float | None,
) -> dict[str, Tensor]:
    """Return by the name of each loss which tokens get no gradient from it, or with CISPO a capped one.

    Args:
        old_log_prob, log_prob, advantages, mask: whole responses, ``(B, T)``, with old log-probs that ``is_usable``
            accepts where the mask is true. Where A = 0 or the mask is false the result means nothing.
        low, high: BAPO's bounds, numbers or ``(B, T)``.
        clip_ratio_c: the dual clip of BAPO's loss; None: no dual clip.
    """
    bapo = is_clipped(old_log_prob, log_prob, advantages, low, high, clip_ratio_c)
    others = {name: loss(old_log_prob, log_prob, advantages, mask)[1] for name, loss in LOSSES.items()}
    return {BAPO: bapo, **others}
