# SPDX-License-Identifier: Apache-2.0
"""What a run of verl loads with the two lines of BAPO, or with the monitor's line.

Beside it such a run loads ``bapo``, ``recipe.bapo.policy_loss`` and ``recipe.bapo.verl_patches.fused_heads``.
``worker`` wraps verl's engine, ``scopes`` and ``monitor`` find the bounds of an update, ``record``, ``verdict`` and
``tell`` say what was found. ``recipe.bapo.policy_loss`` holds what a user's command names.
"""
