# SPDX-License-Identifier: Apache-2.0
"""What docs/losses.md says of verl's losses: which there are, which keys each reads, and what the methods set."""

import re
from dataclasses import fields

import pytest
import torch
from support.actor import actor_config
from support.batches import make_batch
from support.configs import ROOT, compose_in_groups

import verl  # noqa: F401  loads the plugin
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl.workers.config import PolicyLossConfig

PAGE = (ROOT / "docs/losses.md").read_text()
# Other values than the ones from which each loss starts.
CHANGED = {
    "clip_ratio": 0.5,
    "clip_ratio_low": 0.5,
    "clip_ratio_high": 0.5,
    "clip_ratio_c": 1.5,
    "loss_agg_mode": "seq-mean-token-sum",
    "tau_pos": 3.0,
    "tau_neg": 3.0,
    "policy_loss.clip_cov_ratio": 0.5,
    "policy_loss.clip_cov_lb": 0.2,
    "policy_loss.clip_cov_ub": 0.3,
    "policy_loss.kl_cov_ratio": 0.5,
    "policy_loss.ppo_kl_coef": 3.0,
    "policy_loss.dro_beta": 3.0,
}
START = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "clip_cov_ub": 5.0, "kl_cov_ratio": 0.2, "dro_beta": 1.0}


def table(header):
    """Read the rows of the page's table with this header as lists of cells."""
    rows = PAGE[PAGE.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|"))] for row in rows]


def names_in(cell):
    return set(re.findall(r"`([\w.]+)`", cell))


KEYS = {
    loss.strip("`"): names_in(keys) & CHANGED.keys() for loss, keys, _ in table("| `loss_mode` | keys that it reads |")
}


def gradient_of(loss_mode, key=None):
    """Compute the gradient of a loss on random tokens, with one key changed."""
    changes = {key: CHANGED[key]} if key else {}
    of_loss = {name.removeprefix("policy_loss."): value for name, value in changes.items() if "." in name}
    loss = PolicyLossConfig(loss_mode=loss_mode, **(START | of_loss))
    of_actor = {name: value for name, value in changes.items() if "." not in name}
    config = actor_config(loss, **({"clip_ratio_low": 0.02, "clip_ratio_high": 0.02} | of_actor))
    old_log_prob, log_prob, advantages, mask = make_batch(0, rows=48)
    old_log_prob = old_log_prob - 2  # so that no probability is above 1
    log_prob = (log_prob - 2).clamp(max=-0.01).requires_grad_()
    torch.manual_seed(0)  # clip_cov chooses tokens at random
    value, _ = get_policy_loss_fn(loss_mode)(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
    )
    value.backward()
    return log_prob.grad


def test_both_tables_have_a_row_for_every_loss_of_verl():
    described = [row[0].strip("`") for row in table("| `loss_mode` | paper |")]
    assert set(POLICY_LOSS_REGISTRY) - {"bapo"} == set(described) == set(KEYS)


@pytest.mark.parametrize("loss_mode", KEYS)
def test_a_loss_reads_the_keys_of_its_row_and_no_other(loss_mode):
    start = gradient_of(loss_mode)
    assert start.isfinite().all() and start.any()
    assert {key for key in CHANGED if not torch.equal(gradient_of(loss_mode, key), start)} == KEYS[loss_mode]


def test_every_key_of_verls_loss_config_is_changed():
    known = {f"policy_loss.{field.name}" for field in fields(PolicyLossConfig) if not field.name.startswith("_")}
    assert known - {"policy_loss.loss_mode", "policy_loss.rollout_correction"} <= CHANGED.keys()


@pytest.mark.parametrize("method", [row[0].strip("`") for row in table("| `method=` | loss of verl |")])
def test_a_method_sets_what_its_row_says(method, monkeypatch):
    for name in ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE"):
        monkeypatch.setenv(name, f"/{name}")
    (row,) = (row[1:] for row in table("| `method=` | loss of verl |") if row[0] == f"`{method}`")
    config = compose_in_groups("experiment=example", "size=gpu", f"method={method}")
    actor = config.actor_rollout_ref.actor
    found = [actor.policy_loss.loss_mode, actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c]
    found += [actor.loss_agg_mode, "on" if config.algorithm.filter_groups.enable else "off"]
    assert [str(value) for value in found] == [cell.strip("`") for cell in row]
