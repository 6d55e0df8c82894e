# SPDX-License-Identifier: Apache-2.0
"""Run verl on a machine without a GPU.

The entry point ``verl.plugins`` names this package, so every process that imports verl imports it, too. With
``VERL_PLATFORM=cpu`` the package installs the CPU platform; otherwise it imports nothing else of ours.
"""

import os

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from recipe.bapo.verl_patches.cpu import platform

    platform.install()
