# SPDX-License-Identifier: Apache-2.0
"""The sentences at the top of the report: what its numbers say to a reader who reads nothing else.

The thresholds that turn a number into a judgement stand here and nowhere else.
"""

from __future__ import annotations

from bapo import BAPOConfig

OWN = "this run's own"  # the name of the row of methods that is the run's
MATTERS = 0.2  # a share of the updates from which the search is worth having


def _percent(share):
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def verdict(report: dict, config: BAPOConfig, about: dict[str, str]) -> list[str]:
    """What is clipped, who carries the gradient, which target is in reach; and where the run's own scope differs."""
    row = report["methods"][0]
    who, verb = ("This run's own loss", "leaves") if row["method"] == OWN else (row["method"], "would leave")
    without = {name: _percent(share) for name, share in row["without_gradient"].items()}
    clip = (
        f"{who} ({row['settings']}) {verb} {without['all']} of the tokens without a gradient (A > 0: "
        f"{without['positive']}, A < 0: {without['negative']}) and {_percent(row['gradient_left']['all'])} of the "
        "gradient's size before clipping."
    )
    negative, above = report["signs"]["negative"], {row["ratio"]: row for row in report["unbounded"]["above"]}
    carries = (
        f"Tokens with A < 0 are {_percent(negative['tokens'])} of the tokens and carry "
        f"{_percent(negative['gradient'])} of the gradient's size before clipping; those of them with r > 3, "
        f"which no bound of PPO or BAPO touches, carry {_percent(above[3.0]['gradient'])}."
    )
    name = (config.contribution, config.token_weight)
    rho = next(one for one in report["rho"] if (one["contribution"], one["token_weight"]) == name)
    targets, moving = report["curve"]["target"], report["curve"]["met_by_moving"]
    best = max(range(len(targets)), key=lambda k: moving[k])
    reach = f"rho ({', '.join(name)}) is {rho['before']['mean']:.3f} before the search, and bounds move it from "
    reach += f"{rho['reach']['from']:.3f} to {rho['reach']['to']:.3f} on average; "
    if moving[best] < 0.005:
        reach += "no target is met by moving them: BAPO has nothing to adapt here."
    else:
        what = "BAPO can adapt here" if moving[best] >= MATTERS else "BAPO would mostly be a fixed range here"
        reach += (
            f"target {targets[best]:g} is met by moving them in {_percent(moving[best])} of the updates, more than "
        )
        reach += f"any other: {what}."
    sentences = [clip, carries, reach]
    if about.get("bound_scope") == "micro_batch":
        sentences.append("The run found its bounds per micro-batch; this page is per update, so the run's own differ.")
    return sentences


def staleness(report: dict) -> str | None:
    """One sentence, or None where the dump says neither the update's number nor the weights' age.

    Where it says both, the sentence is about the one with which clipping grows.
    """
    sentences = []
    for key, name in (("by_age", "age"), ("by_update", "update")):
        rows = report[key]
        if not rows or len(rows) < 2:
            continue
        before, after = rows[0]["clipped_by_grpo"], rows[-1]["clipped_by_grpo"]
        where = f"[0.8, 1.2] clips {_percent(before)} of the tokens at {name} {rows[0][name]}, {_percent(after)} at "
        where += f"{name} {rows[-1][name]}"
        if max(before, after) < 0.001:
            sentences.append(f"{where}: hardly anything is clipped.")
        elif after > 2 * before:
            return f"{where}: it grows with staleness."
        else:
            sentences.append(f"{where}: staleness is not the main cause; compare the log-probs of sampler and trainer.")
    return sentences[0] if sentences else None
