"""Where one side of a decoder comparison runs: device, number format, compiler.

A target is text until `ready` is called. Only then is torch imported and the device looked up, so
that a spelling mistake is reported without starting a framework. Knows nothing about models.
"""

# torch, transformers, fms and pyarrow are only partly annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from driftline.errors import BadInput, DriftlineError, NotInstalled, did_you_mean
from driftline.registry import require

if TYPE_CHECKING:
    import torch

DTYPES = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp64": "float64",
}
"""Number formats by the short names that file names carry, and torch's names of them."""
_SPELLINGS = {**{long: short for short, long in DTYPES.items()}, "half": "fp16", "float": "fp32"}
EAGER = ("", "none", "eager")
FIELDS = ("device", "dtype", "compile", "dynamic", "attention")

AIU_PACKAGE = "torch_sendnn"
AIU_BACKEND = "sendnn"
NPU_PACKAGE = "torch_npu"


class Target(NamedTuple):
    """Where one side runs.

    Attributes:
        device: `cpu`, `cuda`, `cuda:1`, `npu`, `aiu`, or any other device torch knows.
        dtype: Short name of the number format of the weights: a key of `DTYPES`.
        compile: Backend of `torch.compile`; empty for none.
        dynamic: Compile once for all lengths (`--compile_dynamic`), not for each.
        attention: Which attention transformers shall use (`eager`, `sdpa`), or one of ibm-fms
            (`paged`, `math_fp8`, `paged_fp8`); empty: the library's choice.
    """

    device: str = "cpu"
    dtype: str = "fp32"
    compile: str = ""
    dynamic: bool = False
    attention: str = ""

    def __str__(self) -> str:
        words = [f"device={self.device}", f"dtype={self.dtype}"]
        if self.compile:
            words.append(f"compile={self.compile}")
        if self.dynamic:
            words.append("dynamic=1")
        if self.attention:
            words.append(f"attention={self.attention}")
        return ",".join(words)

    @property
    def words(self) -> str:
        """Where it runs, in which format and by what, for people.

        >>> Target("aiu", "fp16", "sendnn").words, Target().words
        ('aiu in fp16, compiled by sendnn', 'cpu in fp32, not compiled')
        """
        how = f"compiled by {self.compile}" if self.compile else "not compiled"
        return f"{self.device} in {self.dtype}, {how}"

    @property
    def is_aiu(self) -> bool:
        return self.device.partition(":")[0] == "aiu"


def where_line(reference: Target, candidate: Target) -> str:
    """The first line of every command that runs models: what runs where."""
    return f"reference: {reference.words}; candidate: {candidate.words}"


class Place(NamedTuple):
    """A target that has been found to exist, in torch's own terms."""

    device: torch.device
    dtype: torch.dtype
    backend: str


def dtype_name(word: str) -> str:
    """The short name of a number format, however it is spelt.

    >>> dtype_name("float16")
    'fp16'
    """
    plain = word.strip().lower().removeprefix("torch.")
    name = _SPELLINGS.get(plain, plain)
    if name not in DTYPES:
        raise BadInput(
            f"'{word}' is no number format a model can run in",
            hint=did_you_mean(plain, [*DTYPES, *DTYPES.values()]),
        )
    return name


def parse_target(text: str, *, dtype: str = "fp32") -> Target:
    """A target from `device=cuda,dtype=fp16,compile=inductor`.

    Args:
        text: Words `name=value` with commas between them, each of `FIELDS` at most once.
        dtype: Number format where the text names none.

    >>> parse_target("device=aiu,dtype=fp16")
    Target(device='aiu', dtype='fp16', compile='sendnn', dynamic=False, attention='')
    """
    fields: dict[str, str] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not value:
            raise BadInput(
                f"'{word}' in the target '{text}' is not of the form name=value",
                hint="write a target like device=cuda,dtype=fp16,compile=inductor",
            )
        if name not in FIELDS:
            raise BadInput(f"a target has no '{name}' ('{text}')", hint=did_you_mean(name, FIELDS))
        # The last one would win silently, which is rarely what is meant.
        if name in fields:
            raise BadInput(f"{name} is given twice in the target '{text}'", hint="give it once")
        fields[name] = value
    device = fields.get("device", "cpu").lower()
    # The AIU runs compiled graphs only, so its compiler need not be named.
    backend = fields.get("compile", AIU_BACKEND if device == "aiu" else "")
    return Target(
        device,
        dtype_name(fields.get("dtype", dtype)),
        "" if backend.lower() in EAGER else backend,
        _yes_or_no(fields.get("dynamic", "0"), text),
        fields.get("attention", ""),
    )


def _yes_or_no(word: str, text: str) -> bool:
    answers = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if word.lower() not in answers:
        raise BadInput(f"dynamic takes 1 or 0, not '{word}' (in the target '{text}')")
    return answers[word.lower()]


def default_targets(default_dtype: str = "fp16") -> tuple[Target, Target]:
    """Reference and candidate where none is named: CPU in fp32, and CUDA if there is one.

    Args:
        default_dtype: Number format of the candidate.
    """
    torch_module = require("torch", install="torch")
    # Without a GPU two number formats of the CPU are compared, so that the command still runs.
    device = "cuda" if torch_module.cuda.is_available() else "cpu"
    return Target("cpu", "fp32"), Target(device, dtype_name(default_dtype))


def suite_targets(default_dtype: str = "fp16") -> tuple[Target, Target]:
    """Reference and candidate of the suites that were made for the AIU: it, where there is one."""
    reference, candidate = default_targets(default_dtype)
    if _aiu_is_here():
        candidate = Target("aiu", candidate.dtype, AIU_BACKEND)
    return reference, candidate


def _aiu_is_here() -> bool:
    """Whether the AIU's package can be imported, or its backend is registered."""
    if find_spec(AIU_PACKAGE) is not None:
        return True
    # Compilers are not imported for the question alone: that takes seconds.
    return "torch._dynamo" in sys.modules and AIU_BACKEND in _backends()


def ready(target: Target) -> Place:
    """The target in torch's terms, after a look whether all of it is there.

    Raises:
        NotInstalled: The package a device comes with is missing; the message names it.
        BadInput: There is no such device or compiler here.
    """
    torch_module = require("torch", install="torch")
    dtype = cast("torch.dtype", getattr(torch_module, DTYPES[target.dtype]))
    kind = target.device.partition(":")[0]
    if kind == "aiu":
        # Weights and inputs stay where torch keeps them; the compiled graph is what runs there.
        _aiu_backend(target)
        return Place(torch_module.device("cpu"), dtype, target.compile)
    if kind == "npu":
        _package(NPU_PACKAGE, "npu")
    device = _device(torch_module, target.device)
    if target.compile:
        _known_backend(target.compile)
    return Place(device, dtype, target.compile)


def _package(name: str, device: str) -> None:
    try:
        require(name)
    except NotInstalled as absent:
        raise NotInstalled(
            f"device={device} needs the package {name}, which cannot be imported here",
            hint=f"install {name} as the device's maker describes, or name another device",
        ) from absent


def _backends() -> list[str]:
    from torch import _dynamo

    listed = cast(Any, _dynamo).list_backends(exclude_tags=())
    return [str(name) for name in listed]


def _aiu_backend(target: Target) -> None:
    """Accept a backend that is registered under the name; otherwise import the package."""
    if target.compile != AIU_BACKEND:
        raise BadInput(
            f"device=aiu runs what compile={AIU_BACKEND} makes, not "
            + (f"compile={target.compile}" if target.compile else "an uncompiled model"),
            hint=f"leave compile out, or say compile={AIU_BACKEND}",
        )
    # Importing the package registers its backend.
    if AIU_BACKEND not in _backends():
        _package(AIU_PACKAGE, "aiu")
        _known_backend(AIU_BACKEND)


def _known_backend(name: str) -> None:
    backends = _backends()
    if name not in backends:
        raise BadInput(
            f"torch.compile knows no backend '{name}' here",
            hint=did_you_mean(name, backends),
        )


def _device(torch_module: Any, word: str) -> torch.device:
    try:
        device = torch_module.device(word)
    except RuntimeError:
        raise BadInput(
            f"'{word}' is no device that torch knows", hint="cpu, cuda, npu and aiu are the usual"
        ) from None
    if device.type == "cuda" and not torch_module.cuda.is_available():
        raise BadInput(
            f"device={word} was asked for, but torch {torch_module.__version__} sees no CUDA "
            "device here",
            hint="run it on a machine with a GPU, or say --candidate device=cpu,dtype=fp16",
        )
    try:
        # Only a tensor shows whether a device works: torch names devices it was not built for.
        torch_module.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, ModuleNotFoundError) as trouble:
        lines = str(trouble).strip().splitlines() or [type(trouble).__name__]
        raise BadInput(
            f"device={word} cannot be used here: {lines[0][:200]}",
            hint="driftline doctor lists the devices of this machine",
        ) from None
    if device.type == "meta":
        raise DriftlineError("device=meta computes nothing", hint="name a device that does")
    return device
