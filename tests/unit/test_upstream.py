# SPDX-License-Identifier: Apache-2.0
"""The recipe names the verl that it needs as verl's collection of recipes reads it."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipe" / "bapo"


def test_the_required_verl_is_the_one_that_preflight_wants():
    from recipe.bapo.checks.machine import VERL

    lines = dict(line.split("=", 1) for line in (RECIPE / "REQUIRED_VERL.txt").read_text().splitlines() if "=" in line)
    # What install_verl.sh of verl's collection of recipes reads where MODE is pinned_tag.
    assert lines["MODE"] == "pinned_tag" and lines["TAG"] == f"v{VERL}" and lines["COMMIT"]
    assert lines["PIP_INSTALL"].startswith(f"pip install verl=={VERL} TransferQueue==") and lines["UPSTREAM"].endswith(
        "/verl.git"
    )
    assert f"verl=={VERL}\n" in (ROOT / "requirements.txt").read_text()
