# SPDX-License-Identifier: Apache-2.0
"""Take what only serves this repository's own reports out of a file's text: the dump, the record and the warnings.

``export.py`` calls it for the files that it takes over. A name that has no place in the exported recipe is added to
``LEFT_OUT``; the export's test makes an update with what is left.
"""

from __future__ import annotations

import ast
import re

LEFT_OUT = {
    *("DumpConfig", "token_dump_dir", "write_dump", "dump_micro_batch", "_dump", "CLIP_RATIOS"),
    *("_tell_versions", "_add_weight_versions", "trainer_version"),
    *("SAMPLED_BY", "TRAINED_FROM", "ROLLOUT_VERSION", "TRAINER_VERSION"),
    *("bounds_record_dir", "_record", "record_file", "keep_earlier", "source", "updates", "updates_on_batch"),
    *("health_warnings", "_warn", "warn_again", "steps", "recent_batches", "logger"),
}
STAYS = "read_values"  # a call of it as an argument: it raises for input that is not finite


def leave_out(text: str) -> str:
    """``text`` without the statements that name something of ``LEFT_OUT``, and without its entries in docstrings.

    A condition loses the operands that name such a thing, and an assignment of several values those parts.
    """
    edits: list[tuple[int, int, str]] = []
    _edit_body(ast.parse(text).body, text, edits)
    for begin, end, replacement in sorted(edits, reverse=True):
        text = text[:begin] + replacement + text[end:]
    entries = "|".join(sorted(LEFT_OUT))
    return re.sub(rf"^( +)(?:{entries}): .*\n(?:\1 +.*\n)*", "", text, flags=re.M)


def _edit_body(body, text, edits) -> bool:
    """Note the edits of some statements; whether nothing is left of them."""
    return all([_edit(statement, text, edits) for statement in body])


def _edit(node, text, edits) -> bool:
    """Note the edits of a statement; whether nothing is left of it."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        gone = node.name in LEFT_OUT
        if not gone and _edit_body(node.body, text, edits):
            raise ValueError(f"Nothing is left of {node.name}: add it to LEFT_OUT.")
    elif isinstance(node, ast.If):
        gone = _edit_if(node, text, edits)
    elif isinstance(node, ast.With | ast.For):
        gone = _edit_body(node.body, text, edits)
    elif not _names_in(node) & LEFT_OUT:
        gone = False
    else:
        gone = not _keep_a_part(node, text, edits)
    if gone:
        begin, end = _range_of(node, text, with_comments=True)
        edits[:] = [edit for edit in edits if not begin <= edit[0] < end]
        edits.append((begin, end, ""))
    return gone


def _edit_if(node, text, edits) -> bool:
    parts = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
    kept = [part for part in parts if not _names_in(part) & LEFT_OUT]
    if not kept:
        if node.orelse:
            raise ValueError(f"Line {node.lineno} has an else that would be lost.")
        return True
    if len(kept) < len(parts):
        word = " and " if isinstance(node.test.op, ast.And) else " or "
        edits.append((*_range_of(node.test, text), word.join(ast.unparse(part) for part in kept)))
    return _edit_body(node.body, text, edits) & _edit_body(node.orelse, text, edits)


def _keep_a_part(node, text, edits) -> bool:
    """Note what stays of a simple statement, if anything does."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple):
        pairs = zip(node.targets[0].elts, node.value.elts, strict=True)
        kept = [pair for pair in pairs if not _names_in(pair[0]) & LEFT_OUT]
        if not kept:
            return False
        targets, values = (", ".join(ast.unparse(part) for part in side) for side in zip(*kept, strict=True))
        edits.append((*_range_of(node, text), f"{targets} = {values}"))
        return True
    if isinstance(node, ast.ImportFrom):
        return True  # ruff takes out what is not used
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call) and STAYS in ast.unparse(part.func)]
    if calls:
        edits.append((*_range_of(node, text), ast.unparse(calls[0])))
    return bool(calls)


def _names_in(node) -> set[str]:
    """Names, attributes and texts in it."""
    found = (
        getattr(part, "id", None) or getattr(part, "attr", None) or getattr(part, "value", None)
        for part in ast.walk(node)
    )
    return {name for name in found if isinstance(name, str)}


def _range_of(node, text, with_comments=False) -> tuple[int, int]:
    """Where it begins and ends in the text; with comments: whole lines, and those of comments right above."""
    lines = text.splitlines(keepends=True)
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]) - 1
    last = node.end_lineno - 1
    if not with_comments:
        return sum(map(len, lines[:first])) + node.col_offset, sum(map(len, lines[:last])) + node.end_col_offset
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return sum(map(len, lines[:first])), sum(map(len, lines[: last + 1]))
