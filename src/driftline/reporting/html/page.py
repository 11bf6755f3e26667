"""The page as a file: the container of its data, and the HTML around it (docs/report-format.md).

A container is JSON followed by the raw arrays, which the front end maps where they lie, so that
50 000 rows open without 50 000 objects. The HTML allows no network access and shows the headline
without JavaScript.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from html import escape as escape_markup
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from driftline.errors import BadFile
from driftline.units import visible

MAGIC = b"DLP1"
_TYPES = {"f64": "<f8", "f32": "<f4", "i32": "<i4", "u32": "<u4", "u16": "<u2", "u8": "u1"}
_NAMES = {np.dtype(code).str.lstrip("|"): name for name, code in _TYPES.items()}
# Arrays begin at multiples of eight bytes: JavaScript's typed arrays demand that of float64.
_FILL = 8
_LARGEST_SINGLE = float(np.finfo(np.float32).max)
_SMALLEST_SINGLE = float(np.finfo(np.float32).tiny)

Array = np.ndarray[Any, np.dtype[Any]]


def pack(document: Mapping[str, Any]) -> bytes:
    """The container of a document: mappings, sequences, text, numbers, None and numpy arrays."""
    blobs: list[bytes] = []
    place = 0

    def plain(value: Any) -> Any:
        nonlocal place
        if isinstance(value, np.ndarray):
            array = _stored(cast(Array, value))
            content = array.tobytes()
            offset = place
            content += bytes(-len(content) % _FILL)
            blobs.append(content)
            place += len(content)
            # `$` marks an array in JSON; no key of a document begins with it.
            return {"$": _NAMES[array.dtype.str.lstrip("|")], "at": offset, "n": int(array.size)}
        if isinstance(value, np.generic):
            return plain(value.item())
        if isinstance(value, float):
            if math.isfinite(value):
                return value
            # JSON has no such numbers, and the front end reads these words.
            return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
        if isinstance(value, Mapping):
            items = cast("Mapping[object, Any]", value).items()
            return {str(key): plain(item) for key, item in items}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in cast("Sequence[Any]", value)]
        return value

    shown = plain(document)
    # Names in files may contain a lone surrogate, which is not valid UTF-8; it must not fail.
    text = json.dumps(shown, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    content = text.encode("utf-8", "backslashreplace")
    content += b" " * (-len(content) % _FILL)
    return b"".join([MAGIC, struct.pack("<I", len(content)), content, *blobs])


def unpack(content: bytes) -> dict[str, Any]:
    """The document of a container; its arrays become numpy arrays.

    Raises:
        BadFile: It is no container.
    """
    # Length first would read past the end of a short file.
    if content[:4] != MAGIC or len(content) < 8:
        raise BadFile("this is no data of a page")
    (length,) = struct.unpack_from("<I", content, 4)
    start = 8 + length

    def restore(value: dict[str, Any]) -> Any:
        if value.keys() != {"$", "at", "n"}:
            return value
        return np.frombuffer(content, _TYPES[value["$"]], value["n"], start + value["at"])

    try:
        return json.loads(content[8:start], object_hook=restore)
    except (ValueError, KeyError, TypeError) as trouble:
        raise BadFile(f"this is no data of a page: {trouble}") from None


def encode_container(content: bytes) -> str:
    """The container as text for a page: compressed, without characters that end an element."""
    # Base64 has no `<`, so the data cannot end the script element around it.
    # mtime: the same data are the same file.
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode("ascii")


def decode_container(text: str) -> bytes:
    """The inverse of `encode_container`."""
    return gzip.decompress(base64.b64decode(text))


def _stored(array: Array) -> Array:
    """The array in one of the types of a container, without a visible loss."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.str.lstrip("|") in _NAMES:
        return flat
    if flat.dtype.kind == "b":
        return flat.astype(np.uint8)
    if flat.dtype.kind in "iu":
        low, high = (int(flat.min()), int(flat.max())) if flat.size else (0, 0)
        if low >= 0:
            # The narrowest type that holds every value: counts of a histogram are
            # mostly small.
            for kind in (np.uint8, np.uint16, np.uint32):
                if high <= np.iinfo(kind).max:
                    return flat.astype(kind)
        elif low >= -(1 << 31) and high < 1 << 31:
            return flat.astype(np.int32)
    # Wider integers become float64, as JavaScript would convert them anyway.
    return flat.astype("<f8")


def singles(values: Array) -> Array:
    """The figures as float32 if that loses only digits that nobody reads; else unchanged.

    >>> singles(np.array([1e-300, 1.0])).dtype, singles(np.array([0.1, np.inf])).dtype
    (dtype('float64'), dtype('float32'))
    """
    sizes = np.abs(values[np.isfinite(values)])
    sizes = sizes[sizes > 0]
    # Outside float32's range a value would become 0 or infinite.
    if sizes.size and (sizes.max() > _LARGEST_SINGLE or sizes.min() < _SMALLEST_SINGLE):
        return values
    are_integers = sizes.size and bool((sizes == np.floor(sizes)).all())
    # Above 2**24 float32 no longer holds every whole number.
    if are_integers and sizes.max() > 1 << 24:
        return values
    return values.astype(np.float32)


# HTML: one file, a policy against any network access, and the headline.


_BUNDLE = Path(__file__).parent / "bundle"
_VERDICT_WITHIN = 400
"""Characters at the beginning of a page that contain its verdict."""
_SHOWN = 6
"""Differences in the headline."""
_WORDS = {
    "pass": ("Pass", "✓"),
    "fail": ("Fail", "✕"),
    "incomplete": ("Incomplete", "?"),
    "incomparable": ("Not comparable", "?"),
    "unjudged": ("Not judged", "?"),
}


def embedded_page(document: Mapping[str, Any]) -> str:
    """A page that contains its data: it opens from disk, without any network request."""
    return _page(document, "embedded", encode_container(pack(document)))


def remote_page(document: Mapping[str, Any]) -> str:
    """The same page without data, for a server that delivers them (`driftline view`)."""
    return _page(document, "remote", "")


def _page(document: Mapping[str, Any], source: Literal["embedded", "remote"], data: str) -> str:
    name = "page" if source == "embedded" else "view"
    script = (_BUNDLE / f"{name}.js").read_text(encoding="utf-8")
    style = (_BUNDLE / f"{name}.css").read_text(encoding="utf-8")
    # Only the served page may fetch, and only from its own server.
    connect = "connect-src 'self'; " if source == "remote" else ""
    # Scripts and styles are allowed by their hash, so that markup hidden in a name cannot run.
    policy = (
        f"default-src 'none'; script-src {_hashed(script)}; style-src {_hashed(style)}; {connect}"
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    status = str(document["verdict"]["status"])
    word = _WORDS.get(status, (status, ""))[0]
    return f"""<!doctype html>
<html lang="en" data-verdict="{escape(status)}">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="{escape(str(document["made"]["by"]))}">
<meta name="driftline-source" content="{source}">
<meta name="color-scheme" content="light dark">
<title>{escape(f"{word} · {document['title']} · Driftline")}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
{_headline(document)}
<main id="app" aria-busy="true">
<noscript><p class="note">Charts and tables of this page need JavaScript. The finding is above.</p>
</noscript>
</main>
<script type="application/octet-stream" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def escape(text: str) -> str:
    """Text from a run, escaped for the page's markup: no tags and no control characters."""
    return escape_markup(visible(text))


def page_verdict(path: Path) -> str:
    """The verdict that a written page shows; empty if the file is no such page."""
    with path.open(encoding="utf-8", errors="replace") as file:
        beginning = file.read(_VERDICT_WITHIN)
    return beginning.partition('data-verdict="')[2].partition('"')[0]


def _hashed(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _headline(document: Mapping[str, Any]) -> str:
    verdict = document["verdict"]
    status = str(verdict["status"])
    word, sign = _WORDS.get(status, (status, "?"))
    coverage = verdict["coverage"]
    total = _tensors(coverage)
    tiles: list[tuple[str, str, str]] = []
    # A page of a text model may have no tensors; tiles of zeros would mislead.
    if total:
        left = [
            f"{count} {what.replace('_', ' ')}"
            for what, count in coverage.items()
            if count and what != "compared"
        ]
        tiles.append(
            ("Compared", f"{coverage['compared']:,} of {total:,} tensors", ", ".join(left))
        )
        tiles.append(("Outside its limit", f"{verdict['failing']:,}", str(verdict["limits"])))
    for name, value, more in verdict.get("tiles", ()):
        tiles.append((str(name), str(value), str(more)))
    shown = "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}'
        + (f"<small>{escape(more)}</small>" if more else "")
        + "</dd></div>"
        for name, value, more in tiles
    )
    return f"""<header class="headline" id="top">
<p class="kicker"><span class="badge {escape(status)}"><b aria-hidden="true">{sign}</b>
{escape(word)}</span> <span class="names">{escape(str(document["title"]))}</span></p>
<div class="headline-columns"><div>
<h1>{_sentence(verdict)}</h1>
{_lede(verdict)}
{_cause(verdict)}
<dl class="tiles">{shown}</dl>
</div>{_differences(document["sides"])}</div>
</header>"""


def _tensors(coverage: Mapping[str, int]) -> int:
    """How many tensors there are; those inside a fusion are among the missing and extra ones."""
    return sum(int(count) for what, count in coverage.items() if what != "inside_fusion")


def _differences(sides: Mapping[str, Any]) -> str:
    """The few differences between the runs that may matter; the page lists all of them."""
    telling = [
        difference for difference in sides["differences"] if difference["weight"] == "numbers"
    ]
    lines = "".join(
        f'<tr><th scope="row">{_breakable(difference["what"])}{_explains(difference)}</th>'
        f"<td>{escape(str(difference['reference']))}</td><td>{escape(str(difference['candidate']))}</td></tr>"
        for difference in telling[:_SHOWN]
    )
    more = len(telling) - _SHOWN
    if not lines:
        return ""
    rest = f'<p class="remark"><a href="#runs">{more} more</a></p>' if more > 0 else ""
    return (
        "<aside><h2>What differs between the runs</h2>"
        '<table class="plain differences"><thead><tr><th></th><th scope="col">reference</th>'
        f'<th scope="col">candidate</th></tr></thead><tbody>{lines}</tbody></table>{rest}</aside>'
    )


def _explains(difference: Mapping[str, Any]) -> str:
    """The markup of what a difference of the models would explain."""
    text = str(difference.get("explains") or "")
    return f"<br><small>{escape(text)}</small>" if text else ""


def _sentence(verdict: Mapping[str, Any]) -> str:
    """The verdict as a sentence, with a link to the site."""
    site, status = verdict["site"], verdict["status"]
    if verdict.get("headline"):
        return escape(str(verdict["headline"]))
    if site is not None and status == "fail":
        link = f'<a href="#site={escape(_quoted(str(site)))}" class="site">{_breakable(site)}</a>'
        if verdict.get("kind") == "operators":
            return f"{link} is not what it should compute"
        if verdict.get("ordered", True):
            return f"The drift starts at {link}"
        return f"{link} is outside its limit"
    if status == "pass" and verdict.get("kind") == "operators":
        return "Every checked operator computes what it should"
    coverage = verdict["coverage"]
    if status == "incomplete":
        return "Not enough was compared to tell"
    if status == "pass" and _tensors(coverage):
        if coverage.get("incomparable") or coverage.get("missing"):
            return "What could be compared agrees"  # it must not sound as if everything agrees
        return "The two runs agree"
    text = str(verdict["sentence"]).partition(": ")[0] or "nothing was compared"
    return escape(text[:1].upper() + text[1:])


def _lede(verdict: Mapping[str, Any]) -> str:
    lines: list[str] = []
    if verdict.get("headline"):
        text = str(verdict["sentence"])
        sentence = escape(text[:1].upper() + text[1:])
        if verdict["site"] is not None:
            sentence += f"; layers begin to differ at {_breakable(verdict['site'])}"
        return f'<p class="lede">{sentence}</p>'
    if verdict["status"] == "fail" and verdict["site"] is not None:
        if verdict["class"]:
            lines.append(str(verdict["class"]))
        text = str(verdict["sentence"])
        after = text.partition(f"'{verdict['site']}'")[2]
        # ` (SiLU, in the candidate GELU) in step 5, in its output: …`: the headline already names
        # the site and the class.
        opening = re.match(r"(?: \(.*?\))?(?: (in step \d+))?, (?=in )", after)
        sentence = (
            ", ".join(filter(None, (opening[1], after[opening.end() :]))) if opening else text
        )
        lines.append(sentence.replace("<=", "≤").replace(">=", "≥"))
        return f'<p class="lede">{" · ".join(escape(line) for line in lines)}</p>'
    agrees = verdict["status"] == "pass" and _tensors(verdict["coverage"])
    if agrees or verdict["status"] == "incomplete":
        text = str(verdict["sentence"])
        return f'<p class="lede">{escape(text[:1].upper() + text[1:])}</p>'
    rest = str(verdict["sentence"]).partition(": ")[2]  # the rest of a long headline
    return f'<p class="lede">{escape(rest[:1].upper() + rest[1:])}</p>' if rest else ""


def _cause(verdict: Mapping[str, Any]) -> str:
    cause = verdict["cause"]
    if cause is None:
        return ""
    sure = f"{cause['confidence']:.0%} sure, by {cause['by']}" if cause["by"] else ""
    # The diagnosis contradicts the headline, which the reader must see at once.
    if not cause["agrees"] or verdict["status"] == "pass":
        sentence = f"Diagnosis points at {cause['site']}: {cause['where']} {cause['sentence']}"
        name = "But"
    elif not cause["sentence"]:
        # If two trainings diverge, the headline says all that is known.
        return ""
    else:
        sentence = cause["sentence"]
        name = "Cause"
        if cause["kind"] == "unknown":
            sentence = f"not known: {str(sentence).partition(': ')[2] or sentence}"
            sure = ""
    return (
        f'<p class="cause"><b>{name}</b> {_prose(str(sentence))}'
        + (f" <small>({escape(sure)})</small>" if sure else "")
        + "</p>"
    )


def _prose(sentence: str) -> str:
    """A sentence with names between backticks, as a terminal shows them.

    >>> _prose("`a.b`: mode `training` <")
    '<code>a.b</code>: mode <code>training</code> &lt;'
    """
    pieces = enumerate(escape(sentence).split("`"))
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in pieces)


def _breakable(site: object) -> str:
    """The name with line breaks allowed after dots only."""
    return escape(str(site)).replace(".", ".<wbr>").replace("/", "/<wbr>")


def _quoted(text: str) -> str:
    # Imported on use: only failing pages have a link.
    from urllib.parse import quote

    return quote(text.encode("utf-8", "backslashreplace"), safe="")
