# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer with BAPO's bounds. Copy this file to your script; bapo/README.md says how it was tried."""

import torch
import torch.distributed as dist
import trl
from packaging.version import Version
from transformers import ProcessorMixin

from bapo import (
    BAPOConfig,
    collect_clip_statistics,
    diagnose,
    empty_clip_statistics,
    read_and_validate,
    search_clip_bounds,
)

# With other values TRL's loss ignores the bounds that are set here, or has tokens, ratios or factors of its own.
TRIED = {
    "loss_type": ("dapo", "grpo", "bnpo", "dr_grpo"),
    "importance_sampling_level": ("token",),
    "use_liger_kernel": (False,),
    "top_entropy_quantile": (1.0,),
    "off_policy_mask_threshold": (None,),
}


class BAPOTrainer(trl.GRPOTrainer):
    """Set ``epsilon_low`` and ``epsilon_high`` before every optimizer update. The loss stays TRL's own.

    Raises:
        ValueError: on construction, for options with which search and loss may disagree; in training, for log-probs or
            advantages that are not finite.
    """

    options = BAPOConfig(positive_contribution_target=0.4)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        refuse_untried(self.args, self.options, self.processing_class)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if model.training and self._step % self.args.gradient_accumulation_steps == 0:
            first = self._step % self.args.steps_per_generation
            micro_batches = self._buffered_inputs[first : first + self.args.gradient_accumulation_steps]
            if micro_batches[0] is not inputs:
                raise RuntimeError(f"TRL {trl.__version__} does not train on _buffered_inputs[{first}] as 1.16.0 does.")
            self.set_bounds(model, micro_batches)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    @torch.no_grad()
    def set_bounds(self, model, micro_batches):
        """Find the bounds of one update from its micro-batches on all ranks, and log them with their metrics."""
        stats = empty_clip_statistics(self.options, self.accelerator.device)
        for batch in micro_batches:
            words = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            length = batch["completion_ids"].shape[1]
            log_prob = self._get_per_token_logps_and_entropies(model, words, attention_mask, length)[0]
            mask = batch["completion_mask"] * batch.get("tool_mask", 1)
            advantages = batch["advantages"].reshape(len(words), -1)
            tokens = batch["old_per_token_logps"], log_prob, advantages, mask
            stats += collect_clip_statistics(*tokens, self.options, self.args.delta)
        if self.accelerator.num_processes > 1:
            stats = stats.all_reduce(dist.group.WORLD)
        bounds = search_clip_bounds(stats, self.options)
        # TRL's loss would keep a token that BAPO leaves out because its old log-prob is not usable.
        metrics = read_and_validate(bounds, diagnose(stats, bounds), max_masked_fraction=0)
        self.epsilon_low, self.epsilon_high = 1 - metrics["low"], metrics["high"] - 1
        for name, value in metrics.items():
            self._metrics["train"][f"bapo/{name}"].append(value)


def refuse_untried(args, options, processing_class):
    """Raise a ValueError that names the first option with which search and loss may disagree."""

    def refuse(name, value, fix):
        raise ValueError(f"invalid {name}={value!r} with BAPO: {fix}.")

    # Earlier versions divide the gradient of dapo by the updates of a generation batch, or count steps otherwise.
    if not Version("1.12") <= Version(trl.__version__) < Version("2"):
        refuse("trl.__version__", trl.__version__, "install trl>=1.12,<2")
    for name, values in TRIED.items():
        if getattr(args, name) not in values:
            refuse(name, getattr(args, name), f"use {' or '.join(map(repr, values))}")
    if args.use_vllm and args.vllm_importance_sampling_correction:
        refuse("vllm_importance_sampling_correction", True, "use False; its weights do not enter the search")
    if isinstance(processing_class, ProcessorMixin):
        refuse("processing_class", type(processing_class).__name__, "use a tokenizer; images were not tried")
    if args.delta is not None and args.delta < options.ratio_upper_max:
        fix = f"use None, or at least ratio_upper_max={options.ratio_upper_max}, since it limits c_high too"
        refuse("delta", args.delta, fix)
    micro_batches = args.gradient_accumulation_steps
    if args.steps_per_generation % micro_batches:
        fix = f"use a multiple of gradient_accumulation_steps={micro_batches}"
        refuse("steps_per_generation", args.steps_per_generation, fix)
    if args.steps_per_generation * args.num_iterations == micro_batches:
        refuse("num_iterations", args.num_iterations, "use 2: with one update on a generation batch all ratios are 1")
