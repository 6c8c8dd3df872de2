"""The command line: which verbs there are, and how a command ends.

A verb's module is imported when the verb is used, and torch when the verb needs it, so that ``lockstep --help``
answers at once.
"""

from __future__ import annotations

import difflib
import faulthandler
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cyclopts import (
    App,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    Token,
    UnknownOptionError,
    UnusedCliTokensError,
    convert,
)

from lockstep.cli.output import print_error
from lockstep.errors import LockstepError, StorageError, UsageError
from lockstep.telemetry.console import say

INTERRUPTED = 130
#: Files of the working folder from which libraries read settings: matplotlib's and W&B's.
_LIBRARY_CONFIG_FILES = ("matplotlibrc", "wandb/settings", ".wandb/settings")

HELP = "Train one PyTorch task on any set of devices: the same samples, loss and schedule on one as on many."
EPILOGUE = """\
Try it:
  lockstep devices                       # this machine's devices
  lockstep plan har --devices cpu,cpu    # every decision, and why
  lockstep train har --devices cpu,cpu   # train; two ranks on the CPU
  lockstep show last                     # its results

RUN is a run's folder, its id, the beginning of its id, or `last`.
Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 or 143 stopped by a signal after a checkpoint."""


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("lockstep-train")
    except metadata.PackageNotFoundError:
        return "unknown"


def _converted(kind: Any, tokens: Sequence[Token]) -> Any:
    """Convert as the parser does, but refuse a fraction as a whole number, which the parser rounds."""
    for number, expected, example in ((int, "a whole number", "10"), (float, "a number", "0.1")):
        if kind in (number, number | None):
            try:
                return number(tokens[0].value)
            except ValueError:
                flag = tokens[0].keyword
                message = f"{flag} is {tokens[0].value!r}, not {expected}"
                raise UsageError(message, fix=f"write for example {flag} {example}") from None
    return convert(kind, tokens)


app = App(
    name="lockstep",
    help=HELP,
    group_parameters=Group("Options", sort_key=0),
    usage="Usage: lockstep COMMAND [OPTIONS]",
    help_epilogue=EPILOGUE,
    help_format="plaintext",
    default_parameter=Parameter(converter=_converted, show_default=False),  # the texts say the defaults
    version=_version,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
app["--help"].group = app["--version"].group = Group("Help", sort_key=9)

_BEFORE, _RUNNING, _AFTER, _OTHER = (
    Group(name, sort_key=position)
    for position, name in enumerate(("Before a run", "Training", "Runs and results", "Other"))
)
#: Verbs in the order of the help page: name, group, one line.
VERBS = (
    ("devices", _BEFORE, "List this machine's devices, their free memory and the processes that use them."),
    ("plan", _BEFORE, "Show every decision of `train` with the same flags, and its reason; starts nothing."),
    ("doctor", _BEFORE, "Check whether this machine is ready for training on several devices."),
    ("verify", _BEFORE, "Check on your task that several devices compute the same as one."),
    ("audit", _BEFORE, "Check whether anybody's script computes the same on several ranks as on one."),
    ("bench", _BEFORE, "Measure steps, input, communication, scaling, batch sizes and learning rates."),
    ("memory", _BEFORE, "Predict the memory of each device, by strategy, and the largest batch that fits."),
    ("forecast", _BEFORE, "Predict throughput and scaling efficiency on more GPUs than you have."),
    ("train", _RUNNING, "Train a task."),
    ("run", _RUNNING, "Run a script with a training loop, on one or several devices."),
    ("sweep", _RUNNING, "Train a task with several settings and seeds, and compare them."),
    ("resume", _RUNNING, "Resume a run, on the same or different devices."),
    ("stop", _RUNNING, "Stop a run after saving a checkpoint."),
    ("top", _RUNNING, "Watch the devices and a run's progress, live in the terminal."),
    ("studio", _RUNNING, "Open the web page: choose devices, start runs, watch and compare them."),
    ("lightning", _RUNNING, "LightningCLI for your LightningModule: fit, validate, test, predict."),
    ("runs", _AFTER, "List the runs, newest first."),
    ("show", _AFTER, "Show one run: its state, plan, metrics, checkpoints and logs."),
    ("compare", _AFTER, "Compare runs: results, settings and plans."),
    ("report", _AFTER, "Write one HTML page about runs, and its pictures."),
    ("evaluate", _AFTER, "Compute the metrics of a run's checkpoint on its validation or test data."),
    ("predict", _AFTER, "Write a model's prediction for each sample of a data set to a file."),
    ("generate", _AFTER, "Continue a text with a trained language model."),
    (
        "export",
        _AFTER,
        "Write a run's weights (safetensors) and program (torch.export), with an example that loads them.",
    ),
    ("transcribe", _AFTER, "Transcribe audio files with a trained speech model."),
    ("version", _OTHER, "Show the versions of Lockstep, Python and the libraries it uses."),
)
#: The verbs of each module. Those of the leaves are named, never imported, here.
_MODULES = {
    "lockstep.audit.command": ("audit",),
    "lockstep.cli.before": ("plan", "verify"),
    "lockstep.cli.machine": ("devices", "version"),
    "lockstep.cli.reading": ("runs", "show"),
    "lockstep.cli.results": ("evaluate", "predict", "export"),
    "lockstep.cli.top": ("top",),
    "lockstep.cli.training": ("train", "run", "resume", "stop"),
    "lockstep.lab.commands.bench": ("bench",),
    "lockstep.lab.commands.doctor": ("doctor",),
    "lockstep.lab.commands.predict": ("memory", "forecast"),
    "lockstep.lab.commands.report": ("compare", "report"),
    "lockstep.lab.commands.sweep": ("sweep",),
    "lockstep.lightning.command": ("lightning",),
    "lockstep.recipes.commands": ("generate", "transcribe"),
    "lockstep.studio.command": ("studio",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
for _position, (_verb, _group, _help) in enumerate(VERBS):
    app.command(f"{_MODULE_OF[_verb]}:{_verb}", name=_verb, help=_help, group=_group, sort_key=_position)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, the words after ``lockstep``; returns its exit code."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    if argv is None and sys.stderr is not None:
        faulthandler.enable()  # a crash in native code ends the process without another word
    if "LOCAL_RANK" in os.environ:
        # torch.distributed.launch passes each rank its local rank as an argument too.
        tokens = [token for token in tokens if not token.startswith(("--local-rank=", "--local_rank="))]
    # A shell expands `--data-dir ~/x`, and leaves `--data-dir=~/x` as it is.
    tokens = [re.sub(r"(?<==)~(/.*)?$", _in_home, token) if token.startswith("--") else token for token in tokens]
    try:
        _check_working_folder()
        result = app(tokens, exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        return _fail(_as_usage_error(error, tokens))
    except LockstepError as error:
        return _fail(error)
    except KeyboardInterrupt:
        say("interrupted", sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough. The interpreter flushes again when it ends: give it nowhere.
        _discard_output()
        return 0
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and not _can_print():
            _discard_output()
            return _fail(StorageError("cannot write standard output", why=error.strerror or "", fix="free space there"))
        from lockstep.launch.failure.report import task_failure

        report = task_failure(error)
        if report is None:
            raise
        return _fail(report)
    return result if isinstance(result, int) else 0


def _check_working_folder() -> None:
    """Raise :class:`UsageError` if the working folder is gone, or is a run folder with settings of a library."""
    try:
        working_folder = Path.cwd()
    except FileNotFoundError as error:
        raise UsageError(
            "the working folder was removed", why="relative paths and torch's libraries need one", fix="cd to another"
        ) from error
    for file in (working_folder / name for name in _LIBRARY_CONFIG_FILES):
        if file.exists():
            from lockstep.rundir.files import is_in_run_folder

            if is_in_run_folder(working_folder):
                raise UsageError(
                    f"{file} is in a run folder",
                    why="a library would read its settings there; a run folder is data",
                    fix="cd to another folder, or remove the file",
                )


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _in_home(path: re.Match[str]) -> str:
    return str(Path(path[0]).expanduser())


def _can_print() -> bool:
    try:
        print(flush=True)  # what failed before may have left the buffer empty
    except OSError:
        return False
    return True


def _fail(error: LockstepError) -> int:
    print_error(error, sys.stderr, rank=os.environ.get("RANK", "0"))
    return error.exit_code


def _as_usage_error(error: CycloptsError, tokens: Sequence[str]) -> UsageError:
    """Convert the parser's complaint to the form of all our errors."""
    error.verbose = False
    if isinstance(error, UnusedCliTokensError):
        unused = error.unused_tokens or ()
        message = f"unexpected {'arguments' if len(unused) > 1 else 'argument'}: {' '.join(unused)}"
        is_list = all(token.isdecimal() or token.startswith(("gpu:", "cpu")) for token in unused)
        return UsageError(message, fix="write a list with commas: --gpu-ids 0,1" if is_list else _help_of(tokens))
    message, question, suggestion = str(error).strip().partition(" Available commands:")[0].partition(" Did you mean ")
    if isinstance(error, MissingArgumentError):
        message = re.split("parameter ", message, flags=re.IGNORECASE)[-1]  # without `Command "train" parameter`
        message = message if message.startswith("-") else f"missing argument: {message.split()[0]}"
    if isinstance(error, UnknownOptionError):
        from lockstep.config.load import key_for

        option = str(error.token.keyword)
        is_typo = difflib.SequenceMatcher(None, option, suggestion.rstrip("?")).ratio() > 0.9
        if not is_typo and (key := key_for(option)) is not None:
            value = "true" if key == "training.compile" else "VALUE"
            return UsageError(f"unknown option {option}", fix=f"use --set {key}={value}")
        if option == suggestion.rstrip("?"):
            fix = f"write {option} without `--`: words after it are for a script"
            return UsageError(f"{option} stands behind `--`", fix=fix)
    fix = f"did you mean {suggestion}" if question else _help_of(tokens)
    return UsageError(message[:1].lower() + message[1:].rstrip("."), fix=fix)


def _help_of(tokens: Sequence[str]) -> str:
    verb = next((token for token in tokens if not token.startswith("-")), "")
    command = f"lockstep {verb}" if verb in {name for name, _, _ in VERBS} else "lockstep"
    return f"`{command} --help` lists the options"
