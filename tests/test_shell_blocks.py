"""Every command of the documents runs, in order, shortened, on CPU ranks, in a copy of its folder; most are drills.

:data:`tests.documents.ELSEWHERE` has those that do not run, with the reasons. Their flags are parsed: Lockstep's in
``tests/test_guides.py``, those of other programs here.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests import commands
from tests.documents import ELSEWHERE, Command, documents
from tests.documents import commands as commands_of
from tests.gloo import ROOT, clean_environment

#: docs/start is followed command by command, with its output, in tests/test_site.py.
DOCUMENTS = {str(path.relative_to(ROOT)): commands_of(path) for path in documents() if path.parent.name != "start"}
#: Documents whose commands run in the suite, too, but for those that take long.
SHORT = ("README.md", "docs/own-loop.md", "examples/from_pytorch/single_device.py")
LONG = re.compile(r"doctor|torchrun|lightning|speech|verify|bench|forecast|--config")


def typed(lines: list[Command]) -> list[str]:
    """The commands that run, each as often as it is there."""
    return [line.shorter for line in lines if not line.is_mention and line.elsewhere is None]


#: What the pages name, and the page with it: the block of this title, or else the first one.
FILES = {
    "my_task.py": "README.md",
    "script.py": "docs/own-loop.md",
    "line.py": "docs/how-to/streams.md",
    "fine_tune.py": "docs/how-to/from-hugging-face.md",
    "causal.py": "docs/how-to/from-hugging-face.md",
    "power.py": "docs/how-to/time-series.md",
    "graphs.py": "docs/how-to/graphs.md",
}
MY_FILE = """
import lightning as L
import torch
from my_task import MyTask

class MyModule(L.LightningModule):
    def __init__(self, hidden: int = 8):
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, hidden), torch.nn.Linear(hidden, 2))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class MyDataModule(L.LightningDataModule):
    def __init__(self, root: str = "data"):
        super().__init__()

    def train_dataloader(self):
        samples = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.arange(32) % 2)
        return torch.utils.data.DataLoader(samples, batch_size=4)

    val_dataloader = test_dataloader = train_dataloader
"""
MY_CONFIG = "model: {class_path: my_file.MyModule}\ndata: {class_path: my_file.MyDataModule}\n"
#: Runs that a page may name, and the commands that make them.
RUNS = {
    "text-1": "lockstep train text --set task.data=corpus.txt --max-steps 2 --save-dir runs/text-1",
    "images-1": "lockstep train images --max-steps 2 --save-dir runs/images-1",
    "speech-1": "lockstep train speech --set task.train_manifest=train.jsonl --set task.val_manifest=val.jsonl "
    "--max-steps 2 --save-dir runs/speech-1",
    "lightning-1": "lockstep lightning fit -c cli_config.yaml --trainer.max_epochs 1 --run_dir runs/lightning-1",
    "rates-1": "lockstep sweep my_task.py:MyTask --seeds 2 --max-steps 2 --save-dir runs/rates-1",
}
#: As the command line, with ranks that are forks of it also where evaluate and predict start them.
MAIN = """
import os, sys
from lockstep.__main__ import main
from lockstep.launch.local.launcher_process import fork_launcher_ahead
from lockstep.launch.process.environment import set_defaults
set_defaults(os.environ)
for _ in range(8):
    fork_launcher_ahead()
sys.exit(main())
"""


def run(command: str, folder: Path) -> str:
    """Run ``command`` in a fork of a process that has imported torch; it has to succeed. Returns what it printed."""
    words = shlex.split(command)
    variables = dict(word.split("=", 1) for word in itertools.takewhile(re.compile(r"[A-Z_]+=").match, words))
    program, *arguments = words[len(variables) :]
    assert program in ("lockstep", "python", "torchrun")
    if program == "lockstep":
        arguments = ["-c", MAIN, *arguments]
    elif program == "torchrun":
        arguments = ["-m", "torch.distributed.run", "--standalone", *arguments]
    environment = clean_environment(PYTHONPATH=str(ROOT / "src"), COLUMNS="150", **variables)
    uses_lightning = "lightning" in command
    process = commands.start(
        *arguments, cwd=folder, env=environment, merged=True, script=not uses_lightning, lightning=uses_lightning
    )
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, f"{command}\n{output}"
    return output


def write_files(folder: Path) -> None:
    """Write the data that pages name."""
    draw = np.random.default_rng(0)
    (folder / "base_config.yaml").write_text("training: {epochs: 2}")
    (folder / "my_file.py").write_text(MY_FILE)
    (folder / "cli_config.yaml").write_text(MY_CONFIG)
    (folder / "corpus.txt").write_text("One word after the other. " * 4000)
    for kind, number in itertools.product(("cat", "dog"), range(20)):
        path = folder / "pictures" / kind / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (8, 8), dtype=np.uint8)).save(path)
    shutil.copytree(folder / "pictures", folder / "other_pictures")
    (folder / "rare").mkdir()
    for split in ("train", "val", "test"):
        part = {"samples": torch.randn(64, 6, 100), "labels": torch.arange(64) % 7}
        torch.save(part, folder / "rare" / f"{split}.pt")
    words = ("one", "two", "three", "four", "five")
    for number, name in enumerate(("train", "val", "flite", "flite_val", "unseen", "other")):
        lines = []
        for row, word in enumerate(words):
            path = folder / f"{name}-{row}.wav"
            _write_noise(path, draw)
            lines.append(
                json.dumps({"audio_path": path.name, "text": f"{word} {words[number % 5]} {name}", "duration": 2})
            )
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    for name in ("recording.wav", "file.wav", "other.flac"):  # read by its content
        _write_noise(folder / name, draw)


def _write_noise(path: Path, draw: np.random.Generator) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(draw.integers(-9000, 9000, 32000, dtype=np.int16).tobytes())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files and runs that the pages name."""
    folder = tmp_path_factory.mktemp("pages") / "folder"
    shutil.copytree(ROOT / "examples" / "autoencoder", folder)
    shutil.copytree(ROOT / "configs", folder / "configs")
    for name, page in FILES.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        block = re.search(rf'```python title="{name}"\n(.*?)```', text, re.S) or re.search(
            r"```python[^\n]*\n(.*?)```", text, re.S
        )
        assert block
        (folder / name).write_text(block[1], encoding="utf-8")
    write_files(folder)
    for name in ("run-1a2b3c4d", "run-5e6f7a8b"):
        run(f"lockstep train my_task.py:MyTask --devices cpu --max-steps 3 --save-dir runs/{name}", folder)
    return folder


def folder_for(document: str, prepared: Path, copy: Path) -> Path:
    """A copy of the folder in which a reader of ``document`` types its commands, with the files that it shows."""
    example = ROOT.joinpath(*Path(document).parts[:2])
    shutil.copytree(example if (example / "README.md").exists() else prepared, copy, symlinks=True)
    shown = re.findall(r"```yaml\n# (\S+\.yaml)\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.S)
    for name, content in shown:
        (copy / name).write_text(content, encoding="utf-8")
    return copy


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("document", "whole"),
    [
        *(
            pytest.param(path, True, id=path, marks=pytest.mark.drill)
            for path, lines in DOCUMENTS.items()
            if typed(lines)
        ),
        *(pytest.param(path, False, id=f"short {path}") for path in SHORT),
    ],
)
def test_commands_run(document: str, whole: bool, prepared: Path, tmp_path: Path) -> None:
    folder = folder_for(document, prepared, tmp_path / "folder")
    steps = itertools.count(4)
    lines = typed(DOCUMENTS[document])
    lines = lines if whole else [line for line in lines if not LONG.search(line)]
    for name in RUNS:
        if any(name in line for line in lines):
            run(RUNS[name], folder)
    for command in lines:  # each resume has a step to take
        run(re.sub("lockstep resume", f"\\g<0> --set training.max_steps={next(steps)}", command), folder)


#: The programs that measure for too long, and the flags that documents give them.
MEASUREMENTS: dict[str, set[str]] = {}
for _line in itertools.chain(*DOCUMENTS.values()):
    _program = re.match(r"python ((?:benchmarks|scripts)/\S+\.py)", _line.text)
    if _program and (ROOT / _program[1]).exists():
        MEASUREMENTS.setdefault(_program[1], set()).update(re.findall(r"--[\w-]+", _line.text))


@pytest.mark.drill
@pytest.mark.parametrize("program", MEASUREMENTS)
def test_flags_of_measurements_are_those_of_the_programs(program: str) -> None:
    shown = run(f"python {program} --help", ROOT) if MEASUREMENTS[program] else ""
    assert {flag for flag in MEASUREMENTS[program] if not re.search(rf"{flag}\b", shown)} == set()


def test_what_does_not_run_is_said() -> None:
    lines = list(itertools.chain(*DOCUMENTS.values()))
    assert {line.elsewhere for line in lines} == {*ELSEWHERE, None}, "rows without a command"
    assert all(test is None or (ROOT / test).exists() for _, test in ELSEWHERE.values())
    assert len(typed(lines)) > 150
