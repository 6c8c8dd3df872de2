"""``strategy: dp`` as far as no GPU is needed: its plan, who gets how many samples, and what each GPU draws."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from lockstep.config import resolve
from lockstep.data.order import dropout_seed
from lockstep.engine.strategies.base import SeededDraws
from lockstep.engine.strategies.data_parallel import ScatteredModel, devices_for
from lockstep.hardware.resolve import resolve_placement
from lockstep.hardware.world import World
from lockstep.planning import Plan, TaskFacts, make_plan
from tests.hardware.machines import machine


def plan_of(strategy: str, **settings: Any) -> Plan:
    config = resolve({"hardware": {"selected_devices": ["gpu:0", "gpu:1"], "strategy": strategy}, **settings})
    placement = resolve_placement(config.hardware, config.distributed, World(), machine(2))
    facts = TaskFacts(name="toy", train_samples=67, val_samples=50, has_batchnorm=True)
    return make_plan(config, placement, facts, cores=4)


def test_the_plan_says_what_batchnorm_sees() -> None:
    plan = plan_of("dp")
    assert plan.world_size == 1
    assert plan.decisions["sync_batchnorm"].value is False
    assert "batchnorm_split" in {note.key for note in plan.notes}
    assert "batchnorm_split" not in {note.key for note in plan_of("ddp").notes}


def test_validation_on_the_first_gpu_has_as_many_samples_as_a_device_takes() -> None:
    assert plan_of("dp").eval_batch_size == 32
    assert plan_of("dp", validation={"batch_size": 8}).eval_batch_size == 8


@given(st.integers(1, 300), st.integers(1, 9), st.sampled_from([1, 2]))
def test_no_gpu_gets_a_part_too_small_for_batchnorm(samples: int, devices: int, least: int) -> None:
    used = devices_for(samples, devices, least)
    chunks = [len(chunk) for chunk in torch.arange(samples).chunk(used)]
    assert used == 1 or min(chunks) >= least
    if used < devices:
        assert min(len(chunk) for chunk in torch.arange(samples).chunk(used + 1)) < least
    if least == 1:
        assert used == devices


def test_a_tail_of_three_stays_on_one_gpu_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """67 samples in steps of 64 leave 3, of which torch would give the second GPU one."""
    plan = plan_of("dp")
    (tail,) = plan.batch.split(3)[0]
    sent: list[list[int]] = []

    def on_host(self: Any, inputs: tuple[Tensor], kwargs: Any, device_ids: list[int]) -> None:
        sent.append([len(chunk) for chunk in inputs[0].chunk(len(device_ids))])

    monkeypatch.setattr(DataParallel, "scatter", on_host)
    # Else it refuses the host's devices where there are GPUs.
    monkeypatch.setattr(sys.modules[DataParallel.__module__], "_get_available_device_type", lambda: None)
    model = ScatteredModel(nn.Linear(4, 2), [torch.device("cpu")] * 2, plan.batch.least_part)
    for samples in (tail[1] - tail[0], 4, 64):
        model.scatter((torch.zeros(samples, 4),), {}, [0, 1])
    assert sent == [[3], [2, 2], [32, 32]]


def test_each_gpu_of_a_process_draws_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators of the host stand for those of two GPUs; the first draws what a single one does."""
    gpus = torch.Generator(), torch.Generator()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    with torch.random.fork_rng(devices=[]):
        SeededDraws(5, [first, second])(7, 0)
        assert torch.random.initial_seed() == dropout_seed(5, 7, 0)
    seeds = [gpu.initial_seed() for gpu in gpus]
    assert seeds == [dropout_seed(5, 7, 0), dropout_seed(5, 7, 0, 1)]
    assert seeds[0] != seeds[1]
    with torch.random.fork_rng(devices=[]):
        SeededDraws(5, [first, first])(7, 0)
    assert gpus[0].initial_seed() == seeds[0], "a device that is named twice is one"
