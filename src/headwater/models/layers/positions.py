"""Positions of tokens: sinusoidal tables, rotations of queries and keys, biases by distance."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

RotaryStyle = Literal["interleaved", "half"]
"""Which elements are rotated together: neighbours (GPT-J), or one of each half (GPT-NeoX)."""


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """How rotations are slowed down for sequences longer than those of pre-training.

    Attributes:
        kind: `linear` divides every position by the factor (arXiv:2306.15595). `ntk` raises the base by so
            much that the slowest rotation is divided by it and the fastest stays (arXiv:2309.00071, section
            3.1). `yarn` divides rotations by how often they turn within the original length (same, sections
            3.2 and 3.4). `llama3` likewise, by the wavelength (arXiv:2407.21783, section 3.2, and the code
            published with it).
        factor: by how much the length grows.
        original_length: tokens of a sequence in pre-training; for `yarn` and `llama3`.
        low_freq_factor: `llama3`: wavelengths above `original_length` over this are divided by the factor.
        high_freq_factor: `llama3`: those below `original_length` over this stay.
        beta_fast: `yarn`: rotations that turn more often than this in the original length stay.
        beta_slow: `yarn`: those that turn less often are divided by the factor.
        attention_factor: `yarn`: factor on rotated queries and keys each; from `factor` where absent.
    """

    kind: Literal["linear", "ntk", "yarn", "llama3"]
    factor: float
    original_length: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


def rotary_frequencies(
    size: int, theta: float, scaling: RotaryScaling | None = None, *, device: torch.device | None = None
) -> Tensor:
    """Radians a position for each pair of rotated elements, [size / 2] (arXiv:2104.09864, section 3.2).

    Args:
        size: rotated elements of a head, even.
        theta: base of the wavelengths.
        scaling: how they are slowed down.
        device: where the result is computed.
    """
    if scaling is not None and scaling.kind == "ntk":
        theta *= scaling.factor ** (size / (size - 2))
    powers = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
    frequencies = 1.0 / theta**powers
    match scaling:
        case RotaryScaling(kind="linear"):
            return frequencies / scaling.factor
        case RotaryScaling(kind="yarn"):
            return _yarn(frequencies, size, theta, scaling)
        case RotaryScaling(kind="llama3"):
            return _llama3(frequencies, scaling)
    return frequencies


def _yarn(frequencies: Tensor, size: int, theta: float, scaling: RotaryScaling) -> Tensor:
    def pair_that_turns(times: float) -> float:
        """Which pair turns so often within the original length."""
        return size * math.log(scaling.original_length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(scaling.beta_slow)), size - 1)
    pairs = torch.arange(size // 2, device=frequencies.device, dtype=torch.float32)
    slowed = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / scaling.factor * slowed + frequencies * (1 - slowed)


def _llama3(frequencies: Tensor, scaling: RotaryScaling) -> Tensor:
    turns = frequencies * scaling.original_length / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept


def rotary_magnitude(scaling: RotaryScaling | None) -> float:
    """Factor on every rotated query and key: 1 but for YaRN (arXiv:2309.00071, equation 15)."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def rotations(positions: Tensor, frequencies: Tensor, *, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines by which `rotate` turns: two of [*positions, size / 2], fp32.

    Args:
        positions: of tokens, of any shape.
        frequencies: see `rotary_frequencies`.
        magnitude: see `rotary_magnitude`.
    """
    angles = positions.float().unsqueeze(-1) * frequencies
    return angles.cos() * magnitude, angles.sin() * magnitude


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, style: RotaryStyle) -> Tensor:
    """Queries or keys turned by their positions, in their own dtype.

    Args:
        x: [..., seq, head size]; only as many elements of a head are turned as there are rotations.
        cosines: [..., seq, size / 2], see `rotations`.
        sines: likewise.
        style: which elements make a pair.
    """
    size = 2 * cosines.shape[-1]
    turned, rest = x[..., :size].float(), x[..., size:]
    if style == "half":
        first, second = turned.chunk(2, dim=-1)
        turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    else:
        first, second = turned[..., ::2], turned[..., 1::2]
        pairs = (first * cosines - second * sines, second * cosines + first * sines)
        turned = torch.stack(pairs, dim=-1).flatten(-2)
    return torch.cat((turned.to(x.dtype), rest), dim=-1) if rest.shape[-1] else turned.to(x.dtype)


def alibi_slopes(num_heads: int, *, device: torch.device | None = None) -> Tensor:
    """What each head takes off a score for each token of distance, [heads] (arXiv:2108.12409, section 3).

    Powers of 2 where their number is one, `2^(-8/n), 2^(-16/n), …`; else those of the power of 2 below, and
    of the one above every other.
    """
    floor = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (i + 1) / floor) for i in range(floor)]
    slopes += [2.0 ** (-4 * (2 * i + 1) / floor) for i in range(num_heads - floor)]
    return torch.tensor(slopes, device=device)


def alibi_bias(slopes: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """What is added to attention scores: [heads, queries, keys], fp32.

    Args:
        slopes: [heads].
        queries: positions of the queries.
        keys: positions of the keys.
    """
    distance = (queries[:, None] - keys[None, :]).abs()
    return -slopes[:, None, None] * distance


def sinusoidal_positions(length: int, width: int, *, device: torch.device | None = None) -> Tensor:
    """Sines at even and cosines at odd elements (arXiv:1706.03762, section 3.5): [length, width], fp32.

    Args:
        length: positions.
        width: elements of each, even.
        device: where the result is computed.
    """
    positions = torch.arange(length, device=device)
    cosines, sines = rotations(positions, rotary_frequencies(width, 10000.0, device=device))
    return torch.stack((sines, cosines), dim=-1).flatten(-2)


def sinusoidal_grid(rows: int, columns: int, width: int, *, device: torch.device | None = None) -> Tensor:
    """Sines and cosines of column and row (arXiv:2212.09748, the code published with it), fp32.

    Of each place, row by row: sines of its column, then cosines; sines of its row, then cosines, a quarter of
    the elements each.

    Args:
        rows: rows of places.
        columns: places in each.
        width: elements of each place, a multiple of 4.
        device: where the result is computed.

    Returns:
        [rows * columns, width].
    """
    frequencies = rotary_frequencies(width // 2, 10000.0, device=device)

    def waves(count: int) -> Tensor:
        cosines, sines = rotations(torch.arange(count, device=device), frequencies)
        return torch.cat((sines, cosines), dim=-1)

    across, down = waves(columns), waves(rows)
    grid = across.expand(rows, -1, -1), down[:, None].expand(-1, columns, -1)
    return torch.cat(grid, dim=-1).flatten(0, 1)
