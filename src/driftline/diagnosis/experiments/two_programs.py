"""`driftline diff`: dump, compare, diagnose and report two programs in one call.

Each program runs in its own process under `driftline dump`, with its own folder and variables, so
the caller's process and environment do not change. All results are in one folder. Results of
finished steps are kept, so that a second call continues where the first one stopped. How runs are
judged is defined in other packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from driftline import settings
from driftline.captures.launch.child import require_command, run_child
from driftline.comparison.pipeline import compare
from driftline.diagnosis.api import diagnose
from driftline.errors import EXIT_COULD_NOT, AlreadyThere, BadInput, DriftlineError
from driftline.runs.layout import MANIFEST
from driftline.runs.redaction import redact_argv, redact_value
from driftline.units import size_text

if TYPE_CHECKING:
    from driftline.comparison.table.table import Table
    from driftline.diagnosis.result import Diagnosis

SCHEMA = "driftline.diff/2"
QUESTION = "diff.json"
REFERENCE, CANDIDATE, REPLAY, TABLE, REPORT = "ref", "cand", "replay", "table", "report.html"
# Free space required for the second dump, as a factor on the first one's size; it includes some
# room for tables and the report.
ROOM = 1.2
# Size of the first dump in bytes from which it is printed before the second one begins.
WORTH_A_LINE = 100_000_000
INTERRUPTED = 128 + signal.SIGINT
# Interval of the progress lines of a dump.
SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Program:
    """One of the two programs.

    Attributes:
        argv: Its command, word by word.
        variables: Environment variables it gets besides the usual ones.
        revision: The git revision it runs at; empty for the files as they are.
    """

    argv: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    revision: str = ""

    def shown(self) -> Program:
        """The program with secrets redacted, to be printed and stored."""
        variables = {name: redact_value(name, value) for name, value in self.variables.items()}
        return Program(tuple(redact_argv(self.argv)), variables, self.revision)


@dataclass(frozen=True)
class Difference:
    """The result of comparing two programs.

    Attributes:
        table: The comparison.
        diagnosis: Where the drift starts and why.
        report: Path of the HTML page.
        notes: What could not be done, and why.
    """

    table: Table
    diagnosis: Diagnosis
    report: Path
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DiffOptions:
    """How the two programs are looked at.

    Attributes:
        dump: Further words of `driftline dump`, the same for both.
        replay: Whether a failing comparison is followed by a replay.
        force: Begin anew, whatever is in the folder.
    """

    dump: tuple[str, ...] = ()
    replay: bool = True
    force: bool = False


def diff_programs(
    reference: Program,
    candidate: Program,
    output: Path,
    options: DiffOptions | None = None,
    progress: Callable[[str], None] | None = None,
) -> Difference:
    """Run two programs and say where they begin to disagree.

    Args:
        reference: The program that is right.
        candidate: The program that is in question.
        output: Folder of the runs, the comparison and the report.
        options: How they are dumped and compared.
        progress: Called with a sentence when a step begins, takes long or ends.

    Raises:
        AlreadyThere: The folder has other contents.
        DriftlineError: A program cannot be run, failed, or called no model.
    """
    asked = options or DiffOptions()
    say = progress or _silence
    output = output.absolute()
    for program in (reference, candidate):
        # Commands are checked before anything runs: a misspelt candidate should not cost a dump of
        # the reference.
        if not program.revision:
            require_command(program.argv, {**settings.environment(), **program.variables})
    _claim(reference, candidate, output, asked)
    _dump(reference, output / REFERENCE, asked, say)
    _require_room(output / REFERENCE, output / CANDIDATE, say)
    _dump(candidate, output / CANDIDATE, asked, say, expected=_size(output / REFERENCE))
    say("comparing")
    table = compare(output / REFERENCE, output / CANDIDATE)
    table.write(output / TABLE, force=True)
    notes: list[str] = []
    replay = None
    # If nothing was compared (`incomparable`), a replay could not judge any site.
    if table.verdict in ("fail", "incomplete") and asked.replay:
        say("replaying the reference's modules on the candidate's inputs")
        replay = _replay(reference, output, asked, notes)
    if replay is not None:
        # The results of the replay are part of the comparison, so the stored table has them too.
        table = compare(output / REFERENCE, output / CANDIDATE, replay=replay)
        table.write(output / TABLE, force=True)
    diagnosis = diagnose(output / REFERENCE, output / CANDIDATE, replay=replay)
    say("writing the report")
    # Imported late: pages are the largest part of the package, and a program may fail before.
    from driftline.reporting.html.report import report

    page = report(
        output / REFERENCE, output / CANDIDATE, output / REPORT, replay=replay, force=True
    )
    return Difference(table, diagnosis, Path(page), tuple(notes))


def _silence(sentence: str) -> None:
    del sentence


def _claim(reference: Program, candidate: Program, output: Path, asked: DiffOptions) -> None:
    """Prepare the folder, which must be empty or have results of the same question."""
    file, question = output / QUESTION, _question(reference, candidate, asked)
    if output.exists() and any(output.iterdir()):
        same = file.is_file() and _is_asked(_read(file), question)
        if asked.force and file.is_file():
            for name in (REFERENCE, CANDIDATE, REPLAY, TABLE):
                shutil.rmtree(output / name, ignore_errors=True)
        elif not same:
            what = "another diff" if file.is_file() else "other files"
            hint = "give another -o, or --force" if file.is_file() else "give another -o"
            raise AlreadyThere(f"{output} holds {what}", hint=hint)
    try:
        output.mkdir(parents=True, exist_ok=True)
        salt = secrets.token_hex(16)
        kept = {
            **_question(reference.shown(), candidate.shown(), asked),
            "salt": salt,
            "digest": _slow_digest(question, salt),
        }
        file.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    except OSError as error:
        raise BadInput(
            f"cannot write {output}: {error.strerror}", hint="give -o a folder that can be written"
        ) from None


def _question(reference: Program, candidate: Program, asked: DiffOptions) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "reference": asdict(reference),
        "candidate": asdict(candidate),
        "dump": list(asked.dump),
    }


def _is_asked(kept: object, question: Mapping[str, Any]) -> bool:
    """Whether a stored question is this one, including its redacted parts."""
    if not isinstance(kept, dict):
        return False
    stored = cast("dict[str, object]", kept)
    return stored.get("digest") == _slow_digest(question, str(stored.get("salt")))


def _slow_digest(question: Mapping[str, Any], salt: str) -> str:
    """A digest of a question; slow to compute, so that redacted secrets cannot be guessed."""
    text = json.dumps(question, sort_keys=True).encode()
    return hashlib.pbkdf2_hmac("sha256", text, salt.encode(), 200_000).hex()


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _dump(
    program: Program,
    run: Path,
    asked: DiffOptions,
    say: Callable[[str], None],
    expected: int = 0,
) -> None:
    """Dump one program, unless a finished dump of it exists.

    Args:
        program: The program.
        run: Folder of its run.
        asked: How it is dumped.
        say: Receives sentences for the user.
        expected: Expected size of the run in bytes; 0 if unknown.
    """
    side = "reference" if run.name == REFERENCE else "candidate"
    finished = run.with_suffix(".finished")
    if finished.exists() and run.is_dir() and not asked.force:
        changed = _changed_since(program, finished)
        if not changed:
            say(f"the {side} was dumped before: {run} (--force begins anew)")
            return
        # The program may have been repaired since; the old run would not show that.
        say(f"{changed} has changed since the {side} was dumped")
    for mark in (finished, run.with_name(REPLAY).with_suffix(".finished")):
        mark.unlink(missing_ok=True)  # a replay depends on both programs
    say(f"dumping the {side}: {shlex.join(program.shown().argv)}")
    # Only warnings are printed: the next steps that `dump` would suggest follow here anyway.
    words = ["dump", "--force", "--log-level", "warning", "-o", str(run), *asked.dump]
    with _size_lines(run, side, say, expected):
        status = _run(program, words)
    if status == EXIT_COULD_NOT and not (run / MANIFEST).is_file():
        # This is the status of `dump`, which has printed the reason; the program itself may have
        # succeeded.
        raise BadInput(
            f"the {side} left nothing to compare",
            hint="the lines above say why; with that repaired, give the same command again",
        )
    # The terminal sends Ctrl-C to this process and to the program; it is recognised by the
    # program's exit status.
    if status == INTERRUPTED:
        raise KeyboardInterrupt(f"while the {side} ran; the same command goes on from there")
    if status:
        raise BadInput(
            f"the {side} ended with status {status}",
            hint="see what it printed above; the same command goes on from here",
        )
    finished.write_text(json.dumps(_state_of(program, run)), encoding="utf-8")
    say(f"the {side} is in {run}, {size_text(_size(run))}")


def _state_of(program: Program, run: Path) -> dict[str, Any]:
    """The known files on which the run of a program depends.

    For a revision this is the commit. Otherwise these are the files that the command names and the
    source files of the model's classes, each with its size and time.
    """
    if program.revision:
        return {"commit": _git("rev-parse", f"{program.revision}^{{commit}}")}
    from driftline.formats.registry import open_run
    from driftline.runs.sidecars.model_facts import read_model_facts

    facts = read_model_facts(open_run(run), weights=False)
    # Most repairs are made in a file of the model, which the command does not name.
    classes = facts.classes.values()
    code = {own.file for class_ in classes for own in class_.code.values() if own.file}
    paths = (Path(name).expanduser().absolute() for name in (*program.argv, *sorted(code)))
    return {"files": {str(path): _stamp(path) for path in paths if path.is_file()}}


def _stamp(path: Path) -> list[int]:
    """Size and modification time of a file; empty if it does not exist."""
    with suppress(OSError):
        # Contents would be more reliable, but take long for checkpoints that a command names.
        status = path.stat()
        return [status.st_size, status.st_mtime_ns]
    return []


def _changed_since(program: Program, finished: Path) -> str:
    """What has changed since a run was finished; empty if nothing known has changed."""
    state: dict[str, Any] = _read(finished) or {}
    files: dict[str, list[int]] = state.get("files", {})
    commit = state.get("commit")
    # The revision may be a branch or HEAD, which can move.
    if commit and commit != _git("rev-parse", f"{program.revision}^{{commit}}"):
        return program.revision
    for name, stamp in files.items():
        if _stamp(Path(name)) != stamp:
            return Path(name).name
    return ""


def _run(program: Program, words: Sequence[str]) -> int:
    """Run `driftline WORDS -- PROGRAM` in the program's folder; returns the exit status."""
    variables = {**settings.environment(), **program.variables}
    with _folder_of(program) as folder:
        argv = list(program.argv)
        # A command such as .venv/bin/python is usually not part of a revision.
        if folder is not None and os.sep in argv[0] and not (folder / argv[0]).exists():
            argv[0] = str(Path(argv[0]).absolute())
        require_command(argv, variables)
        command = [sys.executable, "-m", "driftline", *words, "--", *argv]
        return run_child(command, variables, folder=folder)


@contextmanager
def _folder_of(program: Program) -> Generator[Path | None, None, None]:
    """The folder in which a program runs: a worktree of its revision; None for the current one."""
    if not program.revision:
        yield None
        return
    root = Path(_git("rev-parse", "--show-toplevel"))
    place = Path.cwd().resolve().relative_to(root.resolve())
    with tempfile.TemporaryDirectory(prefix="driftline-rev-") as folder:
        tree = Path(folder) / "tree"
        _git("worktree", "add", "--quiet", "--detach", str(tree), program.revision)
        try:
            inside = tree / place
            if not inside.is_dir():
                raise BadInput(
                    f"revision {program.revision} has no folder {place}",
                    hint="run this from a folder that both revisions have",
                )
            yield inside
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    except OSError:
        raise BadInput("--rev needs git", hint="give two commands instead") from None
    if done.returncode:
        reason = done.stderr.strip().splitlines()
        raise BadInput(
            f"git {words[0]} failed: {reason[-1] if reason else 'no reason given'}",
            hint="--rev takes A..B, two revisions of the repository of this folder",
        )
    return done.stdout.strip()


@contextmanager
def _size_lines(
    run: Path, side: str, say: Callable[[str], None], expected: int
) -> Generator[None, None, None]:
    """While a dump runs, report its time and the size written at regular intervals."""
    over = threading.Event()
    begun = time.monotonic()

    def watch() -> None:
        while not over.wait(SECONDS_BETWEEN_LINES):
            seconds = time.monotonic() - begun
            about = f" of about {size_text(expected)}" if expected else ""
            say(f"the {side} runs for {seconds:.0f} s, {size_text(_size(run))}{about} written")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        # A file may be renamed or removed meanwhile.
        with suppress(OSError):
            total += path.lstat().st_size
    return total


def _require_room(first: Path, second: Path, say: Callable[[str], None]) -> None:
    """Raise if the second dump, which is about as large as the first, would not fit."""
    if second.exists():
        return
    size, free = _size(first), shutil.disk_usage(first).free
    if free < ROOM * size:
        raise BadInput(
            f"the reference took {size_text(size)}, the candidate needs about as much, and "
            f"{size_text(free)} are free",
            hint="give -o a place with more room, or keep less: --keep summary, --site, --step",
        )
    if size >= WORTH_A_LINE:
        say(f"the candidate will need about {size_text(size)}; {size_text(free)} are free")


def _replay(reference: Program, output: Path, asked: DiffOptions, notes: list[str]) -> Path | None:
    """Replay the reference's modules on the candidate's inputs; a failure becomes a note."""
    from driftline.diagnosis.experiments.replay import require_inputs
    from driftline.formats.registry import open_run

    replay, finished = output / REPLAY, (output / REPLAY).with_suffix(".finished")
    if finished.exists() and replay.is_dir() and not asked.force:
        return replay
    try:
        require_inputs(open_run(output / CANDIDATE))
    except DriftlineError as error:
        notes.append(f"no replay: {error}")
        return None
    words = ["replay", str(output / CANDIDATE), "--force", "--quiet", "-o", str(replay)]
    if status := _run(reference, words):
        notes.append(
            f"the replay failed with status {status}; the finding rests on the two runs alone"
        )
        shutil.rmtree(replay, ignore_errors=True)
        return None
    finished.touch()
    return replay
