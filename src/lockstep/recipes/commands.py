"""`lockstep generate` and `lockstep transcribe`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from lockstep.cli.output import DEFAULT_RUNS_DIR, AsJson, RunRef, RunsDir, answer, flag, verb
from lockstep.cli.results import open_checkpoint, weights_flag
from lockstep.errors import ConfigError, UnsupportedError, UsageError
from lockstep.telemetry.console import say


@verb("RUN [OPTIONS]", "Example:\n  lockstep generate last --prompt 'The class ' --tokens 200")
def generate(
    run: RunRef,
    /,
    *,
    prompt: Annotated[str, flag("Beginning of the text. Default: nothing.")] = "",
    tokens: Annotated[int, flag("Tokens to generate. Default: 200.")] = 200,
    temperature: Annotated[float, flag("0 takes the most probable token; above 1 is more varied. Default: 0.8.")] = 0.8,
    top_k: Annotated[int | None, flag("Draw from the N most probable tokens only. Default: all.")] = None,
    seed: Annotated[int, flag("The same seed gives the same text. Default: 0.")] = 0,
    checkpoint: Annotated[str, weights_flag("")] = "best",
    as_json: AsJson = False,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    for name, value, minimum in (("--tokens", tokens, 0), ("--temperature", temperature, 0), ("--top-k", top_k, 1)):
        if value is not None and value < minimum:
            raise ConfigError(f"invalid value for {name}: {value:g}", fix=f"use {minimum} or more")
    run_folder, chosen = open_checkpoint(run, runs_dir, checkpoint)
    from lockstep.api.finished.reopen import load_model
    from lockstep.recipes.text.task import TextTask

    task, model = load_model(run_folder, chosen)
    tokenizer = getattr(task, "tokenizer", None)
    if isinstance(task, TextTask):
        text = task.generate(model, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed)
    elif callable(getattr(model, "generate", None)) and callable(tokenizer):
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            text = _continue_with_transformers(model, tokenizer, prompt, tokens, temperature, top_k)
    else:
        raise UnsupportedError(
            "this run generates no text",
            why=f"its task is {type(task).__name__}; a model of transformers needs the task's tokenizer",
            fix="name a run of `text`, or set self.tokenizer in the task's __init__, its model() or load_state_dict()",
        )
    answer({"prompt": prompt, "text": text}, lambda out: out.write(f"{text}\n"), as_json)


def _continue_with_transformers(
    model: Any, tokenizer: Any, prompt: str, tokens: int, temperature: float, top_k: int | None
) -> str:
    """Continue ``prompt`` with ``model.generate``, by the most probable tokens if ``temperature`` is 0."""
    import torch

    inputs = tokenizer(prompt or tokenizer.bos_token or tokenizer.eos_token or " ", return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=tokens,
            do_sample=temperature > 0,
            temperature=temperature or None,
            top_k=(top_k or 0) if temperature else None,
        )
    text: str = tokenizer.decode(ids[0], skip_special_tokens=True)
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)  # others could change the terminal


@verb("RUN FILE... [OPTIONS]", "Example:\n  lockstep transcribe last recording.wav other.flac")
def transcribe(
    run: RunRef,
    /,
    *files: Annotated[Path, flag("Recordings: WAV, FLAC or OGG, of any rate.")],
    checkpoint: Annotated[str, weights_flag(" to use")] = "best",
    as_json: AsJson = False,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    if not files:
        raise UsageError("no recording was named", fix="write for example `lockstep transcribe last recording.wav`")
    run_folder, chosen = open_checkpoint(run, runs_dir, checkpoint)
    from lockstep.api.finished.reopen import load_model
    from lockstep.recipes.speech.task import transcribe as transcripts_of

    transcripts = transcripts_of(*load_model(run_folder, chosen), files)
    document = {"run": run_folder.read().id, "transcripts": [transcript._asdict() for transcript in transcripts]}
    answer(
        document,
        partial(say, "\n".join(f"{transcript.file}: {transcript.text}" for transcript in transcripts)),
        as_json,
    )
