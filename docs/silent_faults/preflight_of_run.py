# SPDX-License-Identifier: Apache-2.0
"""Give the command of a run to preflight: python preflight_of_run.py outputs/DATE/TIME/.hydra/overrides.yaml."""

import subprocess
import sys
from pathlib import Path

import yaml

arguments = yaml.safe_load(Path(sys.argv[1]).read_text())
sys.exit(subprocess.call([sys.executable, "-m", "recipe.bapo.preflight", *arguments]))
