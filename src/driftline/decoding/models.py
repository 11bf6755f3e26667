"""Decoder models by path or id: loaded for a target, and asked for the next token's logits.

Two libraries know models: transformers, and ibm-fms (the extra `fms`). They call things differently;
a `DecoderModel` hides that behind `forward`, which takes a padded batch and gives logits.
"""

# torch, transformers and fms are only partly annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false
from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from driftline.decoding.targets import Target, ready
from driftline.errors import BadInput, DriftlineError
from driftline.registry import require

if TYPE_CHECKING:
    import torch

Library = Literal["transformers", "fms"]
HF_ARCHITECTURE = "hf_pretrained"
"""The architecture is whatever the model's own config says."""
WEIGHTS_SEED = 42
"""Random weights of a micro model are drawn from it, so both sides draw the same."""


class Forward(NamedTuple):
    """What one call gives: logits of the last position [batch, vocabulary], and the cache."""

    logits: torch.Tensor
    cache: Any


class DecoderModel:
    """A loaded model on its target.

    Attributes:
        module: The `torch.nn.Module` that is called, compiled in place if the target says so.
        config: The library's own configuration object.
        name: What file names are made of: the id or path it is known by.
        eos_ids: Every id that ends a text, by the model's configuration.
        vocabulary: How many logits a position has.
        target: Where it runs.
        library: Who made it.
        device: Where its inputs go.
        caches: Whether earlier positions are remembered; if not, every token reads the whole text.
    """

    def __init__(
        self, module: torch.nn.Module, *, name: str, target: Target, library: Library
    ) -> None:
        place = ready(target)
        self.module = module
        self.config: Any = cast(Any, module).config
        self.name = name
        self.target = target
        self.library = library
        self.device = place.device
        self.eos_ids = _eos_ids(module)
        self.vocabulary = _vocabulary(self.config)
        takes = inspect.signature(module.forward).parameters
        self._takes = frozenset(takes)
        self._takes_anything = any(p.kind is p.VAR_KEYWORD for p in takes.values())
        self.caches = library == "fms" or "past_key_values" in takes
        if place.backend:
            module.compile(backend=place.backend, dynamic=True if target.dynamic else None)

    def __str__(self) -> str:
        return f"{self.name} ({self.target})"

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, position_ids: torch.Tensor, cache: Any = None
    ) -> Forward:
        """Logits after the last of `ids`.

        Args:
            ids: int64 [batch, new]: all tokens at first, then those that the cache does not hold.
            mask: bool [batch, all]: True where a token is real, of everything up to the last id.
            position_ids: int64 [batch, new].
            cache: What the call before gave; None at first.
        """
        call = _fms_arguments if self.library == "fms" else self._transformers_arguments
        words = call(ids.to(self.device), mask.to(self.device), position_ids.to(self.device), cache)
        output: Any = self.module(**words)
        if self.library == "fms":
            logits, cache = output
        else:
            logits, cache = output.logits, getattr(output, "past_key_values", None)
        return Forward(logits[:, -1, :], cache if self.caches else None)

    def _transformers_arguments(
        self, ids: torch.Tensor, mask: torch.Tensor, position_ids: torch.Tensor, cache: Any
    ) -> dict[str, Any]:
        words: dict[str, Any] = {"input_ids": ids, "attention_mask": mask.to(ids.dtype)}
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
            if name in self._takes:
                words[name] = value
        return words


def _fms_arguments(
    ids: torch.Tensor, mask: torch.Tensor, position_ids: torch.Tensor, cache: Any
) -> dict[str, Any]:
    import torch

    # Padding sees padding and nothing else, so that no row of the softmax is empty.
    allowed = (mask.unsqueeze(-1) == mask.unsqueeze(-2)).tril()[:, -ids.shape[1] :, :]
    bias = torch.where(allowed, 0.0, -torch.inf).to(torch.get_default_dtype())
    return {
        "x": ids,
        "mask": bias,
        "position_ids": position_ids,
        "past_key_value_states": cache,
        "use_cache": True,
        "last_n_tokens": 1,
    }


def _eos_ids(module: torch.nn.Module) -> tuple[int, ...]:
    found: set[int] = set()
    for holder in ("generation_config", "config"):
        config: Any = getattr(module, holder, None)
        for each in (config, getattr(config, "text_config", None)):
            value: Any = getattr(each, "eos_token_id", None)
            for token in cast("list[Any]", value) if isinstance(value, list) else [value]:
                if isinstance(token, int) and token >= 0:
                    found.add(token)
    return tuple(sorted(found))


def _vocabulary(config: Any) -> int:
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    size: Any = getattr(inner, "vocab_size", None) or getattr(inner, "src_vocab_size", None)
    return int(size or 0)


def library_for(architecture: str = "", library: str = "") -> Library:
    """Who loads the model: what the user says; else ibm-fms for architectures it names itself."""
    if library:
        if library not in ("transformers", "fms"):
            raise BadInput(f"models come from transformers or fms, not from '{library}'")
        return library
    return "fms" if architecture and architecture != HF_ARCHITECTURE else "transformers"


def model_name(path: str, variant: str = "") -> str:
    """What a model is called in file names: its variant (an id) if given, else its path."""
    name = (variant or path).strip()
    return name.rstrip("/") or name


def load_model(
    path: str,
    target: Target,
    *,
    architecture: str = HF_ARCHITECTURE,
    variant: str = "",
    unfuse_weights: bool = False,
    micro_layers: int | None = None,
    random_weights: bool = False,
    library: str = "",
    distributed: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> DecoderModel:
    """Load a causal language model for a target, in evaluation mode, without gradients.

    Args:
        path: A folder, or an id that transformers can find; empty: the variant is the id.
        target: Device, number format and compiler.
        architecture: `hf_pretrained`, or one that ibm-fms knows by name.
        variant: Id that names the model, where the path does not.
        unfuse_weights: Separate query, key and value where ibm-fms would join them. Models of
            transformers stay as they are written.
        micro_layers: Keep only that many layers.
        random_weights: Draw the weights instead of reading them.
        library: `transformers` or `fms`; empty: see `library_for`.
        distributed: Split the weights over the ranks of the job.
        extra: More words for the library's own loader.

    Raises:
        BadInput: There is no such model, or it cannot be loaded.
        NotInstalled: The library or the target's package is missing.
    """
    source = path or variant
    if not source:
        raise BadInput("no model is named", hint="give --model_path, or --variant with an id")
    source = source.rstrip("/") or source
    kind = library_for(architecture, library)
    place = ready(target)
    if _looks_like_a_folder(source) and not Path(source).is_dir():
        raise BadInput(
            f"there is no model folder {source}",
            hint="give the folder that holds config.json, or an id of a model",
        )
    ask = _Ask(
        source,
        target,
        architecture or HF_ARCHITECTURE,
        variant,
        unfuse_weights,
        micro_layers,
        random_weights,
        distributed,
        dict(extra or {}),
    )
    make = _from_fms if kind == "fms" else _from_transformers
    with _in_words(source):
        module = make(ask)
    module.eval().requires_grad_(False)
    if not distributed:
        module.to(device=place.device)
    return DecoderModel(module, name=model_name(path, variant), target=target, library=kind)


class _Ask(NamedTuple):
    source: str
    target: Target
    architecture: str
    variant: str
    unfuse_weights: bool
    micro_layers: int | None
    random_weights: bool
    distributed: bool
    extra: dict[str, Any]


def _looks_like_a_folder(source: str) -> bool:
    return source.startswith(("/", ".", "~")) or source.count("/") > 1 or Path(source).exists()


@contextmanager
def _in_words(source: str) -> Generator[None]:
    """Whatever a library raises while it loads a model becomes one sentence."""
    try:
        yield
    except (DriftlineError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as trouble:
        lines = [line.strip() for line in str(trouble).splitlines() if line.strip()]
        said = lines[0][:300] if lines else type(trouble).__name__
        raise BadInput(
            f"the model {source} cannot be loaded: {said}",
            hint="is it a folder with config.json and weights, or an id that can be found?",
        ) from trouble


def _from_transformers(ask: _Ask) -> torch.nn.Module:
    transformers = require("transformers", install="driftline[transformers]")
    torch_module = require("torch", install="driftline[torch]")
    place = ready(ask.target)
    words: dict[str, Any] = dict(ask.extra)
    if ask.target.attention:
        words.setdefault("attn_implementation", ask.target.attention)
    if ask.micro_layers is not None:
        config = transformers.AutoConfig.from_pretrained(ask.source)
        words["config"] = _fewer_layers(config, ask.micro_layers)
    auto = transformers.AutoModelForCausalLM
    if ask.random_weights:
        config = words.pop("config", None) or transformers.AutoConfig.from_pretrained(ask.source)
        torch_module.manual_seed(WEIGHTS_SEED)
        # Drawn in fp32 on every side: in another number format other weights would be drawn.
        return auto.from_config(config, dtype=torch_module.float32, **words).to(place.dtype)
    if ask.distributed:
        words.setdefault("tp_plan", "auto")
    return auto.from_pretrained(ask.source, dtype=place.dtype, **words)


def _fewer_layers(config: Any, layers: int) -> Any:
    inner = config.get_text_config()
    if layers < 1 or layers > inner.num_hidden_layers:
        raise BadInput(
            f"{layers} layers cannot be kept of a model that has {inner.num_hidden_layers}"
        )
    inner.num_hidden_layers = layers
    if getattr(inner, "layer_types", None):
        inner.layer_types = inner.layer_types[:layers]
    return config


def _from_fms(ask: _Ask) -> torch.nn.Module:
    models = require("fms.models", install="driftline[fms]")
    torch_module = require("torch", install="driftline[torch]")
    place = ready(ask.target)
    words: dict[str, Any] = dict(ask.extra)
    if ask.micro_layers is not None:
        words.setdefault("nlayers", ask.micro_layers)
    if ask.unfuse_weights:
        words.setdefault("fused_weights", False)
    if ask.distributed:
        words.setdefault("distributed_strategy", "tp")
    local = Path(ask.source).is_dir()
    architecture = ask.architecture
    if ask.random_weights and architecture == HF_ARCHITECTURE:
        architecture = "hf_configured"
    torch_module.manual_seed(WEIGHTS_SEED)
    return models.get_model(
        architecture,
        variant=ask.variant or (None if local and not ask.random_weights else ask.source),
        model_path=ask.source if local and not ask.random_weights else None,
        device_type=place.device.type,
        data_type=place.dtype,
        **words,
    )


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a folder or id.

    Raises:
        BadInput: There is none, or it cannot be loaded.
    """
    source = path.rstrip("/") or path
    if not source:
        raise BadInput("no tokenizer is named", hint="give --tokenizer, usually the model's path")
    if _looks_like_a_folder(source) and not Path(source).is_dir():
        raise BadInput(
            f"there is no tokenizer folder {source}",
            hint="give the folder that holds tokenizer.json, usually the model's own",
        )
    transformers = require("transformers", install="driftline[transformers]")
    try:
        return transformers.AutoTokenizer.from_pretrained(source)
    except Exception as trouble:
        lines = [line.strip() for line in str(trouble).splitlines() if line.strip()]
        said = lines[0][:300] if lines else type(trouble).__name__
        raise BadInput(f"the tokenizer {source} cannot be loaded: {said}") from trouble
