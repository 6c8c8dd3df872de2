from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.recipes.speech.lmu import CHUNK, FORMS, LMU, LMUState, delay_system, zero_order_hold

both_forms = pytest.mark.parametrize("form", FORMS)


def naive(layer: LMU, x: Tensor, lengths: Tensor, state: LMUState) -> tuple[Tensor, LMUState]:
    """The cell as it is written down, a step at a time; a sequence that has ended stands still."""
    a, b = (part.to(x.dtype) for part in zero_order_hold(*delay_system(layer.memory_size, layer.theta)))
    h, m = state
    outputs = []
    for t, step in enumerate(x.unbind(1)):
        u, z = step @ layer.e_x, step @ layer.W_x.t()
        if layer.form == "recurrent":
            u, z = u + h @ layer.e_h + m @ layer.e_m, z + h @ layer.W_h.t()
        new_m = m @ a.t() + u[:, None] * b
        new_h = torch.tanh(z + new_m @ layer.W_m.t())
        runs = (t < lengths)[:, None]
        h, m = torch.where(runs, new_h, h), torch.where(runs, new_m, m)
        outputs.append(torch.where(runs, new_h, 0))
    return torch.stack(outputs, 1), LMUState(h, m)


def build(form: str, sizes: tuple[int, int, int] = (3, 4, 5), theta: float = 12.0, seed: int = 0) -> LMU:
    """A layer in float64 in which no parameter is zero."""
    torch.manual_seed(seed)
    layer = LMU(*sizes, theta, form).double()
    if form == "recurrent":
        torch.nn.init.normal_(layer.e_m, std=0.1 / math.sqrt(sizes[2]))
    return layer


def start(layer: LMU, batch: int) -> LMUState:
    return LMUState(*(torch.randn(batch, n).double() for n in (layer.hidden_size, layer.memory_size)))


def gradients(loss: Tensor, layer: LMU, *others: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [*layer.parameters(), *others]))


def assert_near(actual: Any, expected: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def compare_with_naive(layer: LMU, x: Tensor, lengths: Tensor | None, state: LMUState | None) -> None:
    batch, time, _ = x.shape
    x.requires_grad_()
    zeros = LMUState(x.new_zeros(batch, layer.hidden_size), x.new_zeros(batch, layer.memory_size))
    full = torch.full((batch,), time)
    results = [layer(x, lengths, state), naive(layer, x, full if lengths is None else lengths, state or zeros)]
    assert_near(*results)
    weights = torch.randn_like(results[0][0])
    losses = [(output * weights).mean() + h.square().mean() + m.square().mean() for output, (h, m) in results]
    assert_near(*(gradients(loss, layer, x) for loss in losses))


@settings(max_examples=60)
@given(data=st.data())
@both_forms
def test_it_is_the_naive_loop_for_any_sizes(form: str, data: st.DataObject) -> None:
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    layer = build(form, (draw(1, 4), draw(1, 5), draw(1, 12)), float(draw(2, 60)), seed=draw(0, 99))
    batch, time = draw(1, 4), draw(1, 3 * CHUNK + 1)
    lengths = torch.tensor([draw(0, time) for _ in range(batch)]) if data.draw(st.booleans()) else None
    state = start(layer, batch) if data.draw(st.booleans()) else None
    compare_with_naive(layer, torch.randn(batch, time, layer.input_size).double(), lengths, state)


@both_forms
def test_it_is_the_naive_loop_at_the_memory_of_a_speech_model(form: str) -> None:
    layer = build(form, (16, 8, 256), 1000.0)
    compare_with_naive(layer, torch.randn(2, 5 * CHUNK + 3, 16).double(), torch.tensor([83, 40]), start(layer, 2))


@both_forms
@pytest.mark.parametrize("hidden", [2, 40], ids=["many steps", "few steps"])
def test_gradients_are_those_of_the_function(form: str, hidden: int) -> None:
    """By finite differences; by steps and width the parallel form chooses what it computes."""
    layer = build(form, (2, hidden, 3))
    x, lengths = torch.randn(2, CHUNK + 3, 2).double().requires_grad_(), torch.tensor([CHUNK + 3, 7])
    names = [name for name, _ in layer.named_parameters()]
    h, m = (part.requires_grad_() for part in start(layer, 2))

    def run(x: Tensor, h: Tensor, m: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(names, parameters, strict=True))
        output, state = torch.func.functional_call(layer, given, (x, lengths, LMUState(h, m)))
        return output, *state

    assert torch.autograd.gradcheck(run, (x, h, m, *layer.parameters()), fast_mode=hidden > 2)


@settings(max_examples=40)
@given(cuts=st.sets(st.integers(1, 59), max_size=5), lengths=st.lists(st.integers(0, 60), min_size=3, max_size=3))
@both_forms
def test_pieces_give_what_the_whole_gives(form: str, cuts: set[int], lengths: list[int]) -> None:
    layer, x, ends = build(form), torch.randn(3, 60, 3).double(), torch.tensor(lengths)
    whole, last = layer(x, ends)
    state, pieces, begin = None, [], 0
    for piece in x.tensor_split(sorted(cuts), dim=1):
        output, state = layer(piece, (ends - begin).clamp(0, piece.shape[1]), state)
        pieces.append(output)
        begin += piece.shape[1]
    assert_near((torch.cat(pieces, 1), state), (whole, last))


@both_forms
def test_a_long_recording_goes_through_in_pieces_without_keeping_the_first(form: str) -> None:
    layer = build(form)
    _, state = layer(torch.randn(1, 500, 3).double())
    assert sum(part.untyped_storage().nbytes() for part in state) == 8 * (layer.hidden_size + layer.memory_size)


@both_forms
@pytest.mark.parametrize("filling", [0.0, 1e30, math.inf, math.nan])
def test_padding_changes_nothing(form: str, filling: float) -> None:
    layer, lengths = build(form), torch.tensor([50, 17, 16, 1])
    x = torch.randn(4, 50, 3).double()
    padding = torch.arange(50) >= lengths[:, None]
    padded = x.masked_fill(padding[..., None], filling).requires_grad_()
    output, state = layer(padded, lengths)
    *found, found_x = gradients(output.sum() + state.m.sum(), layer, padded)
    alone = [layer(x[i : i + 1, :length]) for i, length in enumerate(lengths.tolist())]
    expected = gradients(sum(o.sum() + s.m.sum() for o, s in alone), layer)
    for i, (o, s) in enumerate(alone):
        assert_near(output[i, : lengths[i]], o[0])
        assert_near([part[i] for part in state], [part[0] for part in s])
    assert_near(found, expected)
    assert not output[padding].any()
    assert not found_x[padding].any()
    assert found_x[~padding].all()


def test_the_forms_share_their_parameters() -> None:
    recurrent, parallel = build("recurrent"), build("parallel")
    own = {"e_h": (4,), "e_m": (5,), "W_h": (4, 4)}
    shared = {"e_x": (3,), "W_x": (4, 3), "W_m": (4, 5)}
    assert {name: tuple(p.shape) for name, p in parallel.state_dict().items()} == shared
    assert {name: tuple(p.shape) for name, p in recurrent.state_dict().items()} == shared | own
    report = recurrent.load_state_dict(parallel.state_dict(), strict=False)
    assert not report.unexpected_keys
    for name in own:
        torch.nn.init.zeros_(getattr(recurrent, name))
    x = torch.randn(2, 37, 3).double()
    assert_near(recurrent(x), parallel(x))


def test_the_cell_of_the_speech_model_has_its_parameters() -> None:
    layer = LMU(512, 512, 256, 1000.0, "recurrent")
    assert sum(p.numel() for p in layer.parameters()) == 2 * 512 * 512 + 512 * 256 + 512 + 512 + 256
    assert not layer.e_m.any()


@both_forms
def test_every_parameter_learns(form: str) -> None:
    layer = LMU(3, 4, 5, 12.0, form)
    layer(torch.randn(2, 20, 3))[0].sum().backward()
    assert all(p.grad is not None and p.grad.all() for p in layer.parameters())


@both_forms
def test_what_is_kept_for_the_backward_pass_grows_linearly_in_time(form: str) -> None:
    layer = LMU(8, 8, 16, 100.0, form)
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
        output, _ = layer(torch.randn(4, time, 8))
    assert output.requires_grad  # and all that is kept was alive until here, so no address was used twice
    return sum(blocks.values())


@both_forms
def test_the_matrices_are_exact_after_a_change_of_type_or_of_device(form: str) -> None:
    expected = build(form).transition
    assert expected.dtype == torch.float64
    with torch.device("meta"):
        empty = LMU(3, 4, 5, 12.0, form)
    assert all(t.is_meta for t in [*empty.parameters(), *empty.buffers()])
    assert torch.equal(empty.to_empty(device="cpu").double().transition, expected)
    assert torch.equal(LMU(3, 4, 5, 12.0, form).bfloat16().transition, expected.float())


@both_forms
def test_mixed_precision_keeps_the_memory_in_float32(form: str) -> None:
    layer = build(form, (8, 8, 32), 100.0).float()
    x = torch.randn(2, 200, 8)
    output, state = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, mixed_state = layer(x)
    mixed.float().sum().backward()
    assert mixed.dtype == torch.bfloat16
    assert mixed_state.m.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    assert_near(mixed.float(), output, 0.05)
    assert_near(mixed_state.m, state.m, 0.05)


@pytest.mark.gpu
@both_forms
def test_a_gpu_gives_what_the_cpu_gives(form: str) -> None:
    layer, x, lengths = build(form), torch.randn(3, 60, 3).double(), torch.tensor([60, 17, 0])
    output, state = layer(x, lengths)
    expected = gradients(output.square().sum() + state.m.sum(), layer)
    layer = layer.to("cuda")
    on_gpu, gpu_state = layer(x.to("cuda"), lengths.to("cuda"))
    found = gradients(on_gpu.square().sum() + gpu_state.m.sum(), layer)
    assert_near([t.cpu() for t in (on_gpu, *gpu_state, *found)], [output, *state, *expected])


@both_forms
def test_it_can_be_exported_for_any_batch(form: str) -> None:
    layer = build(form).eval()
    dynamic = ({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO})
    example = (torch.randn(2, 20, 3).double(), torch.tensor([20, 5]))
    program = torch.export.export(layer, example, dynamic_shapes=dynamic).module()
    x, lengths = torch.randn(5, 20, 3).double(), torch.tensor([0, 1, 16, 17, 20])
    assert_near(program(x, lengths), layer(x, lengths))


def run(layer: LMU, *shape: int, **arguments: Any) -> Any:
    return layer(torch.zeros(*shape).double(), **arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LMU(3, 4, 5, 12.0, "serial"), "one of parallel, recurrent, not 'serial'"),
        (lambda: LMU(3, 0, 5, 12.0), "at least 1"),
        (lambda: LMU(3, 4, 5, 0.0), "theta is positive"),
        (lambda: LMU(3, 4, 5, math.nan), "theta is positive"),
        (lambda: run(build("parallel"), 2, 9, 4), r"\(batch, time ≥ 1, 3\), not \(2, 9, 4\)"),
        (lambda: run(build("parallel"), 2, 0, 3), "time ≥ 1"),
        (lambda: run(build("parallel"), 9, 3), "time ≥ 1"),
        (lambda: run(build("parallel"), 2, 9, 3, lengths=torch.tensor([9, 10])), r"0 to the 9 steps.*\[9, 10\]"),
        (lambda: run(build("parallel"), 2, 9, 3, lengths=torch.tensor([-1, 9])), "0 to the 9 steps"),
        (lambda: run(build("parallel"), 2, 9, 3, lengths=torch.tensor([9])), r"integers of shape \(2,\)"),
        (lambda: run(build("parallel"), 2, 9, 3, lengths=torch.tensor([9.0, 9.0])), "integers of shape"),
        (lambda: run(build("recurrent"), 2, 9, 3, state=start(build("recurrent"), 3)), r"\(2, 4\), \(2, 5\)"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, when it is imported
def test_compiled_it_is_one_graph() -> None:
    """Each break would start kernels from Python again."""
    layer = build("parallel").float()
    x = torch.randn(2, 20, 3)
    compiled: Any = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x)[0], layer(x)[0])
