"""What `driftline layer-metrics` is asked for, one model and shape at a time: names, what is done.

File names do not say the mode or the targets; `….layers.json` beside them does. Files made under
other settings are never taken for these.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from driftline.decoding import out_files
from driftline.decoding.compiled_parts import Unit
from driftline.decoding.desk import desk_of
from driftline.decoding.layer_names import METRICS, file_layer, layer_csv
from driftline.decoding.layer_walk import Mode
from driftline.decoding.models import HF_ARCHITECTURE, library_for, model_name
from driftline.decoding.prompts import Order
from driftline.decoding.targets import DTYPES, Target
from driftline.errors import AlreadyThere, BadFile, BadInput
from driftline.runs.provenance import plain_json, provenance

WHAT = "layers"
OPTION = "--output_path"


class LayersAsk(NamedTuple):
    """One model, one shape, one pair of targets.

    Attributes:
        model_path: Folder or id; may be empty if `variant` is an id.
        tokenizer: Folder or id; the model's own if empty.
        prompts: ShareGPT JSON, or one prompt per line.
        output_path: Made if it is not there.
        mode: One call on the prompts, or generation token by token.
        batch_size: Prompts.
        length: Sequence length: prompts have half of it to all of it, and are padded to it.
        new_tokens: Iterations of `generate`; only part of the names in the other mode.
        reference: The trusted side.
        candidate: The other.
        order: How prompts are drawn.
        elements: abs_diff files hold every element, not a mean per row.
        compiled: What is compiled as one, if the candidate is compiled.
        force: Compute again what is there already.
    """

    model_path: str
    prompts: Path
    output_path: Path
    mode: Mode = "generate"
    tokenizer: str = ""
    batch_size: int = 1
    length: int = 64
    new_tokens: int = 128
    reference: Target = Target()
    candidate: Target = Target("cpu", "fp16")
    variant: str = ""
    architecture: str = HF_ARCHITECTURE
    library: str = ""
    unfuse_weights: bool = True
    order: Order = "head"
    elements: bool = False
    compiled: Unit = "block"
    force: bool = False

    @property
    def source(self) -> str:
        return self.model_path or self.variant

    @property
    def model(self) -> str:
        return model_name(self.model_path, self.variant)

    @property
    def prefix(self) -> str:
        """Layer files carry the long name of the number format."""
        shape = (self.new_tokens, self.batch_size, self.length, DTYPES[self.candidate.dtype])
        return out_files.prefix(self.model, *shape, attention=self.reference.attention)

    @property
    def sidecar(self) -> Path:
        return self.output_path / f"{self.prefix}.layers.json"

    @property
    def table(self) -> Path:
        return self.output_path / f"{self.prefix}.layers"


def check(ask: LayersAsk) -> None:
    """Refuse what cannot give a result, before anything is loaded.

    Raises:
        BadInput: A number is out of range, or a name too long.
    """
    if not ask.source:
        raise BadInput("no model is named", hint="give --model_paths, or set MODEL_PATHS")
    if ask.source.startswith(("/", ".", "~")) and not Path(ask.source).is_dir():
        raise BadInput(
            f"there is no model folder {ask.source}",
            hint="give the folder that holds config.json, or an id of a model",
        )
    least = {
        "--batch_sizes": ask.batch_size,
        "--seq_lengths": ask.length,
        "--max_new_tokens": ask.new_tokens,
    }
    for name, value in least.items():
        if value < 1:
            raise BadInput(f"{name} must be at least 1, not {value}")
    out_files.fits(ask.sidecar.name)


def check_names(ask: LayersAsk, sites: Iterator[str], library: str) -> None:
    """Refuse layers whose files no file system could hold, before they are computed."""
    for site in sites:
        out_files.fits(layer_csv(ask.prefix, file_layer(site, library), METRICS[0]))


def settings(ask: LayersAsk) -> dict[str, Any]:
    """What the figures depend on."""
    kept: dict[str, Any] = {
        "model": ask.model,
        "architecture": ask.architecture,
        "library": library_for(ask.architecture, ask.library),
        "unfuse_weights": ask.unfuse_weights,
        "prompts": ask.prompts.name,
        "order": ask.order,
        "mode": ask.mode,
        "reference": str(ask.reference),
        "candidate": str(ask.candidate),
        "batch_size": ask.batch_size,
        "length": ask.length,
        "elements": ask.elements,
    }
    if ask.candidate.compile or ask.reference.compile:
        kept["compiled"] = ask.compiled
    return kept


def described(ask: LayersAsk) -> dict[str, Any]:
    """Provenance: where and how the files were made, and under which settings."""
    made = provenance()
    made.pop("id", None)
    return {**made, "format": "driftline-layer-metrics", "settings": plain_json(settings(ask))}


def is_done(ask: LayersAsk) -> bool:
    """Whether everything asked for is there already, whole.

    Raises:
        AlreadyThere: It is, but made under other settings, or by another program.
    """
    if ask.force or desk_of(ask.output_path, WHAT, ask.prefix).is_dir():
        return False
    hint = f"give another {OPTION}, or --force to compute it again"
    if not ask.sidecar.exists():
        start = f"{ask.prefix}--"
        there = ask.output_path.iterdir() if ask.output_path.is_dir() else ()
        strange = [path for path in there if path.name.startswith(start)]
        if strange:
            raise AlreadyThere(
                f"{strange[0]} is there, and nothing says how it was made", hint=hint
            )
        return False
    content = _sidecar(ask.sidecar)
    kept = cast("Mapping[str, Any]", content.get("settings", {}))
    wanted = cast("Mapping[str, Any]", plain_json(settings(ask)))
    changed = [
        f"{name} was {kept.get(name)}, is {value}"
        for name, value in wanted.items()
        if kept.get(name) != value
    ]
    if changed:
        raise AlreadyThere(
            f"{ask.prefix} is in {ask.output_path} already, made under other settings: "
            + "; ".join(changed[:3]),
            hint=hint,
        )
    files = cast("list[str]", content.get("files", []))
    return bool(files) and all((ask.output_path / Path(name).name).exists() for name in files)


def _sidecar(path: Path) -> dict[str, Any]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as trouble:
        raise BadFile(f"{path} cannot be read: {trouble}", hint="--force makes it anew") from None
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}
