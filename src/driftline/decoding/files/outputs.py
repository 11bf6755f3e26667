"""Saved tokens and logits of decoders (`.out` folders); files appear complete or not at all.

A `.out` is a folder with one torch file per prompt, `0.pt`, `1.pt`, …, each `{"tokens", "logits"}`.
Everything is written under another name first and then renamed. Next to the prompts is
`provenance.json`, which readers of the documented form ignore. With `--logits topk` the largest
logits are kept instead of the whole vocabulary: enough for the four documented metrics, which look
at the reference's k largest only, and a thousandth of the space.
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
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from driftline.decoding.files.names import require_short
from driftline.errors import BadFile

if TYPE_CHECKING:
    import torch

_PROVENANCE = "provenance.json"
_PROMPT = re.compile(r"(\d+)\.pt")

INDICES = "topk_indices"
"""int32 [new, k]: which ids have the largest logits, largest first."""
VALUES = "topk_logits"
"""[new, k] in the model's number format: those logits."""
NORM = "logsumexp"
"""float32 [new]: log of the sum of exp over the whole vocabulary; a logit less this is log p."""
NONFINITE = "nonfinite"
"""int32 [new]: how many logits of the whole vocabulary were NaN or infinite."""
AT_REFERENCE = "reference_logits"
"""[new, k], candidate only: its logits at the reference's ids."""


class Outputs(NamedTuple):
    """The contents of a `.out` folder.

    Attributes:
        tokens: int64 [tokens] per prompt.
        logits: [new, vocabulary] per prompt; empty if only tokens were kept.
        top: The other tensors per prompt, if only the largest logits were kept.
        provenance: How it was made; empty if another program wrote it.
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
    work_folder: Path | None = None,
) -> None:
    """Write a `.out` folder, completely or not at all.

    Args:
        folder: Its path. An existing one is replaced.
        tokens: Per prompt.
        logits: Per prompt; None: tokens only, or `top`.
        top: Per prompt, the tensors that replace the logits.
        provenance: Saved in the folder.
        work_folder: Folder of the same file system where it is written first; the parent if not
            given.

    Raises:
        OSError: It cannot be written.
    """
    import torch

    require_short(folder.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".driftline-", dir=work_folder or folder.parent))
    try:
        draft.chmod(0o777 & ~_umask())
        for index, ids in enumerate(tokens):
            prompt: Any = ids.clone()
            if logits is not None:
                prompt = {"tokens": ids.clone(), "logits": logits[index].clone()}
            elif top:
                prompt = {
                    "tokens": ids.clone(),
                    **{name: t.clone() for name, t in top[index].items()},
                }
            # Through memory: torch's own writer reports a full disk without the reason.
            content = io.BytesIO()
            torch.save(prompt, content)
            with (draft / f"{index}.pt").open("wb") as file:
                file.write(content.getbuffer())
                _to_disk(file)
        if provenance is not None:
            write_json(draft / _PROVENANCE, provenance)
        # A folder cannot be replaced by a rename as a file can.
        if folder.is_dir():
            shutil.rmtree(folder)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def make_readable(path: Path) -> None:
    """Give a temporary file, which only its owner may read, the rights of any other new file."""
    path.chmod(0o666 & ~_umask())


def _umask() -> int:
    # The mask can only be read by setting it.
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
    """Write a file under another name, then rename it, so that no reader sees half of it."""
    # In the same folder: a rename across file systems would be a copy, which is not atomic.
    descriptor, draft = tempfile.mkstemp(prefix=".driftline-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            _to_disk(file)
        make_readable(Path(draft))
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def write_csv(path: Path, metric: str, values: Sequence[float]) -> None:
    """One metric as documented: its name, then a number per line."""
    lines = [metric, *(repr(float(value)) for value in values)]
    replace_file(path, ("\n".join(lines) + "\n").encode("ascii"))


def read_out(folder: Path) -> Outputs:
    """Read a `.out` folder, of this or another program.

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
    # A gap means that a file was lost: the rest would be scored against other prompts.
    if [int(name.removesuffix(".pt")) for name in names] != list(range(len(names))):
        raise BadFile(f"{folder} is not whole: its prompts are {', '.join(names[:12])}")
    saved = Outputs([], [], [], _provenance(folder))
    for name in names:
        _read_prompt(folder / name, saved)
    # A side without logits, or without the largest, is complete; one with some of them is not.
    lengths = {len(saved.tokens), len(saved.logits or saved.tokens), len(saved.top or saved.tokens)}
    if len(lengths) > 1:
        raise BadFile(f"{folder} holds logits for some prompts and none for others")
    return saved


def read_prompt(folder: Path, prompt: int) -> Outputs:
    """Read one prompt of a `.out` folder: the logits of all may not fit into memory.

    Raises:
        BadFile: It is missing, damaged, or holds something else.
    """
    saved = Outputs([], [], [], {})
    _read_prompt(folder / f"{prompt}.pt", saved)
    return saved


def _read_prompt(path: Path, saved: Outputs) -> None:
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
        # weights_only: a pickle could run any code.
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as trouble:  # a damaged stream raises whatever it likes
        summary = (str(trouble).splitlines() or [""])[0].partition(". ")[0][:160]
        raise BadFile(
            f"{path} cannot be loaded: it is damaged, or torch.save has not written it "
            f"({type(trouble).__name__}: {summary})",
            hint="delete the folder; what it held is then computed again",
        ) from trouble


def _provenance(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / _PROVENANCE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as trouble:
        raise BadFile(f"{folder / _PROVENANCE} cannot be read: {trouble}") from None
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}


def shorten(
    logits: torch.Tensor, count: int, *, reference: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The largest logits of [new, vocabulary] logits.

    Args:
        logits: The logits of one prompt.
        count: How many of each row.
        reference: For a candidate: the kept logits of the other side.
    """
    import torch

    count = min(count, int(logits.shape[-1]))
    values, indices = logits.topk(count, dim=-1)
    kept = {
        INDICES: indices.to(torch.int32),
        VALUES: values,
        NORM: torch.logsumexp(logits.float(), dim=-1),
        NONFINITE: (~torch.isfinite(logits)).sum(dim=-1).to(torch.int32),
    }
    if reference is not None:
        kept[AT_REFERENCE] = logits.gather(-1, reference[INDICES].long())
    return kept
