"""The part of a page about a text model: the files of a validation.

Reads the files of `driftline validate`, `metrics` and `layer-metrics`, and joins those of one model
and shape. Tokens are judged only by limits that the user gave.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from driftline.comparison.table.files import is_table, open_table
from driftline.comparison.table.table import Side, Table
from driftline.comparison.tolerance.thresholds import Thresholds, load_thresholds
from driftline.decoding.failures import CHECKS, Rate
from driftline.decoding.files.metric_files import MetricFile, find_metric_files
from driftline.decoding.files.names import parse_name
from driftline.errors import BadFile, BadInput, DriftlineError
from driftline.reporting.html.tokens import (
    Tokens,
    first_failing,
    of_files,
    of_steps,
    read_tokens,
    shape_key,
)

if TYPE_CHECKING:
    from _typeshed import StrPath

_VALIDATION = ".validation.json"
_TABLE = ".tokens.parquet"
_LAYERS = ".layers"
# A larger JSON file is not one of ours, and parsing it could exhaust memory.
_LARGEST = 64 << 20
_ALLOWED = 0.01
"""Default fraction of failing tokens at which `driftline validate` fails."""

Text = Callable[[int], str]


def layers_of(table: Table) -> list[dict[str, Any]]:
    """The map of a comparison with several steps; no map for another one."""
    layer_map = of_steps(table)
    if layer_map is None:
        return []
    part = _part("", {}, "", "")
    part |= {"layers": layer_map, "verdict": "unjudged", "sentence": ""}
    return [part]


def decoder_folder(
    folder: Path, thresholds: Thresholds | StrPath | None = None, *, tokenizer: str = ""
) -> tuple[Table, list[dict[str, Any]]]:
    """The parts of a folder, and the comparison of layers that belongs to them.

    Args:
        folder: The folder that the commands wrote to.
        thresholds: Limits of tokens; default: those in the folder.
        tokenizer: Folder or id of the tokenizer, for the text of tokens.

    Raises:
        BadInput: The folder holds nothing of that kind.
    """
    groups = _groups(folder)
    # The most common mistake gets its own sentence.
    if not groups and (folder / "run.json").is_file():
        raise BadInput(
            f"{folder} is one run, and a report needs two",
            hint=f"driftline report {folder} CAND, or REF {folder}",
        )
    if not groups:
        raise BadInput(
            f"{folder} is no comparison, and holds no scores of a decoder",
            hint="driftline report REF CAND, or the folder that `driftline compare -o`, `metrics` "
            "or `validate -o` wrote",
        )
    text = _texts(tokenizer)
    limits = _limits(folder, thresholds)
    parts = [_of_group(group, limits, text) for group in groups.values()]
    tables = [
        open_table(path) for group in groups.values() for path in group["tables"] if is_table(path)
    ]
    order = ("fail", "incomparable", "incomplete", "unjudged", "pass")
    # The page shows one comparison of layers: the worst.
    tables.sort(key=lambda table: order.index(table.verdict))
    if tables:
        return tables[0], parts
    return _without_layers(parts), parts


def _without_layers(parts: Sequence[Mapping[str, Any]]) -> Table:
    first = parts[0]
    about = {side: dict(first["about"]) | {"target": first[side]} for side in _SIDES}
    return Table(
        (),
        reference=Side(f"{first['model']} ({first['reference']})", about["reference"]),
        candidate=Side(f"{first['model']} ({first['candidate']})", about["candidate"]),
    )


_SIDES = ("reference", "candidate")


def _groups(folder: Path) -> dict[str, dict[str, Any]]:
    """Files by model and shape, in the order of their names."""
    if not folder.is_dir():
        raise BadInput(
            f"{folder} is {'a file that is no table' if folder.exists() else 'not there'}",
            hint="driftline report TABLE, or driftline report REF CAND",
        )
    groups: dict[str, dict[str, Any]] = {}

    def group(path: Path) -> dict[str, Any]:
        new: dict[str, Any] = {"tables": [], "files": [], "prefix": path.name}
        return groups.setdefault(shape_key(path), new)

    for path in sorted(folder.iterdir()):
        # The folder may hold other files; ours are recognised by their names.
        if parse_name(path.name) is None:
            continue
        if path.name.endswith(_VALIDATION):
            group(path)["validation"] = path
        elif path.name.endswith(_TABLE):
            group(path)["tokens"] = path
        elif path.name.endswith(_LAYERS) and path.is_dir():
            group(path)["tables"].append(path)
    for file in find_metric_files(folder, below=False).files:
        if file.layer:
            key = shape_key(file.path.with_name(file.path.name.removesuffix(file.named.rest)))
            # Layer files alone have no token scores to belong to.
            if key in groups:
                groups[key]["files"].append(file)
    return groups


def _limits(folder: Path, thresholds: Thresholds | StrPath | None) -> Thresholds | None:
    if isinstance(thresholds, Thresholds):
        return thresholds
    if thresholds is not None:
        return load_thresholds(thresholds)
    candidates = sorted(folder.glob("*-thresholds.json"))
    # With several files it would be a guess which one is meant.
    return load_thresholds(candidates[0]) if len(candidates) == 1 else None


def _texts(tokenizer: str) -> Text | None:
    if not tokenizer:
        return None
    from driftline.decoding.models.loading import load_tokenizer

    loaded: Any = load_tokenizer(tokenizer)
    return lambda token: str(loaded.decode([token]))


def _part(model: str, shape: Mapping[str, Any], reference: str, candidate: str) -> dict[str, Any]:
    return {
        "model": model,
        "shape": dict(shape),
        "reference": reference,
        "candidate": candidate,
        "verdict": "unjudged",
        "sentence": "",
        "checks": [],
        "tokens": None,
        "prompts": [],
        "first": None,
        "layers": None,
        "about": {},
    }


def _of_group(
    group: Mapping[str, Any], limits: Thresholds | None, text: Text | None
) -> dict[str, Any]:
    validation = _read(group["validation"]) if "validation" in group else {}
    tokens_path = cast("Path | None", group.get("tokens"))
    # All files of a group carry the same settings in their names.
    any_path = tokens_path or group.get("validation") or group["tables"][0]
    named = parse_name(any_path.name)
    assert named is not None
    companion = _companion_document(any_path, named.rest)
    settings = cast("dict[str, Any]", validation.get("settings") or companion.get("settings") or {})
    part = _part(
        str(settings.get("model") or named.model),
        {
            "batch_size": named.batch_size,
            "seq_length": named.length,
            "max_new_tokens": named.new_tokens,
            "dtype": named.dtype,
        },
        str(settings.get("reference", "")),
        str(settings.get("candidate", "")),
    )
    part["about"] = {name: companion[name] for name in ("command", "versions") if name in companion}
    tokens = None if tokens_path is None else read_tokens(tokens_path)
    if validation:
        try:
            _copy_validation(part, validation)
        # The file is JSON, but somebody else may have written it; every shape of damage is
        # one message.
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as trouble:
            raise BadFile(
                f"{group['validation']} is damaged: {type(trouble).__name__}: {trouble}"
            ) from None
    # A validation has judged the tokens already; otherwise they are judged here.
    elif tokens is not None:
        _judge(part, tokens, limits, named.model)
        bad = {check["name"]: float(check["limit"]) for check in part["checks"]}
        start = any_path.with_name(any_path.name.removesuffix(named.rest))
        part["first"] = first_failing(start, tokens, bad, text)
    if tokens is not None:
        part["tokens"] = tokens.columns(_texts_of(validation, text))
    part["layers"] = _layers(group)
    part["sentence"] = _sentence(part, validation, tokens)
    return part


def _texts_of(validation: Mapping[str, Any], text: Text | None) -> Text | None:
    stored_texts = cast("Mapping[str, str]", validation.get("texts") or {})
    if text is None and not stored_texts:
        return None
    return lambda token: stored_texts.get(str(token)) or (text(token) if text is not None else "")


def _copy_validation(part: dict[str, Any], validation: Mapping[str, Any]) -> None:
    """What `driftline validate` found."""
    source = str(cast("Mapping[str, Any]", validation.get("limits") or {}).get("source", ""))
    part["verdict"] = str(validation.get("verdict", "unjudged"))
    part["checks"] = [
        {
            "name": CHECKS[str(rate["name"])][1],
            "called": CHECKS[str(rate["name"])][0],
            "limit": rate["limit"],
            "from": source,
            "failing": rate["failing"],
            "kept": rate["kept"],
            "rate": rate["rate"],
            "low": rate["interval"][0],
            "high": rate["interval"][1],
            "allowed": rate["allowed"],
            "passed": rate["passed"],
        }
        for rate in cast("list[dict[str, Any]]", validation.get("rates") or [])
    ]
    part["prompts"] = [
        {**prompt, "failing": {CHECKS[name][1]: n for name, n in prompt["failing"].items()}}
        for prompt in cast("list[dict[str, Any]]", validation.get("prompts") or [])
    ]
    first = cast("dict[str, Any] | None", validation.get("first"))
    if first is not None:
        values = {CHECKS[name][1]: value for name, value in first["values"].items()}
        part["first"] = {**first, "values": values}


def _judge(part: dict[str, Any], tokens: Tokens, limits: Thresholds | None, model: str) -> None:
    """Judge the scores of `driftline metrics` by the given limits, and add the result to a part."""
    bad: dict[str, Any] = {}
    for check, (called, column) in CHECKS.items():
        entry = None if limits is None else limits.find(column)
        if limits is None or entry is None or not limits.belongs_to(model):
            continue
        limit = float(entry.value)
        # Negated, so that NaN fails.
        fails = ~(tokens.scores[column] < limit)
        bad[column] = fails
        rate = Rate(check, int(fails.sum()), len(fails), limit, _ALLOWED)
        low, high = rate.interval
        part["checks"].append(
            {
                "name": column,
                "called": called,
                "limit": limit,
                "from": limits.path or "the thresholds",
                "failing": rate.failing,
                "kept": rate.kept,
                "rate": rate.rate,
                "low": low,
                "high": high,
                "allowed": _ALLOWED,
                "passed": rate.passed,
            }
        )
    if part["checks"]:
        passed = all(check["passed"] for check in part["checks"])
        part["verdict"] = "pass" if passed else "fail"
    part["prompts"] = tokens.prompts(bad)


def _layers(group: Mapping[str, Any]) -> dict[str, Any] | None:
    for path in group["tables"]:
        if is_table(path):
            try:
                layer_map = of_steps(open_table(path))
            except DriftlineError:
                continue
            if layer_map is not None:
                return layer_map | {"unit": "token"}  # a text model's own files: a step is a token
    return of_files(cast("list[MetricFile]", group["files"]))


def _sentence(part: Mapping[str, Any], validation: Mapping[str, Any], tokens: Tokens | None) -> str:
    checks = cast("list[dict[str, Any]]", part["checks"])
    broken = [check for check in checks if not check["passed"]]
    if broken:
        words = [
            f"{check['called']} fails at {check['failing']:,} of {check['kept']:,} tokens "
            f"({100 * check['rate']:.3g} %, allowed below {100 * check['allowed']:.3g} %)"
            for check in broken
        ]
        # The number of affected prompts separates a systematic error from a single one.
        bad = sum(any(prompt["failing"].values()) for prompt in part["prompts"])
        count = len(part["prompts"])
        have = "has" if bad == 1 else "have"
        return f"{'; '.join(words)}; {bad} of {count} prompts {have} failing tokens"
    if checks:
        # The check that came nearest to failing is the one worth a sentence.
        worst = max(checks, key=lambda check: check["rate"] / check["allowed"])
        return (
            f"{worst['kept']:,} tokens are near enough: {worst['called']} fails at "
            f"{worst['failing']:,} of them ({100 * worst['rate']:.3g} %, allowed below "
            f"{100 * worst['allowed']:.3g} %)"
        )
    if validation.get("tokens_equal"):
        return "Every token that the two generate is the same"
    if tokens is not None:
        return f"{len(tokens):,} tokens were scored; no limits were given to judge them by"
    return "layers were compared, token by token"


def _companion_document(path: Path, rest: str) -> dict[str, Any]:
    start = path.name.removesuffix(rest)
    for suffix in (".provenance.json", ".layers.json"):
        if document := _read(path.with_name(start + suffix)):
            return document
    return {}


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if it cannot be read, since little depends on it."""
    try:
        if path.stat().st_size > _LARGEST:
            return {}
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}


def _refuse(word: str) -> float:
    # Python's JSON reader passes such words here; they are numbers in our files.
    return math.nan if word == "NaN" else math.inf
