"""Functions that compute a score for each row, to weight, order or omit rows in training.

Copy one, and pass it to `Results`:

    Results("results/run1", function=forgetting, keep="all")

Each function takes the results of several epochs, a TensorDict of shape (epochs, N), and returns
one number for each row.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def moving_average(results: Mapping[str, Tensor]) -> Tensor:
    """Average ``row_loss``; an epoch counts half as much as the next one."""
    losses = results["row_loss"]
    weights = 0.5 ** torch.arange(len(losses)).flip(0)
    return (weights[:, None] * losses).sum(0) / weights.sum()


def forgetting(results: Mapping[str, Tensor]) -> Tensor:
    """Count how often a row was ``correct``, and not in the next epoch (Toneva et al. 2019)."""
    correct = results["correct"]
    return (correct[:-1] & ~correct[1:]).sum(0)


def margin(results: Mapping[str, Tensor]) -> Tensor:
    """Average the logit of the label minus the largest other one (AUM, Pleiss et al. 2020)."""
    logits, label = results["logits"], results["label"][..., None]
    others = logits.scatter(-1, label, -torch.inf).amax(-1)
    return (logits.gather(-1, label)[..., 0] - others).mean(0)


def el2n(results: Mapping[str, Tensor]) -> Tensor:
    """Average the norm of the error of the probabilities (EL2N, Paul et al. 2021)."""
    label = F.one_hot(results["label"], results["logits"].shape[-1])
    errors = results["logits"].softmax(-1) - label
    norms: Tensor = errors.norm(dim=-1)
    return norms.mean(0)
