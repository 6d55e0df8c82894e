# SPDX-License-Identifier: Apache-2.0
"""Write the sentences at the top of the report, for a reader who reads nothing else.

All thresholds that turn a number into a judgement are in this file.
"""

OWN = "this run's own"  # in the table of methods, the name of the run's own loss
MATTERS = 0.2  # we call the search worth having if at least this share of the updates meets the target by moving bounds


def _percent(share):
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def verdict(report: dict) -> list[str]:
    """Say what is clipped, which tokens carry the gradient, and which target is in reach.

    If the run found its bounds on other tokens than this report does (``bound_scope``), say that too.
    """
    row, negative = report["methods"][0], report["signs"]["negative"]
    who, verb = ("This run's own loss", "leaves") if row["method"] == OWN else (row["method"], "would leave")
    without = {sign: _percent(share) for sign, share in row["without_gradient"].items()}
    rho = report["rho"][0]
    moving = max(rho["met_by_moving"])
    best = [target for target, share in zip(rho["target"], rho["met_by_moving"], strict=True) if share == moving]
    target = best[(len(best) - 1) // 2]  # the middle one, because rho may drift either way during training
    fit = "BAPO can adapt here" if moving >= MATTERS else "BAPO would mostly be a fixed range here"
    reach = f"of all targets, {target:g} is met by moving them in the most updates, {_percent(moving)}: {fit}."
    if moving < 0.005:
        reach = "no target is met by moving them: BAPO has nothing to adapt here."
    sentences = [
        f"{who} ({row['settings']}) {verb} {without['all']} of the tokens without a gradient (A > 0: "
        f"{without['positive']}, A < 0: {without['negative']}). The others carry "
        f"{_percent(row['gradient_left']['all'])} of the gradient's size before clipping.",
        f"Tokens with A < 0 are {_percent(negative['tokens'])} of the tokens and carry "
        f"{_percent(negative['gradient'])} of the gradient's size before clipping; those of them with r > 3, "
        f"which no bound of PPO or BAPO touches, carry {_percent(report['unbounded']['gradient_above_3'])}.",
        f"rho ({rho['contribution']}, {rho['token_weight']}) is {rho['before']:.3f} before the search, and bounds move "
        f"it from {rho['lowest']:.3f} to {rho['highest']:.3f} on average; {reach}",
    ]
    if report["dump"]["bound_scope"] == "micro_batch":
        sentences.append("The run found its bounds per micro-batch; this page is per update, so the run's own differ.")
    if report["dump"]["bound_scope"] == "previous_batch":
        sentences.append(
            "The run took the bounds of each update from the same update of the rollout batch before, and so does its "
            "row here; the other rows of BAPO search the tokens of each update itself."
        )
    return sentences


def staleness(report: dict) -> str | None:
    """Say in one sentence whether staleness explains the clipping; None if the dump has neither update nor age.

    If the dump has both the number of the update and the age of the weights, the sentence is about the one with which
    clipping grows.
    """
    sentences = []
    for name in ("age", "update"):
        rows = report[f"by_{name}"]
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
