# SPDX-License-Identifier: Apache-2.0
"""Break the code in one place at a time and see that a test fails: ``.venv/bin/python tests/mutants.py``.

Run by hand before a release, on a quiet machine (an hour), or with FILES alone. Each mutant is made in a copy of what
git has; the table that is printed goes to docs/reliability.md. Exit code 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parents[1]
CORE = "tests/unit/test_search.py tests/unit/test_loss.py tests/unit/test_golden.py tests/unit/test_numerics.py"
TESTS = {
    "bapo/ratio.py": CORE,
    "bapo/statistics.py": f"{CORE} tests/unit/test_distributed.py",
    "bapo/search.py": f"{CORE} tests/unit/test_distributed.py",
    "bapo/loss.py": f"{CORE} tests/unit/test_policy_loss.py",
    "recipe/bapo/policy_loss.py": "tests/unit/test_policy_loss.py tests/unit/test_replay.py tests/actor/test_worker.py",
    "recipe/bapo/worker.py": "tests/actor/test_worker.py",
    "recipe/bapo/trainer.py": "tests/unit/test_trainer.py",
    "recipe/bapo/prepare_data.py": "tests/unit/test_prepare_data.py",
    "recipe/bapo/records/validation.py": "tests/unit/test_validation.py",
}
MUTANTS = {
    "bapo/ratio.py": [
        ("(log_prob.to(dtype) - old_log_prob.to(dtype))", "(log_prob - old_log_prob).to(dtype)"),
        (
            "torch.promote_types(old_log_prob.dtype, log_prob.dtype), torch.float32",
            "old_log_prob.dtype, log_prob.dtype",
        ),
        ("LOG_RATIO_LIMIT = 20.0", "LOG_RATIO_LIMIT = 30.0"),
        ("log_prob.to(dtype) - old_log_prob.to(dtype)", "old_log_prob.to(dtype) - log_prob.to(dtype)"),
        ("not clip_ratio_c > 1", "not clip_ratio_c >= 1"),
        ("len({tensor.shape for tensor in tensors.values()}) > 1", "False"),
    ],
    "bapo/statistics.py": [
        ("edges, right=True)", "edges)"),
        ("ratio.copysign(advantages)", "ratio"),
        ("-lower.flip(0)", "-lower"),
        ("math.nextafter(clip_ratio_c, 0)", "clip_ratio_c"),
        ("math.inf if clip_ratio_c is None else math.nextafter(clip_ratio_c, 0)", "math.inf"),
        ("weight * old_log_prob.double().exp()", "weight * old_log_prob.exp()"),
        ("weight * old_log_prob.double().exp()", "weight * log_prob.double().exp()"),
        ("MAX_OLD_LOG_PROB = 0.5", "MAX_OLD_LOG_PROB = 100.0"),
        ("    mask = mask.bool()", "    mask = torch.ones_like(mask).bool()"),
        ("points[-1:].fill_(maximum)", "pass"),
        ("steps.mul_(step).add_(start)", "start + (maximum - start) * steps / steps[-1:].clamp(min=1)"),
        ("vector=self.vector + other.vector", "vector=self.vector"),
        ("vector = self.vector.clone()", "vector = self.vector"),
        ('COLLECTED = ["token_weight", *', "COLLECTED = [*"),
        ("        other.check_config(self.config)\n", ""),
        (".split(rows) for tensor", ".split(rows)[:1] for tensor"),
        ("for signed in (advantages, -advantages)", "for signed in (-advantages, advantages)"),
        ("(weight, weight * ratio, counted)", "(weight, (weight * ratio).float().double(), counted)"),
        ("(mask, *unusable, ", "(mask, unusable[0], unusable[1], unusable[1], "),
        ("ratio.copysign(advantages)", "ratio.copysign(-advantages)"),
    ],
    "bapo/search.py": [
        ("positive_below[WAR] + high * positive_above[WA]", "positive_below[WA] + high * positive_above[WA]"),
        ("positive_below[WAR] + high * positive_above[WA]", "positive_below[WAR] + positive_above[WAR]"),
        (
            "low * negative_below[WA] + negative_above[WAR] + dual_clipped[WAR]",
            "negative_below[WAR] + negative_above[WAR]",
        ),
        (
            "low * negative_below[WA] + negative_above[WAR] + dual",
            "low * negative_below[WA] + negative_above[WA] + dual",
        ),
        ("negative_above[WAR] + dual_clipped[WAR]", "negative_above[WAR]"),
        (
            "p, n = positive_below[WAR], negative_above[WAR]",
            "p, n = positive_below[WAR], negative_above[WAR] + dual_clipped[WAR]",
        ),
        ("[:, at_low]", "[:, at_low].flip(1)"),
        (">= -TOLERANCE * (p + n)", ">= TOLERANCE * (p + n)"),
        (">= -TOLERANCE * (p + n)", "> 0"),
        ("TOLERANCE = 1e-9", "TOLERANCE = 1e-5"),
        ("(1 - target) * p - target * n", "p - target * n"),
        ("saturated=steps == len(reached)", "saturated=chosen == len(reached) - 1"),
        ("positive_contribution_start=rho[0]", "positive_contribution_start=rho.take(chosen)"),
        ("positive_contribution=rho.take(chosen)", "positive_contribution=rho[0]"),
        ("torch.stack([high, p, positive_above[TOKENS]])", "torch.stack([high, p, positive_below[TOKENS]])"),
        ("torch.stack([low, n, negative_below[TOKENS]])", "torch.stack([low, n, negative_above[TOKENS]])"),
        ("squares > 0, ratios**2 / (tokens * squares)", "squares > 0, ratios**2 / squares"),
        ("unbounded / gradient", "unbounded / squares"),
        ('config.search_order == "upper_first"', 'config.search_order != "upper_first"'),
        ("return step - lower, lower", "return step - lower, step - step"),
        ("positive_token_fraction=positive_tokens / tokens", "positive_token_fraction=positive_tokens / squares"),
        ("sums.flip(1).cumsum(1).flip(1)[:, 1:]", "sums.sum(1, keepdim=True) - sums.cumsum(1)[:, :-1]"),
        ("        statistics = statistics.all_reduce(process_group)\n", "        pass\n"),
        ("response_mask, config, clip_ratio_c)\n", "response_mask, config)\n"),
        ("    statistics.check_config(config)\n", ""),
        (
            "low=tried.low.take(chosen),\n        high=tried.high",
            "low=tried.high.take(chosen),\n        high=tried.low",
        ),
    ],
    "bapo/loss.py": [
        ("x.dot(r) * ry.sum() / total - x.dot(ry)", "-x.dot(ry)"),
        ("r.sum() - (mask.numel() - tokens)", "r.sum()"),
        ("torch.where(is_clipped, 0, token_loss)", "token_loss"),
        ("floor = torch.where(negative, low, 0.0)", "floor = torch.where(negative, 0.0, low)"),
        ("math.inf if clip_ratio_c is None else clip_ratio_c, high)", "math.inf, high)"),
        (
            "log_ratio = torch.where(mask, log_ratio_of(old_log_prob.detach(), log_prob), 0)",
            "log_ratio = log_ratio_of(old_log_prob.detach(), log_prob)",
        ),
        ("advantages = torch.where(mask, advantages.detach(), 0)", "advantages = advantages.detach()"),
        ("torch.where(mask, rollout_is_weights, 0)", "1"),
        ("& (advantages != 0)", ""),
        ("(negative & (ratio > ceiling))", "(ratio > ceiling)"),
        ("ppo_kl=-log_ratio", "ppo_kl=log_ratio"),
        ("old_log_prob.detach()", "old_log_prob"),
        ("advantages.detach()", "advantages"),
        ("token_loss = -advantages * clipped_ratio", "token_loss = -advantages * torch.min(ratio, clipped_ratio)"),
        ("(clipped - dual_clipped) / tokens", "clipped / tokens"),
    ],
    "recipe/bapo/policy_loss.py": [
        ("low=bounds.low", "low=bounds.high"),
        ("clip_ratio_c=config.clip_ratio_c,\n        rollout", "clip_ratio_c=None,\n        rollout"),
        ("rollout_is_weights=rollout_is_weights", "rollout_is_weights=None"),
        ("loss_agg_mode=loss_agg_mode", 'loss_agg_mode="token-mean"'),
        ("log_prob.shape[0] * dp_size == global_batch_size", "log_prob.shape[0] * dp_size <= global_batch_size"),
        ("group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None", "group = None"),
        ("process_group=group, clip_ratio_c=config.clip_ratio_c)", "process_group=group)"),
        ('if config.strategy not in ("fsdp", "fsdp2"):', "if False:"),
        ("if bapo_config.token_dump_dir is not None:", "if False:"),
        ('if info.get("dp_size") != 1 or', "if"),
    ],
    "recipe/bapo/worker.py": [
        ("        self.ratios_are_1 = False\n        self.updates", "        self.updates"),
        ("        self.updates += 1\n", ""),
        ("RATIOS_START_AT_1, default=False)", "RATIOS_START_AT_1, default=True)"),
        ("statistics.all_reduce(self._group())", "statistics"),
        ("self.loss_config, self._group(), clip_ratio_c", "self.loss_config, None, clip_ratio_c"),
        ("self.loss_config, self._group(), clip_ratio_c", "self.loss_config, self._group()"),
        ("            clip_ratio_c=self.actor_config.clip_ratio_c,\n", ""),
        ("sum(collected[1:], start=collected[0])", "collected[0]"),
        ("            torch.random.fork_rng(devices, device_type=self.device_name),\n", ""),
        ("        self._set_defaults(data)\n", ""),
        ("bounds = self._find_bounds(data)", 'bounds = self.__dict__.setdefault("first", self._find_bounds(data))'),
        ("old_log_prob if log_prob is None else log_prob", "old_log_prob"),
        ('if self.loss_config.bound_scope == "micro_batch":', "if False:"),
        ("for first in range(0, len(lengths), rows)", "for first in [0]"),
    ],
    "recipe/bapo/prepare_data.py": [
        ("if len(piece) == ROWS_AT_A_TIME:", "if len(piece) == ROWS_AT_A_TIME + 1 and count < 2500:"),
        ("                    piece = []\n", "                    piece = piece[-1:]\n"),
        ("            writer.write_table(pa.Table.from_pylist(piece, SCHEMA))\n        if", "        if"),
        ("str(int(answers[0]))", "answers[0]"),
        ('name.startswith("aime") and ', ""),
        ('and "\\\\boxed" not in prompt', ""),
        ("all(isinstance(one, str) for one in answers)", "True"),
        ('path.suffix in (".jsonl", ".json")', 'path.suffix == ".jsonl"'),
        ("if key.lower() in names", "if key in names"),
        ('"data/math-*.parquet"', '"data/*.parquet"'),
        ("(messages[-1]", "(messages[0]"),
        ("len(seen) - 1", "len(seen)"),
        ("            elif digest in seen:\n", "            elif False:\n"),
        ("        unfinished.unlink(missing_ok=True)\n", "        pass\n"),
        ("    if out.exists():\n", "    if False:\n"),
    ],
    "recipe/bapo/records/validation.py": [
        ("statistics.fmean(map(statistics.fmean, problems.values()))", "statistics.fmean(passes)"),
        ("if accuracy is not None", "if accuracy"),
        ("statistics.stdev(passes)", "statistics.pstdev(passes)"),
        ("min(passes)", "max(passes)"),
        ("zip(*problems.values(), strict=False)", "problems.values()"),
    ],
}


def copy_of_the_repository(folder: Path) -> None:
    """What git has, with changes that are not committed yet."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())


def survives(folder: Path, file: str, old: str, new: str) -> bool:
    """Whether no test of ``file`` fails with ``old`` replaced by ``new``."""
    path = folder / file
    text = path.read_text()
    path.write_text(text.replace(old, new, 1))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS[file].split()]
    code = subprocess.run(command, cwd=folder, capture_output=True, timeout=1200).returncode
    path.write_text(text)
    if code not in (0, 1):
        raise RuntimeError(f"pytest ended with {code} on {file} with {new!r}")
    return code == 0


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of {', '.join(MUTANTS)}; default: all")
    files = parser.parse_args().files or list(MUTANTS)
    if unknown := set(files) - set(MUTANTS):
        parser.error(f"no mutants of {', '.join(sorted(unknown))}: choose from {', '.join(MUTANTS)}")
    chosen = [(file, *mutant) for file in files for mutant in MUTANTS[file]]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy_of_the_repository(Path(folder))
        for mutant in tqdm(chosen, unit=" mutants"):
            if survives(Path(folder), *mutant):
                survivors.append(mutant)
    made, left = (Counter(file for file, *_ in mutants) for mutants in (chosen, survivors))
    print("| file | mutants | killed |\n|---|---|---|")
    for file, count in made.items():
        print(f"| {file} | {count} | {count - left[file]} |")
    for file, old, new in survivors:
        print(f"survived in {file}: {old!r} -> {new!r}")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
