"""Gross faults in the models of the clean pairs: in one place, and a little in every layer.

Single faults are those of `driftline.testing.faults`, planted at the begin, the middle or the end
of models that are deeper and have larger gains than there. What every layer has is planted here.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

import driftline
from benchmarks.clean_pairs.models import ARCHITECTURES, HEADS, WIDTH, buildable, made
from benchmarks.clean_pairs.pairs import CANDIDATES, Pair
from benchmarks.clean_pairs.trial import (
    clean_trial,
    execute,
    figures,
    first_tensor,
    prepare,
    said_by_compare,
    said_by_diagnose,
)
from driftline.testing.faults import FAULTS, Specimen
from driftline.testing.faults.faults import before, sites_of
from driftline.testing.faults.trials import apart, replayed

GROSS = 0.1
"""A fault is gross where it changes its own module's output by this much, in float32."""
PLACES: Mapping[str, float] = {"begin": 0.1, "middle": 0.5, "end": 0.9}
SINGLE: Mapping[str, float] = {
    "scaled weight": 0.2,
    "heads in another order": 1,
    "weight transposed": 1,
    "bias missing": 0.0,
    "norm epsilon": 1e-2,
    "norm weight plus one": 1.0,
    "channels zeroed": 0.25,
    "partial sum": 2,
    "activation": 0,
    "shift by a token": 1,
    "mask off by one": 1,
    "mask missing": 1,
    "attention scale": 2.0,
    "residual lost": 1.0,
    "tile zeroed": 16,
    "offset": 0.5,
}
"""Kinds of `FAULTS` and how strong each is planted."""


class Planted(NamedTuple):
    """A fault in a model of a clean pair.

    Attributes:
        pair: The model and what is different about the candidate besides.
        kind: A key of `SINGLE` or `EVERYWHERE`.
        place: A key of `PLACES`; `everywhere` for faults that every layer has.
    """

    pair: Pair
    kind: str
    place: str

    @property
    def name(self) -> str:
        """Says all of it; results are kept under this name."""
        return f"{self.kind}, {self.place}: {self.pair.name}"

    @property
    def architecture(self) -> str:
        """That of the model."""
        return self.pair.architecture


# Faults that every layer has a little of: planted, and where.


def _last_linears(model: nn.Module) -> list[str]:
    """The last linear layer of each block's feed-forward part, whatever it is called."""
    last: dict[str, str] = {}
    for name in sites_of(model, "linear"):
        parts = name.split(".")
        index = next(i for i, part in enumerate(parts) if part.isdigit())
        last[".".join(parts[: index + 1])] = name
    return list(last.values())


def _everywhere(
    kind: str, amount: float, sites: Callable[[nn.Module], list[str]] | None = None
) -> Callable[[nn.Module], list[str]]:
    def plant(model: nn.Module) -> list[str]:
        fault = FAULTS[kind]
        chosen = fault.sites(model) if sites is None else sites(model)
        for site in chosen:
            fault.plant(model, site, amount, torch.Generator().manual_seed(1))
        return chosen

    return plant


def _rotary_base(model: nn.Module) -> list[str]:
    """Frequencies of rotary positions for another base."""
    sites = [name for name, m in model.named_modules() if hasattr(m, "inv_freq")]
    for site in sites:
        module: Any = model.get_submodule(site)
        exponents = torch.arange(0, WIDTH // HEADS, 2).float() / (WIDTH // HEADS)
        module.inv_freq = 500_000.0 ** -exponents[: len(module.inv_freq)]
    return sites


def _positions_off_by_one(model: nn.Module) -> list[str]:
    """Learnt positions that begin at one."""
    ending = ("wpe", "position_embeddings", "embed_positions")
    sites = [n for n, m in model.named_modules() if n.endswith(ending) and not list(m.children())]
    for site in sites:
        before(
            model.get_submodule(site),
            lambda args, kwargs: ((args[0] + 1, *args[1:]), kwargs) if args else (args, kwargs),
        )
    return sites


EVERYWHERE: Mapping[str, Callable[[nn.Module], list[str]]] = {
    "last linear x1.05": _everywhere("scaled weight", 0.05, _last_linears),
    "epsilon": _everywhere("norm epsilon", 1e-2),
    "weights in fp8": _everywhere("weight in fp8", 1),
    "outputs in fp8": _everywhere("output in fp8", 8),
    "mask off by one": _everywhere("mask off by one", 1),
    "biases missing": _everywhere("bias missing", 0.0),
    "rotary base": _rotary_base,
    "positions off by one": _positions_off_by_one,
}
"""Name → plants it, and gives the sites at fault; none where the model cannot have it."""


def planted_faults() -> Iterator[Planted]:
    """Every fault at every depth and gain; whether it fits is seen when it is planted."""
    here = set(buildable())
    settings = [
        *(
            (architecture, layers, weights)
            for architecture in ("llama", "gpt2")
            for layers, weights in ((4, "default"), (8, "gain 1"), (24, "gain 2, q and k x2"))
        ),
        *(("bert", 8, "gain 1"), ("qwen2", 24, "gain 1"), ("mixtral", 4, "gain 1")),
        *(("vit", 8, "default"), ("t5", 8, "gain 1")),
    ]
    for architecture, layers, weights in settings:
        if architecture not in here:
            continue
        for number, kind in enumerate(SINGLE):
            for candidate in ("bf16", "sdpa"):
                place = tuple(PLACES)[(number + layers + (candidate == "sdpa")) % 3]
                # Other attention would take the place of a fault in attention.
                if candidate == "sdpa" and FAULTS[kind].role == "attention":
                    candidate = "float32"
                yield Planted(Pair(architecture, candidate, layers, weights=weights), kind, place)
        for kind in EVERYWHERE:
            for candidate in ("bf16", "float32"):
                pair = Pair(architecture, candidate, layers, weights=weights)
                yield Planted(pair, kind, "everywhere")


def _plant(planted: Planted, model: nn.Module) -> list[str]:
    if planted.place == "everywhere":
        return EVERYWHERE[planted.kind](model)
    fault = FAULTS[planted.kind]
    sites = fault.sites(model)
    if not sites:
        return []
    site = sites[int(PLACES[planted.place] * len(sites))]
    fault.plant(model, site, SINGLE[planted.kind], torch.Generator().manual_seed(1))
    return [site]


def fault_trial(planted: Planted, replay: bool = True) -> dict[str, Any]:
    """Plant, capture, judge by two runs and with a replay."""
    begin, pair = time.perf_counter(), planted.pair
    result: dict[str, Any] = {"set": "faults", "name": planted.name, "pair": pair._asdict()}
    result |= {"kind": planted.kind, "place": planted.place}
    result["family"] = ARCHITECTURES[pair.architecture].family
    try:
        prepare(pair.candidate)
        reference = made(pair.architecture, pair.size, pair.seed, pair.weights)
        copied = Specimen(copy.deepcopy(reference.model), dict(reference.inputs))
        guilty = _plant(planted, copied.model)
        if not guilty:
            return result | {"skipped": "this model cannot have it"}
        result["guilty"] = guilty[:3]
        result["effect"] = _effect(reference, copied, guilty[0])
        if result["effect"] == 0:
            return result | {"skipped": "it changes no bit"}
        change = CANDIDATES.get(pair.candidate, lambda source: source)
        first, truth = execute(reference, pair, is_candidate=False)
        second, output = execute(change(copied), pair, is_candidate=True)
        table = driftline.compare(first, second, threads=1)
        result |= figures(table, truth, output)
        result["compare"] = said_by_compare(table)
        result["diagnose"] = said_by_diagnose(driftline.diagnose(first, second, threads=1))
        if replay:
            evidence = replayed(reference, second, pair.candidate)
            seen = driftline.diagnose(first, second, replay=evidence, threads=1)
            result["replay"] = said_by_diagnose(seen)
        for method in ("compare", "diagnose", "replay"):
            if method in result:
                result[method]["exact"] = _names(result[method]["first_site"], guilty)
    except Exception as problem:  # a trial that breaks is a finding of its own
        result["broken"] = f"{type(problem).__name__}: {problem}"[:500]
    result["seconds"] = round(time.perf_counter() - begin, 2)
    return result


def _names(site: str, guilty: list[str]) -> bool:
    return site in guilty


def _effect(reference: Specimen, faulty: Specimen, site: str) -> float:
    """How much the first place at fault changes its own output; what it is given is the same."""
    outputs: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, result: Any) -> None:
        outputs.append(first_tensor(result))

    for side in (reference, faulty):
        handle = side.model.get_submodule(site).register_forward_hook(keep)
        count = len(outputs)
        with torch.no_grad():
            side.model(**side.inputs)
        handle.remove()
        del outputs[count + 1 :]  # later visits
    if len(outputs) < 2 or outputs[0].shape != outputs[1].shape:
        return math.inf
    return apart(outputs[0], outputs[1])


def trial(job: Pair | Planted, replay: bool) -> dict[str, Any]:
    """One trial of either set; outside `__main__`, so that a worker process finds it by name."""
    return clean_trial(job) if isinstance(job, Pair) else fault_trial(job, replay)
