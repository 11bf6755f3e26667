"""Functions of leaf modules in numpy float64: linear, convolution, norms, embedding, activations.

The class of a module does not determine which function it computes. `possible_leaves` lists the
functions that fit the shapes of its input, its output and its weights. The caller applies them to
tensors whose result is known, and keeps the function that reproduces it. A leaf is computed for
some rows of its input, and some channels and positions of its output, so that the cost does not
depend on the size of the model. This file knows no runs and judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from driftline.numerics.dtypes import DType, to_float64

F64: TypeAlias = "npt.NDArray[np.float64]"
Places: TypeAlias = "npt.NDArray[np.intp]"
Shape: TypeAlias = tuple[int, ...]
Attributes: TypeAlias = Mapping[str, Any]
"""What is known about a module besides its tensors: `eps`, `stride`, `num_groups`; often
nothing."""


class Weight(NamedTuple):
    """A stored parameter or buffer of which only the needed part is decoded.

    Attributes:
        raw: Storage values in the tensor's shape.
        dtype: Their dtype.
        jitter: Relative size of a random change of every element, to measure the effect of
            rounding.
    """

    raw: npt.NDArray[Any]
    dtype: DType
    jitter: float = 0.0

    @property
    def shape(self) -> Shape:
        return tuple(self.raw.shape)

    def turned(self) -> Weight:
        """Return the transposed matrix."""
        return self._replace(raw=self.raw.T)

    def values(self, part: Places | None = None) -> F64:
        """Return elements as float64, for some entries of the first axis or for all."""
        raw = self.raw if part is None else self.raw[part]
        return jittered(np.asarray(to_float64(raw, self.dtype), np.float64), self.jitter)


def jittered(values: F64, size: float) -> F64:
    """Return values with a random relative change of at most `size`, the same on every call."""
    if not size:
        return values
    # The seed is fixed, because two comparisons of the same runs must give the same figures.
    return values * (1.0 + size * np.random.default_rng(7).uniform(-1.0, 1.0, values.shape))


Weights: TypeAlias = Mapping[str, Weight]


class Part(NamedTuple):
    """The part of a leaf's output that is computed.

    Attributes:
        channels: Output channels; all if None.
        positions: Flat positions after the channel axis; all if None.
    """

    channels: Places | None = None
    positions: Places | None = None


class Leaf(Protocol):
    """A function whose result can be computed from its input and its weights.

    Attributes:
        name: Its name in messages.
        leading: Number of leading axes of input and output that are independent rows.
        has_channels: Whether some of the output channels, on the axis after the rows, can be
            computed without the others.
        terms: Number of terms of its longest sum.
        roundings: Number of roundings of the result that a correct implementation may make.
    """

    @property
    def name(self) -> str: ...
    @property
    def leading(self) -> int: ...
    @property
    def has_channels(self) -> bool: ...
    @property
    def terms(self) -> int: ...
    @property
    def roundings(self) -> float: ...

    def computed(self, rows: F64, weights: Weights, part: Part) -> F64:
        """Return the chosen part of the output for some rows of input: [rows, channels, ...]."""
        ...

    def chosen(self, rows: F64, part: Part) -> F64:
        """Return the same part of some rows of a stored output."""
        ...


def possible_leaves(
    input_shape: Shape,
    integers: bool,
    made: Shape,
    weights: Mapping[str, Shape],
    attributes: Attributes,
) -> Iterator[Leaf]:
    """Yield functions that could give an output of this shape, likely ones first.

    Args:
        input_shape: Shape of the input.
        integers: Whether the input holds integers.
        made: Shape of the output.
        weights: Shapes of the floating-point parameters and buffers, by name.
        attributes: What else is known about the module.
    """
    matrices = [(name, shape) for name, shape in weights.items() if len(shape) == 2]
    kernels = [(name, shape) for name, shape in weights.items() if len(shape) >= 3]
    vectors = [(name, shape) for name, shape in weights.items() if len(shape) <= 1]
    if integers:
        if len(weights) == 1 and matrices and made == (*input_shape, matrices[0][1][1]):
            yield Embedding(matrices[0][0], len(input_shape))
        return
    if not input_shape or not made:
        return
    if len(matrices) == 1 and not kernels and len(vectors) <= 1:
        yield from _linears(input_shape, made, matrices[0], vectors)
    if len(kernels) == 1 and not matrices and len(vectors) <= 1:
        yield from _convolutions(input_shape, made, kernels[0], vectors, attributes)
    if input_shape != made:
        return
    if not matrices and not kernels:
        yield from _norms(input_shape, weights, attributes)
    if not weights:
        yield from _activations(len(input_shape))


# --- matrix products and lookups


class Linear(NamedTuple):
    """`x Wᵀ + b` over the last axis; `turned` if the weight is stored as [in, out]."""

    weight: str
    bias: str
    leading: int
    terms: int
    turned: bool
    name: str = "linear"
    has_channels: bool = True
    roundings: float = 1.0

    def computed(self, rows: F64, weights: Weights, part: Part) -> F64:
        stored = weights[self.weight]
        matrix = (stored.turned() if self.turned else stored).values(part.channels)
        result = rows @ matrix.T
        return result + weights[self.bias].values(part.channels) if self.bias else result

    def chosen(self, rows: F64, part: Part) -> F64:
        return rows if part.channels is None else rows[:, part.channels]


def _linears(
    input_shape: Shape, made: Shape, matrix: tuple[str, Shape], vectors: Sequence[tuple[str, Shape]]
) -> Iterator[Linear]:
    name, shape = matrix
    if input_shape[:-1] != made[:-1]:
        return
    if any(size != (made[-1],) for _, size in vectors):
        return
    bias = vectors[0][0] if vectors else ""
    # torch stores [out, in]; Paddle and transformers' Conv1D store [in, out]. A square matrix may
    # be either.
    for turned, wanted in (
        (False, (made[-1], input_shape[-1])),
        (True, (input_shape[-1], made[-1])),
    ):
        if shape == wanted:
            yield Linear(name, bias, len(input_shape) - 1, input_shape[-1], turned)


class Embedding(NamedTuple):
    """Rows of a table, looked up by index."""

    weight: str
    leading: int
    name: str = "embedding"
    has_channels: bool = False
    terms: int = 1
    roundings: float = 1.0

    def computed(self, rows: F64, weights: Weights, part: Part) -> F64:
        table = weights[self.weight]
        places = rows.reshape(-1).astype(np.intp)
        # For an index outside the table torch raises; other kernels read arbitrary memory.
        if places.size and not 0 <= int(places.min()) <= int(places.max()) < table.shape[0]:
            raise ValueError("an index lies outside the table")
        return table.values(places)

    def chosen(self, rows: F64, part: Part) -> F64:
        return rows


# --- convolutions


_MOST_WINDOWS = 6
"""Combinations of stride, padding and dilation that are tried if no attribute gives them."""
_LARGEST_WINDOW = 1 << 20
"""Largest number of elements of all windows together; the check allows twice as many."""


class Convolution(NamedTuple):
    """A convolution with zeros as padding, over any number of spatial axes."""

    weight: str
    bias: str
    groups: int
    stride: Shape
    padding: Shape
    dilation: Shape
    terms: int
    name: str = "convolution"
    leading: int = 1
    has_channels: bool = True
    roundings: float = 1.0

    def computed(self, rows: F64, weights: Weights, part: Part) -> F64:
        kernel = weights[self.weight]
        channels = _all(part.channels, kernel.shape[0])
        windows = self._windows(rows, kernel.shape[2:], part.positions)
        inside = kernel.shape[1]
        per_group = kernel.shape[0] // self.groups
        factors = kernel.values(channels).reshape(len(channels), -1)
        result = np.empty((len(rows), len(channels), windows.shape[2]))
        for group in np.unique(channels // per_group):
            of_group = channels // per_group == group
            part_of = windows[:, group * inside : (group + 1) * inside]
            flat = np.moveaxis(part_of, 2, 1).reshape(len(rows), windows.shape[2], -1)
            result[:, of_group] = np.moveaxis(flat @ factors[of_group].T, 2, 1)
        if self.bias:
            result += weights[self.bias].values(channels)[:, None]
        return result

    def _windows(self, rows: F64, size: Shape, positions: Places | None) -> F64:
        """Return the window of every chosen output position: [rows, channels, positions, *size]."""
        padded = np.pad(rows, [(0, 0), (0, 0), *((width, width) for width in self.padding)])
        made = tuple(
            (length - dilation * (width - 1) - 1) // stride + 1
            for length, width, stride, dilation in zip(
                padded.shape[2:], size, self.stride, self.dilation, strict=True
            )
        )
        flat = _all(positions, math.prod(made))
        if flat.size * rows.shape[0] * rows.shape[1] * math.prod(size) > 2 * _LARGEST_WINDOW:
            raise ValueError("the windows are too large")
        axes: list[Any] = []
        for axis, start in enumerate(np.unravel_index(flat, made)):
            within = self.dilation[axis] * np.arange(size[axis])
            places = np.asarray(start)[:, None] * self.stride[axis] + within
            # One axis for all windows, and one for each spatial axis.
            spread = [1] * (len(size) + 1)
            spread[0], spread[axis + 1] = len(flat), size[axis]
            axes.append(places.reshape(spread))
        return padded[(slice(None), slice(None), *axes)]

    def chosen(self, rows: F64, part: Part) -> F64:
        return _of_images(rows, part)


def _convolutions(
    input_shape: Shape,
    made: Shape,
    kernel: tuple[str, Shape],
    vectors: Sequence[tuple[str, Shape]],
    attributes: Attributes,
) -> Iterator[Convolution]:
    name, shape = kernel
    if not len(input_shape) == len(made) == len(shape) or made[:2] != (input_shape[0], shape[0]):
        return
    if shape[1] < 1 or input_shape[1] % shape[1] or any(size != (made[1],) for _, size in vectors):
        return
    groups = input_shape[1] // shape[1]
    if shape[0] % groups or any(size < 1 for size in (*input_shape, *shape)):
        return
    spatial = [
        islice(_axis_windows(*sizes), _MOST_WINDOWS)
        for sizes in zip(input_shape[2:], made[2:], shape[2:], strict=True)
    ]
    bias = vectors[0][0] if vectors else ""
    terms = math.prod(shape[1:])
    stated = _stated_window(attributes, len(shape) - 2)
    # The nth choices of all axes are combined, because the axes of a kernel usually agree.
    derived = [tuple(zip(*choice, strict=True)) for choice in zip(*spatial, strict=False)]
    for stride, padding, dilation in [*([stated] if stated else []), *derived]:
        yield Convolution(name, bias, groups, stride, padding, dilation, terms)


def _axis_windows(input_size: int, made: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield stride, padding and dilation that give the axis its length, usual ones first."""
    for dilation in (1, 2, 4):
        reach = dilation * (size - 1)
        # Half the window, no padding at all, then all other values.
        for padding in dict.fromkeys((reach // 2, 0, *range(1, reach + 1))):
            left = input_size + 2 * padding - reach - 1
            for stride in dict.fromkeys((1, 2, size, 4, 3)):
                if left >= 0 and left // stride + 1 == made:
                    yield stride, padding, dilation


def _stated_window(attributes: Attributes, axes: int) -> tuple[Shape, Shape, Shape] | None:
    """Return stride, padding and dilation from the module's attributes; None if incomplete."""
    sizes: list[Shape] = []
    for name in ("stride", "padding", "dilation"):
        value = attributes.get(name)
        if type(value) is int:
            listed: list[Any] = [value] * axes
        elif isinstance(value, (tuple, list)):
            listed = list(cast("Sequence[Any]", value))
        else:
            return None
        if len(listed) != axes:
            return None
        if not all(type(size) is int and 0 <= size < 1 << 16 for size in listed):
            return None
        sizes.append(tuple(map(int, listed)))
    stride, padding, dilation = sizes
    return (stride, padding, dilation) if min(*stride, *dilation) > 0 else None


# --- norms


_EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3)
"""Usual values, tried if the module's attributes have none."""
_GROUPS = (32, 16, 8, 4, 2, 1)


class RowNorm(NamedTuple):
    """A norm over the last axes, with or without centring, times a weight."""

    weight: str
    bias: str
    leading: int
    terms: int
    epsilon: float
    centred: bool
    added: float = 0.0
    has_channels: bool = False
    # The normalised value, the product with the weight and the sum with the bias may be rounded.
    roundings: float = 2.0

    @property
    def name(self) -> str:
        return "layer norm" if self.centred else "RMS norm"

    def computed(self, rows: F64, weights: Weights, part: Part) -> F64:
        result = _normalised(rows.reshape(len(rows), -1), self.epsilon, centred=self.centred)
        if self.weight:
            # Gemma stores its weights minus one.
            result *= self.added + weights[self.weight].values().reshape(-1)
        return result + weights[self.bias].values().reshape(-1) if self.bias else result

    def chosen(self, rows: F64, part: Part) -> F64:
        return rows.reshape(len(rows), -1)


class ChannelNorm(NamedTuple):
    """A norm of every channel with stored mean and variance, as batch norms in evaluation."""

    weight: str
    bias: str
    mean: str
    variance: str
    epsilon: float
    name: str = "batch norm"
    leading: int = 1
    has_channels: bool = True
    terms: int = 1
    roundings: float = 2.0

    def computed(self, rows: F64, weights: Weights, part: Part) -> F64:
        values = _of_images(rows, part)

        def column(name: str) -> F64:
            return weights[name].values(part.channels)[:, None]

        result = (values - column(self.mean)) / np.sqrt(column(self.variance) + self.epsilon)
        if self.weight:
            result *= column(self.weight)
        return result + column(self.bias) if self.bias else result

    def chosen(self, rows: F64, part: Part) -> F64:
        return _of_images(rows, part)


class GroupNorm(NamedTuple):
    """A norm over groups of channels and their positions; one channel each is an instance norm."""

    weight: str
    bias: str
    groups: int
    terms: int
    epsilon: float
    name: str = "group norm"
    leading: int = 1
    has_channels: bool = False
    roundings: float = 2.0

    def computed(self, rows: F64, weights: Weights, part: Part) -> F64:
        grouped = rows.reshape(len(rows), self.groups, -1)
        result = _normalised(grouped, self.epsilon, centred=True)
        result = result.reshape(len(rows), rows.shape[1], -1)
        if self.weight:
            result *= weights[self.weight].values()[:, None]
        return result + weights[self.bias].values()[:, None] if self.bias else result

    def chosen(self, rows: F64, part: Part) -> F64:
        return rows.reshape(len(rows), rows.shape[1], -1)


def _normalised(values: F64, epsilon: float, *, centred: bool) -> F64:
    """Return values over their root mean square on the last axis, centred first if requested."""
    if centred:
        values = values - values.mean(axis=-1, keepdims=True)
    return values / np.sqrt(np.mean(values * values, axis=-1, keepdims=True) + epsilon)


def _norms(
    input_shape: Shape, weights: Mapping[str, Shape], attributes: Attributes
) -> Iterator[Leaf]:
    """Yield norms that fit; parameters are in registration order: weight, bias, statistics."""
    epsilons = _epsilons(attributes)
    names = list(weights)
    shapes = set(weights.values())
    if len(shapes) > 1 or len(names) > 4:
        return
    weight, bias = (*names, "", "")[:2]
    shape = next(iter(shapes), input_shape[-1:])
    tail = len(shape)
    if len(names) <= 2 and 0 < tail < len(input_shape) and input_shape[-tail:] == shape:
        terms = math.prod(shape)
        for epsilon in epsilons:
            yield RowNorm(weight, bias, len(input_shape) - tail, terms, epsilon, centred=True)
            if not bias:
                yield RowNorm(weight, "", len(input_shape) - tail, terms, epsilon, centred=False)
            if weight and not bias:
                yield RowNorm(weight, "", len(input_shape) - tail, terms, epsilon, False, 1.0)
    if len(input_shape) >= 2 and tail == 1 and input_shape[1:2] == shape:
        yield from _channel_norms(input_shape, names, attributes)


def _channel_norms(
    input_shape: Shape, names: Sequence[str], attributes: Attributes
) -> Iterator[Leaf]:
    """Yield norms whose parameters have one value per channel."""
    epsilons = _epsilons(attributes)
    weight, bias = (*names, "", "")[:2]
    if len(names) in (2, 4):
        mean, variance = names[-2:]
        first, second = (weight, bias) if len(names) == 4 else ("", "")
        for epsilon in epsilons:
            yield ChannelNorm(first, second, mean, variance, epsilon)
    if len(names) <= 2 and len(input_shape) > 2:
        stated = attributes.get("num_groups")
        stated_first = (stated,) if isinstance(stated, int) and stated > 0 else ()
        for groups in dict.fromkeys((*stated_first, input_shape[1], *_GROUPS)):
            if input_shape[1] % groups == 0:
                terms = math.prod(input_shape[1:]) // groups
                for epsilon in epsilons[:2]:
                    yield GroupNorm(weight, bias, groups, terms, epsilon)


def _epsilons(attributes: Attributes) -> tuple[float, ...]:
    for name in ("eps", "epsilon", "variance_epsilon", "_epsilon"):
        value = attributes.get(name)
        if isinstance(value, float) and 0.0 <= value < 1.0:
            return (value,)
    return _EPSILONS


# --- activations


class Activation(NamedTuple):
    """A function of single elements, or of rows along the last axis."""

    name: str
    function: Callable[[F64], F64]
    leading: int
    has_channels: bool = False
    terms: int = 1
    # An activation that is computed in steps rounds at each of them.
    roundings: float = 3.0

    def computed(self, rows: F64, weights: Weights, part: Part) -> F64:
        return self.function(rows.reshape(len(rows), -1))

    def chosen(self, rows: F64, part: Part) -> F64:
        return rows.reshape(len(rows), -1)


def _activations(axes: int) -> Iterator[Activation]:
    for name, function in (*ACTIVATIONS.items(), *_ROW_FUNCTIONS.items()):
        yield Activation(name, function, axes - 1)


_erf = np.frompyfunc(math.erf, 1, 1)


def _sigmoid(x: F64) -> F64:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _gelu(x: F64) -> F64:
    return 0.5 * x * (1.0 + np.asarray(_erf(x / math.sqrt(2.0)), dtype=np.float64))


def _gelu_tanh(x: F64) -> F64:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _softmax(x: F64) -> F64:
    raised = np.exp(x - x.max(axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)


ACTIVATIONS: dict[str, Callable[[F64], F64]] = {
    "relu": lambda x: np.maximum(x, 0.0),
    "gelu": _gelu,
    "gelu (tanh)": _gelu_tanh,
    "gelu (sigmoid)": lambda x: x * _sigmoid(1.702 * x),
    "silu": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "softsign": lambda x: x / (1.0 + np.abs(x)),
    "relu squared": lambda x: np.maximum(x, 0.0) ** 2,
    "leaky relu": lambda x: np.where(x > 0.0, x, 0.01 * x),
    "elu": lambda x: np.where(x > 0.0, x, np.expm1(np.minimum(x, 0.0))),
    "softplus": lambda x: np.logaddexp(x, 0.0),
    "mish": lambda x: x * np.tanh(np.logaddexp(x, 0.0)),
    "hard swish": lambda x: x * np.clip(x + 3.0, 0.0, 6.0) / 6.0,
    "no activation": lambda x: x,
    # After the functions that they may equal: below 6 a relu6 is a relu.
    "relu6": lambda x: np.clip(x, 0.0, 6.0),
    "hard sigmoid": lambda x: np.clip(x + 3.0, 0.0, 6.0) / 6.0,
    "leaky relu (0.2)": lambda x: np.where(x > 0.0, x, 0.2 * x),
    "leaky relu (0.1)": lambda x: np.where(x > 0.0, x, 0.1 * x),
}
"""Functions of single elements, by name; if two fit equally, the first one is named."""
_ROW_FUNCTIONS: dict[str, Callable[[F64], F64]] = {
    "softmax": _softmax,
    "log softmax": lambda x: (
        x
        - x.max(axis=-1, keepdims=True)
        - np.log(np.exp(x - x.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True))
    ),
}
"""Functions of whole rows, which only a leaf can be."""


# --- parts of outputs


def _all(places: Places | None, count: int) -> Places:
    return np.arange(count, dtype=np.intp) if places is None else places


def _of_images(rows: F64, part: Part) -> F64:
    """Return channels and positions of [rows, channels, *spatial], as [rows, channels, places]."""
    flat = rows.reshape(len(rows), rows.shape[1], -1)
    if part.channels is not None:
        flat = flat[:, part.channels]
    return flat if part.positions is None else flat[:, :, part.positions]
