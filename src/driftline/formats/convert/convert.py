"""Write anything that opens as a run as a run of our own, or as files for other programs.

`convert` is the entry point: it checks the output, opens the source, and replaces the output only
after everything was written. `Conversion` does the work, one tensor at a time, so that a dump may
be larger than memory. It does not know addresses, or what may be replaced.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np

from driftline.errors import AlreadyThere, BadInput, DriftlineError, Unreachable
from driftline.formats.convert import targets
from driftline.formats.convert.targets import FilePerTensor, TensorList, write_safetensors
from driftline.formats.registry import open_run
from driftline.numerics.dtypes import DTYPES
from driftline.registry import Address, require
from driftline.runs.files.local_files import reason_of
from driftline.runs.layout import MODEL, STEPS, WEIGHTS
from driftline.runs.provenance import check_room, create_run
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run, Storage
from driftline.runs.stores.addresses import UrlPath, url_of
from driftline.runs.writer import RunWriter

if TYPE_CHECKING:
    from _typeshed import StrPath


Target = Literal["run", "npy", "pt", "safetensors", "ait"]
Progress = Callable[[int, int], None]

# By address, so that the layouts of other tools are loaded only on request.
AIT_TREE = Address("driftline.dialects.ait.dump_tree:AitTree")
AIT_SHEETS = Address("driftline.formats.ait.side_files:convert_sheets")
OWN_TREES = {"atb": Address("driftline.formats.ascend.atb.export:AtbTree")}
"""Formats whose dumps `--to ait` writes back in their own layout."""
_UNFINISHED = ".unfinished-"
# Mapped pages count as this process's memory until the run releases them.
_RELEASE_AFTER = 256 << 20
# Facts of a process that are copied in addition to those of the run. With `only_ranks`, a reader
# does not report the other ranks as missing.
_PROCESS_KEYS = (
    *("framework", "devices", "seed", "seeds", "default_dtype", "threads", "deterministic"),
    "only_ranks",
)


class Conversion:
    """One conversion in progress: what was written, and what was left out for which reason."""

    def __init__(self, run: Run, place: Path, to: Target, progress: Progress | None) -> None:
        self.run = run
        self.place = place
        self.to = to
        self.progress = progress
        self.skipped: Counter[str] = Counter()
        self.left_out: list[tuple[TensorKey, str]] = []
        self.written = 0
        self.sheets = 0
        self.size = 0
        self._done = 0
        self._mapped = 0

    def into_run(self) -> None:
        facts = {
            (int(about.get("rank", 0)), int(about.get("process", 0))): about
            for about in self.run.processes()
        }
        for rank, process, records in self._parts():
            writer = RunWriter(
                self.place,
                rank=rank,
                world_size=world_of(self.run),
                command=command_of(self.run),
                # The folder is temporary until the end; a seal at exit could find it renamed.
                seal_at_exit=False,
            )
            about = facts.get((rank, process), {})
            writer.describe(
                converted_from={"format": self._format(), "path": self.run.name},
                **(
                    self.run.facts.of_process(rank, process)
                    | {name: about[name] for name in _PROCESS_KEYS if name in about}
                ),
            )
            if (tree := self.run.topology(rank, process)) is not None:
                writer.topology(tree)
            for event in self._events(rank, process):
                details = event.get("details")
                writer.event(
                    str(event.get("kind", "dump")),
                    str(event.get("message", "")),
                    **_details(cast("Any", details)),
                )
            for name in self.run.sheets(rank, process):
                writer.sheet(name, self.run.sheet(name, rank, process))
                self.sheets += 1
            for name in (MODEL, STEPS, WEIGHTS):
                if text := self.run.sheet(name, rank, process):
                    writer.sheet(name, text)
            try:
                for record in records:
                    self._put(writer, record)
            finally:
                writer.close()
            if writer.failure:
                raise OSError(0, writer.failure)

    def _put(self, writer: RunWriter, record: Record) -> None:
        # Our index cannot name the type, so the tensor is recorded as an event.
        if record.dtype not in DTYPES:
            reason = record.lost or f"the element type {record.dtype} is not known"
            writer.event("lost", f"{record.key}: {reason}")
            self._skip(record, reason)
            return
        # The blob is the location in the source; the writer assigns a new one.
        plain = record._replace(blob=None)
        if record.kept in ("full", "sample"):
            raw = self._values(record)
            if isinstance(raw, str):
                # A tensor that cannot be read stays in the run, with the reason.
                writer.put(plain._replace(lost=raw), None)
                self._skip(record, raw)
                return
            writer.put(plain, cast("Any", np.ascontiguousarray(raw)).view(np.uint8))
            self.size += raw.nbytes
        else:
            writer.put(plain, None)
        self.written += 1
        self._step()

    def into_files(self, to: Target) -> None:
        about = self.run.facts.to_json()
        listed = TensorList(
            self.place,
            f"{self._format()}: {self.run.name}",
            {
                **about,
                "processes": [
                    process_facts.to_json() for process_facts in self.run.facts.processes
                ],
            },
        )
        try:
            for rank, process, records in self._parts():
                if to == "safetensors":
                    readable = [record for record in records if self._has_values(record)]
                    self.size += write_safetensors(
                        self.place, readable, self._required_values, listed
                    )
                    self.written += len(readable)
                else:
                    files = FilePerTensor(self.place, f".{to}", listed)
                    for record in records:
                        self._file(files, record)
                if (tree := self.run.topology(rank, process)) is not None:
                    listed.topology(rank, process, tree)
                for event in self._events(rank, process):
                    listed.event(event)
        finally:
            listed.close()

    def _file(self, files: FilePerTensor, record: Record) -> None:
        if self._has_values(record):
            raw = self._values(record)
            if isinstance(raw, str):
                self._skip(record, raw)
                return
            self.size += files.put(record, raw)
            self.written += 1
            self._step()

    def _into_own_tree(self, tree_of: Any) -> None:
        """Write the tree that the dump had; `into_ait` writes that of torch modules."""
        for rank, process, records in self._parts():
            tree = tree_of(self.place, rank, process, os.getpid())
            for record in records:
                if not self._has_values(record):
                    continue
                raw = self._values(record)
                reason = raw if isinstance(raw, str) else tree.put(record, raw)
                if reason or isinstance(raw, str):
                    self._skip(record, reason)
                    continue
                self.size += raw.nbytes
                self.written += 1
                self._step()

    def into_ait(self) -> None:
        # A tree of torch modules cannot hold ATB's operations, which have their own layout.
        if (own := OWN_TREES.get(self.run.facts.first_format)) is not None:
            self._into_own_tree(own.load())
            return
        require("torch", install="torch")
        tree_of = AIT_TREE.load()
        for rank, process, records in self._parts():
            # The tree names a process after its device, which a dump of another tool may not know.
            kind = next((r.device for r in self.run.records if r.device), "cpu").partition(":")[0]
            device = kind if kind == "cpu" and not rank else f"{kind}{rank}"
            tree = tree_of(self.place, device=device)
            if (modules := self.run.topology(rank, process)) is not None:
                tree.topology(modules)
            for record in records:
                if not self._has_values(record):
                    continue
                raw = self._values(record)
                if isinstance(raw, str):
                    self._skip(record, raw)
                    continue
                # The tree reports a refused tensor only by not counting it.
                before = tree.tensors_written
                tree.put(record, cast("Any", np.ascontiguousarray(raw)).view(np.uint8))
                if tree.tensors_written == before:
                    self._skip(
                        record, f"torch cannot hold {record.dtype} in a file, or the disk is full"
                    )
                    continue
                self.size += raw.nbytes
                self.written += 1
                self._step()
            if self.run.sheets(rank, process):
                tree.open()
                self.sheets += AIT_SHEETS.load()(self.run, rank, process, tree.folder)
            tree.close()

    # ---- shared by all targets

    def _parts(self) -> Iterator[tuple[int, int, Sequence[Record]]]:
        listed: set[tuple[int, int]] = set()
        for (rank, process), some in itertools.groupby(
            self.run.records, key=lambda record: (record.key.rank, record.key.process)
        ):
            listed.add((rank, process))
            yield rank, process, list(some)
        # A process that stored only sheets has no record, but its sheets are converted too.
        for about in self.run.processes():
            process_key = (int(about.get("rank", 0)), int(about.get("process", 0)))
            if process_key not in listed and self.run.sheets(*process_key):
                yield *process_key, []

    def _events(self, rank: int, process: int) -> Iterator[Mapping[str, Any]]:
        for event in self.run.events():
            if (event.get("rank", 0), event.get("process", 0)) == (rank, process):
                yield event

    def _has_values(self, record: Record) -> bool:
        """Whether a tensor can be written to a file; if not, it is counted with the reason."""
        reason = self.run.lost(record)
        if not reason and record.dtype not in DTYPES:
            reason = f"the element type {record.dtype} is not known"
        if not reason and record.kept not in ("full", "sample"):
            reason = f"only its {record.kept} was kept"
        if reason:
            self._skip(record, reason)
        return not reason

    def _values(self, record: Record) -> Storage | str:
        """The values, or the reason why there are none."""
        if reason := self.run.lost(record):
            return reason
        try:
            raw = self.run.raw(record)
        except (DriftlineError, OSError) as trouble:
            return reason_of(trouble)
        self._mapped += raw.nbytes
        # Otherwise the pages of a 100 GB dump would fill the memory.
        if self._mapped > _RELEASE_AFTER:
            self.run.release()
            self._mapped = 0
        return raw

    def _required_values(self, record: Record) -> Storage:
        raw = self._values(record)
        if isinstance(raw, str):
            raise BadInput(
                f"{record.key} cannot be read: {raw}",
                hint="driftline show RUN --verify lists what is damaged",
            )
        self._step()
        return raw

    def _skip(self, record: Record, reason: str) -> None:
        self.skipped[reason] += 1
        self.left_out.append((record.key, reason))
        self._step()

    def _step(self) -> None:
        self._done += 1
        if self.progress is not None:
            self.progress(self._done, len(self.run))

    def _format(self) -> str:
        return str(self.run.manifest.get("format", "run"))


def _details(details: Any) -> dict[str, Any]:
    if not isinstance(details, Mapping):
        return {}
    named = cast("Mapping[str, Any]", details)
    # These two are arguments of `event` itself.
    return {name: value for name, value in named.items() if name not in ("kind", "message")}


def command_of(run: Run) -> list[str]:
    """The command that made the run, if the run has it; foreign dumps do not."""
    command = run.manifest.get("command")
    if isinstance(command, (list, tuple)) and command:
        return [str(word) for word in cast("list[Any]", command)]
    return ["driftline", "convert", run.name]


def world_of(run: Run) -> int:
    """Number of ranks of the job, if known; at least the number of ranks with tensors."""
    return max(run.facts.world, len({record.key.rank for record in run.records}), 1)


# ---- Entry point


class Converted(NamedTuple):
    """The result of a conversion.

    Attributes:
        path: Path of the result.
        tensors: Number of tensors written.
        size: Number of bytes of values.
        skipped: Reason → number of tensors that have no values in the result for this reason.
        left_out: Key and reason of these tensors. A converted run contains them as lost tensors.
    """

    path: Path
    tensors: int
    size: int
    skipped: Mapping[str, int]
    left_out: tuple[tuple[TensorKey, str], ...] = ()


def convert(
    source: Run | StrPath,
    output: StrPath,
    *,
    to: Target = "run",
    force: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write a run, or a dump or tensor file of another program, in another format.

    Args:
        source: Anything that `open_run` opens.
        output: Folder of the result.
        to: `run` for Driftline's format; `npy`, `pt` and `safetensors` for files of these formats
            with a list of keys next to them; `ait` for the tree of `ait llm dump`, or that of ATB
            if the source came from there.
        force: Replace an earlier result of the same kind.
        progress: Called with the number of finished tensors and the total.

    Raises:
        AlreadyThere: The output exists and may not be replaced.
        DriftlineError: The source cannot be read, or the output cannot be written.
    """
    if ":/" in os.fspath(output) and (url := url_of(output)) is not None:
        return _convert_to_url(source, url, output, to=to, force=force, progress=progress)
    run = source if isinstance(source, Run) else open_run(source)
    place = Path(output)
    # The output is replaced at the end, so the source would be deleted.
    if not isinstance(source, Run) and _is_same_folder(Path(source), place):
        raise BadInput(f"{place} cannot be converted into itself", hint="give another output")
    _refuse_empty(run, to)
    # The `ait` writers create this folder themselves, and only this folder may be replaced.
    final = place / "ait_dump" if to == "ait" else place
    if to == "run":
        check_room(place, force=force)
    else:
        _check_room(final, force, replaceable=to == "ait" or targets.has_list(place))
    try:
        with _atomic_folder(final, "ait_dump" if to == "ait" else "") as working:
            work = Conversion(run, working, to, progress)
            if to == "run":
                create_run(working, command=command_of(run), world_size=world_of(run))
                work.into_run()
            elif to == "ait":
                work.into_ait()
            else:
                work.into_files(to)
            # An empty result would look like a success.
            if not work.written and not work.sheets:
                why = next(iter(work.skipped), "it has no values")
                raise BadInput(
                    f"nothing of {run.name} can be written as {to}: {why}",
                    hint="--to run keeps everything; driftline show says what is there",
                )
    except OSError as trouble:
        raise BadInput(
            f"{place} cannot be written: {reason_of(trouble)}", hint="nothing was left there"
        ) from trouble
    return Converted(place, work.written, work.size, dict(work.skipped), tuple(work.left_out))


def _refuse_empty(run: Run, to: Target) -> None:
    """Refuse a run of which nothing could be written.

    Raises:
        BadInput: The run has no tensors, or none with values although values are needed.
    """
    sheets = to in ("run", "ait") and any(
        run.sheets(int(about.get("rank", 0)), int(about.get("process", 0)))
        for about in run.processes()
    )
    if not len(run) and not sheets:
        raise BadInput(f"{run.name} holds no tensors", hint="driftline show says what it holds")
    values = sheets or any(record.kept in ("full", "sample") for record in run.records)
    # Refused before anything is written, because every tensor would be skipped.
    if to != "run" and not values:
        raise BadInput(
            f"nothing of {run.name} can be written as {to}: only {run.records[0].kept} was kept",
            hint="--to run keeps what there is",
        )


def _convert_to_url(
    source: Run | StrPath,
    url: str,
    output: StrPath,
    *,
    to: Target,
    force: bool,
    progress: Progress | None,
) -> Converted:
    """As `convert`, to an address: the result is made here, and then sent."""
    import tempfile

    from driftline.runs.stores.api import push, refuse_overwriting

    if to != "run":
        raise BadInput(
            f"--to {to} writes files of this machine, and the output is an address",
            hint="give a folder; a run may go to an address",
        )
    # Checked first, because converting may take an hour.
    refuse_overwriting(url, force=force)
    with tempfile.TemporaryDirectory(prefix="driftline-") as folder:
        done = convert(source, Path(folder) / "run", to=to, progress=progress)
        sent = push(done.path, url, force=force)
        if sent.reason:
            raise Unreachable(
                f"not all of it is at {sent.url}: {sent.reason}",
                hint="give the same command with --force when the store answers again",
            )
    return done._replace(path=UrlPath(os.fspath(output)))


def _is_same_folder(source: Path, output: Path) -> bool:
    return output.exists() and source.exists() and output.resolve() == source.resolve()


def _check_room(place: Path, force: bool, *, replaceable: bool) -> None:
    """Refuse an existing output, unless it may be replaced and is of this kind.

    Raises:
        AlreadyThere: The output exists and may not be replaced.
    """
    if place.exists() and not place.is_dir():
        raise AlreadyThere(f"'{place}' exists and is a file", hint="choose another output folder")
    if not place.is_dir() or not any(place.iterdir()):
        return
    if not force:
        raise AlreadyThere(
            f"output folder '{place}' exists and is not empty",
            hint="choose another one, or --force to replace what is in it",
        )
    # `--force` must not delete a folder that was named by mistake.
    if not replaceable:
        raise AlreadyThere(
            f"'{place}' holds other things than converted tensors, so it is not replaced",
            hint="choose another output folder",
        )


@contextlib.contextmanager
def _atomic_folder(place: Path, inner: str = "") -> Generator[Path]:
    """An empty folder to write to; it becomes `place` on success, and is deleted otherwise.

    It has another name next to `place` and is renamed at the end. So a conversion that is stopped
    half way leaves nothing under the requested name, and an earlier result stays. A killed process
    leaves `.NAME.unfinished-PID`, which the next conversion removes.

    Args:
        place: The requested name.
        inner: The inner folder that becomes `place`, if the writers create one of their own.

    Raises:
        OSError: The disk refused the write.
    """
    place = place.absolute()
    new = not place.parent.exists()
    place.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(place)
    # In the same parent folder, hence on the same disk: renaming is then one step.
    working = place.with_name(f".{place.name}{_UNFINISHED}{os.getpid()}")
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir()
    try:
        yield working
        # A link stays, and its target is replaced.
        if place.is_symlink():
            place = place.resolve()
        if place.exists():
            shutil.rmtree(place)
        (working / inner).rename(place)
        if inner:
            shutil.rmtree(working)
    # Also if the user interrupts: half a result must not remain.
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        if new:
            with contextlib.suppress(OSError):
                place.parent.rmdir()
        raise


def _remove_leftovers(place: Path) -> None:
    """Remove what killed processes left of the same output."""
    begin = f".{place.name}{_UNFINISHED}"
    for path in place.parent.iterdir():
        number = path.name.removeprefix(begin)
        if path.name.startswith(begin) and number.isdecimal() and not _is_running(int(number)):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A process of another user exists even if it may not be signalled.
    except (OSError, OverflowError):
        return True
    return True
