"""The chunked cross-entropy is the plain one, in value and gradients, and never holds the logits whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmcli import loss
from llmcli.config import ModelConfig
from llmcli.loss import cross_entropy
from llmcli.model import build

V, D = 101, 8


@pytest.fixture(autouse=True)
def fresh_compilations() -> Iterator[None]:
    yield
    torch.compiler.reset()


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, softcap: float | None = None) -> Tensor:
    """The reference: every logit at once."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def inputs(
    positions: int = 60, dtype: torch.dtype = torch.float64, bias: bool = False, seed: int = 0
) -> tuple[list[Tensor], Tensor]:
    """hidden (3, T, D), weight (V, D) and perhaps bias (V,), all learned; targets of which a third is ignored."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()

    targets = torch.randint(0, V, (3, positions), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 1 / 3] = -100
    return [drawn(3, positions, D), drawn(V, D), *([drawn(V)] if bias else [])], targets


def value_and_gradients(function: Callable[..., Tensor], learned: list[Tensor], targets: Tensor, **options: object):
    weight_and_bias = learned[1:] if len(learned) == 3 else [learned[1], None]
    value = function(learned[0], *weight_and_bias, targets, **options)
    # By the mean, as training does: what flows back is not 1.
    return [value, *torch.autograd.grad(value / 7, learned)]


def assert_same(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        scale = max(1.0, other.abs().max().item())
        assert (one - other).abs().max().item() <= tolerance * scale


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 90, 180, 1000])
def test_equals_the_plain_loss_and_all_its_gradients(chunk: int, bias: bool, softcap: float | None) -> None:
    learned, targets = inputs(bias=bias)
    got = value_and_gradients(cross_entropy, learned, targets, chunk=chunk, softcap=softcap)
    assert_same(got, value_and_gradients(plain, learned, targets, softcap=softcap), 1e-12)


@given(
    positions=st.integers(1, 40),
    chunk=st.integers(1, 130),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
    shift=st.sampled_from([0.0, -700.0, 700.0]),
)
@settings(max_examples=40, deadline=None)
def test_equals_the_plain_loss_for_any_sizes(positions: int, chunk: int, bias: bool, seed: int, shift: float) -> None:
    learned, targets = inputs(positions, bias=bias, seed=seed)
    if bias:  # far from zero all exponentials would overflow or vanish
        learned[2].data += shift
    got = value_and_gradients(cross_entropy, learned, targets, chunk=chunk)
    assert_same(got, value_and_gradients(plain, learned, targets), 1e-12)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_a_model_are_those_of_its_logits(tied: bool) -> None:
    config = ModelConfig(
        family="gpt2",
        vocab_size=64,
        embed_dim=16,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    model = build(config).double()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    ids = torch.randint(0, 64, (3, 33))
    logits = model(ids[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    want = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    head = model.token_embeddings if model.output_projection is None else model.output_projection
    bias = None if tied else model.output_projection.bias
    cross_entropy(model.hidden(ids[:, :-1]), head.weight, bias, ids[:, 1:], chunk=10).backward()
    assert want.keys() == dict(model.named_parameters()).keys() and (tied or bias is not None)
    for name, parameter in model.named_parameters():
        assert (parameter.grad - want[name]).abs().max() < 1e-12 * max(1.0, want[name].abs().max()), name


@pytest.mark.parametrize("learned", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_what_is_learned_has_a_gradient(learned: tuple[int, ...]) -> None:
    tensors, targets = inputs(bias=True)
    want = value_and_gradients(plain, tensors, targets)
    for number, tensor in enumerate(tensors):
        tensor.requires_grad_(number in learned)
    cross_entropy(*tensors, targets, chunk=50).div(7).backward()
    for number, tensor in enumerate(tensors):
        if number in learned:
            assert_same([tensor.grad], [want[1 + number]], 1e-12)
        else:
            assert tensor.grad is None


def test_without_gradients_the_value_is_the_same_and_nothing_is_recorded() -> None:
    learned, targets = inputs(bias=True)
    want = cross_entropy(*learned, targets, chunk=50)
    with torch.no_grad():
        got = cross_entropy(*learned, targets, chunk=50)
    assert got.item() == want.item() and not got.requires_grad


def test_all_positions_ignored_is_a_loss_of_zero_without_gradient() -> None:
    learned, targets = inputs(bias=True)
    value, *gradients = value_and_gradients(cross_entropy, learned, torch.full_like(targets, -100), chunk=50)
    assert value.item() == 0 and all(not gradient.any() for gradient in gradients)


def test_no_positions_at_all_is_a_loss_of_zero() -> None:
    learned, targets = inputs(positions=0)
    value, *gradients = value_and_gradients(cross_entropy, learned, targets, chunk=50)
    assert value.item() == 0 and all(not gradient.any() for gradient in gradients)


def test_another_ignore_index_is_honoured() -> None:
    learned, targets = inputs()
    want = value_and_gradients(cross_entropy, learned, targets, chunk=50)
    got = value_and_gradients(cross_entropy, learned, targets.where(targets != -100, -1), chunk=50, ignore_index=-1)
    assert_same(got, want, 0)


def test_a_target_outside_the_vocabulary_is_an_error() -> None:
    learned, targets = inputs()
    targets[1, 5] = V
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        cross_entropy(learned[0], learned[1], None, targets, chunk=50)


def test_a_loss_that_is_not_a_number_is_not_hidden() -> None:
    learned, targets = inputs()
    targets[2, 3] = 1
    learned[0].data[2, 3, 0] = float("nan")
    assert cross_entropy(learned[0], learned[1], None, targets, chunk=50).isnan()


def test_a_second_backward_pass_and_a_second_derivative_are_errors() -> None:
    learned, targets = inputs()
    value = cross_entropy(learned[0], learned[1], None, targets, chunk=50)
    torch.autograd.grad(value, learned, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(value, learned)
    value = cross_entropy(learned[0], learned[1], None, targets, chunk=50)
    first, _ = torch.autograd.grad(value, learned, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        first.sum().backward()


def test_small_logits_are_computed_whole_to_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    learned, targets = inputs(bias=True)
    want = value_and_gradients(cross_entropy, learned, targets, chunk=50, softcap=2.0)
    monkeypatch.setattr(loss, "_chunked", None)  # by themselves these sizes do not get there
    assert_same(value_and_gradients(cross_entropy, learned, targets, softcap=2.0), want, 1e-12)


@pytest.mark.parametrize("chunk", [None, 50])
def test_half_precision_gives_a_float32_loss_close_to_the_exact_one(chunk: int | None) -> None:
    learned, targets = inputs(bias=True, dtype=torch.float32)
    want = value_and_gradients(plain, learned, targets)
    rounded = [tensor.detach().to(torch.bfloat16).requires_grad_() for tensor in learned]
    value, *gradients = value_and_gradients(cross_entropy, rounded, targets, chunk=chunk)
    assert value.dtype == torch.float32 and all(gradient.dtype == torch.bfloat16 for gradient in gradients)
    assert_same([value, *(gradient.float() for gradient in gradients)], want, 0.02)
    with torch.no_grad():
        assert_same([cross_entropy(*(t.half() for t in rounded), targets, chunk=chunk)], want[:1], 0.005)


@pytest.mark.parametrize("chunk", [None, 50])
def test_under_autocast_products_are_bfloat16_and_gradients_float32(chunk: int | None) -> None:
    learned, targets = inputs(bias=True, dtype=torch.float32)
    want = value_and_gradients(plain, learned, targets)
    with torch.autocast("cpu", torch.bfloat16):
        got = value_and_gradients(cross_entropy, learned, targets, chunk=chunk)
    assert_same(got, want, 0.02)
    assert got[0].item() != want[0].item()


# Dynamo makes an instance of every autograd.Function it traces, and warns about it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_into_one_graph_it_is_the_same(autocast: bool) -> None:
    learned, targets = inputs(bias=True, dtype=torch.float32)
    compiled = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        want = value_and_gradients(cross_entropy, learned, targets, chunk=50)
        assert_same(value_and_gradients(compiled, learned, targets, chunk=50), want, 1e-6)


def peak_memory(work: Callable[[], object]) -> int:
    """The most bytes that `work` holds at once in tensors of its own."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_memory_is_a_seventh_of_that_of_all_logits(autocast: bool) -> None:
    vocabulary, width, positions = 50257, 16, 2048
    hidden = torch.randn(positions, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(0, vocabulary, (positions,))

    def measured(function: Callable[..., Tensor]) -> int:
        def work() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                (function(hidden, weight, None, targets) / positions).backward()

        hidden.grad = weight.grad = None
        return peak_memory(work)

    whole, chunked = measured(plain), measured(cross_entropy)
    assert whole > 3 * 4 * positions * vocabulary
    # The buffer, the gradient of the weight (float32) and of autocast the weight in bfloat16; and a few rows more.
    assert chunked < loss.BUFFER["cpu"] + 6 * weight.numel() + 2**22
    assert chunked < whole / 7


def test_memory_does_not_grow_with_the_number_of_positions() -> None:
    weight = torch.randn(20000, 4, requires_grad=True)

    def work(positions: int) -> Callable[[], object]:
        hidden, targets = torch.randn(positions, 4), torch.randint(0, 20000, (positions,))
        return lambda: cross_entropy(hidden, weight, None, targets, chunk=16)

    assert peak_memory(work(640)) < 1.05 * peak_memory(work(80))
