from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.recipes.speech.lmu import CHUNK, LMU, delay_system, zero_order_hold


def naive(layer: LMU, x: Tensor, lengths: Tensor) -> Tensor:
    """The cell as it is written down, a step at a time; the output is 0 after the end of a sequence."""
    a, b = (part.to(x.dtype) for part in zero_order_hold(*delay_system(layer.memory_size, layer.theta)))
    h, m = x.new_zeros(len(x), layer.hidden_size), x.new_zeros(len(x), layer.memory_size)
    outputs = []
    for t, step in enumerate(x.unbind(1)):
        u = step @ layer.e_x + h @ layer.e_h + m @ layer.e_m
        m = m @ a.t() + u[:, None] * b
        h = torch.tanh(step @ layer.W_x.t() + h @ layer.W_h.t() + m @ layer.W_m.t())
        outputs.append(torch.where((t < lengths)[:, None], h, 0))
    return torch.stack(outputs, 1)


def build(sizes: tuple[int, int, int] = (3, 4, 5), theta: float = 12.0, seed: int = 0) -> LMU:
    """A layer in float64 in which no parameter is zero."""
    torch.manual_seed(seed)
    layer = LMU(*sizes, theta).double()
    torch.nn.init.normal_(layer.e_m, std=0.1 / math.sqrt(sizes[2]))
    return layer


def gradients(loss: Tensor, layer: LMU, *others: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [*layer.parameters(), *others]))


def assert_near(actual: Any, expected: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def compare_with_naive(layer: LMU, x: Tensor, lengths: Tensor | None) -> None:
    batch, time, _ = x.shape
    x.requires_grad_()
    full = torch.full((batch,), time)
    outputs = [layer(x, lengths), naive(layer, x, full if lengths is None else lengths)]
    assert_near(*outputs)
    weights = torch.randn_like(outputs[0])
    assert_near(*(gradients((output * weights).mean(), layer, x) for output in outputs))


@pytest.mark.long
@settings(max_examples=60)
@given(data=st.data())
def test_it_is_the_naive_loop_for_any_sizes(data: st.DataObject) -> None:
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    layer = build((draw(1, 4), draw(1, 5), draw(1, 12)), float(draw(2, 60)), seed=draw(0, 99))
    batch, time = draw(1, 4), draw(1, 3 * CHUNK + 1)
    lengths = torch.tensor([draw(0, time) for _ in range(batch)]) if data.draw(st.booleans()) else None
    compare_with_naive(layer, torch.randn(batch, time, layer.input_size).double(), lengths)


def test_it_is_the_naive_loop_at_the_memory_of_a_speech_model() -> None:
    layer = build((16, 8, 256), 1000.0)
    compare_with_naive(layer, torch.randn(2, 5 * CHUNK + 3, 16).double(), torch.tensor([83, 40]))


def test_gradients_are_those_of_the_function() -> None:
    """By finite differences."""
    layer = build((2, 2, 3))
    x, lengths = torch.randn(2, CHUNK + 3, 2).double().requires_grad_(), torch.tensor([CHUNK + 3, 7])
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x, lengths))

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()))


@pytest.mark.parametrize("filling", [0.0, 1e30, math.inf, math.nan])
def test_padding_changes_nothing(filling: float) -> None:
    layer, lengths = build(), torch.tensor([50, 17, 16, 1])
    x = torch.randn(4, 50, 3).double()
    padding = torch.arange(50) >= lengths[:, None]
    padded = x.masked_fill(padding[..., None], filling).requires_grad_()
    output = layer(padded, lengths)
    *found, found_x = gradients(output.sum(), layer, padded)
    alone = [layer(x[i : i + 1, :length]) for i, length in enumerate(lengths.tolist())]
    expected = gradients(sum(part.sum() for part in alone), layer)
    for i, part in enumerate(alone):
        assert_near(output[i, : lengths[i]], part[0])
    assert_near(found, expected)
    assert not output[padding].any()
    assert not found_x[padding].any()
    assert found_x[~padding].all()


def test_the_cell_of_the_speech_model_has_its_parameters() -> None:
    layer = LMU(512, 512, 256, 1000.0)
    assert sum(p.numel() for p in layer.parameters()) == 2 * 512 * 512 + 512 * 256 + 512 + 512 + 256
    assert not layer.e_m.any()


def test_every_parameter_learns() -> None:
    layer = LMU(3, 4, 5, 12.0)
    layer(torch.randn(2, 20, 3)).sum().backward()
    assert all(p.grad is not None and p.grad.all() for p in layer.parameters())


def test_what_is_kept_for_the_backward_pass_grows_linearly_in_time() -> None:
    layer = LMU(8, 8, 16, 100.0)
    kept = [saved_bytes(layer, 16 * CHUNK * factor) for factor in (1, 2, 4)]
    assert kept[2] - kept[1] == pytest.approx(2 * (kept[1] - kept[0]), rel=0.02)
    # A step keeps a few times its input and output, not a matrix.
    assert (kept[1] - kept[0]) / (16 * CHUNK) < 4 * 8 * 4 * (8 + 8 + 16)


def saved_bytes(layer: LMU, time: int) -> int:
    blocks: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        blocks[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = layer(torch.randn(4, time, 8))
    assert output.requires_grad  # and all that is kept was alive until here, so no address was used twice
    return sum(blocks.values())


def test_the_matrices_are_exact_after_a_change_of_type_or_of_device() -> None:
    expected = build().transition
    assert expected.dtype == torch.float64
    with torch.device("meta"):
        empty = LMU(3, 4, 5, 12.0)
    assert all(t.is_meta for t in [*empty.parameters(), *empty.buffers()])
    assert torch.equal(empty.to_empty(device="cpu").double().transition, expected)
    assert torch.equal(LMU(3, 4, 5, 12.0).bfloat16().transition, expected.float())


def test_mixed_precision_keeps_the_memory_in_float32() -> None:
    layer = build((8, 8, 32), 100.0).float()
    x = torch.randn(2, 200, 8)
    output = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(x)
    mixed.float().sum().backward()
    assert mixed.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    assert_near(mixed.float(), output, 0.05)


@pytest.mark.gpu
def test_a_gpu_gives_what_the_cpu_gives() -> None:
    layer, x, lengths = build(), torch.randn(3, 60, 3).double(), torch.tensor([60, 17, 0])
    output = layer(x, lengths)
    expected = gradients(output.square().sum(), layer)
    layer = layer.to("cuda")
    on_gpu = layer(x.to("cuda"), lengths.to("cuda"))
    found = gradients(on_gpu.square().sum(), layer)
    assert_near([t.cpu() for t in (on_gpu, *found)], [output, *expected])


@pytest.mark.long
def test_it_can_be_exported_for_any_batch() -> None:
    layer = build().eval()
    dynamic = ({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO})
    example = (torch.randn(2, 20, 3).double(), torch.tensor([20, 5]))
    program = torch.export.export(layer, example, dynamic_shapes=dynamic).module()
    x, lengths = torch.randn(5, 20, 3).double(), torch.tensor([0, 1, 16, 17, 20])
    assert_near(program(x, lengths), layer(x, lengths))


@pytest.mark.parametrize(("sizes", "theta"), [((3, 0, 5), 12.0), ((3, 4, 5), 0.0), ((3, 4, 5), math.nan)])
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int], theta: float) -> None:
    with pytest.raises(ValueError):
        LMU(*sizes, theta)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, when it is imported
def test_compiled_it_is_one_graph() -> None:
    """Each break would start kernels from Python again."""
    layer = build().float()
    x = torch.randn(2, 20, 3)
    compiled: Any = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))
