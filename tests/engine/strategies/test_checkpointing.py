"""Activations that are computed again: the same weights, with each block called twice a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import ArrayDataset, Datasets, Loss
from lockstep.errors import UnsupportedError
from tests.attempts import attempt
from tests.toys import CLASSES, FEATURES, Toy, arrays


class Block(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, FEATURES))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        Block.calls += self.training
        return values + self.inside(values)


class Deep(Toy):
    def model(self) -> nn.Module:
        self.parts = nn.ModuleList(Block() for _ in range(2))
        return nn.Sequential(*self.parts, nn.Linear(FEATURES, CLASSES))

    def blocks(self, model: Any) -> Any:
        return [model[0], model[1]]

    def stages(self, model: Any) -> Any:
        return list(model)


class Normed(Deep):
    def model(self) -> nn.Module:
        return nn.Sequential(super().model(), nn.BatchNorm1d(CLASSES))


@pytest.mark.parametrize("reproducibility", ["fast", "exact"])
def test_the_weights_are_the_same_and_blocks_run_twice(tmp_path: Path, reproducibility: str) -> None:
    found, calls = [], []
    for recompute in (False, True):
        training: dict[str, Any] = {"max_steps": 3, "activation_checkpointing": recompute}
        training["reproducibility"] = reproducibility
        Block.calls = 0
        found.append(attempt(Deep, tmp_path / str(recompute), training=training)[0])
        calls.append(Block.calls)
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())
    assert calls[1] == 2 * calls[0] > 0


def test_batchnorm_is_refused(tmp_path: Path) -> None:
    training = {"max_steps": 1, "activation_checkpointing": True}
    with pytest.raises(UnsupportedError, match=r"activation_checkpointing\b.*BatchNorm1d"):
        attempt(Normed, tmp_path / "run", training=training)


class Sentences(Toy):
    """Models of transformers with their own settings: a cache is on."""

    def datasets(self) -> Datasets:
        inputs, labels = arrays(64, 1)
        return Datasets(ArrayDataset((inputs * 10).long().clamp(0, 49), labels))

    def loss(self, model: Any, batch: Any) -> Loss:
        ids = batch[0]
        return Loss(model(input_ids=ids, labels=ids).loss * len(ids), len(ids))


class Translates(Sentences):
    def model(self) -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        return T5ForConditionalGeneration(T5Config(vocab_size=50, decoder_start_token_id=0, **sizes))


class Continues(Sentences):
    def model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))


@pytest.mark.long
@pytest.mark.parametrize("kind", [Translates, Continues])
def test_models_with_a_cache_train_without_it(tmp_path: Path, kind: type[Toy]) -> None:
    pytest.importorskip("transformers")
    found = []
    for recompute in (False, True):
        training = {"max_steps": 3, "activation_checkpointing": recompute}
        # Gradients of what several blocks read are added in another order; Adam would enlarge such rounding.
        found.append(attempt(kind, tmp_path / str(recompute), training=training, optimizer={"name": "sgd"})[0])
    torch.testing.assert_close(found[0], found[1])
