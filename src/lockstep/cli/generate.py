"""``lockstep generate``."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import App, Parameter

from lockstep.cli.output import DEFAULT_RUNS_DIR, AsJson, RunRef, RunsDir, checkpoint_choice, find, print_json
from lockstep.errors import ConfigError, UnsupportedError

app = App(
    name="generate",
    usage="Usage: lockstep generate RUN [OPTIONS]",
    help_epilogue="Example:\n  lockstep generate last --prompt 'The class ' --tokens 200",
)


@app.default
def generate(
    run: RunRef,
    /,
    *,
    prompt: Annotated[str, Parameter(help="What the text begins with. Default: nothing.")] = "",
    tokens: Annotated[int, Parameter(help="Tokens to generate. Default: 200.")] = 200,
    temperature: Annotated[
        float, Parameter(help="0 takes the most probable token; above 1 is more varied. Default: 0.8.")
    ] = 0.8,
    top_k: Annotated[int | None, Parameter(help="Draw from the N most probable tokens only. Default: all.")] = None,
    seed: Annotated[int, Parameter(help="The same seed gives the same text. Default: 0.")] = 0,
    checkpoint: Annotated[str, Parameter(metavar="best|last|STEP", help="Which weights. Default: best.")] = "best",
    as_json: AsJson = False,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    """Continue a prompt with a trained language model."""
    for flag, value, least in (("--tokens", tokens, 0), ("--temperature", temperature, 0), ("--top-k", top_k, 1)):
        if value is not None and value < least:
            raise ConfigError(f"invalid value for {flag}: {value:g}", fix=f"use {least} or more")
    chosen = checkpoint_choice(checkpoint)
    found = find(run, runs_dir)
    from lockstep.launch.finished.reopen import load_model
    from lockstep.tasks.text.task import TextTask

    task, model = load_model(found, chosen)
    if not isinstance(task, TextTask):
        raise UnsupportedError(
            "this run generates no text", why=f"its task is {type(task).__name__}", fix="name a run of `text`"
        )
    text = task.generate(model, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed)
    if as_json:
        print_json({"prompt": prompt, "text": text}, sys.stdout)
    else:
        sys.stdout.write(text + "\n")
