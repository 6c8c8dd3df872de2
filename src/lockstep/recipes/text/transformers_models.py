"""Causal language models of the library transformers, with LoRA adapters of peft; from local files only."""

from __future__ import annotations

import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.errors import ConfigError, UnsupportedError


def build(path: Path, vocabulary: int, context: int, lora: int, *, has_tokenizer: bool) -> nn.Module:
    """Build the model of a config.json (new weights) or of a folder (with its weights, if any), in float32.

    Args:
        vocabulary: number of tokens of the tokenizer; ``has_tokenizer``: it is of a file, not bytes or of the corpus.
        context: tokens of a sample.
        lora: rank of the adapters; 0: none.

    Raises:
        UnsupportedError: a library is not installed. ConfigError: no such model, it is too small for the tokens, it
            was trained with another tokenizer, or its tokens see those after them.
    """
    library = _import("transformers")
    if not path.exists():
        raise ConfigError(f"there is no {path}", fix="name a config.json, or a folder with one, in task.model")
    try:
        config = library.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        auto = library.AutoModelForCausalLM
        is_trained = path.is_dir() and any(chain(path.glob("*.safetensors"), path.glob("pytorch_model*.bin")))
        if is_trained:
            model = auto.from_pretrained(
                str(path), config=config, dtype="float32", local_files_only=True, trust_remote_code=False
            )
        else:
            model = auto.from_config(config.get_text_config(decoder=True), dtype=torch.float32)
        model.config.use_cache = False
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"transformers cannot make a causal language model of {path}", why=str(error)[:300], fix="check task.model"
        ) from None
    sizes = config.get_text_config(decoder=True)
    _check_sizes(path, sizes, vocabulary, context)
    if is_trained and not has_tokenizer and sizes.vocab_size != vocabulary:
        raise ConfigError(
            f"the model of {path} was trained with {sizes.vocab_size} tokens, and task.tokenizer has {vocabulary}",
            why="its weights belong to the tokens of its tokenizer, and the folder has no tokenizer.json",
            fix="set task.tokenizer to the model's tokenizer.json",
        )
    if lora:
        model = _with_adapters(path, model, lora)
    model.register_forward_hook(_logits)
    if not next(model.parameters()).is_meta:
        _check_attention(path, model, vocabulary)
    return model


def _logits(model: nn.Module, args: Any, output: Any) -> Any:
    """Return logits alone: a program of torch.export is loaded where the library and its types may not be."""
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
            fix="use the model's tokenizer (task.tokenizer=tokenizer.json), or "
            + ("a smaller task.vocabulary" if config.vocab_size >= 257 else f"a model of at least {vocabulary} tokens"),
        )
    longest = getattr(config, "max_position_embeddings", context)
    if 0 < longest < context:  # -1: any number
        raise ConfigError(
            f"the model of {path} takes {longest} tokens, and task.context is {context}", fix="lower task.context"
        )


@torch.no_grad()
def _check_attention(path: Path, model: Any, vocabulary: int) -> None:
    """Compare logits of tokens before and after later tokens are changed."""
    ids = torch.full((1, 8), vocabulary - 1, device=next(model.parameters()).device)
    changed = ids.clone()
    changed[:, 4:] = vocabulary - 2
    is_training = model.training
    model.eval()
    logits = model(ids)[:, :4]
    difference = (logits - model(changed)[:, :4]).abs().max()
    model.train(is_training)
    if difference > 1e-5 * logits.abs().max():
        raise ConfigError(
            f"the model of {path} sees the tokens that it predicts",
            why="its attention is not limited to earlier tokens",
            fix='set "is_decoder": true in its config.json, or use a model that generates text',
        )


def _import(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        raise UnsupportedError(
            f"the package {name}, which task.model and task.lora need, is not installed",
            fix="pip install 'lockstep-train[transformers]'",
        ) from None
