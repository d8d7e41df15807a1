"""Scores of three rows in four epochs, against their definitions."""

from itertools import pairwise

import torch
from tensordict import TensorDict

from examples.row_scores import el2n, forgetting, margin, moving_average

LABELS = torch.tensor([0, 1, 1])
LOGITS = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
CORRECT = LOGITS.argmax(-1) == LABELS
RESULTS = TensorDict(
    {
        "logits": LOGITS,
        "label": LABELS.expand(4, 3),
        "correct": CORRECT,
        "row_loss": torch.arange(12.0).view(4, 3),
    },
    (4, 3),
)


def test_forgetting_counts_the_epochs_before_a_mistake() -> None:
    expected = [sum(a and not b for a, b in pairwise(row)) for row in CORRECT.T.tolist()]
    assert max(expected) > 0
    assert forgetting(RESULTS).tolist() == expected


def test_moving_average_halves_the_weight_of_each_earlier_epoch() -> None:
    weights = torch.tensor([1, 2, 4, 8.0])
    expected = (weights[:, None] * RESULTS["row_loss"]).sum(0) / 15
    torch.testing.assert_close(moving_average(RESULTS), expected)


def test_margin_is_the_logit_of_the_label_minus_the_other_one() -> None:
    expected = (LOGITS[:, range(3), LABELS] - LOGITS[:, range(3), 1 - LABELS]).mean(0)
    torch.testing.assert_close(margin(RESULTS), expected)


def test_el2n_is_the_norm_of_the_error_of_probabilities() -> None:
    errors = LOGITS.softmax(-1) - torch.eye(2)[LABELS]
    torch.testing.assert_close(el2n(RESULTS), errors.square().sum(-1).sqrt().mean(0))
