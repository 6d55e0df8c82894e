# SPDX-License-Identifier: Apache-2.0
"""The files of configs/method set what docs/losses.md says of them."""

import pytest
from support.configs import ROOT, compose_in_groups

ROWS = (ROOT / "docs/losses.md").read_text().partition("| `method=` | loss of verl |")[2].split("\n\n")[0]
CELLS = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in ROWS.splitlines()[2:]]


@pytest.mark.parametrize("method, row", [(method, row) for method, *row in CELLS])
def test_a_method_sets_what_its_row_says(method, row, monkeypatch):
    for name in ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE"):
        monkeypatch.setenv(name, f"/{name}")
    config = compose_in_groups("experiment=example", "size=gpu", f"method={method}")
    actor = config.actor_rollout_ref.actor
    found = [actor.policy_loss.loss_mode, actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c]
    found += [actor.loss_agg_mode, "on" if config.algorithm.filter_groups.enable else "off"]
    assert [str(value) for value in found] == row
