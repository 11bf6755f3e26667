"""Named models as subjects of expectations: loaded, and called with the documented input.

The input is the tokens 5 … 64, filled up on the left to 64 positions. Files are called
`models.test_model_expectations.{class}.{model}.{test}`; the model part is `org--name`, and names
with the last part of the id alone, which older files have, are read too.
"""

# torch, transformers and fms are only partly annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import numpy as np

from driftline.comparison.tolerance.thresholds import load_thresholds
from driftline.decoding.models.decoder import DecoderModel
from driftline.decoding.models.loading import ModelSource, load_model
from driftline.decoding.models.targets import DTYPES, Target, parse_target, suite_targets
from driftline.decoding.prompts import PAD, Padded, Prompt, pad_left
from driftline.errors import BadInput
from driftline.testing.expectations.expectations import (
    Calibrated,
    Subject,
    device_name,
    documented_label,
    model_label,
)
from driftline.testing.expectations.signature import tensors_of

DOCUMENTED_MODULE = "models.test_model_expectations"
DTYPE = "fp16"
ROOT = "(root)"
"""The site of the model itself in runs."""
FIRST_TOKEN, TOKENS, LENGTH = 5, 60, 64


class SuiteOptions(NamedTuple):
    """How the models of a test run are loaded, by the user's options; empty ones are defaults."""

    target: str = ""
    library: str = ""
    micro_layers: str = ""
    thresholds: str = ""

    @property
    def where(self) -> Target:
        """The device for the models: the user's choice, else the AIU, else a GPU, else the CPU."""
        if self.target:
            return parse_target(self.target, dtype=DTYPE)
        return suite_targets(DTYPE)[1]


class Loaded(NamedTuple):
    """A model whose outputs can be compared with expectations.

    Attributes:
        name: As the user named it.
        subject: What is called and what its fingerprint says.
        label: Its part of the file names, and the one that older files have.
    """

    name: str
    subject: Subject
    label: tuple[str, str]

    def names(self, suite: str, test: str) -> list[str]:
        """The file names of one of its expectations; the first one is the name to write."""
        stems = dict.fromkeys(f"{DOCUMENTED_MODULE}.{suite}.{label}" for label in self.label)
        return [f"{stem}.{test}" for stem in stems]


def load(name: str, options: SuiteOptions, *, tuple_output: bool) -> Loaded:
    """Load a model and make its documented input.

    Args:
        name: Id or folder.
        options: How.
        tuple_output: It gives several tensors and sees all of its input, not only what is before.

    Raises:
        BadInput: The model, the target or the number of layers cannot mean anything.
    """
    target = options.where
    layers = _layers(options.micro_layers)
    source = ModelSource(
        name,
        library=options.library,
        unfuse_weights=True,
        micro_layers=layers,
        random_weights=layers is not None,
        as_written=True,
    )
    model = load_model(source, target)
    pad: Any = getattr(model.config, "pad_token_id", None)
    # An encoder of transformers numbers positions itself, beginning after the padding.
    own = tuple_output and model.library == "transformers" and isinstance(pad, int)
    batch = documented_batch(model.vocabulary, pad=pad if own else PAD)
    arguments = _arguments(model, batch, causal=not tuple_output)
    label = (model_label(name), documented_label(name))
    # Files of a micro model must not be mistaken for those of the whole model.
    if layers is not None:
        label = (f"{label[0]}-micro{layers}", label[1])
    facts = {
        "model": label[0],
        "library": model.library,
        "device": _device(model),
        "compile": target.compile,
        "weights": DTYPES[target.dtype],
        "micro_layers": layers,
    }
    subject = Subject(
        name,
        lambda: _output_of(model, arguments, tuple_output=tuple_output),
        model.module,
        np.asarray(batch.mask[0].numpy(), np.bool_),
        facts,
        explicit=_calibrated(name, options.thresholds),
    )
    return Loaded(name, subject, label)


def documented_batch(vocabulary: int, *, pad: int = PAD) -> Padded:
    """The tokens 5 … 64 of one prompt, padded on the left; smaller vocabularies begin again."""
    ids = range(FIRST_TOKEN, FIRST_TOKEN + TOKENS)
    # A config without a vocabulary leaves the documented ids as they are.
    size = vocabulary or FIRST_TOKEN + TOKENS
    return pad_left([Prompt("documented", tuple(token % size for token in ids))], LENGTH, pad=pad)


def _calibrated(name: str, path: str) -> Calibrated | None:
    if not path:
        return None
    thresholds = load_thresholds(path)
    thresholds.require_model(name)
    sites = (ROOT, None) if ROOT in thresholds.sites else (None,)
    limits = [thresholds.limit("relative_l2", site) for site in sites]
    return Calibrated(next(limit for limit in limits if limit is not None), path)


def _layers(text: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or not int(text):
        raise BadInput(f"'{text}' is no number of layers", hint="--driftline-micro-layers 3")
    return int(text)


def _arguments(model: DecoderModel, batch: Padded, *, causal: bool) -> dict[str, Any]:
    import torch

    ids, mask, positions = (part.to(model.device) for part in batch)
    if model.library == "fms":
        # Padding attends to padding only, so that no row of the softmax is empty.
        allowed = mask.unsqueeze(-1) == mask.unsqueeze(-2)
        allowed = allowed.tril() if causal else allowed
        dtype = getattr(torch, DTYPES[model.target.dtype])
        bias = torch.where(allowed, 0.0, -torch.inf).to(dtype)
        return {"x": ids, "mask": bias, "position_ids": positions}
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask.to(ids.dtype)}
    takes = inspect.signature(model.module.forward).parameters
    optional = {"use_cache": False, **({"position_ids": positions} if causal else {})}
    return arguments | {name: value for name, value in optional.items() if name in takes}


def _output_of(model: DecoderModel, arguments: dict[str, Any], *, tuple_output: bool) -> Any:
    output = model.module(**arguments)
    # If the device's compiler did not compute it, it is not an expectation for the device.
    model.require_compiled()
    count = len(tensors_of(output))
    if not tuple_output and count > 1:
        raise BadInput(
            f"{model.name} gives {count} tensors; a decoder gives one",
            hint="name it under --driftline-tuple-output-models, for TestAIUModelsTupleOutput",
        )
    return output


def _device(model: DecoderModel) -> str:
    kind: Target = model.target
    return kind.device if kind.device.startswith("aiu") else device_name(model.device)
