# SPDX-License-Identifier: Apache-2.0
"""A fix for verl 0.9.1: fused kernels where embeddings are not tied. Importing this module applies it.

With ``model.use_fused_kernels=true`` verl's forward reads ``lm_head.weight`` and does not call ``lm_head``. FSDP2
gathers the weight of a unit, and reduces its gradient over the ranks, when the unit's module is called, and verl makes
``lm_head`` a unit of its own unless the embeddings are tied (``verl/utils/fsdp_utils.py:551``). So the forward fails
(``verl/models/transformers/dense_common.py:125``: ``aten.mm.default got mixed torch.Tensor and DTensor``), or it
gathers the weight itself, and each rank trains its shard of the head with the gradient of its own tokens alone
(``qwen3_5.py:589`` and ``qwen3_vl.py:371``). With this patch ``lm_head`` belongs to the unit of the whole model, as it
does with tied embeddings. Without fused kernels nothing changes. A similar change was proposed to verl (pull request
#7427, ``docs/dev/upstream.md``).

``BAPOPolicyLossConfig`` imports this module. A monitored run does not, because a monitor changes nothing. A reference
model, which verl builds before the actor's config, needs ``model.external_lib=recipe.bapo.verl_patches.fused_heads``
too. Our platforms without flash-attn set that in every run, because they need fused kernels.
"""

from recipe.bapo.hook.tell import tell
from verl.utils import fsdp_utils

# A private name of verl, which another version may not have. Fused kernels then do what verl does.
_select_of_verl = getattr(fsdp_utils, "_select_fsdp2_wrap_targets", None)


def select_fsdp2_wrap_targets(model, layer_classes):
    """Select the modules that verl makes FSDP2 units, without ``lm_head`` if fused kernels read its weight."""
    modules = _select_of_verl(model, layer_classes)
    if getattr(model, "_verl_fused_kernels_backend", None) is None:  # verl sets it when it patches the model's forward
        return modules
    heads = {id(module) for name, module in model.named_modules() if name.rpartition(".")[2] == "lm_head"}
    kept = [module for module in modules if id(module) not in heads]
    if len(kept) < len(modules):
        tell(
            "use_fused_kernels=true: lm_head is kept in FSDP2's unit of the whole model. As a unit of its own, as in "
            "verl 0.9.1, its weight or its gradient would be wrong (recipe/bapo/verl_patches/fused_heads.py)."
        )
    return kept


if _select_of_verl is not None:
    fsdp_utils._select_fsdp2_wrap_targets = select_fsdp2_wrap_targets
