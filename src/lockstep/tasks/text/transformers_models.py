"""Causal language models of the library transformers, with LoRA adapters of peft; from local files only."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.errors import ConfigError, UnsupportedError


def build(path: Path, vocabulary: int, context: int, lora: int) -> nn.Module:
    """The model of a config.json (with new weights), or of a folder (with its weights, where it has some).

    Raises:
        UnsupportedError: a library is not installed. ConfigError: no such model, or it is too small for the tokens.
    """
    library = _import("transformers")
    if not path.exists():
        raise ConfigError(f"there is no {path}", fix="name a config.json, or a folder with one, in task.model")
    try:
        config = library.AutoConfig.from_pretrained(str(path), local_files_only=True)
        config.use_cache = False
        weights = path.is_dir() and any(path.glob("*.safetensors"))
        auto = library.AutoModelForCausalLM
        if weights:
            model = auto.from_pretrained(str(path), config=config, local_files_only=True, dtype="float32")
        else:
            model = auto.from_config(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"transformers cannot make a causal language model of {path}", why=str(error)[:300], fix="check task.model"
        ) from None
    _check(path, config, vocabulary, context)
    if lora:
        model = _with_adapters(model, lora)
    model.register_forward_hook(_logits)
    return model  # type: ignore[no-any-return]


def _logits(model: nn.Module, args: Any, output: Any) -> Any:
    """Logits alone: a program of torch.export is loaded where the library and its types may not be."""
    return output.logits


def _with_adapters(model: nn.Module, lora: int) -> Any:
    peft = _import("peft")
    settings = peft.LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a property that transformers 5 has renamed
        return peft.get_peft_model(model, settings)


def _check(path: Path, config: Any, vocabulary: int, context: int) -> None:
    if config.vocab_size < vocabulary:
        raise ConfigError(
            f"the model of {path} has {config.vocab_size} tokens, and the tokenizer {vocabulary}",
            why="the model has no embedding for the others",
            fix="use the model's own tokenizer (task.tokenizer=tokenizer.json), or a smaller task.vocabulary",
        )
    longest = getattr(config, "max_position_embeddings", context)
    if longest < context:
        raise ConfigError(
            f"the model of {path} takes {longest} tokens, and task.context is {context}", fix="lower task.context"
        )


def _import(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        raise UnsupportedError(
            f"the package {name}, which task.model and task.lora need, is not installed",
            fix="pip install 'lockstep-train[transformers]'",
        ) from None
