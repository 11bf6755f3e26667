"""Names and files of decoder validation: what is written, under which name, and read back.

A `.out` is a folder with a torch file per prompt, `0.pt`, `1.pt`, …, each `{"tokens", "logits"}`.
It appears whole or not at all: it is written under another name and renamed. Beside the prompts
lies `provenance.json`, which readers of the documented form pass over.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from driftline.decoding.paged import FP8
from driftline.errors import BadFile, BadInput

if TYPE_CHECKING:
    import torch

Side = Literal["cpu", "cuda", "aiu"]
REFERENCE: Side = "cpu"
CANDIDATE: Side = "cuda"
"""The documented label of the candidate, also where it ran on something else."""
PROVENANCE = "provenance.json"
LONGEST_NAME = 255
"""Bytes of a file name, on every file system in use."""
METRICS = ("ce", "diff_mean", "prob_mean", "prob_std")

_NAME = re.compile(
    r"(?P<model>.+)_max-new-tokens-(?P<new>\d+)_batch-size-(?P<batch>\d+)"
    r"_seq-length-?(?P<length>\d+)_dtype-(?P<dtype>[A-Za-z0-9]+)(?P<rest>.*)"
)
_PROMPT = re.compile(r"(\d+)\.pt")


class Named(NamedTuple):
    """A file name taken apart; `rest` is what follows the number format, its dot included."""

    model: str
    new_tokens: int
    batch_size: int
    length: int
    dtype: str
    rest: str


def flat(model: str) -> str:
    """A model's id or path as part of a file name.

    >>> flat("ibm-granite/granite-3.2-8b-instruct/")
    'ibm-granite--granite-3.2-8b-instruct'
    """
    return model.rstrip("/").replace("/", "--")


def prefix(
    model: str, new_tokens: int, batch_size: int, length: int, dtype: str, attention: str = ""
) -> str:
    """What all files of one model and shape begin with.

    Args:
        model: Its id or path.
        new_tokens: Per prompt.
        batch_size: Prompts.
        length: Of the prompts.
        dtype: The candidate's number format.
        attention: The reference's; one in fp8 is named, as it gives other numbers than any other.

    >>> prefix("acme/tiny", 128, 1, 64, "fp16")
    'acme--tiny_max-new-tokens-128_batch-size-1_seq-length-64_dtype-fp16'
    """
    kind = f"_attn-type-{attention}" if attention in FP8 else ""
    return (
        f"{flat(model)}_max-new-tokens-{new_tokens}_batch-size-{batch_size}"
        f"_seq-length-{length}_dtype-{dtype}{kind}"
    )


def parse(name: str) -> Named | None:
    """A file name taken apart, in either documented spelling of the length; None if it is none.

    >>> parse("a--b_max-new-tokens-8_batch-size-1_seq-length64_dtype-fp16.ce.csv").length
    64
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    new, batch, length = (int(match[part]) for part in ("new", "batch", "length"))
    return Named(match["model"], new, batch, length, match["dtype"], match["rest"])


def out_name(start: str, side: Side, seed: int) -> str:
    return f"{start}.{side}_validation_info.{seed}.out"


def csv_name(start: str, metric: str) -> str:
    return f"{start}.{metric}.csv"


def fits(name: str) -> None:
    """Refuse a name that no file system takes, before hours of work are to be kept under it."""
    size = len(os.fsencode(name))
    if size > LONGEST_NAME:
        raise BadInput(
            f"the file name '{name[:60]}…' would have {size} bytes; {LONGEST_NAME} is the most",
            hint="name the model with --variant, or give a shorter path to it",
        )


class Saved(NamedTuple):
    """What a `.out` folder holds.

    Attributes:
        tokens: int64 [tokens] per prompt.
        logits: [new, vocabulary] per prompt; empty if only tokens were kept.
        top: The other tensors per prompt, where only the largest logits were kept.
        provenance: Where it comes from; empty if another program wrote it.
    """

    tokens: list[torch.Tensor]
    logits: list[torch.Tensor]
    top: list[dict[str, torch.Tensor]]
    provenance: dict[str, Any]


def write_out(
    folder: Path,
    tokens: Sequence[torch.Tensor],
    logits: Sequence[torch.Tensor] | None = None,
    *,
    top: Sequence[Mapping[str, torch.Tensor]] = (),
    provenance: Mapping[str, Any] | None = None,
    desk: Path | None = None,
) -> None:
    """Write a `.out` folder; it is there whole, or not at all.

    Args:
        folder: Its place. What is there already is replaced.
        tokens: Per prompt.
        logits: Per prompt; None: tokens only, or `top`.
        top: Per prompt what is kept instead of the logits.
        provenance: Kept beside them.
        desk: Folder of the same file system where it is written first; the parent if not given.

    Raises:
        OSError: It cannot be written.
    """
    import torch

    fits(folder.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".driftline-", dir=desk or folder.parent))
    try:
        draft.chmod(0o777 & ~_umask())
        for at, ids in enumerate(tokens):
            kept: Any = ids.clone()
            if logits is not None:
                kept = {"tokens": ids.clone(), "logits": logits[at].clone()}
            elif top:
                kept = {"tokens": ids.clone(), **{name: t.clone() for name, t in top[at].items()}}
            # By way of memory: torch's own writer says of a full disk only that it failed.
            content = io.BytesIO()
            torch.save(kept, content)
            with (draft / f"{at}.pt").open("wb") as file:
                file.write(content.getbuffer())
                _to_disk(file)
        if provenance is not None:
            write_json(draft / PROVENANCE, provenance)
        if folder.is_dir():
            shutil.rmtree(folder)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    from driftline.runs.provenance import dump_json

    replace_file(path, dump_json(dict(content)))


def replace_file(path: Path, content: bytes) -> None:
    """Write a file under another name, then rename it: nobody ever sees half of it."""
    descriptor, draft = tempfile.mkstemp(prefix=".driftline-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            _to_disk(file)
        Path(draft).chmod(0o666 & ~_umask())
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def write_csv(path: Path, metric: str, values: Sequence[float]) -> None:
    """One metric as documented: its name, then a number per line."""
    lines = [metric, *(repr(float(value)) for value in values)]
    replace_file(path, ("\n".join(lines) + "\n").encode("ascii"))


def read_out(folder: Path) -> Saved:
    """Read a `.out` folder, whoever wrote it.

    Raises:
        BadFile: It is missing, empty, damaged, or holds something else.
    """
    try:
        names = sorted(
            (entry.name for entry in os.scandir(folder) if _PROMPT.fullmatch(entry.name)),
            key=lambda name: int(name.removesuffix(".pt")),
        )
    except OSError as trouble:
        raise BadFile(f"{folder} cannot be read: {trouble.strerror}") from None
    if not names:
        raise BadFile(f"{folder} holds no prompt (0.pt, 1.pt, …)")
    if [int(name.removesuffix(".pt")) for name in names] != list(range(len(names))):
        raise BadFile(f"{folder} is not whole: its prompts are {', '.join(names[:12])}")
    saved = Saved([], [], [], _provenance(folder))
    for name in names:
        _read_prompt(folder / name, saved)
    if len({len(each) for each in (saved.tokens, saved.logits or saved.tokens)}) > 1 or (
        saved.top and len(saved.top) != len(saved.tokens)
    ):
        raise BadFile(f"{folder} holds logits for some prompts and none for others")
    return saved


def read_prompt(folder: Path, prompt: int) -> Saved:
    """One prompt of a `.out` folder, for who needs no other: logits of all may not fit.

    Raises:
        BadFile: It is missing, damaged, or holds something else.
    """
    saved = Saved([], [], [], {})
    _read_prompt(folder / f"{prompt}.pt", saved)
    return saved


def _read_prompt(path: Path, saved: Saved) -> None:
    loaded = _load(path)
    kept = cast("dict[str, torch.Tensor]", loaded if isinstance(loaded, dict) else {})
    if not kept and not isinstance(loaded, dict):
        kept = {"tokens": cast("torch.Tensor", loaded)}
    tensors = all(_holds_what_it_says(value) for value in kept.values())
    tokens = kept.get("tokens")
    if not tensors or tokens is None or tokens.dim() != 1 or tokens.is_floating_point():
        raise BadFile(f"{path} holds no tokens of a prompt")
    saved.tokens.append(tokens.long())
    logits = kept.get("logits")
    if logits is not None:
        if logits.dim() != 2 or not logits.is_floating_point() or len(logits) > len(tokens):
            raise BadFile(
                f"{path}: its logits are {logits.dtype} {tuple(logits.shape)} for {len(tokens)} "
                "tokens; a row per generated token is expected"
            )
        saved.logits.append(logits)
    rest = {name: value for name, value in kept.items() if name not in ("tokens", "logits")}
    if rest:
        saved.top.append(rest)


def _holds_what_it_says(value: Any) -> bool:
    """Whether it is a plain tensor; a few bytes can claim any size as an expanded view."""
    import torch

    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_meta:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _load(path: Path) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as trouble:  # a damaged stream raises whatever it likes
        said = (str(trouble).splitlines() or [""])[0].partition(". ")[0][:160]
        raise BadFile(
            f"{path} cannot be loaded: it is damaged, or torch.save has not written it "
            f"({type(trouble).__name__}: {said})",
            hint="delete the folder; what it held is then computed again",
        ) from trouble


def _provenance(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as trouble:
        raise BadFile(f"{folder / PROVENANCE} cannot be read: {trouble}") from None
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}
