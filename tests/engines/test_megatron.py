# SPDX-License-Identifier: Apache-2.0
"""Compare BAPO's updates in layouts of verl's real Megatron engine with FSDP's.

``layouts.py`` makes the updates. To see the figures as a table, run it by hand.
"""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engines.layouts import ALONE, BATCHES, KINDS, LAYOUTS, LOSS_OPTIONS, MONITOR, SPOILED, reference_of
from support.capture import (
    assert_rounding_changes_no_bounds,
    bounds_of,
    read_updates,
    tokens_of_updates,
    values_of_updates,
)
from support.megatron import install_packages
from support.oracle import sequential_search

from bapo import BAPOConfig
from recipe.bapo.run.console import warnings_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    try:
        install_packages()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"Megatron cannot be installed into .megatron/: {error}")
    folder = tmp_path_factory.mktemp("layouts") / "results"
    script = Path(__file__).with_name("layouts.py")
    done = subprocess.run([sys.executable, script, "--folder", folder], capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_makes_the_updates_that_fsdp_makes(results, layout, kind):
    expected, found = results[reference_of(layout)]["updates"], results[f"{layout}: {kind}"]["updates"]
    for update, (row, reference) in enumerate(zip(found, expected, strict=True)):
        assert (row["clip_low"], row["clip_high"]) == (reference["clip_low"], reference["clip_high"]), update
        assert row["positive_contribution"] == pytest.approx(reference["positive_contribution"], rel=1e-5)
        for value in ("loss", "grad_norm"):
            assert row[value] == pytest.approx(reference[value], rel=1e-4), (update, value)


def test_the_updates_use_different_bounds(results):
    """Check that the updates differ, because otherwise the comparison would show little."""
    rows = results["FSDP"]["updates"]
    assert len({(row["clip_low"], row["clip_high"]) for row in rows}) == BATCHES


ALL = {**LAYOUTS, **ALONE}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ALL)
def test_all_ranks_hold_the_same_bits_also_those_that_never_call_the_loss(results, layout, kind):
    found = results[f"{layout}: {kind}"]
    assert found["ranks"] == ALL[layout][0] and found["equal"]
    made = {"forward": (1, 0), "redone": (0, 1)}[kind]
    assert [(row["extra_forward"], row["redone"]) for row in found["updates"]] == [made] * BATCHES


@pytest.mark.parametrize("layout", ALL)
def test_a_redone_update_leaves_the_state_of_one_that_is_made_once(results, layout):
    """Compare weights, optimizer, and buffers such as the router's bias, on every rank, bit for bit."""
    states = {kind: results[f"{layout}: {kind}"]["states"] for kind in (*KINDS, "fixed")}
    assert states["redone"] == states["forward"]
    assert [rank[0] for rank in states["redone"]] == [rank[0] for rank in states["fixed"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ALL)
def test_a_bad_advantage_in_one_share_raises_on_all_ranks_and_changes_nothing(results, layout, kind):
    """Check the count, too. If all ranks added their tokens, it would double, and the bounds would not show that."""
    found = results[f"{layout}: {kind}"]["bad"]
    assert len(found) == ALL[layout][0]
    for rank in found:
        assert "on response tokens: 1 in advantages. No optimizer step" in rank["error"]
        assert rank["unchanged"]


@pytest.mark.parametrize("layout", ALL)
def test_each_update_searches_on_its_own_tokens(folder, results, layout):
    for kind in KINDS:
        capture, config = folder / f"{layout}: {kind}" / "capture", BAPOConfig(**LOSS_OPTIONS)
        found = values_of_updates(capture, config)
        assert_rounding_changes_no_bounds(capture, config)
        rows = results[f"{layout}: {kind}"]["updates"]
        for side in ("clip_low", "clip_high"):
            assert [values[side] for values in found[:BATCHES]] == [row[side] for row in rows]


def test_the_monitor_leaves_every_ranks_weights_and_sees_each_token_once(folder, results):
    of_verl, monitored = (results[name] for name in MONITOR)
    assert monitored == of_verl  # loss, gradient norm, and the hash of weights and optimizer
    capture = folder / "2 stages, monitored" / "capture"
    literal = [sequential_search(*tokens, BAPOConfig(), 3.0)[:2] for tokens in tokens_of_updates(capture)]
    for rank in range(2):  # the first stage never calls the loss
        assert [bounds_of(update) for update in read_updates(capture, rank)] == literal
    assert len(literal) == BATCHES


def test_what_is_said_of_a_spoiled_gradient_is_what_became_of_the_weights(folder, results):
    found = results[SPOILED]
    logged = found["logged"]
    assert not found["weights are finite"] and math.isnan(logged["actor/grad_norm"])
    assert logged["actor/bapo/skipped"] == 0
    (warning,) = warnings_of(logged).values()
    assert "Megatron makes its step, which breaks the weights" in warning
    of_worker = re.findall("^BAPO: the gradient norm .*$", (folder / SPOILED / "rank0.log").read_text(), re.M)
    assert len(of_worker) == 1 and "Megatron has made its step all the same" in of_worker[0]
