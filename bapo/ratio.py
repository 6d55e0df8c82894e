"""The importance ratio, the same in the search and in the loss."""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # as in verl's losses: exp(20) is 4.9e8


def log_ratio_of(old_log_prob: Tensor, log_prob: Tensor, mask: Tensor) -> Tensor:
    """``log_prob - old_log_prob``, clamped to +-20, in at least float32; 0 where ``mask`` is false, whatever is there.

    Without a graph: the loss knows its own gradient.

    Args:
        old_log_prob, log_prob: ``(B, T)``, any float type.
        mask: ``(B, T)``, bool.
    """
    dtype = torch.promote_types(torch.promote_types(old_log_prob.dtype, log_prob.dtype), torch.float32)
    difference = log_prob.detach().to(dtype) - old_log_prob.detach().to(dtype)
    return difference.clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).masked_fill_(~mask, 0)


def check_shapes(**tensors: Tensor) -> None:
    """Raise a ValueError that names every shape unless all tensors have the same one."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"All tensors must have the same shape (B, T), but got: {shapes}.")
