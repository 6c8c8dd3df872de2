"""`lockstep generate` and `lockstep transcribe`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lockstep.cli.output import DEFAULT_RUNS_DIR, AsJson, RunRef, RunsDir, answer, flag, verb
from lockstep.errors import ConfigError, UnsupportedError, UsageError
from lockstep.telemetry.console import say

if TYPE_CHECKING:
    pass
from lockstep.cli.results import open_checkpoint, weights_flag


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
    from lockstep.launch.finished.reopen import load_model
    from lockstep.recipes.text.task import TextTask

    task, model = load_model(run_folder, chosen)
    if not isinstance(task, TextTask):
        raise UnsupportedError(
            "this run generates no text", why=f"its task is {type(task).__name__}", fix="name a run of `text`"
        )
    text = task.generate(model, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed)
    answer({"prompt": prompt, "text": text}, lambda out: out.write(f"{text}\n"), as_json)


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
    from lockstep.launch.finished.reopen import load_model
    from lockstep.recipes.speech.task import transcribe as transcripts_of

    transcripts = transcripts_of(*load_model(run_folder, chosen), files)
    document = {"run": run_folder.read().id, "transcripts": [transcript._asdict() for transcript in transcripts]}
    answer(
        document,
        partial(say, "\n".join(f"{transcript.file}: {transcript.text}" for transcript in transcripts)),
        as_json,
    )
