# SPDX-License-Identifier: Apache-2.0
"""Run verl on a machine without a GPU.

The entry point ``verl.plugins`` names this package, so every process that imports verl imports it and gets the CPU
platform. Without ``VERL_PLATFORM=cpu`` it imports nothing else of ours.
"""

import os

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from recipe.bapo.cpu import platform

    platform.install()
