"""The next token's distribution: what each filter keeps, and that draws follow it."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llmcli.generate import Sampling, choose, distribution, draw

logits_of = arrays.arrays(np.float32, st.integers(1, 300), elements=st.floats(-30, 30, width=32)).map(torch.from_numpy)
plain = Sampling(temperature=1.0)


def full(logits: Tensor, sampling: Sampling, seen: list[int] | None = None) -> Tensor:
    """The distribution over the whole vocabulary, (V,) float64."""
    ids, probabilities = distribution(logits, sampling, seen or [])
    assert ids.tolist() == sorted(set(ids.tolist()))
    return torch.zeros(len(logits), dtype=torch.float64).index_put((ids,), probabilities)


@given(logits=logits_of)
def test_unfiltered_it_is_the_softmax(logits: Tensor) -> None:
    torch.testing.assert_close(full(logits, plain), logits.double().softmax(-1), rtol=1e-5, atol=1e-9)


@given(logits=logits_of, k=st.integers(1, 400))
def test_top_k_keeps_the_k_most_probable_and_clamps_to_what_there_is(logits: Tensor, k: int) -> None:
    kept = full(logits, Sampling(temperature=1, top_k=k)) > 0
    reference = full(logits, plain)
    assert 1 <= kept.sum() <= min(k, len(logits))
    assert int(kept.sum()) == min(k, len(logits), int((reference > 0).sum()))
    if not kept.all():
        assert reference[kept].min() >= reference[~kept].max()


@settings(deadline=None)
@given(logits=logits_of, p=st.floats(1e-6, 1.0, exclude_min=True))
def test_top_p_keeps_the_smallest_set_that_reaches_p_and_never_none(logits: Tensor, p: float) -> None:
    reference = logits.double().softmax(-1)
    kept = full(logits, Sampling(temperature=1, top_p=p)) > 0
    mass = float(reference[kept].sum())
    assert kept.any()
    assert mass >= p - 1e-6
    if p < 1:  # without its least probable member it would not reach p
        assert mass - float(reference[kept].min()) < p + 1e-6
        assert reference[kept].min() >= (reference[~kept].max() if not kept.all() else 0) - 1e-6


@pytest.mark.parametrize("size", [127, 128, 129, 1024, 5000])
def test_top_p_of_flat_distributions_reaches_beyond_the_first_candidates(size: int) -> None:
    ids, probabilities = distribution(torch.zeros(size), Sampling(temperature=1, top_p=0.9))
    assert len(ids) == math.ceil(0.9 * size)
    torch.testing.assert_close(probabilities, torch.full_like(probabilities, 1 / len(ids)))


@given(logits=logits_of, p=st.floats(0.0, 1.0))
def test_min_p_keeps_what_is_at_least_p_times_the_most_probable(logits: Tensor, p: float) -> None:
    reference = logits.double().softmax(-1)
    kept = full(logits, Sampling(temperature=1, min_p=p)) > 0
    margin = 1e-6 * reference.max()
    assert kept[reference > p * reference.max() + margin].all()
    assert not kept[reference < p * reference.max() - margin].any()


@given(logits=logits_of, temperature=st.floats(0.0, 1e-3, exclude_min=True))
def test_a_temperature_that_goes_to_nothing_takes_the_most_probable(logits: Tensor, temperature: float) -> None:
    ordered = logits.sort(descending=True).values
    assume(len(logits) == 1 or float(ordered[0] - ordered[1]) > 0.1)
    best = int(logits.argmax())
    assert full(logits, Sampling(temperature=temperature))[best] > 1 - 1e-6
    assert choose(logits, Sampling(temperature=0), [], random.Random(0)) == best
    assert full(logits, Sampling(temperature=0))[best] == 1


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(2, 300),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    k=st.none() | st.integers(1, 50),
    p=st.none() | st.sampled_from([0.2, 0.5, 0.9]),
    least=st.none() | st.sampled_from([0.01, 0.3]),
    penalty=st.sampled_from([1.0, 1.3, 0.8]),
    data=st.data(),
)
def test_filters_together_are_those_of_transformers(
    seed: int,
    size: int,
    temperature: float,
    k: int | None,
    p: float | None,
    least: float | None,
    penalty: float,
    data: st.DataObject,
) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 4
    seen = data.draw(st.lists(st.integers(0, len(logits) - 1), min_size=1, max_size=5))
    steps = [RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(temperature)]
    steps += [TopKLogitsWarper(k)] if k else []
    steps += [TopPLogitsWarper(p)] if p else []
    steps += [MinPLogitsWarper(least)] if least else []
    theirs = LogitsProcessorList(steps)(torch.tensor([seen]), logits[None].clone())[0].double().softmax(-1)
    sampling = Sampling(temperature=temperature, top_k=k, top_p=p, min_p=least, repetition_penalty=penalty)
    ours = full(logits, sampling, seen)
    ordered = theirs[theirs > 0]
    differing = (ours > 0) != (theirs > 1e-12)
    if differing.any():  # only where a threshold is met to the last bit
        assert float(torch.maximum(ours, theirs)[differing].max()) < 1e-5 or len(ordered) == 1
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_repetition_penalty_acts_once_on_an_id_and_with_either_sign() -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, 3.0])
    penalised = full(logits, Sampling(temperature=1, repetition_penalty=2.0), [0, 1, 0, 0])
    torch.testing.assert_close(
        penalised, torch.tensor([1.0, -2.0, 0.5, 3.0]).double().softmax(-1), rtol=1e-5, atol=1e-7
    )
    assert choose(logits, Sampling(temperature=0, repetition_penalty=2.0), [3], random.Random(0)) == 0
    assert logits.tolist() == [2.0, -1.0, 0.5, 3.0]


@given(logits=logits_of, uniform=st.floats(0.0, 1.0, exclude_max=True), data=st.data())
def test_what_must_not_come_is_never_drawn(logits: Tensor, uniform: float, data: st.DataObject) -> None:
    allowed = data.draw(st.integers(0, len(logits) - 1))
    masked = torch.where(torch.rand(len(logits), generator=torch.Generator().manual_seed(0)) < 0.5, logits, -torch.inf)
    masked[allowed] = logits[allowed]
    for sampling in (plain, Sampling(temperature=1, top_k=len(logits)), Sampling(temperature=1, top_p=0.99)):
        assert masked[draw(*distribution(masked, sampling), uniform)] > -torch.inf


@given(
    weights=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20),
    uniform=st.sampled_from([0.0, 0.5, 1 - 2**-53]) | st.floats(0.0, 1.0, exclude_max=True),
)
@example(weights=[0.0, 1.0], uniform=0.0)
@example(weights=[0.5, 0.0, 0.5], uniform=0.5)
@example(weights=[1.0, 0.0], uniform=1 - 2**-53)
def test_a_draw_is_where_the_cumulated_probability_passes_the_number(weights: list[float], uniform: float) -> None:
    assume(sum(weights) > 0)
    probabilities = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    ids = torch.arange(len(weights)) * 10
    drawn = draw(ids, probabilities, uniform) // 10
    assert probabilities[drawn] > 0
    before = float(probabilities[:drawn].sum())
    assert before - 1e-12 <= uniform < before + float(probabilities[drawn]) + 1e-12


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=9),
        Sampling(temperature=1.3, top_p=0.9),
        Sampling(temperature=1.0, min_p=0.1),
    ],
    ids=["plain", "top k", "top p", "min p"],
)
def test_20_000_draws_fit_the_distribution(sampling: Sampling) -> None:
    logits = torch.randn(24, generator=torch.Generator().manual_seed(4)) * 1.5
    generator, draws = random.Random(11), 20_000
    ids, probabilities = distribution(logits, sampling)
    counts = np.zeros(24)
    for _ in range(draws):
        counts[draw(ids, probabilities, generator.random())] += 1
    expected = full(logits, sampling).numpy() * draws
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = float((((counts - expected) ** 2)[kept] / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    # Wilson and Hilferty's cube root is normal: 3.3 standard deviations are passed once in two thousand seeds.
    z = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert abs(z) < 3.3, (chi_square, freedom)
