# SPDX-License-Identifier: Apache-2.0
"""Let verl synchronise weights with vLLM's worker on a CPU."""

import torch
import vllm.model_executor.layers.utils as layer_utils

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


def _plain_linear(layer, remove_weight):
    # vLLM calls this for each linear layer once its weights are loaded.
    layer.cpu_linear = torch.nn.functional.linear


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """Keeps vLLM from packing the weights of linear layers.

    On a CPU vLLM packs them after loading and drops the originals. verl's next synchronisation would then have no
    weights to load into, and hang.
    """

    def __new__(cls, **kwargs):
        layer_utils.dispatch_cpu_unquantized_gemm = _plain_linear
        return super().__new__(cls, **kwargs)
