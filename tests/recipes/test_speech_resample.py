from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.recipes.speech.audio import _filters, resample, resampled_length

TARGET = 16_000


def tone(hz: float, rate: int, seconds: float = 0.5) -> np.ndarray:
    return np.sin(2 * np.pi * hz * np.arange(round(rate * seconds)) / rate)


def inner(wave: np.ndarray) -> np.ndarray:
    """Without the ends, where the recording begins and stops all at once."""
    return wave[1000:-1000]


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 16_001])
def test_a_tone_below_both_limits_stays_the_same_tone(rate: int) -> None:
    for share in (0.02, 0.3, 0.85):
        hz = share * min(rate, TARGET) / 2
        error = inner(resample(tone(hz, rate), rate, TARGET) - tone(hz, TARGET))
        assert np.abs(error).max() < 1e-4


@pytest.mark.parametrize("rate", [22_050, 44_100, 48_000])
def test_a_tone_above_the_new_limit_is_gone(rate: int) -> None:
    for hz in (8_600, 0.97 * rate / 2):
        assert np.abs(inner(resample(tone(hz, rate), rate, TARGET))).max() < 1e-4


def test_the_same_rate_changes_nothing() -> None:
    wave = tone(300, TARGET)
    np.testing.assert_array_equal(resample(wave, TARGET, TARGET), wave)


@given(st.integers(0, 700), st.integers(8_000, 96_000))
def test_the_length_is_that_of_the_new_grid_for_any_rate(samples: int, rate: int) -> None:
    length = resampled_length(samples, rate, TARGET)
    inside = [n for n in range(length + 1) if Fraction(n, TARGET) < Fraction(samples, rate)]
    assert length == len(inside)


@given(st.integers(0, 700), st.sampled_from([8_000, 11_025, 22_050, 44_100, 96_000]))
def test_a_constant_stays_a_constant_of_that_length(samples: int, rate: int) -> None:
    wave = resample(np.ones(samples), rate, TARGET)
    assert len(wave) == resampled_length(samples, rate, TARGET)
    np.testing.assert_allclose(wave[90:-90], 1, atol=1e-4)


def test_sums_over_16_bit_samples_are_exact_so_every_machine_finds_the_same() -> None:
    wave = np.random.default_rng(0).integers(-32_768, 32_768, 600).astype(np.int16)
    found = resample(wave, 22_050, TARGET)
    filters = _filters(320, 441)
    taps = filters.shape[1]
    for place in (200, 201, 311):
        first = place * 441 // 320 - taps // 2 + 1
        terms = zip(filters[place % 320].tolist(), wave[first : first + taps].tolist(), strict=True)
        assert Fraction(float(found[place])) == sum(Fraction(weight) * sample for weight, sample in terms)
