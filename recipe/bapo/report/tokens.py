# SPDX-License-Identifier: Apache-2.0
"""Read the tokens that a run has written, file by file, and count what each loss cuts of them."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import torch

from bapo import is_usable
from recipe.bapo.hook.own_clip import OwnClip
from recipe.bapo.hook.tokens import KEY, SCHEMA, VERSION
from recipe.bapo.report.losses import BAPO, LOSSES, cut_by_each

OF_THE_LOSS = ("loss_mode", "applied", "clip_ratio_c", "own_clip")  # what all files of a run have in common
UNREADABLE = "files that are cut off or hold something else"
PROBABILITIES = [0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0]  # ends of the ranges that are counted apart
THIS_RUN = "this run: "
EXAMPLES = 3  # responses that are kept of each sign


@dataclass
class Cuts:
    """What the losses cut of a run's tokens with an advantage.

    Attributes:
        about: what the metadata of the files says of the run's loss.
        losses: the names of the losses, the run's own first if its limits are known.
        updates: the pairs of BAPO's bounds in each update that was read, by its step and number; one pair unless the
            bounds are those of micro-batches.
        responses: number of responses, each counted in every update.
        no_advantage: number of tokens with A = 0, which no other number here counts.
        by_probability: numbers of tokens (``tokens``) and of those that each loss cuts, by the sign of A and the number
            of the range of ``PROBABILITIES`` that holds the old probability.
        by_token: the same by token and sign, with the sum of old probabilities (``probability``).
        both: number of tokens that two losses both cut, a row and a column for each loss.
        examples: by the sign of A the responses of which the first loss cuts most tokens.
        left_out: numbers of files and tokens that could not be counted, by what they are.
    """

    about: dict
    losses: list[str]
    left_out: Counter
    updates: dict[tuple[int, int], set[tuple[float, float]]] = field(default_factory=dict)
    responses: int = 0
    no_advantage: int = 0
    by_probability: pd.DataFrame = field(default_factory=pd.DataFrame)
    by_token: pd.DataFrame = field(default_factory=pd.DataFrame)
    both: pd.DataFrame = field(default_factory=pd.DataFrame)
    examples: dict[int, list[pd.DataFrame]] = field(default_factory=lambda: {1: [], -1: []})

    @property
    def by_sign(self) -> pd.DataFrame:
        """The numbers of ``by_probability`` by sign alone."""
        return self.by_probability.groupby(level="sign").sum()


def count_cuts(folder: Path) -> Cuts:
    """Count what each loss cuts of the tokens in a folder.

    Where two starts of a run wrote the same update, as after a resume, the later one counts.

    Raises:
        ValueError: the folder has no file that can be read, no token with an advantage, or runs with several losses.
    """
    paths = sorted(folder.glob("tokens-*.parquet"))
    if not paths:
        raise ValueError(
            f"{folder} holds no tokens-*.parquet: train with token_dir={folder.resolve()} (docs/monitor.md)."
        )
    left_out: Counter = Counter()
    latest: dict[tuple, Path] = {}
    runs: dict[str, dict] = {}
    for path in paths:
        try:
            about = json.loads(pq.read_schema(path).metadata[KEY])
            if about["version"] == VERSION:
                latest[about["step"], about["update"], about["rank"]] = path
                runs[json.dumps([about[name] for name in OF_THE_LOSS])] = about
            else:
                left_out[f"files of version {about['version']} (this reads version {VERSION})"] += 1
        except (OSError, ValueError, KeyError, TypeError):
            left_out[UNREADABLE] += 1
    if len(runs) > 1:
        raise ValueError(f"{folder} holds runs with different losses: {' and '.join(runs)}. Give each its own folder.")
    if not runs:
        raise ValueError(f"{folder} holds no tokens that can be read, but {describe(left_out)}.")
    about = next(iter(runs.values()))
    cuts = Cuts(about, _losses_of(about), left_out)
    for path in latest.values():
        try:
            rows = pq.read_table(path).select(SCHEMA.names).cast(SCHEMA).to_pandas()
        except (OSError, ValueError, KeyError):
            left_out[UNREADABLE] += 1
            continue
        _add(cuts, rows)
    if cuts.by_probability.empty:
        raise ValueError(f"{folder} holds no token with an advantage that can be used. {describe(left_out)}".strip())
    return cuts


def describe(left_out: Counter) -> str:
    """Say what could not be counted; nothing if there is nothing."""
    return ", ".join(f"{number:,} {what}" for what, number in left_out.items() if number)


def _losses_of(about: dict) -> list[str]:
    """Return the names of the losses to compare, each once, the run's own first."""
    others = [BAPO, *LOSSES]
    if about["applied"]:
        return [f"{THIS_RUN}{about['loss_mode']}", *LOSSES]
    if about["own_clip"] is None:
        return others
    own = OwnClip(**about["own_clip"])
    limits = f"{about['loss_mode']}{', which caps' * (own.kind == 'cap')} [{own.low:g}, {own.high:g}]"
    name = next((name for name, loss in LOSSES.items() if loss == own), limits)
    return [f"{THIS_RUN}{name}", *(other for other in others if other != name)]


def _add(cuts: Cuts, rows: pd.DataFrame) -> None:
    """Add the tokens of a file."""
    old, new, advantages = (torch.tensor(rows[name].to_numpy()) for name in ("old_log_prob", "log_prob", "advantage"))
    usable = (is_usable(old) & new.isfinite() & advantages.isfinite()).numpy()
    cuts.left_out["tokens with a log-prob or an advantage that cannot be used"] += int((~usable).sum())
    measured = rows["c_low"].notna().to_numpy()
    cuts.left_out["tokens of updates that were not measured"] += int((usable & ~measured).sum())
    rows = rows[usable & measured].reset_index(drop=True)
    if rows.empty:
        return
    of_update = cuts.updates.setdefault((int(rows["step"][0]), int(rows["update"][0])), set())
    of_update |= {*zip(rows["c_low"], rows["c_high"], strict=True)}
    cuts.responses += rows["response"].nunique()
    found = _cut_by_each(rows, cuts.about["clip_ratio_c"])
    if cuts.losses[0] not in found:  # the run's own loss, which is in the file
        found[cuts.losses[0]] = rows["cut"].to_numpy()
    rows = rows.assign(
        **{name: found[name] for name in cuts.losses},
        sign=np.sign(rows["advantage"]).astype(int),
        probability=np.exp(rows["old_log_prob"].astype(float)),
        tokens=1,
    )
    rows["range"] = np.searchsorted(PROBABILITIES[1:-1], rows["probability"], side="right")
    signed = rows[rows["sign"] != 0]
    cuts.no_advantage += len(rows) - len(signed)
    counts = ["tokens", *cuts.losses]
    cuts.by_probability = _sum(cuts.by_probability, signed.groupby(["sign", "range"])[counts].sum())
    cuts.by_token = _sum(cuts.by_token, signed.groupby(["token", "sign"])[[*counts, "probability"]].sum())
    cut = signed[cuts.losses].astype(int)
    cuts.both = _sum(cuts.both, cut.T @ cut)
    for sign, examples in cuts.examples.items():
        number = signed[signed["sign"] == sign].groupby("response")[cuts.losses[0]].sum()
        examples += [rows[rows["response"] == response] for response in number.nlargest(EXAMPLES).index]
        examples.sort(key=lambda one: -one[cuts.losses[0]].sum())
        del examples[EXAMPLES:]


def _cut_by_each(rows: pd.DataFrame, clip_ratio_c: float | None) -> dict[str, np.ndarray]:
    """Return which of the tokens each loss cuts."""
    numbers = pd.factorize(rows["response"])[0], rows.groupby("response").cumcount().to_numpy()
    place = tuple(torch.tensor(number.copy()) for number in numbers)
    mask = torch.zeros([int(index.max()) + 1 for index in place], dtype=torch.bool)
    mask[place] = True

    def padded(name):
        column = torch.tensor(rows[name].to_numpy())
        return torch.zeros(mask.shape, dtype=column.dtype).index_put_(place, column)

    old, new, advantages, low, high = map(padded, ("old_log_prob", "log_prob", "advantage", "c_low", "c_high"))
    found = cut_by_each(old, new, advantages, mask, low, high, clip_ratio_c)
    return {name: cut[place].numpy() for name, cut in found.items()}


def _sum(one: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    return other if one.empty else one.add(other, fill_value=0)
