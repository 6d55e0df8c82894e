# SPDX-License-Identifier: Apache-2.0
"""Dump the tokens that TRL's GRPOTrainer trains on, for the clip report (docs/clip_report.md). For TRL 1.16.

    pip install '.[report]' trl==1.16.0          # from the repository's root
    python docs/examples/trl_dump.py MODEL DUMP
    bapo-report DUMP

Take the class into your own script; the lines below it train on four prompts, so that there is something to dump.
``tests/stack/test_packaging.py`` runs this file in an environment of its own.
"""

import math
import sys

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from recipe.bapo.records.tokens import write_dump


class DumpingGRPOTrainer(GRPOTrainer):
    """A GRPOTrainer that leaves the tokens of every micro-batch in the folder ``dump``."""

    dump: str

    def _get_per_token_logps_and_entropies(self, *arguments, **options):
        found = super()._get_per_token_logps_and_entropies(*arguments, **options)
        self.latest_log_prob = found[0].detach()
        return found

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if not model.training:
            return loss
        args, processes, log_prob = self.args, self.accelerator.num_processes, self.latest_log_prob
        old_log_prob = inputs.get("old_per_token_logps")  # None if they equal those of this very forward
        updates_per_rollout_batch = args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps
        write_dump(
            self.dump,
            log_prob if old_log_prob is None else old_log_prob,
            log_prob,
            inputs["advantages"].reshape(len(log_prob), -1).expand_as(log_prob),
            inputs["completion_mask"] * inputs.get("tool_mask", 1),
            about={
                "dp_size": processes,
                "global_batch_size": args.per_device_train_batch_size * args.gradient_accumulation_steps * processes,
                # With loss_type grpo, dapo, dr_grpo or bnpo; leave these four out with any other.
                "loss_mode": "vanilla",
                "clip_ratio_low": args.epsilon,
                "clip_ratio_high": args.epsilon if args.epsilon_high is None else args.epsilon_high,
                "clip_ratio_c": math.inf if args.delta is None else args.delta,
            },
            update=self.state.global_step % updates_per_rollout_batch,
        )
        return loss


def reward(completions, **columns):
    """Count the different characters of each completion: the number differs between the completions of a prompt."""
    return [float(len(set(completion))) for completion in completions]


if __name__ == "__main__":
    DumpingGRPOTrainer.dump = sys.argv[2]
    settings = GRPOConfig(
        output_dir=f"{sys.argv[2]}/trl",
        max_steps=2,
        num_iterations=2,  # two updates on each rollout
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=16,
        learning_rate=1e-2,
        bf16=torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
    )
    prompts = Dataset.from_dict({"prompt": ["1 2", "3 4", "5 6", "0 7"]})
    DumpingGRPOTrainer(sys.argv[1], reward, args=settings, train_dataset=prompts).train()
