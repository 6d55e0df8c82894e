"""The importance ratio, the same in the search and in the loss."""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # as in verl's losses: exp(20) is 4.9e8


def ratio_dtype(old_log_prob: Tensor, log_prob: Tensor) -> torch.dtype:
    """The type in which the ratio is computed: at least float32."""
    return torch.promote_types(torch.promote_types(old_log_prob.dtype, log_prob.dtype), torch.float32)


def log_ratio_of(old_log_prob: Tensor, log_prob: Tensor) -> Tensor:
    """``log_prob - old_log_prob`` in ``ratio_dtype``, clamped to +-20, in memory of its own.

    Without a graph: the loss knows its own gradient.

    Args:
        old_log_prob, log_prob: the same shape, any float type.
    """
    dtype = ratio_dtype(old_log_prob, log_prob)
    difference = log_prob.detach().to(dtype) - old_log_prob.detach().to(dtype)
    return difference.clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def check_shapes(**tensors: Tensor) -> None:
    """Raise a ValueError that names every shape unless all tensors have the same one."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"All tensors must have the same shape (B, T), but got: {shapes}.")
