# SPDX-License-Identifier: Apache-2.0
"""verl on a machine without a GPU. The entry point ``verl.plugins`` names this package, so that every process which
imports verl has the platform; without ``VERL_PLATFORM=cpu`` nothing more of ours is imported there."""

import os

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from recipe.bapo.cpu import platform

    platform.install()
