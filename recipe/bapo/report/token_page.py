# SPDX-License-Identifier: Apache-2.0
"""Write the page on tokens: one HTML file that needs no network and holds no script.

Everything from a run goes through ``html.escape``, after control characters were made visible.
"""

import io
from collections import Counter
from collections.abc import Callable, Iterable
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from recipe.bapo.hook.own_clip import OwnClip
from recipe.bapo.hook.tokens import RESPONSES
from recipe.bapo.hook.verdict import percent
from recipe.bapo.report.losses import BAPO, COMPARED, LOSSES, REPORTED, what_it_compares
from recipe.bapo.report.tokens import PROBABILITIES, THIS_RUN, Cuts, count_cuts, describe

SIGNS = {1: "A > 0", -1: "A < 0"}
MOST_TOKENS = 30  # rows of the table of tokens
LONGEST = 600  # tokens of a response that are shown
FEWEST = 20  # tokens of a range of probabilities that has a point in the figure
INK = "#010203"  # stands for the color of the page's text in a figure
COLORS = ["#d1495b", "#2a9d8f", "#e08e2b", "#4a7fd6", "#9b5de5", "#7f8c3b", "#c05299"]
STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #666d75; --paper: #fffdf9; --line: #dfdcd4; --mark: #ffd9a8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e2dd; --soft: #a09c94; --paper: #17181a; --line: #37383b; --mark: #7a4a12; }
}
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 46rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.6 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; } h2 { margin: 2.6rem 0 .4rem; font-size: 1.2rem; }
.soft, caption, figcaption { color: var(--soft); font-size: .88rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
@media (min-width: 60rem) { .scroll { width: max-content; max-width: calc(50vw + 21rem); } }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem 0 .3rem .8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { vertical-align: bottom; font-weight: 600; white-space: normal; min-width: 3.2rem; }
p { overflow-wrap: anywhere; }
th:first-child, td:first-child { padding-left: 0; min-width: 7rem; text-align: left; white-space: normal; }
table.words { max-width: 44rem; } .words th, .words td { text-align: left; white-space: normal; }
figure { margin: 1.4rem 0; } svg { display: block; width: 100%; max-width: 36rem; height: auto; }
.text { margin: .3rem 0; padding: .8rem 1rem; border: 1px solid var(--line); border-radius: .4rem;
  font: .88rem/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
mark { padding: .1em 0; color: inherit; background: var(--mark); border-radius: .2em; }
u { text-decoration: underline dotted; text-underline-offset: .25em; }
"""


def write_page(folder: Path, out: Path, tokenizer: str | None = None) -> str:
    """Write the page on the tokens in a folder. Returns a warning, or an empty text.

    Args:
        folder: the ``token_dir`` of a run.
        out: the page.
        tokenizer: the folder of the run's tokenizer, as transformers reads it. None: the page shows numbers of tokens.

    Raises:
        ValueError: the folder has no tokens that can be counted.
    """
    cuts = count_cuts(folder)
    decode: Callable[[int], str] = _number
    warning = ""
    if tokenizer is not None:
        try:
            decode = _decoder(tokenizer)
        except Exception as error:  # transformers raises many kinds
            reason = " ".join(str(error).split())[:200]
            warning = f"The tokenizer {tokenizer} cannot be read, so tokens are shown by their numbers: {reason}"
    body = [*_what_it_is(folder, cuts, warning), *_shares(cuts), *_by_probability(cuts), *_by_token(cuts, decode)]
    body += [*_disagreement(cuts), *_responses(cuts, decode)]
    head = f'<meta name="viewport" content="width=device-width"><title>Clipped tokens</title><style>{STYLE}</style>'
    lines = ['<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8">', head, "<body>", *body, "</body></html>\n"]
    out.write_text("\n".join(lines), encoding="utf-8")
    return warning


def _what_it_is(folder: Path, cuts: Cuts, warning: str) -> Iterable[str]:
    steps = sorted({step for step, _ in cuts.updates})
    tokens = int(cuts.by_sign["tokens"].sum())
    few = ", ".join(map(str, steps[:12])) + (" and later" if len(steps) > 12 else "")
    yield "<h1>Which tokens do the losses clip?</h1>"
    yield _text(
        f"Measured in {len(cuts.updates):,} updates of the training steps {few}, on {cuts.responses:,} responses, each "
        f"counted again in every update that trains on it, with {tokens:,} tokens that have an advantage (up to "
        f"{RESPONSES} responses of an update on a rank; {folder}). A loss cuts a token if the token gets no gradient "
        "from it; CISPO caps the token's weight instead, which is counted here as if it were cut."
    )
    yield _text(
        "These are measurements on the tokens of this run. They say what each loss would do to the same tokens, and "
        "not which loss trains better: with another loss the ratios would differ from the second update on. A > 0 are "
        "the tokens of answers that were better than others to the same prompt, A < 0 those of worse ones."
    )
    if cuts.no_advantage:
        yield _text(f"{cuts.no_advantage:,} more tokens have no advantage (A = 0) and train nothing.", "soft")
    for left_out in filter(None, (describe(cuts.left_out), warning)):
        yield _text(f"Not counted: {left_out}." if left_out != warning else left_out, "soft")


def _shares(cuts: Cuts) -> Iterable[str]:
    counts = cuts.by_sign.reindex(SIGNS, fill_value=0)
    everything = counts["tokens"].sum() + cuts.no_advantage
    rows = [
        [
            name,
            *(_share(counts[name][sign], counts["tokens"][sign]) for sign in SIGNS),
            _share(counts[name].sum(), everything),
            REPORTED.get(name.removeprefix(THIS_RUN), "–"),
        ]
        for name in cuts.losses
    ]
    rows.append(["tokens", *(f"{int(counts['tokens'][sign]):,}" for sign in SIGNS), f"{int(everything):,}", ""])
    yield "<h2>Share of the tokens that are cut</h2>"
    yield _table(["", *SIGNS.values(), "all, A = 0 too", "others report"], rows)
    yield _text(
        "To see whether a share is usual, compare the last two columns. Both are over all response tokens, also those "
        "with A = 0, which no loss cuts; so is verl's pg_clipfrac, but for what the dual clip cuts. Where nothing is "
        "reported, we know of no figure (docs/results/published.md of BAPO for verl has the sources). More updates on "
        "each rollout batch and older rollouts mean more clipping."
    )
    yield "<h2>What each loss compares</h2>"
    yield _table(["loss", "it cuts a token by"], list(_rules(cuts)), "words")


def _rules(cuts: Cuts) -> Iterable[list[str]]:
    found = (pair for of_update in cuts.updates.values() for pair in of_update)
    pairs = Counter(f"[{low:.3g}, {high:.3g}]" for low, high in found).most_common()
    bounds = ", ".join(f"{pair} in {number:,}" for pair, number in pairs[:3])
    others = f" of the {len(pairs):,} pairs found, the most common ones," if len(pairs) > 3 else ""
    of_bapo = (
        f"{COMPARED['ratio']}: above the upper bound if A > 0, below the lower one if A < 0. It searches both for each "
        f"update:{others} {bounds} of the {len(cuts.updates):,} updates here"
    )
    for name in cuts.losses:
        if name == BAPO or (name == cuts.losses[0] and cuts.about["applied"]):
            yield [name, of_bapo]
        else:
            yield [name, what_it_compares(LOSSES.get(name) or OwnClip(**cuts.about["own_clip"]))]


def _by_probability(cuts: Cuts) -> Iterable[str]:
    yield "<h2>By the token's probability</h2>"
    yield _text(
        "The share that is cut of the tokens whose probability under the old policy was in a range, and below each "
        f"range the number of its tokens; a range with fewer than {FEWEST} says nothing and has no point. The "
        "BAPO paper argues that fixed bounds cut rare tokens of good answers most, which are those of the first figure "
        "with a probability of a few percent or less. Likely tokens cannot be cut there by a bound on their own ratio: "
        "with probability p it is at most 1 / p, so 1.2 is out of reach above 83 %. Where losses have the same limit, "
        "as PPO and DAPO for A < 0, one curve hides the other."
    )
    places = pd.MultiIndex.from_product([SIGNS, range(len(_ranges()))])
    counts = cuts.by_probability.reindex(places, fill_value=0)
    for sign, label in SIGNS.items():
        yield f"<figure>{_figure(counts.loc[sign], cuts.losses, label)}</figure>"


def _figure(counts: pd.DataFrame, losses: list[str], label: str) -> str:
    settings: Any = {f"{part}color": INK for part in ("text.", "axes.edge", "axes.label", "xtick.", "ytick.")}
    file = io.StringIO()
    with rc_context({**settings, "svg.fonttype": "none", "svg.hashsalt": "bapo", "font.size": 11}):
        figure = Figure(figsize=(5.4, 4.8), layout="constrained")
        axis = figure.subplots()
        for name, color, marker in zip(losses, cycle([INK, *COLORS]), cycle("os^vDPX<"), strict=False):
            shares = counts[name] / counts["tokens"].where(counts["tokens"] >= FEWEST)
            label_of = name.replace("$", r"\$")  # no mathematics
            style = ":" if "cap" in name else "-"  # where it lies on another curve, both are seen
            axis.plot(range(len(shares)), shares, style, marker=marker, markersize=5, color=color, label=label_of)
        ticks = [f"{name}\n{int(tokens):,}" for name, tokens in zip(_ranges(), counts["tokens"], strict=True)]
        axis.set_xticks(range(len(counts)), ticks, rotation=40, ha="right")
        axis.set_title(f"Tokens with {label}: share that is cut", loc="left", fontsize=12)
        axis.set_xlabel("probability under the old policy, and number of tokens")
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=10)
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")


def _by_token(cuts: Cuts, decode: Callable[[int], str]) -> Iterable[str]:
    first = cuts.losses[0]
    cut = cuts.by_token[cuts.by_token[first] > 0]
    most = cut.sort_values([first, "tokens"], ascending=False, kind="stable").head(MOST_TOKENS)
    rows = [
        [
            _visible(decode(int(token))).replace(" ", "␣"),
            SIGNS[sign],
            f"{int(row[first]):,}",
            f"{int(row['tokens']):,}",
            f"{row['probability'] / row['tokens']:.3f}",
            *(_share(row[name], row["tokens"]) for name in cuts.losses),
        ]
        for (token, sign), row in most.iterrows()
    ]
    yield "<h2>The tokens that are cut most often</h2>"
    yield _text(
        f"The {len(rows)} tokens of a sign of which “{first}” cuts most, with the number of times it cut them, how "
        "often they occur, their mean probability under the old policy where they occur, and the share of them that "
        "each loss cuts."
    )
    yield _table(["token", "sign", "cut", "occurs", "mean probability, cut or not", *cuts.losses], rows)


def _disagreement(cuts: Cuts) -> Iterable[str]:
    first, *others = cuts.losses
    rows = []
    for name in others:
        both, of_first, of_this = (int(cuts.both.loc[pair]) for pair in ((first, name), (first, first), (name, name)))
        rows.append([name, *(f"{number:,}" for number in (both, of_first - both, of_this - both))])
    yield "<h2>Where the losses disagree</h2>"
    yield _text(f"Numbers of tokens that “{first}” and the loss of a row both cut, and that only one of the two cuts.")
    yield _table(["", "both", f"only {first}", "only the row's loss"], rows)


def _responses(cuts: Cuts, decode: Callable[[int], str]) -> Iterable[str]:
    first = cuts.losses[0]
    yield "<h2>Responses</h2>"
    yield _text(
        f"Of each sign the responses in which “{first}” cuts most tokens, so they are not typical. Marked: what it "
        "cuts. Underlined: what only another loss cuts, other than GSPO, which cuts whole responses. Pointing at one "
        "shows its probabilities and these losses."
    )
    for rows in (one for sign in SIGNS for one in cuts.examples[sign]):
        start = rows.iloc[0]
        more = f" Its first {LONGEST} of {len(rows):,} tokens." if len(rows) > LONGEST else ""
        caption = (
            f"Step {start['step']}, update {start['update']}, rank {start['rank']}, response {start['response']}: "
            f"A = {start['advantage']:.2f}; {int(rows[first].sum()):,} of {len(rows):,} tokens are cut.{more}"
        )
        between = " " if decode is _number else ""
        text = between.join(_token(row, cuts.losses, decode) for row in rows.head(LONGEST).to_dict("records"))
        yield f'<figure><figcaption>{escape(caption)}</figcaption><p class="text">{text}</p></figure>'


def _token(row: dict, losses: list[str], decode: Callable[[int], str]) -> str:
    text = escape(_visible(decode(row["token"]).replace("\n", "↵\n"), keep="\n"))
    of_tokens = [losses[0], *(name for name in losses[1:] if name not in LOSSES or LOSSES[name].of != "sequence ratio")]
    cutting = [name for name in of_tokens if row[name] and row["sign"] != 0]
    if not cutting:
        return text
    new = np.exp(row["log_prob"])
    title = f"probability {row['probability']:.3g}, now {new:.3g}, ratio {new / row['probability']:.3g}; cut by "
    tag = "mark" if cutting[0] == losses[0] else "u"
    return f'<{tag} title="{escape(title + ", ".join(cutting))}">{text}</{tag}>'


def _decoder(path: str) -> Callable[[int], str]:
    """Return what maps a token to its text, or to its number where the tokenizer has no text for it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    return lambda token: str(tokenizer.decode([token])) or _number(token)


def _number(token: int) -> str:
    return f"#{token}"


def _visible(text: str, keep: str = "") -> str:
    """Write characters that would not be seen, or would move others, as escapes such as ``\\x1b``."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def _ranges() -> list[str]:
    ends = [f"{100 * end:g}" for end in PROBABILITIES]
    return [f"{low}–{high} %" for low, high in zip(ends, ends[1:], strict=False)]


def _share(part: float, whole: float) -> str:
    return percent(float(part / whole)) if whole else "–"


def _text(text: str, kind: str = "") -> str:
    return f"<p{' class=' + kind if kind else ''}>{escape(text)}</p>"


def _table(head: list[str], rows: list[list[str]], kind: str = "") -> str:
    lines = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f'<div class="scroll"><table{" class=" + kind if kind else ""}>{"".join(lines)}</table></div>'
