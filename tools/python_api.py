"""Write docs/python-api.md from the docstrings of the public functions; a test checks the page.

python tools/python_api.py
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import driftline
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Table
from driftline.diagnosis.result import Diagnosis

PAGE = Path(__file__).resolve().parent.parent / "docs" / "python-api.md"
HEAD = """# The Python API

Everything that `import driftline` offers. Each command prints its own program with `--python`.
This page is made from the docstrings by `tools/python_api.py`.
"""
WIDTH = 80
GROUPS = {
    "Capture": (
        *("capture", "step", "capture_onnx", "run_onnx", "watch_errors", "open_run"),
        *("convert", "push"),
    ),
    "Compare": (
        *("compare", "compare_models", "lockstep", "assert_no_drift", "align", "open_table"),
        *("compare_shard", "merge", "calibrate", "check", "load_thresholds"),
    ),
    "Diagnose and show": ("diagnose", "report", "view", "serve", "topology_to_onnx"),
}
MEMBERS = {
    Table: ("worst", "only", "failing", "coverage", "to_arrow", "to_pandas", "write"),
    Row: ("passed", "failed", "metric", "value", "relative_l2", "cosine", "max_abs_error"),
    Diagnosis: ("introduced", "exit_code", "site", "as_json"),
}


def page() -> str:
    parts = [HEAD]
    listed = [name for names in GROUPS.values() for name in names]
    rest = tuple(name for name in driftline.__all__ if name not in listed and name[0] != "_")
    for title, names in {**GROUPS, "For those who come from other tools": rest}.items():
        parts.append(f"## {title}\n")
        parts += [_function(f"driftline.{name}", getattr(driftline, name)) for name in names]
    parts.append("## What they return\n")
    for kind, members in MEMBERS.items():
        parts.append(_entry(kind.__name__, "", inspect.getdoc(kind) or ""))
        for name in members:
            member = inspect.getattr_static(kind, name)
            function = member.fget if isinstance(member, property) else member
            words = "" if isinstance(member, property) else _signature(function)
            parts.append(_entry(f"{kind.__name__}.{name}", words, inspect.getdoc(function) or ""))
    return "\n".join(parts).rstrip() + "\n"


def _function(name: str, function: object) -> str:
    words = _signature(function) if callable(function) else ""
    return _entry(name, words, inspect.getdoc(function) or "")


def _signature(function: object) -> str:
    """The signature; on several lines, with one parameter each, if it is too long for one."""
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    words: list[str] = []
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(w[0] == "*" for w in words):
            words.append("*")
        words.append(f"{stars.get(parameter.kind, '')}{parameter.name}{_about(parameter)}")
    result = signature.return_annotation
    end = "" if result is signature.empty else f" -> {_words(result)}"
    line = f"({', '.join(words)}){end}"
    if len(line) <= WIDTH:
        return line
    return "(\n" + "".join(f"    {word},\n" for word in words) + f"){end}"


def _about(parameter: inspect.Parameter) -> str:
    """The annotation and the default of a parameter."""
    text = ""
    if parameter.annotation is not parameter.empty:
        text = f": {_words(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        shown = re.sub(r"<object object at 0x[0-9a-f]+>", "...", repr(parameter.default))
        text += f" = {shown}"
    return text


def _words(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _entry(name: str, signature: str, text: str) -> str:
    shown = f"```text\n{name}{signature}\n```\n\n" if signature else ""
    body = f"```text\n{text}\n```\n" if text else ""
    return f"### `{name}`\n\n{shown}{body}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
