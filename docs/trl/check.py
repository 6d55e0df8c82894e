# SPDX-License-Identifier: Apache-2.0
"""Train a tiny model with TRL and BAPO on the CPU, and compare bounds and gradients of every update.

From the root of the clone, on two ranks:

    PYTHONPATH=. torchrun --nproc-per-node 2 docs/trl/check.py

Bounds and metrics must be those of the tokens that TRL's loss got, gathered from all micro-batches and ranks. The
gradient of TRL's loss with respect to each log-prob must be that of ``clipped_surrogate_loss``.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
import trl
from bapo_trainer import TRIED, BAPOTrainer
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bapo import BAPOConfig, clipped_surrogate_loss, find_clip_bounds, read_and_validate

UPDATES = 8
WORDS = "abcdefghij"


class CheckedTrainer(BAPOTrainer):
    """A BAPOTrainer that compares bounds and gradients. Every fourth token or so is masked as output of a tool."""

    options = BAPOConfig(positive_contribution_target=0.58)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tokens, self.bounds, self.clipped, self.worst = [], [], 0, 0.0

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        output["tool_mask"] = (torch.rand(output["completion_mask"].shape) > 0.25).int()
        return output

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if torch.is_grad_enabled():
            self.log_prob = outputs[0]
        return outputs

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        old, mask = inputs["old_per_token_logps"], inputs["completion_mask"] * inputs["tool_mask"]
        tokens = old, self.log_prob, inputs["advantages"][:, None], mask
        micro_batches = self.args.gradient_accumulation_steps

        def aggregate(token_loss, mask):
            lengths = mask.sum(1).clamp(min=1)
            return {
                "dapo": lambda: token_loss.sum() / (inputs["num_items_in_batch"] / self.accelerator.num_processes)
                * self.args.steps_per_generation,
                "grpo": lambda: (token_loss.sum(1) / lengths).mean(),
                "bnpo": lambda: token_loss.sum() / mask.sum().clamp(min=1),
                "dr_grpo": lambda: token_loss.sum() / len(token_loss) / self.args.max_completion_length,
            }[self.loss_type]() / micro_batches  # fmt: skip

        low, high = 1 - self.epsilon_low, 1 + self.epsilon_high
        ours = clipped_surrogate_loss(*tokens, low, high, self.args.delta, aggregate=aggregate)
        (expected,) = torch.autograd.grad(ours.loss, self.log_prob, retain_graph=True)
        (found,) = torch.autograd.grad(loss, self.log_prob, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
        self.worst = max(self.worst, ((found - expected).norm() / expected.norm().clamp(min=1e-9)).item())
        self.clipped += ours.pg_clipfrac.item() * mask.sum().item()
        self.tokens.append([tensor.detach().expand_as(mask) for tensor in tokens])
        if len(self.tokens) == micro_batches:
            self.compare_bounds(low, high)
        return loss

    def compare_bounds(self, low, high):
        """Compare the bounds in use with those of all the tokens that the losses of this update got."""
        ranks = [None] * self.accelerator.num_processes
        dist.all_gather_object(ranks, self.tokens)
        self.tokens = []
        parts = [tokens for rank in ranks for tokens in rank]
        width = max(tokens[0].shape[1] for tokens in parts)
        batch = [
            torch.cat([functional.pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors])
            for tensors in zip(*parts, strict=True)
        ]
        expected = read_and_validate(*find_clip_bounds(*batch, self.options, clip_ratio_c=self.args.delta))
        found = {name: self._metrics["train"][f"bapo/{name}"][-1] for name in expected}
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close((low, high), (expected["low"], expected["high"]), rtol=1e-12, atol=0)
        self.bounds.append((round(low, 6), round(high, 6)))

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        assert all(parameter.grad.any() for parameter in model.parameters())
        return loss


def reward(completions, **_):
    """Reward the word a and short completions."""
    return [float(text.count("a")) - 0.1 * len(text.split()) for text in completions]


def check(loss_type, bf16, folder):
    """Make the updates with one loss_type; return what the trainer found."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, eos_token_id=1, bos_token_id=None, max_position_embeddings=64,
    )  # fmt: skip
    prompts = [" ".join(WORDS[(i + j) % 10] for j in range(1 + i % 3)) for i in range(64)]
    options = trl.GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=bf16, loss_type=loss_type, delta=3.0, max_steps=UPDATES,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=2,
        num_generations=4, max_completion_length=8, learning_rate=2e-2, lr_scheduler_type="constant",
        max_grad_norm=100.0, gradient_checkpointing=False, logging_steps=1, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = CheckedTrainer(
        model=LlamaForCausalLM(config),
        reward_funcs=reward,
        args=options,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
    )
    trainer.train()
    assert len(trainer.bounds) == UPDATES
    return trainer


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--bf16", action="store_true", help="train in bfloat16, TRL's default")
arguments = parser.parse_args()
with tempfile.TemporaryDirectory() as folder:
    for loss_type in TRIED["loss_type"]:
        trainer = check(loss_type, arguments.bf16, folder)
        if trainer.accelerator.is_main_process:
            print(f"TRL {trl.__version__}, {loss_type}: bounds of {UPDATES} updates agree: {trainer.bounds}")
            print(f"{trainer.clipped:.0f} tokens clipped; gradients differ by {trainer.worst:.1e} at most", flush=True)
dist.destroy_process_group()
