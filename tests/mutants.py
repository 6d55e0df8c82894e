# SPDX-License-Identifier: Apache-2.0
"""Break the code in one place at a time and see that a test fails: ``.venv/bin/python tests/mutants.py``.

Run by hand before a release, on a quiet machine, all or those of FILES (127 took an hour). Each mutant is made in a
copy of what git has, two at a time; the table that is printed goes to docs/reliability.md. Exit code 1 if a mutant
survives.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tqdm import tqdm

ROOT = Path(__file__).parents[1]
AT_A_TIME = 2
CORE = "tests/unit/test_search.py tests/unit/test_loss.py tests/unit/test_golden.py tests/unit/test_numerics.py"
REPORT = "tests/unit/test_report.py tests/unit/test_replay.py"
CHECKS = "tests/unit/test_checks_gpu.py tests/unit/test_checks_"
TESTS = {
    "bapo/config.py": "tests/unit/test_config.py",
    "bapo/ratio.py": CORE,
    "bapo/statistics.py": f"{CORE} tests/unit/test_distributed.py",
    "bapo/search.py": f"{CORE} tests/unit/test_distributed.py",
    "bapo/diagnostics.py": f"{CORE} tests/unit/test_diagnostics.py",
    "bapo/bounds.py": f"{CORE} tests/unit/test_distributed.py",
    "bapo/loss.py": f"{CORE} tests/unit/test_policy_loss.py",
    "recipe/bapo/policy_loss.py": "tests/unit/test_policy_loss.py tests/unit/test_replay.py tests/actor/test_worker.py",
    "recipe/bapo/worker.py": "tests/actor/test_worker.py",
    "recipe/bapo/trainer.py": "tests/unit/test_trainer.py",
    "recipe/bapo/prepare_data.py": "tests/unit/test_prepare_data.py",
    "recipe/bapo/records/validation.py": "tests/unit/test_validation.py",
    "recipe/bapo/records/tokens.py": REPORT,
    "recipe/bapo/report/measure.py": REPORT,
    "recipe/bapo/report/facts.py": REPORT,
    "recipe/bapo/replay.py": REPORT,
    "recipe/bapo/plot.py": "tests/unit/test_plot.py",
    "recipe/bapo/example/reward.py": "tests/unit/test_example_task.py",
    "recipe/bapo/checks/__main__.py": "tests/unit/test_checks_gpu.py",
    "recipe/bapo/checks/table.py": f"{CHECKS}machine.py",
    "recipe/bapo/checks/config.py": f"{CHECKS}config.py",
    "recipe/bapo/checks/inputs.py": "tests/unit/test_checks_inputs.py tests/unit/test_checks_config.py",
    "recipe/bapo/checks/machine.py": f"{CHECKS}machine.py",
    "recipe/bapo/checks/size.py": f"{CHECKS}machine.py",
    "recipe/bapo/checks/other_runs.py": f"tests/unit/test_watchdog.py {CHECKS}machine.py",
}
MUTANTS = {
    "bapo/config.py": [
        ("if value not in choices:", "if False:"),
        ("if not 0 < target < 1:", "if not 0 < target <= 1:"),
        ("if not 0 < target < 1:", "if not 0 <= target < 1:"),
        ('        _check_range("ratio_lower", self.lower)\n', ""),
        ('        _check_range("ratio_upper", self.upper)\n', ""),
        ("if self.ratio_lower_start < 0:", "if False:"),
        ("if self.ratio_lower_max >= 1:", "if self.ratio_lower_max > 1:"),
        ("if self.ratio_upper_start <= 1:", "if self.ratio_upper_start < 1:"),
        ("if candidates.step <= 0:", "if candidates.step < 0:"),
        ("if candidates.start > candidates.maximum:", "if False:"),
        ("/ candidates.step > MAX_STEPS:", "/ candidates.step < 0:"),
        ("/ self.step - 1e-6)", "/ self.step)"),
        ("math.ceil((self.maximum - self.start) / self.step - 1e-6)", "round((self.maximum - self.start) / self.step)"),
        ("torch.where(k < self.steps, self.start + k * self.step, self.maximum)", "self.start + k * self.step"),
        ("return self.lower.fixed and self.upper.fixed", "return self.lower.fixed or self.upper.fixed"),
        ("isinstance(value, bool) or ", ""),
        ("or not math.isfinite(value)", ""),
        ("ratio_upper_max: float = 3.0", "ratio_upper_max: float = 2.0"),
    ],
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
        ("torch.bucketize(ratio, upper_edges, right=True)", "torch.bucketize(ratio, upper_edges)"),
        ("torch.bucketize(ratio, lower_edges)", "torch.bucketize(ratio, lower_edges, right=True)"),
        ("math.nextafter(clip_ratio_c, 0)", "clip_ratio_c"),
        ("math.inf if clip_ratio_c is None else math.nextafter(clip_ratio_c, 0)", "math.inf"),
        ("size * old_log_prob.double().exp()", "size * old_log_prob.exp()"),
        ("size * old_log_prob.double().exp()", "size * log_prob.double().exp()"),
        ("MAX_OLD_LOG_PROB = 0.5", "MAX_OLD_LOG_PROB = 100.0"),
        ("    mask = mask.bool()", "    mask = torch.ones_like(mask).bool()"),
        ("advantages = torch.where(mask, advantages.double(), 0)", "advantages = advantages.double()"),
        ("vector = torch.cat([tensor.flatten() for tensor", "vector = torch.cat([0 * tensor.flatten() for tensor"),
        ("[ours + theirs for ours, theirs", "[ours for ours, theirs"),
        ("torch.distributed.all_reduce(vector, group=group)", "torch.distributed.all_reduce(vector[:-9], group=group)"),
        ('            ("token_weight", ours.token_weight, theirs.token_weight),\n', ""),
        ('            ("lower", ours.lower, theirs.lower),\n', ""),
        ('            ("upper", ours.upper, theirs.upper),\n', ""),
        ("        other.check_config(self.config)\n", ""),
        (".split(rows) for tensor", ".split(rows)[:1] for tensor"),
        ("positive, negative = advantages > 0, advantages < 0", "positive, negative = advantages < 0, advantages > 0"),
        ("sums_by_bucket(weight * ratio)", "sums_by_bucket((weight * ratio).float().double())"),
        ("positive_responses=_count(positive.any(1))", "positive_responses=_count(negative.any(1))"),
        ("invalid_log_probs=_count(mask & ~_finite(log_prob))", "invalid_log_probs=_count(~_finite(log_prob))"),
        ("invalid_log_probs=_count(mask & ~_finite(log_prob))", "invalid_log_probs=_count(~_finite(advantages))"),
        ("negative & (ratio > UNBOUNDED)", "ratio > UNBOUNDED"),
    ],
    "bapo/search.py": [
        ("high * _sums_above(sums.positive_weight)", "high * _sums_below(sums.positive_weight)"),
        ("p = p_inside + high * _sums_above(sums.positive_weight)", "p = p_inside"),
        ("n_inside + low * _sums_below(sums.negative_weight[:-1])", "n_inside"),
        (" + sums.negative_weighted_ratio[-1]", ""),
        ("p, n = p_inside, n_inside", "p, n = p_inside, n_inside + sums.negative_weighted_ratio[-1]"),
        ("p[index_of_high], n[index_of_low]", "p[index_of_high], n[index_of_low].flip(0)"),
        (">= -TOLERANCE * (p + n)", ">= TOLERANCE * (p + n)"),
        (">= -TOLERANCE * (p + n)", "> 0"),
        ("TOLERANCE = 1e-9", "TOLERANCE = 1e-5"),
        ("(1 - target) * p - target * n", "p - target * n"),
        ("saturated = ~reached.any()", "saturated = ~reached[-1]"),
        ("len(reached) - 1, reached.int()", "0, reached.int()"),
        ("positive_contribution_start=rho[0]", "positive_contribution_start=rho.take(chosen)"),
        ("positive_contribution=rho.take(chosen)", "positive_contribution=rho[0]"),
        ('config.search_order == "upper_first"', 'config.search_order != "upper_first"'),
        ("return step - lower, lower", "return step - lower, step - step"),
        ("buckets.flip(0).cumsum(0).flip(0)[1:]", "buckets.sum() - buckets.cumsum(0)[:-1]"),
        ("    statistics.check_config(config)\n", ""),
        (
            "low=tried.low.take(chosen),\n        high=tried.high",
            "low=tried.high.take(chosen),\n        high=tried.low",
        ),
    ],
    "bapo/diagnostics.py": [
        ("torch.where(upper >= bounds.high", "torch.where(upper > bounds.high"),
        ("torch.where(lower <= bounds.low", "torch.where(lower < bounds.low"),
        ("sums.positive_tokens[1:]", "sums.positive_tokens[:-1]"),
        ("_quotient(positive_tokens, sums.tokens)", "_quotient(negative_tokens, sums.tokens)"),
        ("_quotient(positive_tokens, sums.positive_responses)", "_quotient(positive_tokens, sums.negative_responses)"),
        ("sums.tokens * sums.ratio_squared", "sums.ratio_squared"),
        ("_quotient(sums.unbounded_gradient, sums.gradient)", "_quotient(sums.unbounded_gradient, sums.ratio)"),
        ("denominator > 0, numerator / denominator", "denominator >= 0, numerator / denominator"),
        ("torch.where(clipped, 0, ratio * advantages)", "(ratio * advantages)"),
        ("weighted.dot(log_prob) - weighted.sum() * mean_log_prob", "weighted.dot(log_prob)"),
        ("torch.where(mask, values, 0)", "values"),
    ],
    "bapo/bounds.py": [
        ("        statistics = statistics.all_reduce(process_group)\n", "        pass\n"),
        ("response_mask, config, clip_ratio_c)\n", "response_mask, config)\n"),
        ("if count)", "if count > 2)"),
        ('values.pop("invalid_log_probs")', 'values["invalid_log_probs"]'),
    ],
    "bapo/loss.py": [
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
        ("found = self._find_bounds(data)", 'found = self.__dict__.setdefault("first", self._find_bounds(data))'),
        ("old_log_prob if log_prob is None else log_prob", "old_log_prob"),
        ('if self.loss_config.bound_scope == "micro_batch":', "if False:"),
        ("for first in range(0, len(lengths), rows)", "for first in [0]"),
    ],
    "recipe/bapo/trainer.py": [
        ('reward_extra_infos_dict.get("acc", reward_extra_infos_dict["reward"])', 'reward_extra_infos_dict["reward"]'),
        ('.get("acc", reward_extra_infos_dict["reward"])', '["acc"]'),
        ("return not bypass and (", "return ("),
        ('(self.trainer_mode != "separate_async" or self.local_trigger_step == 0)', "True"),
        ("/ actor.ppo_mini_batch_size * actor.ppo_epochs", "/ actor.ppo_mini_batch_size"),
        ("sorted(range(len(batch)), key=batch.keys.__getitem__)", "list(range(len(batch)))"),
        ('if "actor/entropy" not in metrics and', "if"),
        ("trained_from = self.global_steps - 1", "trained_from = self.global_steps"),
        ('tag.get("min_global_steps", trained_from)', 'tag.get("max_global_steps", trained_from)'),
        ('if not tag.get("is_padding", False)', ""),
        ('tag["max_global_steps"] > tag["min_global_steps"]', 'tag["max_global_steps"] >= tag["min_global_steps"]'),
        ("buffer.poll_interval = poll_interval", "pass"),
        ('policy_loss.get("token_dump_dir") is not None', 'policy_loss.get("token_dump_dir") is None'),
    ],
    "recipe/bapo/plot.py": [
        ('[("actor/bapo/clip_high", "", "-")]', '[("actor/bapo/clip_low", "", "-")]'),
        ('("actor/bapo/clipfrac_positive", "positive"', '("actor/bapo/clipfrac_negative", "positive"'),
        ('"actor/bapo/positive_contribution_start", "start"', '"actor/bapo/positive_contribution", "start"'),
        ("            axis.axhline(value", "            print(value"),
        (
            "_range(loss.ratio_upper_start, loss.ratio_upper_max)",
            "_range(loss.ratio_lower_start, loss.ratio_upper_max)",
        ),
        ("sum(at) / len(at) for at", "max(at) for at"),
        ("list(map(min, values)), list(map(max, values))", "list(map(min, values)), list(map(min, values))"),
        ('        del marks["Positive contribution"]', "        pass"),
        ('if not series([run], "critic/rewards/mean")[0]:', "if False:"),
        ('{"fixed": start} if start == maximum else', '{"fixed": start} if False else'),
    ],
    "recipe/bapo/example/reward.py": [
        (r'r"(\d\d) yes$"', r'r"(\d\d) yes"'),
        (r'r"(\d\d) yes$"', r'r"(\d\d)"'),
        ("last_try.group(1) == ground_truth", "True"),
        (".strip()", ""),
    ],
    "recipe/bapo/prepare_data.py": [
        ("                    piece = []\n", "                    piece = piece[-1:]\n"),
        ("            writer.write_table(pa.Table.from_pylist(piece, SCHEMA))\n        if", "        if"),
        ("str(int(answers[0]))", "answers[0]"),
        ('name.startswith("aime") and ', ""),
        ('and "\\\\boxed" not in prompt', ""),
        ("all(isinstance(one, str) for one in answers)", "True"),
        ('path.suffix in (".jsonl", ".json")', 'path.suffix == ".jsonl"'),
        ("if key.lower() in names", "if key in names"),
        ('"data/math-*.parquet"', '"data/*.parquet"'),
        ("return (messages[-1]", "return (messages[0]"),
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
    "recipe/bapo/records/tokens.py": [
        ("[mask].float()", "[mask].bfloat16().float()"),
        ("(old_log_prob, log_prob, advantages), strict=True))", "(log_prob, old_log_prob, advantages), strict=True))"),
        ("if its_kind != first[1]:", "if False:"),
        ("if sequences < wanted:", "if False:"),
        ("if not found:", "if False:"),
        ("if any(folder.glob(pattern)):", "if False:"),
        ("if len(set(shapes.values())) > 1:", "if False:"),
        ("if unusable:", "if False:"),
        ('found["log_prob"]):\n', 'found["log_prob"]) + 1e9:\n'),
        ("tensors[name][mask].flatten()", "tensors[name].flatten()"),
        ('int(metadata.get("dp_size", 1)) >= wanted', "1 >= wanted"),
    ],
    "recipe/bapo/report/measure.py": [
        ("self.ratio**2 / (self.tokens * self.ratio_squared)", "self.ratio**2 / self.ratio_squared"),
        ("0.95], dtype=torch.float64) * tokens", "0.90], dtype=torch.float64) * tokens"),
        ("(values[at] / counts[at])", "(values[at] / tokens)"),
        ("POSITIVE if advantage > 0 else NEGATIVE", "NEGATIVE if advantage > 0 else POSITIVE"),
        ("if 2 * below >= sequences:", "if below >= sequences:"),
        ("sums_so_far + more", "more"),
        ('rows[2] * tokens["rollout_is_weights"][part]', "rows[2]"),
        ("sums_so_far.config, clip_ratio_c)", "sums_so_far.config)"),
        ("planted = torch.stack([counted, size, size * ratio])", "planted = torch.stack([counted, size, size])"),
        ("(1 - counted).sum()", "counted.sum()"),
        ("torch.where(advantages < 0, ratio, 0).max()", "ratio.max()"),
        ("away = (sign * 2 - 1) * log_ratio > 0", "away = (sign * 2 - 1) * log_ratio < 0"),
        ("values <= M2PO_THRESHOLD * counts", "values <= counts"),
        ("found.probability.add(old[chosen].exp(), group)", "found.probability.add(log_prob[chosen].exp(), group)"),
        ('int(tokens.get("trainer_version", newest)) - ', "newest - "),
        ("planted * (ages == age)", "planted"),
        ("at_once, on_the_way = stopped", "on_the_way, at_once = stopped"),
        ("range(0, len(planes[0]), CHUNK)", "range(0, len(planes[0]) - CHUNK, CHUNK)"),
    ],
    "recipe/bapo/report/facts.py": [
        ("clip_ratio_c < 1e6", "clip_ratio_c < 2"),
        ("any_of & ~first, ~any_of", "any_of, ~any_of"),
        ('fmean(of_target["low"])', 'fmean(of_target["high"])'),
        ('(("from", min), ("to", max))', '(("from", max), ("to", min))'),
        ('"with": [update.corrected', '"with": [update.statistics["uniform"]'),
        ("negative[EDGES.index(edge) + 1 :]", "negative[EDGES.index(edge) :]"),
        ("_share(part[:, WAR].sum(), size)", "_share(part[:, WAR].sum(), negative[:, WAR].sum())"),
        ("max(update.largest_negative", "min(update.largest_negative"),
        ("taken[sign] += total[sign, buckets]", "taken[sign] += total[1 - sign, buckets]"),
        (
            "parts.append((POSITIVE, slice(EDGES.index(high) + 1, None)))",
            "parts.append((POSITIVE, slice(EDGES.index(high), None)))",
        ),
        ("clipped(0.8, 1.28)", "clipped(0.8, 1.2)"),
        ("clipped(None, None, DUAL_CLIP)", "clipped(None, None, 10.0)"),
        ("high_of_negative=1.2, low_of_positive=0.8", "high_of_negative=1.2"),
        ("above_1, WAR].sum() - total[NEGATIVE, above_1, WA].sum()", "above_1, WAR].sum()"),
        ("_by_search([update.own for", "_by_search([update.statistics for"),
        ("slice(high.index(high_bound) + 1, None)", "slice(high.index(high_bound), None)"),
        ("slice(low.index(low_bound) + 1)", "slice(low.index(low_bound))"),
        ("counts[POSITIVE, EDGES.index(1.2) + 1 :].sum() + counts", "counts"),
        ("index % per_batch if", "index // per_batch if"),
        ("if after > 2 * before:", "if after < 2 * before:"),
        ("if on_the_way[best] < 0.005:", "if on_the_way[best] < 0.5:"),
        ("on_the_way[best] >= MATTERS", "on_the_way[best] < MATTERS"),
        ("own or next(row for row", "next(row for row"),
    ],
    "recipe/bapo/replay.py": [
        ("searches = own is not None and not own.fixed", "searches = own is not None"),
        ("replace(own if searches else BAPOConfig(), **(ranges or {}))", "own if searches else BAPOConfig()"),
        ('float(about.get("clip_ratio_c", VERLS_CLIP_RATIO_C))', "VERLS_CLIP_RATIO_C"),
        ("updates_per_rollout_batch is not None and updates_per_rollout_batch < 1", "False"),
        ("if not path.absolute().parent.is_dir():", "if False:"),
        (
            '(curve["at_once"], curve["on_the_way"], curve["never"])',
            '(curve["never"], curve["on_the_way"], curve["at_once"])',
        ),
        ('f"{row[side]:.3f}" for side in ("c_low", "c_high")', 'f"{row[side]:.3f}" for side in ("c_high", "c_low")'),
    ],
    "recipe/bapo/checks/__main__.py": [
        ("(HydraException, ValueError)", "ValueError"),
        ("(HydraException, ValueError)", "HydraException"),
        ('" ".join(said.split())', "said"),
        ("error.__cause__ or ''", "''"),
        ('line.status == "failed" for line', 'line.status == "warning" for line'),
        ("if arguments.json else", "if not arguments.json else"),
    ],
    "recipe/bapo/checks/table.py": [
        ('    if lines[0].status == "failed":\n', "    if False:\n"),
        ('line.status == "failed" and line.name == "model"', "False"),
        ('return Line(name, "warning", str(concern))', 'return Line(name, "ok", str(concern))'),
        ("    except Exception as error:  # a check that", "    except KeyError as error:  # a check that"),
    ],
    "recipe/bapo/checks/config.py": [
        ("value not in ENGINES", "True"),
        (
            '("actor_rollout_ref.actor.strategy", ("fsdp", "fsdp2").__contains__, "fsdp or fsdp2")',
            '("actor_rollout_ref.actor.strategy", bool, "")',
        ),
        ('("trainer.use_v1", bool,', '("trainer.use_v1", lambda _: True,'),
        ("modes.__contains__", "bool"),
        ('lambda backend: backend != "naive"', "bool"),
        ("lambda size: size == batch", "bool"),
        ("lambda factor: any_width or factor is not None", "lambda factor: True"),
        ("isinstance(value, int | float) and value > 1,", "isinstance(value, int | float) and value > 0,"),
        ("refuse_earlier(Path(actor.policy_loss.token_dump_dir))", "pass"),
        ("not isinstance(value, bool) and value > 0", "value > 0"),
        ("if sizes[0] > 1 else", "if sizes[0] > 0 else"),
        ("ranks_of(config) == 1 and not actor", "not actor"),
        ("// max(1, sequence_parallel(config)[1])", ""),
        ("    _check_tokens(config)\n", ""),
        ("lambda dynamic: dynamic == actor.use_dynamic_bsz", "lambda dynamic: True"),
        ("least = -(-longest // parallel)", "least = longest // parallel"),
        ("(limit or 0) >= least", "(limit or 0) > least"),
        ("(field, lambda size: gpus % size == 0,", "(field, lambda size: True,"),
        (
            '(field, lambda size: heads % size == 0, f"a divisor of the model\'s {heads} attention heads"),\n        (',
            "(",
        ),
        ("groups % size == 0 or size % groups == 0", "groups % size == 0"),
        ("pool % (size * copies) == 0", "pool % size == 0"),
        ("node % size == 0 or size % node == 0", "True"),
        ("pools.append((rollout.nnodes", "print((rollout.nnodes"),
        ("    if whole % part:\n", "    if False:\n"),
        ("if ignored:", "if False:"),
        ('!= "sync" and not bypass:', '!= "sync":'),
        ("if bypass and clip > NO_DUAL_CLIP:", "if clip > NO_DUAL_CLIP:"),
        ("updates = batch // mini * actor.ppo_epochs", "updates = batch // mini"),
        ("need_reference_policy(config), need_critic(config))", "need_reference_policy(config), True)"),
    ],
    "recipe/bapo/checks/inputs.py": [
        ("if tokenizer.eos_token_id is None:", "if False:"),
        ("if tokenizer.chat_template is None and not", "if not"),
        ("if highest >= vocabulary:", "if highest > vocabulary:"),
        ("wanted > positions", "wanted >= positions"),
        ('(model.get("override_config") or {}).get("max_position_embeddings", positions)', "positions"),
        ("rows - len(prompts)", "len(prompts) - rows"),
        ('self.ground_truth is None and self.style in (None, "rule")', "self.ground_truth is None"),
        ("    if missing:\n", "    if False:\n"),
        ("    if not rows:\n", "    if False:\n"),
        ('{**row, "prompt": row[key]}', "row"),
        ("len(text.encode()) + 64 <= limit", "len(text) <= limit"),
        ("        if length > limit:\n", "        if length > 2 * limit:\n"),
        ("add_generation_prompt=True", "add_generation_prompt=False"),
        ("if name not in other and (", "if False and ("),
        ('(*(folder / "actor").glob("*.pt"), folder / "data.pt")', '(folder / "actor").glob("*.pt")'),
        ("not zipfile.is_zipfile(file)", "False"),
        ('if "global_step_" not in folder.name or not folder.is_dir():', "if False:"),
    ],
    "recipe/bapo/checks/machine.py": [
        ("not in ((3, 11), (3, 12))", "not in ((3, 11), (3, 12), (3, 10))"),
        ('if found != f"verl {VERL}":', "if False:"),
        ("    if entry_point is None:\n", "    if False:\n"),
        ("if parallel > 1 and attention not in", "if parallel > 8 and attention not in"),
        ('if precision in ("fp32", "float32"):', "if True:"),
        ('attention == "flash_attention_2" and not installed', "False"),
        ("actor.use_dynamic_bsz and not model.use_remove_padding", "False"),
        ("            if not named:  # CUDA ignores this one and those after it\n                break\n", ""),
        ("row[1].startswith(name)", "row[1] == name"),
        ("float(mebibytes) / 1024", "float(mebibytes) / 1000"),
        ("wanted += config.actor_rollout_ref.rollout.n_gpus_per_node", "pass"),
        ("        if listed:\n", "        if False:\n"),
        ("if not joins_a_cluster(config):", "if False:"),
        ("    if there < wanted:\n", "    if there < wanted - 1:\n"),
        ("if free < 1 and not on_cpu(config):", "if False:"),
        ("    if free < 1:\n", "    if False:\n"),
    ],
    "recipe/bapo/checks/size.py": [
        ("return width, width * trained, 2 * width * trained", "return width, width * trained, width * trained"),
        ("lora_rank or 0) <= 0", "lora_rank or 0) < 0"),
        ("group if 0 < group < ranks else ranks", "ranks"),
        ('if fsdp.offload_policy and actor.strategy == "fsdp2":', "if fsdp.offload_policy:"),
        ("kept = 0.0 if fsdp.optimizer_offload else adamw", "kept = adamw"),
        ("asleep = 0.0 if rollout.free_cache_engine else serving", "asleep = 0.0"),
        ("2 * tokens * model.layers * model.hidden / GIB", "tokens * model.layers * model.hidden / GIB"),
        ("0.0 if fsdp.param_offload else weights", "weights"),
        ('        del phases["log-probs"]\n', "        pass\n"),
        ("longest * number // sequence_parallel(config)[1]", "longest * number"),
        ("if config.actor_rollout_ref.model.use_fused_kernels:", "if False:"),
        ("1 + (config.actor_rollout_ref.rollout.temperature != 1)", "1"),
        ("        planes += 2  # the entropy's", "        planes += 1  # the entropy's"),
        ("        planes += 1  # the gradient\n", ""),
        ("planes += 2 * (attention", "planes += 1 * (attention"),
        ("return 2 * planes * tokens", "return 4 * planes * tokens"),
        ("free = total - used", "free = total"),
        ("        if size > free:\n", "        if size > total:\n"),
        ("if left < TIGHT * total:", "if False:"),
        ("if served > share * total:", "if served > total:"),
        ("width * model.weights / devices / GIB", "width * model.weights / GIB"),
        ("(ranks if model.tied else 1)", "ranks"),
        ("needed, there = max(offloaded, loaded)", "needed, there = min(offloaded, loaded)"),
        ("weights * fsdp.param_offload + adamw * fsdp.optimizer_offload", "weights * fsdp.param_offload"),
        ("min(megabytes << 20, all_weights)", "megabytes << 20"),
        ("largest > megabytes << 20", "False"),
        (
            "(weight + adamw) * model_of(config).weights * ((kept or 1) + 1)",
            "(weight + adamw) * model_of(config).weights * (kept or 1)",
        ),
        ("    if kept is None:\n", "    if False:\n"),
        ("not existing.is_dir() or not os.access(existing, os.W_OK)", "False"),
    ],
    "recipe/bapo/checks/other_runs.py": [
        ('not in ("", "local") or config.trainer.nnodes > 1', 'not in ("", "local")'),
        ("if claim is None or others:", "if claim is None:"),
        ("if claim is None or others:", "if others:"),
        ("fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB"),
        ('.get("VERL_RAY_JOB_ID") == FIRST_JOB', '.get("VERL_RAY_JOB_ID")'),
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
    try:
        code = subprocess.run(command, cwd=folder, capture_output=True, timeout=1200).returncode
    except subprocess.TimeoutExpired:
        code = "a timeout"
    path.write_text(text)
    if code not in (0, 1):  # killed all the same: these tests pass on the code as it is
        tqdm.write(f"pytest ended with {code} on {file}: {old!r} -> {new!r}")
    return code == 0


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of {', '.join(MUTANTS)}; default: all")
    files = parser.parse_args().files or list(MUTANTS)
    if unknown := set(files) - set(MUTANTS):
        parser.error(f"no mutants of {', '.join(sorted(unknown))}: choose from {', '.join(MUTANTS)}")
    chosen = [(file, *mutant) for file in files for mutant in MUTANTS[file]]
    copies: SimpleQueue[Path] = SimpleQueue()

    def lives(mutant):
        folder = copies.get()
        try:
            return survives(folder, *mutant)
        finally:
            copies.put(folder)

    def try_one(mutant):
        lived = lives(mutant)
        if lived:
            file, old, new = mutant
            tqdm.write(f"survived in {file}: {old!r} -> {new!r}")
        return lived

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_A_TIME) as pool:
        for number in range(AT_A_TIME):
            copies.put(Path(folder, str(number)))
            copy_of_the_repository(Path(folder, str(number)))
        as_it_is = [(file, "", "") for file in {TESTS[file]: file for file in files}.values()]
        passed = pool.map(lives, as_it_is)
        if broken := [file for (file, *_), passes in zip(as_it_is, passed, strict=True) if not passes]:
            sys.exit(f"the tests of {', '.join(broken)} fail on the code as it is")
        all_lived = list(tqdm(pool.map(try_one, chosen), total=len(chosen), unit=" mutants"))
    survivors = [mutant for mutant, lived in zip(chosen, all_lived, strict=True) if lived]
    made, left = (Counter(file for file, *_ in mutants) for mutants in (chosen, survivors))
    print("| file | mutants | killed |\n|---|---|---|")
    for file, count in made.items():
        print(f"| {file} | {count} | {count - left[file]} |")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
