"""Position embeddings: sinusoidal, rotary, and attention biases by distance (ALiBi)."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

RotaryStyle = Literal["interleaved", "half"]
"""Pairs of elements that are rotated together: neighbours (GPT-J), or one of each half (GPT-NeoX)."""


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """Scaling of rotary frequencies for sequences longer than those of pretraining.

    Attributes:
        kind: `linear`: every position is divided by the factor (arXiv:2306.15595). `ntk`: the base is
            increased so that the lowest frequency is divided by the factor and the highest does not change
            (arXiv:2309.00071, section 3.1). `yarn`: each frequency is scaled according to its number of turns
            within the original length (same paper, sections 3.2 and 3.4). `llama3`: each frequency is scaled
            according to its wavelength (arXiv:2407.21783, section 3.2, and the code published with it).
        factor: factor by which the length grows.
        original_length: tokens of a sequence in pretraining; for `yarn` and `llama3`.
        low_freq_factor: `llama3`: frequencies with wavelengths above `original_length / low_freq_factor` are
            divided by the factor.
        high_freq_factor: `llama3`: frequencies with wavelengths below `original_length / high_freq_factor` do
            not change.
        beta_fast: `yarn`: frequencies with more turns than this in the original length do not change.
        beta_slow: `yarn`: frequencies with fewer turns than this are divided by the factor.
        attention_factor: `yarn`: factor on rotated queries, and on rotated keys; by default derived from
            `factor`.
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
    """Return the frequency of each pair of rotated elements in radians per position, fp32 [size / 2].

    See arXiv:2104.09864, section 3.2.

    Args:
        size: rotated elements of a head, even.
        theta: base of the wavelengths.
        scaling: scaling for longer sequences.
        device: device of the result.
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
        """Return the index of the pair that turns `times` times in the original length; it is not rounded."""
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
    """Return the factor on every rotated query and key; 1 except for YaRN (arXiv:2309.00071, equation 15)."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def rotations(positions: Tensor, frequencies: Tensor, *, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines for `rotate`, each fp32 [*positions, size / 2].

    Args:
        positions: positions of tokens, of any shape.
        frequencies: see `rotary_frequencies`, [size / 2].
        magnitude: see `rotary_magnitude`.
    """
    angles = positions.float().unsqueeze(-1) * frequencies
    return angles.cos() * magnitude, angles.sin() * magnitude


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, style: RotaryStyle) -> Tensor:
    """Return queries or keys rotated by their positions, in their dtype.

    Args:
        x: queries or keys, [..., seq, head size]; only the first `size` elements of a head are rotated.
        cosines: see `rotations`, [..., seq, size / 2].
        sines: see `rotations`, [..., seq, size / 2].
        style: pairs of elements that are rotated together.
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
    """Return the ALiBi slope of each head, fp32 [heads] (arXiv:2108.12409, section 3).

    If the number n of heads is a power of 2, the slopes are `2^(-8/n), 2^(-16/n), …`. Otherwise they are
    those of the next lower power of 2, followed by every second slope of the next higher power of 2.
    """
    floor = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (i + 1) / floor) for i in range(floor)]
    slopes += [2.0 ** (-4 * (2 * i + 1) / floor) for i in range(num_heads - floor)]
    return torch.tensor(slopes, device=device)


def alibi_bias(slopes: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the ALiBi biases that are added to attention scores, fp32 [heads, queries, keys].

    Args:
        slopes: slope of each head, [heads].
        queries: positions of the queries, [queries].
        keys: positions of the keys, [keys].
    """
    distance = (queries[:, None] - keys[None, :]).abs()
    return -slopes[:, None, None] * distance


def sinusoidal_positions(length: int, width: int, *, device: torch.device | None = None) -> Tensor:
    """Return sinusoidal position embeddings (arXiv:1706.03762, section 3.5), fp32 [length, width].

    Sines are at even elements, cosines at odd elements.

    Args:
        length: number of positions.
        width: elements of an embedding, even.
        device: device of the result.
    """
    positions = torch.arange(length, device=device)
    cosines, sines = rotations(positions, rotary_frequencies(width, 10000.0, device=device))
    return torch.stack((sines, cosines), dim=-1).flatten(-2)


def sinusoidal_grid(rows: int, columns: int, width: int, *, device: torch.device | None = None) -> Tensor:
    """Return sinusoidal position embeddings of a grid, as in the code published with arXiv:2212.09748.

    An embedding has four parts of equal size: sines of the column, cosines of the column, sines of the row,
    cosines of the row.

    Args:
        rows: rows of the grid.
        columns: columns of the grid.
        width: elements of an embedding, a multiple of 4.
        device: device of the result.

    Returns:
        Embeddings in row-major order, fp32 [rows * columns, width].
    """
    frequencies = rotary_frequencies(width // 2, 10000.0, device=device)

    def waves(count: int) -> Tensor:
        cosines, sines = rotations(torch.arange(count, device=device), frequencies)
        return torch.cat((sines, cosines), dim=-1)

    across, down = waves(columns), waves(rows)
    grid = across.expand(rows, -1, -1), down[:, None].expand(-1, columns, -1)
    return torch.cat(grid, dim=-1).flatten(0, 1)
