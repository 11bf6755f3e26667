"""What `driftline metrics` is asked for, one model and shape at a time: names and settings.

Settings are what makes two results comparable. They are kept with every output; a file made under
other settings is never taken for this one's.
"""

from __future__ import annotations

import glob
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

from driftline.decoding import out_files
from driftline.decoding.models import HF_ARCHITECTURE, library_for, model_name
from driftline.decoding.prompts import Order
from driftline.decoding.targets import Target
from driftline.decoding.weights import weights_of
from driftline.errors import AlreadyThere, BadFile, BadInput
from driftline.runs.provenance import plain_json, provenance
from driftline.settings import job_place

Keep = Literal["full", "topk"]
TABLE = "tokens.parquet"
SIDECAR = "provenance.json"
DONE = "prob_mean"
"""The metric whose file is written last: where it is, everything is."""


class MetricsAsk(NamedTuple):
    """One model, one shape, one pair of targets.

    Attributes:
        model_path: Folder or id; may be empty if `variant` is an id.
        tokenizer: Folder or id.
        prompts: ShareGPT JSON, or one prompt per line.
        output_dir: Made if it is not there.
        batch_size: Prompts of one round.
        length: Sequence length: prompts have half of it to all of it, and are padded to it.
        new_tokens: Generated per prompt and round.
        tokens_per_sequence: Rounds are this over `new_tokens`; None: one round.
        reference: The trusted side.
        candidate: The side that is forced along the reference's tokens.
        topk: How many of the reference's largest logits the four documented metrics look at.
        keep: Whether `.out` files hold all logits or the largest.
        order: How prompts are drawn.
        skip_computation: Only score what is saved.
        distributed: Split the candidate over the ranks of the job.
        force: Compute again what is there already.
    """

    model_path: str
    tokenizer: str
    prompts: Path | None
    output_dir: Path
    batch_size: int = 1
    length: int = 0
    new_tokens: int = 100
    tokens_per_sequence: int | None = None
    reference: Target = Target()
    candidate: Target = Target("cpu", "fp16")
    variant: str = ""
    architecture: str = HF_ARCHITECTURE
    library: str = ""
    unfuse_weights: bool = False
    extra: Mapping[str, Any] = MappingProxyType({})
    topk: int = 20
    keep: Keep = "full"
    order: Order = "head"
    skip_computation: bool = False
    distributed: bool = False
    force: bool = False

    @property
    def model(self) -> str:
        return model_name(self.model_path, self.variant)

    @property
    def source(self) -> str:
        return self.model_path or self.variant

    @property
    def prefix(self) -> str:
        shape = (self.new_tokens, self.batch_size, self.length, self.candidate.dtype)
        return out_files.prefix(self.model, *shape, attention=self.reference.attention)

    @property
    def rounds(self) -> int:
        wanted = self.new_tokens if self.tokens_per_sequence is None else self.tokens_per_sequence
        return wanted // self.new_tokens

    def out(self, side: out_files.Side, seed: int) -> Path:
        return self.output_dir / out_files.out_name(self.prefix, side, seed)

    def csv(self, metric: str) -> Path:
        return self.output_dir / out_files.csv_name(self.prefix, metric)

    @property
    def table(self) -> Path:
        return self.output_dir / f"{self.prefix}.{TABLE}"

    @property
    def sidecar(self) -> Path:
        return self.output_dir / f"{self.prefix}.{SIDECAR}"


def check(ask: MetricsAsk) -> None:
    """Refuse what cannot give a result, before anything is loaded.

    Raises:
        BadInput: A number is out of range, or a name too long.
    """
    if not ask.source:
        raise BadInput("no model is named", hint="give --model_path, or --variant with an id")
    least = {
        "--batch_size": ask.batch_size,
        "--min_pad_length (the sequence length)": ask.length,
        "--max_new_tokens": ask.new_tokens,
        "--topk_per_token": ask.topk,
    }
    for name, value in least.items():
        if value < 1:
            raise BadInput(f"{name} must be at least 1, not {value}")
    if ask.rounds < 1:
        raise BadInput(
            f"--num_test_tokens_per_sequence {ask.tokens_per_sequence} is less than one round of "
            f"--max_new_tokens {ask.new_tokens}",
            hint="give a multiple of --max_new_tokens; 1024 is usual",
        )
    longest = out_files.out_name(ask.prefix, out_files.CANDIDATE, ask.rounds - 1)
    out_files.fits(longest)


def settings(ask: MetricsAsk) -> dict[str, Any]:
    """What the scores depend on."""
    return {
        "model": ask.model,
        "architecture": ask.architecture,
        "library": library_for(ask.architecture, ask.library),
        "unfuse_weights": ask.unfuse_weights,
        "extra": plain_json(ask.extra),
        "weights": weights_of(ask.source),
        "reference": str(ask.reference),
        "candidate": str(ask.candidate),
        "ranks": job_place().world_size if ask.distributed else 1,
        "topk": ask.topk,
        "batch_size": ask.batch_size,
        "length": ask.length,
        "max_new_tokens": ask.new_tokens,
        "rounds": ask.rounds,
    } | ({} if ask.skip_computation else {"prompts": _digest(ask.prompts), "order": ask.order})


def side_settings(ask: MetricsAsk, side: out_files.Side, seed: int) -> dict[str, Any]:
    """What the logits of one side and round depend on, beside the prompts themselves."""
    everything = settings(ask)
    own = ("model", "architecture", "library", "unfuse_weights", "extra", "weights")
    trusted = side == out_files.REFERENCE
    target = ask.reference if trusted else ask.candidate
    return {name: everything[name] for name in own} | {
        "target": str(target),
        "ranks": 1 if trusted else everything["ranks"],
        "seed": seed,
        "max_new_tokens": ask.new_tokens,
    }


def described(ask: MetricsAsk, content: Mapping[str, Any]) -> dict[str, Any]:
    """Provenance for one output: where and how it was made, and under which settings."""
    made = provenance()
    made.pop("id", None)
    return {
        **made,
        "format": "driftline-decoder-metrics",
        "settings": plain_json(content),
    }


def _digest(path: Path | None) -> str | None:
    if path is None or not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def differences(kept: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Settings that are not the same, in words."""
    plain = cast("dict[str, Any]", plain_json(wanted))
    return [
        f"{name} was {kept.get(name)!r}, is {value!r}"
        for name, value in plain.items()
        if name in kept and kept[name] != value and not (name == "weights" and not kept[name])
    ]


def forget(ask: MetricsAsk) -> None:
    """Take back that all is done; where it was asked for, delete the logits that were saved."""
    ask.csv(DONE).unlink(missing_ok=True)
    if ask.force and not ask.skip_computation:
        for side in (out_files.REFERENCE, out_files.CANDIDATE):
            for place in ask.output_dir.glob(f"{glob.escape(ask.prefix)}.{side}_validation_info.*"):
                if place.is_dir():
                    shutil.rmtree(place)


def is_done(ask: MetricsAsk) -> bool:
    """Whether everything asked for is there already.

    Raises:
        AlreadyThere: It is, but made under other settings.
    """
    if ask.force or not ask.csv(DONE).exists():
        return False
    if not ask.sidecar.exists():  # another program's, which does not say how it was made
        return True
    try:
        kept = json.loads(ask.sidecar.read_text(encoding="utf-8")).get("settings", {})
    except (OSError, ValueError, AttributeError) as trouble:
        raise BadFile(f"{ask.sidecar} cannot be read: {trouble}") from None
    wanted = settings(ask)
    rounds = wanted.pop("rounds")
    changed = differences(kept, wanted)
    if not changed and kept.get("rounds") != rounds:
        return False  # those that are there are used again
    if changed:
        raise AlreadyThere(
            f"{ask.csv(DONE)} is there, made under other settings: {'; '.join(changed[:3])}",
            hint="give another --output_dir, or --force to compute it again; with "
            "--skip_computation --force the saved logits are scored again",
        )
    return True
