"""One decoder model that gives the next token's logits, whichever library it comes from.

transformers and ibm-fms name their arguments and caches differently; `DecoderModel.forward` takes
a padded batch and returns logits for either. It does not know how models are loaded.
"""

# torch, transformers, fms and pyarrow are only partly annotated.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from driftline.decoding.models.backend_graphs import (
    CompiledUnit,
    GraphCount,
    compile_unit,
    count_graphs,
)
from driftline.decoding.models.paged_cache import (
    MATH_FP8,
    PAGED,
    PAGED_FP8,
    PagedCache,
    fp8_arguments,
    paged_arguments,
)
from driftline.decoding.models.targets import Target, ready
from driftline.errors import DriftlineError

if TYPE_CHECKING:
    import torch

Library = Literal["transformers", "fms"]
PLAIN = "eager"
"""Attention written out, as transformers calls it."""
_LAST_ONLY = ("logits_to_keep", "last_n_tokens")
"""Arguments by which only the last position's logits are computed."""


class Forward(NamedTuple):
    """The result of one call: logits of the last position [batch, vocabulary], and the cache."""

    logits: torch.Tensor
    cache: Any


class DecoderModel:
    """A loaded model on its target.

    Attributes:
        module: The `torch.nn.Module` that is called, compiled in place if the target says so.
        config: The library's own configuration object.
        name: The id or path that is used in file names.
        eos_ids: Every id that ends a text, by the model's configuration.
        vocabulary: Number of logits at a position.
        context: Number of positions it was made for; 0 if its configuration does not say.
        target: The target on which it runs.
        library: The library that it comes from.
        device: The device of its inputs.
        caches: Whether it has a cache; if not, it reads the whole text for every token.
        units: The parts that are compiled; none if the target is not.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        name: str,
        target: Target,
        library: Library = "transformers",
        eos_ids: Iterable[int] = (),
    ) -> None:
        place = ready(target)
        self.module = module
        self.config: Any = cast(Any, module).config
        self.name = name
        self.target = target
        self.library = library
        self.device = place.device
        self.eos_ids = tuple(sorted({*_eos_ids(module), *eos_ids}))
        self.vocabulary = _vocabulary(self.config)
        self.context = _context(self.config)
        takes = inspect.signature(module.forward).parameters
        self._takes = frozenset(takes)
        self._takes_anything = any(p.kind is p.VAR_KEYWORD for p in takes.values())
        self.caches = library == "fms" or "past_key_values" in takes
        self.units: list[CompiledUnit] = []
        # Compiled in place, so that hooks and names of the module stay what they were.
        if place.backend:
            self.units = [compile_unit(module, "", place.backend, dynamic=target.dynamic)]

    def __str__(self) -> str:
        return f"{self.name} ({self.target})"

    @property
    def graphs(self) -> GraphCount:
        """The graphs that reached the backend so far."""
        return count_graphs(self.units)

    def require_compiled(self) -> None:
        """Refuse the results of a compiled model of which the backend never saw a graph.

        Raises:
            DriftlineError: It ran without its backend.
        """
        if any(unit.calls for unit in self.units) and not self.graphs.graphs:
            raise DriftlineError(
                f"no graph of {self.name} reached the backend {self.target.compile}: it ran "
                "without it, so nothing can be said about the device",
                hint="is torch.compile switched off (TORCHDYNAMO_DISABLE)? TORCH_LOGS=+dynamo says "
                "why it makes no graph",
            )

    def forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Any = None,
        *,
        every_position: bool = False,
    ) -> Forward:
        """Logits after the last of `ids`.

        Args:
            ids: int64 [batch, new]: all tokens at first, then those that the cache does not hold.
            mask: bool [batch, all]: True where a token is real, of everything up to the last id.
            position_ids: int64 [batch, new].
            cache: The cache of the previous call; None at first.
            every_position: Whether the model computes the logits of all `ids`, not only of the
                last; only those of the last are returned.
        """
        call = self._fms_arguments if self.library == "fms" else self._transformers_arguments
        ids, mask = ids.to(self.device), mask.to(self.device)
        arguments = call(ids, mask, position_ids.to(self.device), cache)
        paged: PagedCache | None = None
        attention = self.target.attention
        if self.library == "fms" and attention in (PAGED, PAGED_FP8):
            fp8 = attention == PAGED_FP8
            more, paged = paged_arguments(self.module, ids, mask, cache, fp8=fp8)
            arguments |= more
        elif self.library == "fms" and attention == MATH_FP8:
            arguments |= fp8_arguments()
        # Some layers are only computed for the last position unless all logits are wanted.
        if every_position:
            arguments = {name: word for name, word in arguments.items() if name not in _LAST_ONLY}
        output: Any = self.module(**arguments)
        if self.library == "fms":
            logits, cache = output
            if paged is not None:
                cache = PagedCache(list(cache), paged.table)
        else:
            logits, cache = output.logits, getattr(output, "past_key_values", None)
        return Forward(logits[:, -1, :], cache if self.caches else None)

    def _transformers_arguments(
        self, ids: torch.Tensor, mask: torch.Tensor, position_ids: torch.Tensor, cache: Any
    ) -> dict[str, Any]:
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask.to(ids.dtype)}
        optional = {
            "position_ids": position_ids,
            "logits_to_keep": 1,
            "return_dict": True,
        }
        if self.caches:
            optional |= {"past_key_values": cache, "use_cache": True}
        else:
            optional |= {"use_cache": False}
        for name, value in optional.items():
            # Not every architecture takes all of them, and an unknown argument is an error.
            if name in self._takes:
                arguments[name] = value
        return arguments

    def _fms_arguments(
        self, ids: torch.Tensor, mask: torch.Tensor, position_ids: torch.Tensor, cache: Any
    ) -> dict[str, Any]:
        import torch

        # Padding sees padding and nothing else, so that no row of the softmax is empty.
        allowed = (mask.unsqueeze(-1) == mask.unsqueeze(-2)).tril()[:, -ids.shape[1] :, :]
        bias = torch.where(allowed, 0.0, -torch.inf).to(torch.get_default_dtype())
        arguments: dict[str, Any] = {
            "x": ids,
            "mask": bias,
            "position_ids": position_ids,
            "past_key_value_states": cache,
            "use_cache": True,
            "last_n_tokens": 1,
        }
        if self.target.attention == PLAIN:
            arguments["attn_algorithm"] = "math"
        return arguments


def _eos_ids(module: torch.nn.Module) -> tuple[int, ...]:
    configs = [getattr(module, name, None) for name in ("generation_config", "config")]
    return eos_of(*configs)


def eos_of(*holders: Any) -> tuple[int, ...]:
    """The ids that end a text, from every object that has an `eos_token_id`."""
    ids: set[int] = set()
    for holder in holders:
        for config in (holder, getattr(holder, "text_config", None)):
            value: Any = getattr(config, "eos_token_id", None)
            for token in cast("list[Any]", value) if isinstance(value, list) else [value]:
                # Some configs say -1 where a model has no such token.
                if isinstance(token, int) and token >= 0:
                    ids.add(token)
    return tuple(sorted(ids))


def ended_by(ends: Sequence[int]) -> str:
    """The ids that end a text, in a few words: a tokenizer may have hundreds of them.

    >>> ended_by((2, 7)), ended_by(range(100, 400))
    ('ids 2, 7', 'ids 100, 101, 102, 103, … of 300')
    """
    few = ", ".join(map(str, ends[:4]))
    return f"ids {few}" + (f", … of {len(ends)}" if len(ends) > 4 else "")


def _context(config: Any) -> int:
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("max_position_embeddings", "n_positions", "max_expected_seq_len")
    sizes = [getattr(inner, name, None) for name in names]
    return next((size for size in sizes if isinstance(size, int) and size > 0), 0)


def _vocabulary(config: Any) -> int:
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    size: Any = getattr(inner, "vocab_size", None) or getattr(inner, "src_vocab_size", None)
    return int(size or 0)
