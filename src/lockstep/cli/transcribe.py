"""``lockstep transcribe``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from lockstep.cli.output import DEFAULT_RUNS_DIR, AsJson, RunRef, RunsDir, checkpoint_choice, find, print_json
from lockstep.errors import UsageError

app = App(
    name="transcribe",
    usage="Usage: lockstep transcribe RUN FILE... [OPTIONS]",
    help_epilogue="Example:\n  lockstep transcribe last recording.wav other.flac",
)


@app.default
def transcribe(
    run: RunRef,
    /,
    *files: Annotated[Path, Parameter(help="Recordings: WAV, FLAC or OGG, of any rate.")],
    checkpoint: Annotated[
        str, Parameter(metavar="best|last|STEP", help="Which weights to use. Default: best.")
    ] = "best",
    as_json: AsJson = False,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    """Print what is said in each file, a line each; computed on the CPU."""
    if not files:
        raise UsageError("no recording was named", fix="write for example `lockstep transcribe last recording.wav`")
    chosen = checkpoint_choice(checkpoint)
    found = find(run, runs_dir)
    from lockstep.launch.finished.reopen import load_model
    from lockstep.tasks.speech.transcribe import transcribe as hear
    from lockstep.telemetry.tables import say

    transcripts = hear(*load_model(found, chosen), files)
    if as_json:
        print_json({"run": found.read().id, "transcripts": [t._asdict() for t in transcripts]}, sys.stdout)
        return
    for transcript in transcripts:
        say(f"{transcript.file}: {transcript.text}", sys.stdout)
