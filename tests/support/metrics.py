# SPDX-License-Identifier: Apache-2.0
"""The metrics that every update logs."""

METRICS = {
    "actor/pg_clipfrac",
    "actor/ppo_kl",
    "actor/pg_clipfrac_lower",
    "actor/bapo/clip_low",
    "actor/bapo/clip_high",
    "actor/bapo/positive_contribution",
    "actor/bapo/positive_contribution_start",
    "actor/bapo/positive_contribution_highest",
    "actor/bapo/search_steps",
    "actor/bapo/saturated",
    "actor/bapo/met_at_start",
    "actor/bapo/met_by_moving",
    "actor/bapo/positive_token_fraction",
    "actor/bapo/clipfrac_positive",
    "actor/bapo/clipfrac_negative",
    "actor/bapo/length_positive",
    "actor/bapo/length_negative",
    "actor/bapo/effective_sample_size",
    "actor/bapo/entropy_covariance",
    "actor/bapo/negative_unbounded_share",
    "actor/bapo/masked_token_fraction",
    "actor/bapo/extra_forward",
    "actor/bapo/redone",
    "actor/bapo/skipped",
}
