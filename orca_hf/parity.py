"""Whether two ways to compute the same logits agree."""

import torch
from torch import Tensor


def disagreement(ours: Tensor, expected: Tensor, computed_in: torch.dtype | None = None) -> str | None:
    """By how much logits differ beyond rounding, in words; None if they do not.

    Args:
        ours: Logits of any shape.
        expected: As `ours`; the judge of how much rounding may do.
        computed_in: The dtype of the products where it is another than the logits', as under autocast.
    """
    eps = max(torch.finfo(dtype).eps for dtype in (expected.dtype, computed_in) if dtype is not None)
    tolerance = max(1e-4, 16 * eps) * max(1.0, expected.abs().max().item())
    difference = (ours.float() - expected.float().to(ours.device)).abs().max().item()
    if difference <= tolerance:  # not so where either is NaN
        return None
    return f"by {difference:.2g}, where rounding explains {tolerance:.2g}"
