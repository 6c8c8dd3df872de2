from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.tasks.har.models import Cnn, Mlp

MODELS = [Cnn, Mlp]


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(MODELS),
    batch=st.integers(1, 4),
    channels=st.integers(1, 9),
    length=st.integers(8, 130),
    classes=st.integers(2, 8),
)
def test_windows_become_logits(kind: type[nn.Module], batch: int, channels: int, length: int, classes: int) -> None:
    model = kind(channels, classes, length).eval()
    assert model(torch.randn(batch, channels, length)).shape == (batch, classes)


@pytest.mark.parametrize("kind", MODELS)
def test_every_parameter_learns(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind(3, 4, 64)
    model(torch.randn(8, 3, 64)).logsumexp(1).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("kind", MODELS)
def test_it_can_be_built_without_memory(kind: type[nn.Module]) -> None:
    with torch.device("meta"):
        model = kind(6, 7, 100)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.long
@pytest.mark.parametrize("kind", MODELS)
def test_it_can_be_exported_for_any_batch(kind: type[nn.Module]) -> None:
    model = kind(6, 7, 100).eval()
    program = torch.export.export(
        model, (torch.randn(2, 6, 100),), dynamic_shapes=({0: torch.export.Dim.AUTO},)
    ).module()
    samples = torch.randn(5, 6, 100)
    torch.testing.assert_close(program(samples), model(samples))


def test_the_mlp_has_the_classic_layers() -> None:
    linear = [(m.in_features, m.out_features) for m in Mlp(1, 6, 561).modules() if isinstance(m, nn.Linear)]
    assert linear == [(561, 128), (128, 6)]
    assert not any(isinstance(m, nn.Dropout) for m in Mlp(1, 6, 561).modules())


def test_the_cnn_sees_a_pattern_wherever_it_is() -> None:
    """Time steps far from the borders: pooling forgets the place."""
    torch.manual_seed(0)
    early, late = torch.zeros(1, 1, 160), torch.zeros(1, 1, 160)
    early[..., 40:56], late[..., 80:96] = 1.0, 1.0
    cnn = Cnn(1, 3, 160).eval()
    torch.testing.assert_close(cnn(early), cnn(late))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Cnn(1, 2, 7), "halve"),
        (lambda: Cnn(1, 2, 64, widths=(8, 8), kernels=(3,)), "shorter"),
    ],
)
def test_sizes_that_cannot_be_are_refused(build: type[nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
