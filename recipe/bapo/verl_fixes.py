# SPDX-License-Identifier: Apache-2.0
"""Two fixes for verl 0.9.1 that have nothing to do with clip bounds.

**Unused entropy.** verl subtracts 0 times the entropy from the loss where its coefficient is 0, so the backward of an
update that measures the entropy holds a tensor of (tokens, vocabulary). ``detach_unused_entropy`` prevents it.

**Fused kernels where embeddings are not tied.** With ``model.use_fused_kernels=true`` verl's forward reads
``self.lm_head.weight`` and does not call ``lm_head`` (``verl/models/transformers/dense_common.py:125``). FSDP2 gathers
the weight of a unit when the unit's module is called, and verl makes ``lm_head`` a unit unless the embeddings are tied
(``verl/utils/fsdp_utils.py:559``). The kernels then get a shard, and the first log-probs fail: ``aten.mm.default got
mixed torch.Tensor and DTensor``. With this patch ``lm_head`` belongs to the unit of the whole model, as it does with
tied embeddings. Without fused kernels nothing changes. The same change was proposed to verl (pull request #7427,
``docs/dev/upstream/fused_lm_head.md``). Importing this module applies the patch. ``recipe.bapo.worker`` does so; a
reference model, which verl builds before the actor's config, needs ``model.external_lib=recipe.bapo.verl_fixes`` too.
"""

from verl.utils import fsdp_utils

# A private name of verl, which another version may not have. Fused kernels then do what verl does.
_select_of_verl = getattr(fsdp_utils, "_select_fsdp2_wrap_targets", None)


def detach_unused_entropy(model_output: dict, actor_config) -> dict:
    """Detach the entropy in the output of verl's forward if its coefficient in the loss is 0."""
    entropy = model_output.get("entropy")
    if entropy is None or actor_config.entropy_coeff != 0:
        return model_output
    return {**model_output, "entropy": entropy.detach()}


def select_fsdp2_wrap_targets(model, layer_classes):
    """Select the modules that verl makes FSDP2 units, without ``lm_head`` if fused kernels read its weight."""
    modules = _select_of_verl(model, layer_classes)
    if getattr(model, "_verl_fused_kernels_backend", None) is None:  # verl sets it when it patches the model's forward
        return modules
    heads = {id(module) for name, module in model.named_modules() if name.rpartition(".")[2] == "lm_head"}
    return [module for module in modules if id(module) not in heads]


if _select_of_verl is not None:
    fsdp_utils._select_fsdp2_wrap_targets = select_fsdp2_wrap_targets
