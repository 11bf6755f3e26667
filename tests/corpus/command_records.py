"""Runs the command lines of `commands/*.txt` and writes down what each prints, returns and writes.

A file of commands is one folder's story: its lines run one after the other in a fresh copy of the
fixtures (`FIXTURES`), so that a later line may read what an earlier one wrote. What is recorded is
made independent of the time, the machine and the versions around it: see `masked`.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from driftline.cli.main import main
from old_files import DATA, unpack

FOLDER = Path(__file__).parent
FIXTURES = {
    "ascend": DATA / "ascend",
    "msprobe": DATA / "msprobe",
    "aiu": DATA / "aiu",
}
"""Dumps of other programs that lie beside the files of 0.1.0."""
ENVIRONMENT = {
    "COLUMNS": "120",
    "NO_COLOR": "1",
    "TZ": "UTC",
    "OMP_NUM_THREADS": "1",
    "GITHUB_STEP_SUMMARY": "summary.md",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
READABLE = (".json", ".jsonl", ".csv", ".toml", ".txt", ".md", ".py", ".xml")
UNSTEADY = (".parquet", ".lock")
"""Files whose bytes change with the versions of libraries."""
LONGEST_TEXT = 2_000
"""Characters of a printed or written text that are kept; of longer ones the start, and a digest."""
COMPUTED = ("programs", "decoders")
"""Files of commands that run models: what torch computes differs from one processor to another, so
their numbers are kept to three digits and their files of tensors by name."""
PACKAGES = (
    "driftline|numpy|torch|pyarrow|ml_dtypes|safetensors|msgspec|onnx|onnxruntime|paddle"
    "|transformers|python|tokenizers|scipy"
)


def commands(name: str) -> list[str]:
    """The command lines of one file, without its comments."""
    lines = (FOLDER / "commands" / f"{name}.txt").read_text("utf-8").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def names() -> list[str]:
    return sorted(path.stem for path in (FOLDER / "commands").glob("*.txt"))


def prepare(place: Path) -> None:
    """The fixtures, and a few files that are wrong in one way each."""
    unpack(place)
    for name, source in FIXTURES.items():
        shutil.copytree(source, place / name)
    (place / "wrong").mkdir()
    (place / "wrong" / "empty").mkdir()
    (place / "wrong" / "text.json").write_text("no JSON\n")
    (place / "wrong" / "plan.toml").write_text("[[pair\n")
    (place / "wrong" / "cut.npy").write_bytes(b"\x93NUMPY\x01\x00")
    newer = place / "wrong" / "newer"
    shutil.copytree(place / "runs" / "digest", newer)
    manifest = newer / "run.json"
    manifest.write_text(manifest.read_text().replace('"schema": 1', '"schema": 99'))


def record(name: str, place: Path, python: str = sys.executable) -> tuple[str, str]:
    """All commands of a file, run in this folder: the text that is kept, and all of it.

    In the second one nothing is left out for length: to be compared with that of an older version
    where a digest differs.

    Args:
        name: The file of commands.
        place: A folder that does not exist yet.
        python: What `python` is for the programs that the commands start.
    """
    prepare(place)
    with _standing_in(place, python):
        records = [_one(line, place, computed=name in COMPUTED) for line in commands(name)]
    whole, short = ("\n".join(texts) for texts in zip(*records, strict=True))
    return short, whole


@contextlib.contextmanager
def _standing_in(place: Path, python: str) -> Iterator[None]:
    folder, environment = Path.cwd(), dict(os.environ)
    os.environ.update(ENVIRONMENT)
    os.environ["PATH"] = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["HOME"] = str(place)
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)


def _one(line: str, place: Path, *, computed: bool) -> tuple[str, str]:
    """One command: its record with every line, and as it is kept."""
    command, _, target = line.partition(" > ")
    before = _listing(place)
    code, out, err = _run(shlex.split(command))
    if target:
        (place / target).write_text(out)
        out = ""
    texts = [(f"{title}:", text) for title, text in (("stdout", out), ("stderr", err)) if text]
    after = _listing(place)
    for path in sorted(after):
        if before.get(path) != after[path]:
            texts.append(_file(place / path, f"wrote {path}", computed=computed))
    texts += [(f"removed {path}", "") for path in sorted(before) if path not in after]
    steady = [
        (masked(title, place), masked(text, place, computed=computed)) for title, text in texts
    ]
    head = [f"$ {line}", f"exit code {code}"]
    return (
        "\n".join([*head, *(_entry(title, text, sys.maxsize) for title, text in steady)]) + "\n",
        "\n".join([*head, *(_entry(title, text, LONGEST_TEXT) for title, text in steady)]) + "\n",
    )


def _listing(place: Path) -> dict[str, tuple[int, int]]:
    """Every file with what tells that it was written: its size and its time."""
    found = {}
    for folder, inner, files in os.walk(place):
        inner[:] = [name for name in inner if name != "__pycache__" and not name.startswith(".")]
        for name in files:
            path = os.path.join(folder, name)  # noqa: PTH118 - a thousand files, twice per command
            status = os.stat(path)  # noqa: PTH116
            found[os.path.relpath(path, place)] = (status.st_size, status.st_mtime_ns)
    return found


def _run(words: list[str]) -> tuple[int, str, str]:
    """In this process, as the console script would; `python ...` is a process of its own."""
    if words[0] == "python":
        done = subprocess.run(
            [sys.executable, *words[1:]], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr
    assert words[0] == "driftline", words
    arguments = sys.argv, sys.orig_argv
    sys.argv = sys.orig_argv = list(words)  # what a run says it was made by
    try:
        with _captured() as texts:
            code = main(words[1:])
    finally:
        sys.argv, sys.orig_argv = arguments
    return code, texts[0], texts[1]


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """What is written to the two streams, also by programs that are started."""
    texts: list[str] = []
    sys.stdout.flush()
    sys.stderr.flush()
    kept, streams = [os.dup(1), os.dup(2)], (sys.stdout, sys.stderr)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        files = (out, err)
        for number, file in enumerate(files, start=1):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", write_through=True)
            for number in (1, 2)
        )
        try:
            yield texts
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = streams
            for number, descriptor in enumerate(kept, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            for file in files:
                file.seek(0)
                texts.append(file.read().decode("utf-8", "replace"))


def _file(path: Path, title: str, *, computed: bool) -> tuple[str, str]:
    """A written file: its title and, where it is text, what it holds."""
    # Digests of code and of weights are those of one version of Python and torch.
    if path.name in ("model.jsonl", "weights.jsonl"):
        return title, ""
    content = path.read_bytes()
    if path.suffix == ".html":
        return f"{title}, its data:", _page_data(content.decode())
    if path.suffix in READABLE:
        return f"{title}:", content.decode("utf-8", "replace")
    if path.suffix in UNSTEADY or computed:
        return title, ""
    return f"{title}: {_digest(content)}", ""


def _page_data(page: str) -> str:
    """What a report says, without its script, its style and its arrays (docs/report-format.md)."""
    (packed,) = re.findall(r'id="data">\s*([\w+/=\s]+)</script>', page)
    container = gzip.decompress(base64.b64decode(packed))
    length = int.from_bytes(container[4:8], "little")
    return json.dumps(json.loads(container[8 : 8 + length]), indent=1, ensure_ascii=False)


def _entry(title: str, text: str, longest: int) -> str:
    """Indented, so that no line is taken for one of the record's own; long texts by a digest."""
    lines = text.splitlines()
    if len(text) > longest:
        start: list[str] = []
        for line in lines:
            if sum(map(len, start)) + len(line) > longest:
                break
            start.append(line)
        start = start or [lines[0][:longest]]
        lines = [*start, f"... {len(lines)} lines, {_digest(text.encode())}"]
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])


def _digest(content: bytes) -> str:
    return f"digest {hashlib.blake2b(content, digest_size=8).hexdigest()}"


def masked(text: str, place: Path, *, computed: bool = False) -> str:
    """A text without what differs between two executions that do the same.

    Paths, times, durations, process numbers, random ids, versions, the kernel's instruction set,
    what started a program, and the digits of a number beyond the sixth, or the third of what was
    computed just now.
    """
    text = text.replace(str(place.resolve()), "HERE").replace(str(place), "HERE")
    text = text.replace(str(Path(sys.executable).parent), "BIN")
    text = text.replace(str(FOLDER.parents[1]), "REPOSITORY")
    for pattern, standing_in in _PATTERNS:
        text = pattern.sub(standing_in, text)
    if not computed:
        return _NUMBER.sub(lambda number: _rounded(number[0], 6), text)
    return _NUMBER.sub(lambda number: _rounded(number[0], 3), text)


_PATTERNS = [
    (re.compile(pattern, re.MULTILINE), standing_in)
    for pattern, standing_in in (
        # What started the program: an interpreter would show nothing of itself.
        (r", \"REPOSITORY/tests/warm_python\.py:\d+ in [^\"]*\"", ""),
        (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)?", "TIME"),
        # A second file of the same second has a number behind its time.
        (r"(?<!\d)20\d{6}_?\d{6}(?:_\d)?(?!\d)", "TIME"),
        (r"\b[0-9a-f]{32}\b", "ID"),
        (r"\b[0-9a-f]{64}\b", "DIGEST"),
        (r"(\"sketch\": ?\")[\w+/=]+", r"\1SKETCH"),
        (r"(\"(?:time|started|ended|created)\": ?)\d+(\.\d+)?", r"\1TIME"),
        (r"(\"pid\": ?)\d+", r"\1PID"),
        (r"\bdata_\d{19}_\d+_\w{8}", "LABEL"),
        (r"(\bcpu_|_res_|\bfindings-|\blabels-)\d+", r"\1PID"),
        (r"(\"seed\": ?)\d{6,}", r"\1SEED"),
        (r"\b\d+_(?=\d+_cmp_result|\d+ in)", "PID_"),
        (r"(\"(?:versions|environment)\": ?)\{[^{}]*\}", r"\1{...}"),
        (r"^( *versions +).*$", r"\1..."),
        (r"\b\d+(\.\d+)? ?(ms|s|seconds)\b", "DURATION"),
        (r"(/tmp/)?driftline-bug-\w+\.txt", "BUGFILE"),
        (r"\b(avx512|avx2|generic)\b", "KERNEL"),
        (r"Linux-[\w.+-]+|Linux \d[\w.+-]+ \w+", "PLATFORM"),
        (rf"\b({PACKAGES})(\"?[:=]* *\"?)\d+\.\d+[\w.+]*", r"\1\2VERSION"),
    )
]
_NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+(?:e[+-]?\d+)?(?![\w.])")
_SMALLEST = 1e-6
"""Of what was computed just now, smaller numbers are rounding and nothing else."""


def _rounded(number: str, digits: int) -> str:
    if digits < 6 and abs(float(number)) < _SMALLEST:
        return "0.0"
    significant = re.sub(r"e.*|[-.]", "", number).lstrip("0")
    return f"{float(number):.{digits}g}" if len(significant) > digits else number
