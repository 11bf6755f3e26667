"""Sessions of ONNX Runtime: the one that a user would have, and those that expose inner values.

If a session is asked for inner values before it optimises, it cannot fuse them, and another program
is measured. So the model is optimised first, by the session that a user would have. The optimised
graph is saved, gets inner values as outputs, and runs with optimisation off, so that its nodes are
the same.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from driftline.captures.onnxruntime import model_file
from driftline.captures.onnxruntime.tensors import HostTensor, TextTensor
from driftline.errors import BadFile, BadInput, DriftlineError

Level = Literal["none", "basic", "extended", "all"]
LEVELS: tuple[Level, ...] = get_args(Level)

_LEVELS = {
    "none": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
_ENDING = "ExecutionProvider"
_SILENT = 4
"""Log severity at which only fatal messages are printed; errors are raised as exceptions."""
# Parts of messages about a missing operator, in several versions of ONNX Runtime.
_NO_OPERATOR = ("not a registered", "no op registered", "not implemented", "could not find an impl")
_LONGEST = 600
"""Largest number of characters of ONNX Runtime's messages that are shown."""
_LOADING = re.compile(r"^Load model from .*? failed:\s*")
_SOURCE = re.compile(r"/\S+\.(?:h|cc|cpp):\d+ .*?\)(?: const)?(?:::<lambda\(\)>)? (?=[A-Z])")
"""The part of a message that names a line of ONNX Runtime's own source."""
_WEIGHTS = "weights.bin"


class SessionPlan(NamedTuple):
    """How a model is run.

    Attributes:
        level: The level of optimisation.
        providers: Full names of execution providers, the preferred one first.
        threads: Threads for one node; 0 lets ONNX Runtime choose.
        parallel_nodes: Threads for parallel execution of nodes; 0 runs nodes one after the other.
        custom_ops: Libraries of operators to load.
        config: Further entries of the session's configuration.
        profiled: Whether the session without capture measures the times of its nodes.
    """

    level: Level = "all"
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    threads: int = 0
    parallel_nodes: int = 0
    custom_ops: tuple[str, ...] = ()
    config: Mapping[str, str] = {}
    profiled: bool = False


def plan_of(
    level: str,
    providers: Sequence[str],
    *,
    threads: int = 0,
    parallel_nodes: int = 0,
    custom_ops: Sequence[str] = (),
    config: Mapping[str, str] | None = None,
    profiled: bool = False,
) -> SessionPlan:
    """Check options and make a plan from them.

    Raises:
        NotInstalled: onnxruntime is missing.
        BadInput: There is no such level or provider, or this build lacks the provider.
        BadFile: A library of operators does not exist.
    """
    if level not in LEVELS:
        raise BadInput(
            f"there is no optimisation level '{level}'", hint=f"levels are {', '.join(LEVELS)}"
        )
    for name, number in (("threads", threads), ("parallel_nodes", parallel_nodes)):
        if type(number) is not int or number < 0:
            raise BadInput(f"{name} is a number of threads, not {number!r}")
    for library in custom_ops:
        if not Path(library).is_file():
            raise BadFile(
                f"there is no library of operators '{library}'",
                hint="--custom-ops takes the path of a shared library",
            )
    # Only the providers of the installed build can be used.
    available = list(model_file.engine().get_available_providers())
    return SessionPlan(
        level,
        tuple(_provider(word, available) for word in providers) or ("CPUExecutionProvider",),
        threads,
        parallel_nodes,
        tuple(str(Path(library).absolute()) for library in custom_ops),
        dict(config or {}),
        profiled,
    )


def _provider(word: str, available: Sequence[str]) -> str:
    """The full name of a provider; `word` may lack the ending, and upper case does not matter."""
    wanted = word.strip().lower().removesuffix(_ENDING.lower())
    for name in available:
        if name.lower().removesuffix(_ENDING.lower()) == wanted:
            return name
    shown = [name.removesuffix(_ENDING) for name in available]
    raise BadInput(
        f"this ONNX Runtime has no provider '{word}'",
        hint=f"it has {', '.join(shown)}; others come with other packages, "
        "such as onnxruntime-gpu for CUDA",
    )


class Optimised(NamedTuple):
    """A model as a user's session runs it.

    Attributes:
        session: That session; the captured one must have the same outputs.
        path: File of the optimised graph; its weights are next to it.
    """

    session: Any
    path: Path


def optimise(model: Path, plan: SessionPlan, folder: Path) -> Optimised:
    """Load a model as a user would, and save the optimised graph.

    Args:
        model: The model file.
        plan: How the model is run.
        folder: An empty folder for the graph and its weights.

    Raises:
        BadFile: The model cannot be loaded; the text contains ONNX Runtime's message.
    """
    place = folder / "optimised.onnx"
    options = _options(plan, _LEVELS[plan.level])
    options.optimized_model_filepath = str(place)
    # Weights are written to a separate file, because a protobuf cannot exceed 2 GB.
    named = "session.optimized_model_external_initializers"
    options.add_session_config_entry(f"{named}_file_name", _WEIGHTS)
    options.add_session_config_entry(f"{named}_min_size_in_bytes", str(model_file.SMALL))
    if plan.profiled:
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
    session = _session(model, options, plan, model.name)
    if not place.is_file():
        raise BadFile(
            f"ONNX Runtime did not write the graph that it made of '{model.name}'",
            hint="providers that compile whole graphs have no nodes to show; try --providers CPU",
        )
    return Optimised(session, place)


def with_outputs(optimised: Path, values: Sequence[str], number: int) -> Path:
    """Write the optimised graph with further outputs to a file next to it; return the file."""
    onnx = model_file.protobuf()
    model = onnx.load(str(optimised), load_external_data=False)
    # An output must not be listed twice.
    have = {output.name for output in model.graph.output}
    for value in values:
        if value not in have:
            model.graph.output.add().name = value
    place = optimised.with_name(f"captured{number}.onnx")
    place.write_bytes(model.SerializeToString())
    return place


def capturing(path: Path, plan: SessionPlan, name: str) -> Any:
    """A session that runs a graph without further optimisation."""
    return _session(path, _options(plan, _LEVELS["none"]), plan, name)


def _options(plan: SessionPlan, level: str) -> Any:
    ort = model_file.engine()
    options = ort.SessionOptions()
    options.log_severity_level = _SILENT
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    if plan.threads:
        options.intra_op_num_threads = plan.threads
    if plan.parallel_nodes:
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
        options.inter_op_num_threads = plan.parallel_nodes
    for library in plan.custom_ops:
        try:
            options.register_custom_ops_library(library)
        except Exception as error:
            raise BadFile(
                f"'{library}' cannot be loaded: {message_of(error)}",
                hint="was it built for this machine, and for the onnxruntime that is installed?",
            ) from None
    for name, value in plan.config.items():
        try:
            options.add_session_config_entry(name, value)
        except Exception as error:
            raise BadInput(
                f"session entry '{name}': {message_of(error)}",
                hint="onnxruntime's documentation of session options lists the entries",
            ) from None
    return options


def _session(path: Path, options: Any, plan: SessionPlan, name: str) -> Any:
    try:
        return model_file.engine().InferenceSession(
            str(path), options, providers=list(plan.providers)
        )
    except DriftlineError:
        raise
    except Exception as error:  # ONNX Runtime's errors have no common base class
        raise _refused(error, name) from None


def _refused(error: Exception, name: str) -> BadFile:
    text = message_of(error)
    kind = type(error).__name__
    hint = "this is what ONNX Runtime says; is the file complete?"
    lower = text.lower()
    if kind == "NotImplemented" or any(words in lower for words in _NO_OPERATOR):
        hint = (
            "this ONNX Runtime has no such operator, or none for these types: export for another "
            "opset or type, use a newer onnxruntime, or give the library that holds it with "
            "--custom-ops"
        )
    elif "opset" in lower or "ir version" in lower or "ir_version" in lower:
        hint = "the file is newer than this onnxruntime: install a newer one, or export again"
    elif "compiled nodes" in lower:
        hint = (
            "this provider compiles whole graphs, whose nodes cannot be seen; try --providers CPU"
        )
    return BadFile(f"ONNX Runtime cannot load '{name}': {text}", hint=hint)


def message_of(error: Exception) -> str:
    """The message of an ONNX Runtime error, without its error code and source lines."""
    text = " ".join(str(error).split())
    parts = text.split(" : ")
    if text.startswith("[ONNXRuntimeError]") and len(parts) > 2:
        text = " : ".join(parts[3:] or parts[2:])
    text = _SOURCE.sub("", _LOADING.sub("", text))
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ..."
    return text or type(error).__name__


def run(session: Any, outputs: Sequence[str], feed: Mapping[str, Any], name: str) -> list[Any]:
    """Execute a model and return the values of some outputs.

    Raises:
        DriftlineError: The model failed; the text contains ONNX Runtime's message.
    """
    try:
        if any(isinstance(value, np.ndarray) for value in feed.values()):
            return _run_with_texts(session, outputs, feed)
        return list(session.run_with_ort_values(list(outputs), dict(feed)))
    except Exception as error:
        raise BadInput(
            f"'{name}' failed: {message_of(error)}",
            hint="it fails without driftline too; are the inputs the right ones?",
        ) from None


def _run_with_texts(session: Any, outputs: Sequence[str], feed: Mapping[str, Any]) -> list[Any]:
    """Execute a model with arrays as inputs, because ONNX Runtime has no values of texts."""
    arrays = {
        name: value if isinstance(value, np.ndarray) else value.numpy()
        for name, value in feed.items()
    }
    return [_wrapped(value) for value in session.run(list(outputs), arrays)]


def _wrapped(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value  # a list or a map, which `look` refuses
    if value.dtype.kind in "OUS":
        return TextTensor(value)
    return HostTensor(value, value.dtype.name, value.shape)
