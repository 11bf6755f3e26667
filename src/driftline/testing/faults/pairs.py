"""Both models of a trial: the reference, and the candidate with or without a fault.

Everything follows from the setting to the bit, so that another tool, in another process, can be
tried on the same pair. Needs torch and transformers, nothing else of Driftline.
"""

# torch objects have no complete types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from driftline.testing.faults.architectures import Specimen, specimen
from driftline.testing.faults.formats import in_format
from driftline.testing.faults.implementations import IMPLEMENTATIONS, other_attention
from driftline.testing.faults.planting import Fault

LONG = 4096
"""From this length on both sides use `scaled_dot_product_attention`: eager attention would need
gigabytes."""


class Setting(NamedTuple):
    """What is tried.

    Attributes:
        architecture: One of `ARCHITECTURES`.
        format: One of `FORMATS`, the candidate's.
        seed: Of weights, inputs and the place of the fault.
        fault: What is planted; nothing where None.
        amount: How strong.
        length: Tokens of each sequence.
        implementation: One of `IMPLEMENTATIONS`, the candidate's; empty: as it is, in fp32 other
            attention (without any difference the pair would be equal to the bit).
        batch: Sequences.
    """

    architecture: str
    format: str
    seed: int
    fault: Fault | None = None
    amount: float = 0.0
    length: int = 40
    implementation: str = ""
    batch: int = 4


def reference_of(setting: Setting) -> Specimen:
    """The reference: float32, and nothing wrong with it."""
    made = specimen(setting.architecture, setting.seed, length=setting.length, batch=setting.batch)
    if setting.length >= LONG:
        other_attention(made.model)
    return made


def candidate_of(setting: Setting, *, planted: bool = True) -> Specimen:
    """The candidate in its format; `planted=False` leaves the fault out."""
    source = reference_of(setting)
    fault = setting.fault if planted else None
    if fault is not None:
        generator = torch.Generator().manual_seed(104729 * setting.seed + 1)
        fault.plant(source.model, place_of(setting, source.model), setting.amount, generator)
    model = IMPLEMENTATIONS[implementation_of(setting)](source.model)
    return Specimen(*in_format(model, source.inputs, setting.format))


def implementation_of(setting: Setting) -> str:
    """Which implementation the candidate is."""
    if setting.implementation:
        return setting.implementation
    at_attention = setting.fault is not None and setting.fault.role == "attention"
    return "other attention" if setting.format == "fp32" and not at_attention else "as it is"


def place_of(setting: Setting, model: nn.Module) -> str:
    """Where the fault is planted; empty without one."""
    if setting.fault is None:
        return ""
    sites = setting.fault.sites(model)
    return sites[(31 * setting.seed + 7) % len(sites)]


def output_of(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """What a model gives; what is drawn in it is drawn alike each time."""
    torch.manual_seed(5)
    with torch.no_grad():
        return model(**inputs)[0]


def effect_of(setting: Setting) -> float:
    """How much the fault changes its own module's output, in float32 and on the same input.

    This is the size of the fault itself, free of any format's noise and of what later layers make
    of it.
    """
    plain = setting._replace(format="fp32", implementation="as it is")
    source, faulty = reference_of(plain), candidate_of(plain)
    site = place_of(plain, source.model)
    other = faulty.model.get_submodule(site)
    change: list[float] = []

    def compare(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if not change:
            torch.manual_seed(5)
            change.append(apart(_first(result), _first(other(*args, **kwargs))))

    with torch.no_grad():
        handle = source.model.get_submodule(site).register_forward_hook(compare, with_kwargs=True)
        source.model(**source.inputs)
    handle.remove()
    return change[0] if change else 0.0


def _first(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


def apart(truth: torch.Tensor, other: torch.Tensor) -> float:
    """Relative error, by the 2-norm; infinite where there is no number."""
    truth, other = truth.double(), other.double()
    value = float((other - truth).norm() / truth.norm())
    return value if value < float("inf") else float("inf")
