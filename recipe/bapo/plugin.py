# SPDX-License-Identifier: Apache-2.0
"""Loaded by verl in every process (entry point ``verl.plugins``), and usable as ``external_lib``.

Registers the policy loss ``bapo`` and, only where ``VERL_PLATFORM=cpu`` asks for it, the CPU
platform.
"""

import os

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from recipe.bapo.cpu import platform

    platform.install()

from recipe.bapo import policy_loss  # noqa: E402, F401
