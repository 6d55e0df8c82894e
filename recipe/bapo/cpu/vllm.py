# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker on a CPU, for verl's weight synchronisation."""

import torch
import vllm.model_executor.layers.utils as layer_utils

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


def _plain_linear(layer, remove_weight):
    # Called by vLLM for each linear layer once its weights are loaded.
    layer.cpu_linear = torch.nn.functional.linear


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """Keeps the weights of linear layers as they are.

    vLLM on a CPU packs them after loading and drops the originals; verl's next synchronisation would then find
    nothing to load into, and hang.
    """

    def __new__(cls, **kwargs):
        layer_utils.dispatch_cpu_unquantized_gemm = _plain_linear
        return super().__new__(cls, **kwargs)
