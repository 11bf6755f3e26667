"""Decoder models and tokenizers by folder or id, loaded for a target; and what identifies a model.

transformers loads models, or ibm-fms (extra `fms`). Whatever goes wrong inside a library becomes
one sentence. Ids are looked up once before a library tries to load them, because libraries retry
an unreachable hub many times. What a loaded model can do is `decoder.DecoderModel`.
"""

# torch, transformers, fms and pyarrow are only partly annotated.
# pyright: reportMissingImports=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from driftline.decoding.models.decoder import PLAIN, DecoderModel, Library, eos_of
from driftline.decoding.models.paged_cache import OF_FMS
from driftline.decoding.models.targets import Target, ready
from driftline.errors import BadInput, DriftlineError, NotInstalled, did_you_mean
from driftline.numerics import kernel
from driftline.registry import require

if TYPE_CHECKING:
    import torch

HF_ARCHITECTURE = "hf_pretrained"
"""The architecture is whatever the model's own config says."""
TRANSFORMERS = "transformers accelerate"
FMS = "ibm-fms transformers"
WEIGHTS_SEED = 42
"""Random weights of a micro model are drawn from it, so both sides draw the same."""
HUB_TIMEOUT = 3.0
"""Seconds for the one request."""
_HUB_PACKAGE = "huggingface_hub"
_SNAPSHOT = re.compile(r"[/\\]snapshots[/\\]([0-9a-f]{7,64})[/\\]")
_READ_SIZE = 64 << 20
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
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
    """The library that loads the model: the user's choice, else ibm-fms for its architectures."""
    if library:
        if library not in ("transformers", "fms"):
            raise BadInput(
                f"models come from transformers or fms, not from '{library}'",
                hint="--library transformers, or --library fms",
            )
        return library
    return "fms" if architecture and architecture != HF_ARCHITECTURE else "transformers"


def model_name(path: str, variant: str = "") -> str:
    """The name of a model in file names: its variant (an id) if given, else its path."""
    name = (variant or path).strip()
    return name.rstrip("/") or name


class ModelSource(NamedTuple):
    """Which model is loaded and how, whatever the target.

    Attributes:
        path: A folder, or an id that transformers can find; empty: the variant is the id.
        variant: Id that names the model, where the path does not.
        architecture: `hf_pretrained`, or one that ibm-fms knows by name.
        library: `transformers` or `fms`; empty: see `library_for`.
        unfuse_weights: Separate query, key and value where ibm-fms would join them. Models of
            transformers stay as they are written.
        micro_layers: Keep only that many layers.
        random_weights: Draw the weights instead of reading them.
        as_written: Load the kind of model that its config names (question answering, say) instead
            of a causal language model.
        extra: More arguments for the library's own loader.
    """

    path: str
    variant: str = ""
    architecture: str = HF_ARCHITECTURE
    library: str = ""
    unfuse_weights: bool = False
    micro_layers: int | None = None
    random_weights: bool = False
    as_written: bool = False
    extra: Mapping[str, Any] = MappingProxyType({})

    @property
    def location(self) -> str:
        """The folder or id that is read."""
        return (self.path or self.variant).rstrip("/") or self.path or self.variant


def load_model(source: ModelSource, target: Target, *, distributed: bool = False) -> DecoderModel:
    """Load a causal language model for a target, in evaluation mode, without gradients.

    Args:
        source: Which model, and how.
        target: Device, number format and compiler.
        distributed: Split the weights over the ranks of the job.

    Raises:
        BadInput: There is no such model, or it cannot be loaded.
        NotInstalled: The library or the target's package is missing.
    """
    location = source.location
    if not location:
        raise BadInput("no model is named", hint="give --model_path, or --variant with an id")
    kind = library_for(source.architecture, source.library)
    # The target and the model are looked up first: a library takes seconds to import.
    place = ready(target)
    find_model(location, source.architecture)
    find_library(source.architecture, source.library, target)
    if not source.as_written:
        _require_decoder(source)
    load = _from_fms if kind == "fms" else _from_transformers
    with _as_one_sentence(location), _no_progress_bars():
        module = load(source, target, distributed=distributed)
        ends = end_ids(location)
    module.eval().requires_grad_(False)
    if not distributed:  # the parts of a split model are on their devices already
        module.to(device=place.device)
    return DecoderModel(
        module,
        name=model_name(source.path, source.variant),
        target=target,
        library=kind,
        eos_ids=ends,
    )


def _require_decoder(source: ModelSource) -> None:
    """Refuse an encoder: its tokens see the whole input, so its logits do not predict a next token.

    Raises:
        BadInput: It is an encoder, by its configuration.
    """
    if source.architecture not in ("", HF_ARCHITECTURE):
        return  # one that ibm-fms names itself has no such configuration
    transformers = require("transformers", install=TRANSFORMERS)
    with _as_one_sentence(source.location):
        config: Any = transformers.AutoConfig.from_pretrained(source.location)
    auto = require("transformers.models.auto.modeling_auto", install=TRANSFORMERS)
    # Libraries silently make a decoder from an encoder's weights, but it still sees later tokens.
    encoders: Any = getattr(auto, "MODEL_FOR_MASKED_LM_MAPPING_NAMES", {})
    if config.model_type in encoders and not getattr(config, "is_decoder", False):
        named = (getattr(config, "architectures", None) or [config.model_type])[0]
        raise BadInput(
            f"{source.location} is no decoder: a {named} sees all of its input, and says no next "
            "token",
            hint="expectations of such models: pytest --pyargs "
            "driftline.suites.test_model_expectations::TestAIUModelsTupleOutput",
        )


def find_model(source: str, architecture: str = "") -> None:
    """Refuse a folder or an id that does not exist.

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
                hint="give --library fms (pip install ibm-fms)",
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
def _as_one_sentence(source: str) -> Generator[None]:
    """Turn any exception of a library that loads a model into one message."""
    try:
        yield
    except (DriftlineError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as trouble:
        raise BadInput(
            f"the model {source} cannot be loaded: {_first_line(trouble)}",
            hint="is it a folder with config.json and weights, or an id that can be found?",
        ) from trouble


def _first_line(trouble: Exception) -> str:
    """The first line of a library's message, which may have hundreds, cut to a readable length."""
    lines = [line.strip() for line in str(trouble).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(trouble).__name__


@contextmanager
def _no_progress_bars() -> Generator[None]:
    """Hide progress bars and remarks of transformers while a model is loaded."""
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


def _from_transformers(
    source: ModelSource, target: Target, *, distributed: bool
) -> torch.nn.Module:
    transformers = require("transformers", install=TRANSFORMERS)
    torch_module = require("torch", install="torch")
    place = ready(target)
    location = source.location
    arguments: dict[str, Any] = dict(source.extra)
    if target.attention:
        arguments.setdefault("attn_implementation", target.attention)
    if source.micro_layers is not None:
        config = transformers.AutoConfig.from_pretrained(location)
        arguments["config"] = _fewer_layers(config, source.micro_layers)
    auto = transformers.AutoModelForCausalLM
    if source.as_written:
        auto = _auto_class(transformers, transformers.AutoConfig.from_pretrained(location))
    if source.random_weights:
        config = arguments.pop("config", None)
        config = config or transformers.AutoConfig.from_pretrained(location)
        torch_module.manual_seed(WEIGHTS_SEED)
        # Drawn in fp32 on every side: in another number format other weights would be drawn.
        return auto.from_config(config, dtype=torch_module.float32, **arguments).to(place.dtype)
    if distributed:
        require("accelerate", install=TRANSFORMERS)  # transformers shards weights through it
        arguments.setdefault("distributed_config", _tensor_parallel(transformers))
    return auto.from_pretrained(location, dtype=place.dtype, **arguments)


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
    with _as_one_sentence(source):
        config = transformers.AutoConfig.from_pretrained(source.rstrip("/") or source)
        return int(config.get_text_config().num_hidden_layers)


def _check_layers(wanted: int, available: int) -> None:
    if wanted < 1 or wanted > available:
        raise BadInput(
            f"{wanted} layers cannot be kept of a model that has {available}",
            hint=f"--micro_layers takes 1 to {available}",
        )


def _from_fms(source: ModelSource, target: Target, *, distributed: bool) -> torch.nn.Module:
    models = require("fms.models", install=FMS)
    torch_module = require("torch", install="torch")
    place = ready(target)
    drawn = source.random_weights
    arguments: dict[str, Any] = dict(source.extra)
    if source.micro_layers is not None and drawn:
        arguments.setdefault("nlayers", source.micro_layers)
    if source.unfuse_weights:
        arguments.setdefault("fused_weights", False)
    # Without it a model is split as soon as the process belongs to a job, and waits for the others.
    arguments.setdefault("distributed_strategy", "tp" if distributed else "none")
    architecture = source.architecture or HF_ARCHITECTURE
    variant = source.variant or None
    folder = source.location if Path(source.location).is_dir() and not drawn else None
    if architecture == HF_ARCHITECTURE:  # then it wants the id or the folder, never both
        architecture = "hf_configured" if drawn else architecture
        variant = None if folder else source.location
    torch_module.manual_seed(WEIGHTS_SEED)
    # Another device or number format would draw other weights: they are drawn on the CPU in fp32.
    with redirect_stdout(sys.stderr):  # it prints while it loads
        module = models.get_model(
            architecture,
            variant=variant,
            model_path=folder,
            device_type="cpu" if drawn else place.device.type,
            data_type=torch_module.float32 if drawn else place.dtype,
            **arguments,
        )
    if drawn:
        module = module.to(device=place.device, dtype=place.dtype)
    if source.micro_layers is not None and not drawn:
        # A model with weights takes its layers from them, not from `nlayers`; so they are cut off.
        _check_layers(source.micro_layers, len(module.base_model.layers))
        module.base_model.layers = module.base_model.layers[: source.micro_layers]
        module.config.nlayers = source.micro_layers
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
        raise BadInput(
            f"the tokenizer {source} cannot be loaded: {_first_line(trouble)}",
            hint="is it a folder with tokenizer.json, or an id that can be found?",
        ) from trouble


class _HubEntry(NamedTuple):
    """An id: what the hub says, its commit, and whether this machine has a copy."""

    state: Literal["exists", "absent", "off", "unreachable"]
    commit: str = ""
    cached: bool = False


def find_id(source: str, what: str = "model") -> None:
    """Refuse an id that is neither on this machine nor on the hub.

    If this machine has a copy and the hub cannot be reached, this process does not try it again.

    Args:
        source: The id.
        what: `model` or `tokenizer`, for the sentence.

    Raises:
        BadInput: Nobody has it.
    """
    entry = _look_up_id(source)
    if entry.state == "exists":
        return
    if entry.cached:
        # A library would try again and again to reach the hub before it uses the copy.
        if entry.state == "unreachable":
            require(f"{_HUB_PACKAGE}.constants", install=TRANSFORMERS).HF_HUB_OFFLINE = True
        return
    why = {
        "absent": "the hub has none of that name, or does not show it to you",
        "off": "this machine keeps none of that name, and the hub is switched off (HF_HUB_OFFLINE)",
        "unreachable": "this machine keeps none of that name, and the hub cannot be reached",
    }[entry.state]
    raise BadInput(
        f"there is no {what} '{source}': it is no folder here, {why}",
        hint=f"give the {what}'s folder, or download it first",
    )


def commit_of(source: str) -> str:
    """The current commit of an id; empty if it is not known."""
    try:
        return _look_up_id(source).commit if source else ""
    except NotInstalled:  # saved logits can be scored without any library of models
        return ""


@functools.lru_cache(maxsize=64)
def _look_up_id(source: str) -> _HubEntry:
    hub = require(_HUB_PACKAGE, install=TRANSFORMERS)
    errors = require(f"{_HUB_PACKAGE}.errors", install=TRANSFORMERS)
    constants = require(f"{_HUB_PACKAGE}.constants", install=TRANSFORMERS)
    try:
        place: Any = hub.try_to_load_from_cache(source, "config.json")
    except ValueError:  # nothing that could be an id
        return _HubEntry("absent")
    cached = isinstance(place, str)
    snapshot = _SNAPSHOT.search(place) if isinstance(place, str) else None
    commit = snapshot[1] if snapshot else ""
    if constants.HF_HUB_OFFLINE:
        return _HubEntry("off", commit, cached)
    try:
        info = hub.HfApi().model_info(source, timeout=HUB_TIMEOUT)
    except errors.GatedRepoError:  # who may have it is seen when it is loaded
        return _HubEntry("exists", commit, cached)
    except errors.RepositoryNotFoundError:
        return _HubEntry("absent", commit, cached)
    except errors.HfHubHTTPError:  # the hub is there, and in trouble
        return _HubEntry("exists", commit, cached)
    except Exception:  # whatever a network and its libraries can raise
        return _HubEntry("unreachable", commit, cached)
    return _HubEntry("exists", str(info.sha or commit), cached)


def weights_digest(source: str) -> str | None:
    """A short text that changes as soon as a single weight or the config of a model does.

    Of a folder all weights and the config are read; of an id it is the hub's commit, as far as it
    can be known without the weights.

    Args:
        source: A folder, or an id.

    Returns:
        None where nothing is known: an id that this machine has no copy of and the hub does not
        answer for.
    """
    if not Path(source).is_dir():
        commit = commit_of(source)
        return f"commit {commit}" if commit else None
    digest = hashlib.sha256()
    for path, size, modified in weight_files(source):
        digest.update(f"{path.name} {size} ".encode("utf-8", "surrogateescape"))
        digest.update(_file_digest(path, size, modified).encode())
    return digest.hexdigest()[:32]


def weight_files(source: str) -> tuple[tuple[Path, int, int], ...]:
    """The weights and the config of a model's folder, each with its size and time of change.

    Cheap enough to be called before every use of a loaded model: nothing is read. An id has none.
    """
    folder = Path(source)
    if not source or not folder.is_dir():
        return ()
    paths = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in _WEIGHT_SUFFIXES or path.name == "config.json"
    ]
    return tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths)


@functools.lru_cache(maxsize=1024)
def _file_digest(path: Path, size: int, modified: int) -> str:
    """Of all bytes of a file; not read again while its size and time of change stay the same."""
    del size, modified
    buffer = np.empty(min(_READ_SIZE, max(path.stat().st_size, 1)), np.uint8)
    parts: list[str] = []
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):  # weights are gigabytes: let the kernel read ahead
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer.data):
            parts.append(kernel.digest(buffer[:count]))
    return " ".join(parts)
