from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import get_window, stft

from lockstep.recipes.speech.features import SpecAugment, extract, feature_frames, log_mel, normalise


def slaney_hz(mel: float) -> float:
    return mel * 200 / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27)


def reference(wave: np.ndarray) -> np.ndarray:
    """Log-mel power by scipy, with a filter bank built from the definition of the scale."""
    window = get_window("hann", 400, fftbins=True)
    frequencies, _, spectrum = stft(
        wave.astype(np.float64), 16_000, window, 400, 240, 512, boundary="zeros", padded=False, scaling="spectrum"
    )
    power = np.abs(spectrum * window.sum()) ** 2
    top = 15 + 27 * np.log(8) / np.log(6.4)
    corners = [slaney_hz(mel) for mel in np.linspace(0, top, 82)]
    bands = [np.interp(frequencies, corners[place : place + 3], [0, 1, 0]) for place in range(80)]
    return np.log(np.maximum(np.stack(bands) @ power, 1e-6)).T


def voice_like(samples: int, level: float) -> np.ndarray:
    """Loud low harmonics over faint noise, with digital silence at the end: a wide range in every frame."""
    time = np.arange(samples) / 16_000
    harmonics = sum(np.sin(2 * np.pi * 110 * k * time) / k**2 for k in range(1, 30))
    noise = np.random.default_rng(1).standard_normal(samples) * 1e-4
    wave = level * (harmonics * (1 + np.sin(2 * np.pi * 3 * time)) / 4 + noise)
    wave[-samples // 5 :] = 0
    return wave.astype(np.float32)


@pytest.mark.parametrize(("samples", "level"), [(24_000, 1.0), (24_000, 0.01), (15_999, 1.0), (401, 1.0)])
def test_features_equal_an_independent_implementation(samples: int, level: float) -> None:
    wave = voice_like(samples, level)
    expected = reference(wave)
    found = log_mel(torch.from_numpy(wave))
    assert found.shape == expected.shape == (feature_frames(samples), 80)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-4)
    normal = (expected - expected.mean(0)) / (expected.std(0) + 1e-5)
    np.testing.assert_allclose(extract(torch.from_numpy(wave)).numpy(), normal, atol=1e-4)


@given(st.integers(1, 2000))
@settings(max_examples=30)
def test_any_length_gives_the_frames_that_are_foretold(samples: int) -> None:
    features = extract(torch.zeros(samples))
    assert features.shape == (feature_frames(samples), 80)
    assert torch.equal(features, torch.zeros_like(features))  # silence is nothing, not a division by zero


def test_loudness_and_colour_of_a_recording_do_not_matter() -> None:
    features = log_mel(torch.from_numpy(voice_like(16_000, 0.5))).clamp_min(-8)
    changed = features + torch.linspace(-3, 3, 80)
    torch.testing.assert_close(normalise(changed), normalise(features), atol=1e-4, rtol=0)


def masks(masked: torch.Tensor) -> tuple[list[int], list[int]]:
    """Bands and frames of which nothing is left."""
    gone = masked == 0
    return gone.all(dim=0).nonzero().flatten().tolist(), gone.all(dim=1).nonzero().flatten().tolist()


@given(st.integers(1, 700), st.integers(0, 2**32))
@settings(max_examples=40)
def test_masks_are_never_wider_than_allowed(frames: int, seed: int) -> None:
    features = torch.ones(frames, 80)
    masked = SpecAugment()(features, np.random.default_rng(seed))
    bands, times = masks(masked)
    assert bool((features == 1).all()), "the original is left alone"
    assert len(bands) <= 40 or len(times) == frames
    assert len(times) <= 2 * min(100, int(0.2 * frames))
    kept = masked[[t for t in range(frames) if t not in times]][:, [b for b in range(80) if b not in bands]]
    assert bool((kept == 1).all())


def test_masks_reach_their_widths_and_every_place() -> None:
    rng, once = np.random.default_rng(0), SpecAugment(frequency_masks=1, time_masks=1)
    long = [masks(once(torch.ones(500, 80), rng)) for _ in range(600)]
    assert {len(bands) for bands, _ in long} == set(range(21))
    assert max(len(times) for _, times in long) == 100
    assert set().union(*(bands for bands, _ in long)) == set(range(80))
    short = [masks(once(torch.ones(40, 80), rng))[1] for _ in range(600)]
    assert {len(times) for times in short} == set(range(9))
    assert set().union(*short) == set(range(40))


def test_masks_belong_to_the_sample_and_the_epoch() -> None:
    features = torch.ones(300, 80)
    first, again, other, later = (
        SpecAugment()(features, np.random.default_rng((42, epoch, index)))
        for epoch, index in ((0, 7), (0, 7), (0, 8), (1, 7))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, later)
