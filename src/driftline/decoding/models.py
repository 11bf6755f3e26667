"""Decoder models by path or id, loaded for a target: by transformers, or by ibm-fms (extra `fms`).

Whatever goes wrong inside a library while it loads becomes one sentence. What a loaded model can do
is `decoder.DecoderModel`.
"""

# torch, transformers and fms are only partly annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false
from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from driftline.decoding.decoder import PLAIN, DecoderModel, Library, eos_of
from driftline.decoding.hub import find_id
from driftline.decoding.paged import OF_FMS
from driftline.decoding.targets import Target, ready
from driftline.errors import BadInput, DriftlineError, did_you_mean
from driftline.registry import require

if TYPE_CHECKING:
    import torch

HF_ARCHITECTURE = "hf_pretrained"
"""The architecture is whatever the model's own config says."""
TRANSFORMERS = "driftline[transformers]"
FMS = "driftline[fms]"
WEIGHTS_SEED = 42
"""Random weights of a micro model are drawn from it, so both sides draw the same."""
_FMS_ATTENTION = ("", "sdpa", PLAIN, *OF_FMS)


def end_ids(source: str, tokenizer: Any = None) -> tuple[int, ...]:
    """Every id that ends a text, by the model's own files and its tokenizer; no weight is read.

    Args:
        source: Folder or id of the model; what it does not say is not an error.
        tokenizer: Asked as well.
    """
    holders: list[Any] = [tokenizer]
    if source:
        transformers = require("transformers", install=TRANSFORMERS)
        for maker in (transformers.AutoConfig, transformers.GenerationConfig):
            try:
                holders.append(maker.from_pretrained(source.rstrip("/") or source))
            except (OSError, ValueError, KeyError):  # no such file there: most models lack one
                continue
    return eos_of(*holders)


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
    as_written: bool = False,
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
        as_written: Load the kind of model that its config names (question answering, say) instead
            of a causal language model.
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
    find_model(source, architecture)
    find_library(architecture, library, target)
    ask = _Ask(
        source,
        target,
        architecture or HF_ARCHITECTURE,
        variant,
        unfuse_weights,
        micro_layers,
        random_weights,
        distributed,
        as_written,
        dict(extra or {}),
    )
    make = _from_fms if kind == "fms" else _from_transformers
    with _in_words(source), _no_bars():
        module = make(ask)
        ends = end_ids(source)
    module.eval().requires_grad_(False)
    if not distributed:
        module.to(device=place.device)
    return DecoderModel(
        module, name=model_name(path, variant), target=target, library=kind, eos_ids=ends
    )


class _Ask(NamedTuple):
    source: str
    target: Target
    architecture: str
    variant: str
    unfuse_weights: bool
    micro_layers: int | None
    random_weights: bool
    distributed: bool
    as_written: bool
    extra: dict[str, Any]


def find_model(source: str, architecture: str = "") -> None:
    """Refuse a folder that is not there, or an id that nobody has.

    Args:
        source: The folder or id.
        architecture: One of ibm-fms has variants of its own, which no hub knows.

    Raises:
        BadInput: There is no such model.
    """
    find_folder(source)
    if not Path(source).is_dir() and architecture in ("", HF_ARCHITECTURE):
        find_id(source)


def find_folder(source: str) -> None:
    """Refuse a folder that is not there; an id may be anything.

    Raises:
        BadInput: There is no such folder.
    """
    if _looks_like_a_folder(source) and not Path(source).is_dir():
        raise BadInput(
            f"there is no model folder {source}",
            hint="give the folder that holds config.json, or an id of a model",
        )


def find_library(architecture: str = "", library: str = "", *targets: Target) -> None:
    """Import who loads the model, and refuse an attention that it does not have.

    Raises:
        NotInstalled: It is not there.
        BadInput: There is no such attention.
    """
    kind = library_for(architecture, library)
    for attention in (target.attention for target in targets):
        if attention in OF_FMS and kind != "fms":
            raise BadInput(
                f"{attention} is an attention of ibm-fms",
                hint="give --library fms (extra driftline[fms])",
            )
        if kind == "fms" and attention not in _FMS_ATTENTION:
            raise BadInput(
                f"ibm-fms has no attention '{attention}' here",
                hint=did_you_mean(attention, _FMS_ATTENTION[1:]),
            )
    if kind == "fms":
        require("fms.models", install=FMS)
    else:
        require("transformers", install=TRANSFORMERS)


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


@contextmanager
def _no_bars() -> Generator[None]:
    """Loading bars and remarks of transformers have no place between our own lines."""
    if "transformers" not in sys.modules:
        yield
        return
    logging: Any = sys.modules["transformers"].logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _from_transformers(ask: _Ask) -> torch.nn.Module:
    transformers = require("transformers", install=TRANSFORMERS)
    torch_module = require("torch", install="driftline[torch]")
    place = ready(ask.target)
    words: dict[str, Any] = dict(ask.extra)
    if ask.target.attention:
        words.setdefault("attn_implementation", ask.target.attention)
    if ask.micro_layers is not None:
        config = transformers.AutoConfig.from_pretrained(ask.source)
        words["config"] = _fewer_layers(config, ask.micro_layers)
    auto = transformers.AutoModelForCausalLM
    if ask.as_written:
        auto = _auto_class(transformers, transformers.AutoConfig.from_pretrained(ask.source))
    if ask.random_weights:
        config = words.pop("config", None) or transformers.AutoConfig.from_pretrained(ask.source)
        torch_module.manual_seed(WEIGHTS_SEED)
        # Drawn in fp32 on every side: in another number format other weights would be drawn.
        return auto.from_config(config, dtype=torch_module.float32, **words).to(place.dtype)
    if ask.distributed:
        require("accelerate", install=TRANSFORMERS)  # transformers shards weights through it
        words.setdefault("distributed_config", _tensor_parallel(transformers))
    return auto.from_pretrained(ask.source, dtype=place.dtype, **words)


def _auto_class(transformers: Any, config: Any) -> Any:
    """The automatic class for what a config calls its architecture, `…ForQuestionAnswering` say."""
    named = (getattr(config, "architectures", None) or [""])[0]
    head = str(named).rpartition("For")[2]
    return getattr(transformers, f"AutoModelFor{head}", transformers.AutoModelForCausalLM)


def _tensor_parallel(transformers: Any) -> Any:
    """Every layer's matrices split over all ranks, as the model's own plan says."""
    require("transformers.distributed", install=TRANSFORMERS)
    return transformers.distributed.DistributedConfig(tp_plan="auto")


def _fewer_layers(config: Any, layers: int) -> Any:
    inner = config.get_text_config()
    _check_layers(layers, inner.num_hidden_layers)
    inner.num_hidden_layers = layers
    if getattr(inner, "layer_types", None):
        inner.layer_types = inner.layer_types[:layers]
    return config


def model_layers(source: str) -> int:
    """How many layers a model has, by its configuration.

    Raises:
        BadInput: It has none that can be read.
    """
    transformers = require("transformers", install=TRANSFORMERS)
    with _in_words(source):
        config = transformers.AutoConfig.from_pretrained(source.rstrip("/") or source)
        return int(config.get_text_config().num_hidden_layers)


def _check_layers(wanted: int, there: int) -> None:
    if wanted < 1 or wanted > there:
        raise BadInput(f"{wanted} layers cannot be kept of a model that has {there}")


def _from_fms(ask: _Ask) -> torch.nn.Module:
    models = require("fms.models", install=FMS)
    torch_module = require("torch", install="driftline[torch]")
    place = ready(ask.target)
    words: dict[str, Any] = dict(ask.extra)
    if ask.micro_layers is not None and ask.random_weights:
        words.setdefault("nlayers", ask.micro_layers)
    if ask.unfuse_weights:
        words.setdefault("fused_weights", False)
    # Unsaid, a model is split as soon as the process belongs to a job, and waits for the others.
    words.setdefault("distributed_strategy", "tp" if ask.distributed else "none")
    architecture, variant = ask.architecture, ask.variant or None
    folder = ask.source if Path(ask.source).is_dir() and not ask.random_weights else None
    if architecture == HF_ARCHITECTURE:  # then it wants the id or the folder, never both
        architecture = "hf_configured" if ask.random_weights else architecture
        variant = None if folder else ask.source
    torch_module.manual_seed(WEIGHTS_SEED)
    # Another device or number format would draw other weights: they are drawn on the CPU in fp32.
    drawn = ask.random_weights
    with redirect_stdout(sys.stderr):  # it speaks while it loads
        module = models.get_model(
            architecture,
            variant=variant,
            model_path=folder,
            device_type="cpu" if drawn else place.device.type,
            data_type=torch_module.float32 if drawn else place.dtype,
            **words,
        )
    if drawn:
        module = module.to(device=place.device, dtype=place.dtype)
    if ask.micro_layers is not None and not ask.random_weights:
        # A model with weights takes its layers from them, whatever is said; so they are cut off.
        _check_layers(ask.micro_layers, len(module.base_model.layers))
        module.base_model.layers = module.base_model.layers[: ask.micro_layers]
        module.config.nlayers = ask.micro_layers
    return module


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
    if not Path(source).is_dir():
        find_id(source, "tokenizer")
    transformers = require("transformers", install=TRANSFORMERS)
    try:
        return transformers.AutoTokenizer.from_pretrained(source)
    except Exception as trouble:
        lines = [line.strip() for line in str(trouble).splitlines() if line.strip()]
        said = lines[0][:300] if lines else type(trouble).__name__
        raise BadInput(
            f"the tokenizer {source} cannot be loaded: {said}",
            hint="is it a folder with tokenizer.json, or an id that can be found?",
        ) from trouble
