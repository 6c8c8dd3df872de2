"""The recogniser: its full size, and padding that changes nothing."""

from __future__ import annotations

import pytest
import torch

from lockstep.recipes.speech.recogniser import Recogniser, output_lengths

SMALL = {"width": 16, "layers": 2, "heads": 2, "memory_size": 6, "theta": 8.0}


@pytest.mark.parametrize(("symbols", "parameters"), [(29, 7_156_253), (32, 7_157_792)])
def test_the_whole_model_has_the_size_that_the_document_gives(symbols: int, parameters: int) -> None:
    with torch.device("meta"):
        model = Recogniser(symbols=symbols)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("downsample", [1, 2, 4])
def test_neighbours_and_padding_do_not_change_an_utterance(downsample: int) -> None:
    torch.manual_seed(0)
    model = Recogniser(5, 7, **SMALL, downsample=downsample, dropout=0.0).double()
    lengths = torch.tensor([13, 9, 1])
    features = torch.randn(3, 17, 5, dtype=torch.float64)
    together = model(features, lengths)
    garbage = features.clone()
    for row, length in enumerate(lengths.tolist()):
        garbage[row, length:] = float("nan")
    assert torch.equal(model(garbage, lengths).isnan(), torch.zeros_like(together, dtype=torch.bool))
    for row, length in enumerate(lengths.tolist()):
        alone = model(features[row : row + 1, :length], lengths[row : row + 1])
        frames = int(output_lengths(lengths[row : row + 1], downsample))
        assert alone.shape[1] == frames
        # The model's output is float32; what is before it is not.
        torch.testing.assert_close(together[row, :frames], alone[0], rtol=1e-5, atol=1e-6)


def test_outputs_are_log_probabilities() -> None:
    output = Recogniser(5, 7, **SMALL)(torch.randn(2, 6, 5), torch.tensor([6, 4]))
    torch.testing.assert_close(output.exp().sum(-1), torch.ones(2, 6))
