"""Objects that a configuration of LightningCLI makes: module, data module, and arguments of the Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from lockstep._compat.lightning_cli import OpenCLI


@dataclass
class Hardware:
    """Which devices to train on, and in what precision.

    Args:
        selected_devices: "cpu", "gpu:0", …; "all" alone means every GPU, else the CPU. "cpu" twice means two ranks on
            the CPU. Unset: gpu:0 if there is one, else cpu; unless trainer.accelerator, devices or strategy say it.
        precision: 32, 16-mixed, bf16-mixed or bf16-true. With the section left out, trainer.precision may say another,
            and the devices stay those of the default.
    """

    selected_devices: list[str] | None = None
    precision: Literal["32", "16-mixed", "bf16-mixed", "bf16-true"] = "32"


class HardwareCLI(OpenCLI):
    """Sections ``model``, ``data``, ``trainer``, ``optimizer``, ``lr_scheduler`` and ``hardware``.

    With ``run=False`` it makes module, data module and, as ``trainer``, the arguments of the Trainer.
    """

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_core_arguments_to_parser(parser)
        parser.usage = "%(prog)s [options]"  # an error would print a page of them before its message
        parser.add_class_arguments(Hardware, "hardware")
        parser.add_argument(
            "--run_dir", type=str | None, default=None, help="Run folder of a fit. Default: a new one in runs/."
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # As in Lightning, but without its warning about a program that has arguments itself.
        self.config = parser.parse_object(args) if isinstance(args, Mapping) else parser.parse_args(args)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        if self.subcommand is None:
            self.trainer_class = dict  # type: ignore[assignment]
        return super().instantiate_trainer(**kwargs)


def make_parts(
    sections: Mapping[str, Any], cli_class: type[HardwareCLI] = HardwareCLI, **options: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """What ``sections`` of LightningCLI make: module, data module, arguments of the Trainer.

    ``options``: further arguments of the class.
    """
    options |= {"args": deepcopy(dict(sections)), "run": False, "save_config_callback": None}
    cli = cli_class(**options)
    return cli.model, cli.datamodule, changed(cli.trainer)  # type: ignore[arg-type]


def changed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a Trainer's arguments that differ from its defaults."""
    defaults = {name: parameter.default for name, parameter in signature(Trainer).parameters.items()}

    def is_default(value: Any, default: Any) -> bool:
        return value == [] or (type(value) is type(default) and value == default)

    return {name: value for name, value in arguments.items() if not is_default(value, defaults.get(name))}
