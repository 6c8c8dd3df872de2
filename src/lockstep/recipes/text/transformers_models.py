"""Causal language models of the library transformers, with LoRA adapters of peft; from local files only."""

from __future__ import annotations

import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.packing import causal_mask
from lockstep.errors import ConfigError, UnsupportedError


def build(path: Path, vocabulary: int, context: int, lora: int, *, packs: bool) -> nn.Module:
    """The model of a config.json (with new weights), or of a folder (with its weights, if it has some), in float32.

    Raises:
        UnsupportedError: a library is not installed. ConfigError: no such model, it is too small for the tokens, or
            its tokens see others than those before them (``packs``: in their document).
    """
    library = _import("transformers")
    if not path.exists():
        raise ConfigError(f"there is no {path}", fix="name a config.json, or a folder with one, in task.model")
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = library.AutoConfig.from_pretrained(str(path), **local)
        auto = library.AutoModelForCausalLM
        if path.is_dir() and any(chain(path.glob("*.safetensors"), path.glob("pytorch_model*.bin"))):
            model = auto.from_pretrained(str(path), config=config, dtype="float32", **local)
        else:
            model = auto.from_config(config.get_text_config(decoder=True), dtype=torch.float32)
        model.config.use_cache = False
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"transformers cannot make a causal language model of {path}", why=str(error)[:300], fix="check task.model"
        ) from None
    _check_sizes(path, config.get_text_config(decoder=True), vocabulary, context)
    if lora:
        model = _with_adapters(path, model, lora)
    model.register_forward_hook(_logits)
    if not next(model.parameters()).is_meta:
        _check_attention(path, model, vocabulary, packs=packs)
    return model


def _logits(model: nn.Module, args: Any, output: Any) -> Any:
    """Logits alone: a program of torch.export is loaded where the library and its types may not be."""
    return output.logits


def _with_adapters(path: Path, model: Any, lora: int) -> Any:
    peft = _import("peft")
    settings = peft.LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a property that transformers 5 has renamed
        try:
            return peft.get_peft_model(model, settings)
        except ValueError as error:
            raise ConfigError(
                f"peft has no adapters for the model of {path}",
                why=str(error)[:300],
                fix="leave task.lora out, or use another model",
            ) from None


def _check_sizes(path: Path, config: Any, vocabulary: int, context: int) -> None:
    if config.vocab_size < vocabulary:
        raise ConfigError(
            f"the model of {path} has {config.vocab_size} tokens, and the tokenizer {vocabulary}",
            why="the model has no embedding for the others",
            fix="use the model's tokenizer (task.tokenizer=tokenizer.json), or a smaller task.vocabulary",
        )
    longest = getattr(config, "max_position_embeddings", context)
    if 0 < longest < context:  # -1: any number
        raise ConfigError(
            f"the model of {path} takes {longest} tokens, and task.context is {context}", fix="lower task.context"
        )


@torch.no_grad()
def _check_attention(path: Path, model: Any, vocabulary: int, *, packs: bool) -> None:
    """Compare logits of tokens before and after later tokens, or other documents, are changed."""
    device = next(model.parameters()).device
    ids = torch.full((1, 8), vocabulary - 1, device=device)
    later = ids.clone()
    other = ids.clone()
    later[:, 4:] = vocabulary - 2
    other[:, :4] = vocabulary - 2
    trains = model.training
    model.eval()
    try:
        sees_later = _differ(model(ids)[:, :4], model(later)[:, :4])
        if packs:
            documents = torch.tensor([[1] * 4 + [2] * 4], device=device)
            mask = causal_mask(documents)
            positions = torch.tensor([[0, 1, 2, 3] * 2], device=device)
            packed = model(ids, attention_mask=mask, position_ids=positions)
            with_other = model(other, attention_mask=mask, position_ids=positions)
            sees_other = _differ(packed[:, 4:], with_other[:, 4:])
    except Exception as error:  # of any class, by model
        why = f"{type(error).__name__}: {str(error)[:300]}"
        fix = "use another model"
        with_mask = " with task.pack" if packs else ""
        raise ConfigError(f"the model of {path} cannot be called on tokens{with_mask}", why=why, fix=fix) from None
    model.train(trains)
    if sees_later:
        raise ConfigError(
            f"the model of {path} sees the tokens that it predicts",
            why="its attention is not limited to earlier tokens",
            fix='set "is_decoder": true in its config.json, or use a model that generates text',
        )
    if packs and sees_other:
        raise ConfigError(
            f"the model of {path} cannot be trained with task.pack",
            why="it does not keep the documents of a window apart",
            fix="leave task.pack out, or use another model",
        )


def _differ(logits: Tensor, other_logits: Tensor) -> bool:
    return bool((logits - other_logits).abs().max() > 1e-5 * logits.abs().max())


def _import(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        raise UnsupportedError(
            f"the package {name}, which task.model and task.lora need, is not installed",
            fix="pip install 'lockstep-train[transformers]'",
        ) from None
