"""The language model: its positions, and drawing tokens."""

from __future__ import annotations

import pytest
import torch

from lockstep.recipes.text.gpt import Gpt, generate, rotated


def test_the_future_has_no_influence() -> None:
    torch.manual_seed(0)
    model = Gpt(50, 16, width=32, depth=2, heads=2).eval()
    ids = torch.randint(0, 50, (3, 16))
    torch.testing.assert_close(model(ids[:, :7]), model(ids)[:, :7])


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    angles = torch.arange(20)[:, None] * torch.tensor([1.0, 0.1])
    query, key = torch.randn(4), torch.randn(4)
    turned = rotated(query.expand(20, 4), angles), rotated(key.expand(20, 4), angles)
    scores = turned[0] @ turned[1].T
    torch.testing.assert_close(scores.diagonal(3), scores[0, 3].expand(17))


def test_generating_is_repeatable_and_longer_than_the_context() -> None:
    torch.manual_seed(0)
    model = Gpt(50, 8, width=32, depth=1, heads=2).eval()
    first, second = (generate(model, [1, 2], 30, context=8, seed=3) for _ in range(2))
    assert first == second and len(first) == 30
    assert generate(model, [1] * 20, 5, context=8, temperature=0) == generate(model, [1] * 20, 5, context=8, top_k=1)


def test_a_width_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\b30 .*\b4 heads"):
        Gpt(50, 8, width=30, heads=4)
