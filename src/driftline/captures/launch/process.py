# pyright: reportUnknownMemberType=false
"""Start the capture of a launched process, and end it when the process ends.

`bootstrap` calls `begin` when a framework has been imported. This file carries out a plan: it
chooses the sink, finds the rank and seals the run. A process may end in several ways: by
interpreter exit (atexit), by multiprocessing's own exit (its finalizers), or by `os._exit`, all of
which seal the run; by `os.exec*`, before which the run is flushed; or by a kill, after which the
run is readable but unsealed. A forked child starts with a run part of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

from driftline import settings
from driftline.captures.errcheck.findings import Finding, FindingsFile, headroom_rows
from driftline.captures.events import is_sent
from driftline.captures.framework import FRAMEWORKS
from driftline.captures.launch.bootstrap import keep_spare, send_message
from driftline.captures.launch.jobs import TORCH_LISTS, CapturePlan, WatchPlan, is_watch_plan
from driftline.captures.launch.messages import MOST_PLACES, Place, ProcessReport
from driftline.captures.model_facts import EXIT_THREAD, FactOptions
from driftline.captures.module_calls import exception_words
from driftline.captures.options import Reduction
from driftline.errors import BadInput
from driftline.runs.files.owned_file import print_to_stderr
from driftline.runs.layout import SHARD_BYTES
from driftline.runs.sidecars.calls import CALLS, GRAPHS
from driftline.runs.sinks import Late, Limited, Nowhere

if TYPE_CHECKING:
    from driftline.captures.session import Session
    from driftline.runs.sinks import Sink


CALLS_TAP = "driftline.captures.torch.operators.call_list:CallTap"
PROFILE_TAP = "driftline.captures.torch.profiler:ProfileTap"
GRAPH_TAP = "driftline.captures.torch.compile.tap:GraphTap"
AIT_TREE = "driftline.dialects.ait.dump_tree:AitTree"
"""Dialects are a layer above this one, so they are loaded by address, and only if requested."""

EXPERIMENTS = {
    "replay": "driftline.diagnosis.experiments.live.experiments:LiveReplay",
    "variant": "driftline.diagnosis.experiments.live.experiments:LiveVariant",
    "substitute": "driftline.diagnosis.experiments.live.experiments:LiveSubstitution",
    "batch": "driftline.diagnosis.experiments.live.experiments:LiveBatch",
}
"""Experiments on a running program, by kind; also a layer above, loaded by address."""

# Seconds that `os._exit` waits for the end of the capture. It may never come: a signal handler may
# call `os._exit` while the thread that it interrupted is writing.
_EXIT_SECONDS = 2.0
# multiprocessing runs finalizers of higher priority first; the writer's finalizer has priority 0.
_SEAL_FIRST = 10


def begin(plan_path: str, framework: str) -> None:
    """Read the plan and start the capture of a framework that was just imported."""
    _stand_on_real_ground()
    text = Path(plan_path).read_text(encoding="utf-8")
    if is_watch_plan(text):
        if framework != "torch":
            send_message(plan_path, "apart", framework)
            return

        launched: Launched = Watched(WatchPlan.from_json(text), plan_path)
    else:
        plan = CapturePlan.from_json(text)
        if framework not in plan.frameworks:
            send_message(plan_path, "unasked", framework)
            return
        # Experiments replace calls of modules, and are written for torch only.
        if framework != "torch" and plan.experiment:
            send_message(plan_path, "apart", framework)
            return
        launched = Launched(plan, plan_path, framework)
    launched.start()
    send_message(plan_path, "started", framework)
    with contextlib.suppress(OSError, ImportError):
        keep_spare(plan_path)


def _stand_on_real_ground() -> None:
    """Let later imports use the package's real folder, not the launcher's link to it.

    The link is removed when the launcher ends, and a process may outlive the launcher.
    """
    package = sys.modules["driftline"]
    package.__path__[:] = [os.path.realpath(entry) for entry in package.__path__]


class Experiment(Protocol):
    """An experiment on a launched program, which changes how module calls are executed.

    It is made with the plan's experiment, the session and a function that returns the rank. It sets
    the session's `stand_in`; `finish` returns its result.
    """

    def finish(self) -> Mapping[str, Any]: ...


class Launched:
    """The capture of one framework in one launched process."""

    def __init__(self, plan: CapturePlan, plan_path: str, framework: str = "torch") -> None:
        if framework != "torch" and plan.layout != "run":
            raise BadInput(
                f"--layout {plan.layout} holds what torch programs compute, and this one uses "
                f"{framework}",
                hint="without --layout it becomes a run",
            )
        self.plan = plan
        self.plan_path = plan_path
        self.framework = framework
        self.place = settings.job_place()
        self.ended = False
        selection = plan.selection
        if self.place.world_size == 1:
            # The rank may be known only later, when the program initialises torch.distributed. So
            # ranks are selected when the sink is made.
            selection = dataclasses.replace(selection, ranks=())
        self.sink = Late(self._make_sink, tree_is_enough=not plan.wants_tensors)
        self.session: Session = _load(FRAMEWORKS[framework].session)(
            self.sink,
            selection,
            plan.reduction if plan.wants_tensors else Reduction("describe"),
            plan.levels if plan.wants_tensors else ("modules",),
            rank=self.place.rank,
        )
        if plan.step_budget >= 0:
            # The limit is for the whole dump; each rank gets an equal share.
            self.session.set_budget(plan.step_budget // max(1, self.place.world_size))
        # Only sessions with a device backend have budgets.
        device_backend: Any = getattr(self.session, "device_backend", None)
        if device_backend is not None:
            device_backend.budgets = plan.budgets
        # Imported by the program's thread, so that a fork cannot happen while another thread is
        # importing it.
        self.session.recorder.prepare = lambda: importlib.import_module("driftline.runs.writer")
        # Experiments change what a model computes, and other layouts have no place for facts.
        if plan.layout == "run" and not plan.experiment:
            self.session.describe_models(plan.facts)
        self.experiment: Experiment | None = None
        if plan.experiment:
            kind = EXPERIMENTS[plan.experiment["kind"]]
            self.experiment = _load(kind)(plan.experiment, self.session, self._rank)
        if framework != "torch":
            self._say_what_is_not_there()
            return
        # If operators are kept in full they can be executed again, which needs the list of calls
        # with their parameters. In ait's tree this is supported if the operators' csv is requested.
        listed = plan.layout == "run" or "op" in plan.types
        again = self.session.replayable and listed and not plan.experiment
        self.session.for_replay = again
        if plan.wants_calls or again:
            write = functools.partial(self.sink.sheet, CALLS)
            self.session.taps.append(_load(CALLS_TAP)(self.session, write))
        if plan.wants_profile:
            self.session.taps.append(
                _load(PROFILE_TAP)(
                    self.session,
                    self.sink.sheet,
                    kernels="kernel" in plan.types,
                    times="cpu_profiling" in plan.types,
                )
            )
        if plan.graph:
            write = functools.partial(self.sink.sheet, GRAPHS)
            self.session.taps.append(
                _load(GRAPH_TAP)(self.session, plan.graph, write, fusion=plan.fusion)
            )
        if plan.tiling:
            self.sink.event("tiling", "tiling data were asked for; torch on this device has none")

    def _say_what_is_not_there(self) -> None:
        lists = [word for word in self.plan.types if word in TORCH_LISTS]
        if lists:
            text = f"--type {' '.join(lists)} lists what torch programs do"
            self.sink.event("type", f"{text}; of {self.framework} programs there is no such list")
        if self.plan.graph:
            self.sink.event(
                "graph",
                f"--graph {self.plan.graph} sees what torch.compile makes; of "
                f"{self.framework} programs layers are captured",
            )

    def start(self) -> None:
        self.session.start()
        atexit.register(self.end)
        os.register_at_fork(after_in_child=self._forked)
        util = importlib.import_module("multiprocessing.util")
        # A child of multiprocessing drops its parent's finalizers and ends without atexit.
        util.register_after_fork(self, Launched._end_with_multiprocessing)
        self._end_with_multiprocessing()
        self._be_told_of_leaving()

    def end(self) -> None:
        """Stop the capture, seal the run and send the report; only the first call has an effect."""
        if self.ended:
            return
        self.ended = True
        if not self.session.execution_order:
            # This may be a data worker, forked from a process with a model; the module tree is the
            # parent's.
            self.sink.tree_is_enough = False
        # The interpreter sets this for an uncaught exception before it ends.
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException):
            self.session.exception = exception_words(error)
        self.session.stop()
        if self.experiment is not None:
            with contextlib.suppress(OSError):
                send_message(self.plan_path, "experiment", json.dumps(self.experiment.finish()))
        with contextlib.suppress(OSError):  # the launcher may have ended already
            send_message(self.plan_path, "report", self.report().to_json())

    def report(self) -> ProcessReport:
        session = self.session
        seen = sorted(session.steps_seen)
        places = [Place(*place) for place in session.places()]
        return ProcessReport(
            pid=os.getpid(),
            rank=self._rank()[0],
            calls=len(session.execution_order) + session.outside,
            steps_seen=tuple(seen),
            steps_taken=tuple(step for step in seen if session.wants_step(step)),
            tensors=session.tensors,
            bytes=self.sink.bytes_written,
            places=tuple(places[:MOST_PLACES]),
            notes=tuple(message for kind, message in self.sink.waiting_events if is_sent(kind)),
            failure=self.sink.failure,
        )

    def _end_with_multiprocessing(self) -> None:
        process = sys.modules.get("multiprocessing.process")
        if process is not None and process.parent_process() is not None:
            util = sys.modules["multiprocessing.util"]
            util.Finalize(None, self.end, exitpriority=_SEAL_FIRST)

    def _be_told_of_leaving(self) -> None:
        """Wrap `os._exit` and `os.exec*`, which run no atexit functions.

        Servers and launchers often end by one of them, right after the last call.
        """
        leave, become = os._exit, {name: getattr(os, name) for name in ("execv", "execve")}

        def _exit(status: int) -> NoReturn:
            try:
                if not self.ended:
                    _at_most(_EXIT_SECONDS, self.end)
            finally:
                leave(status)

        def after_writing(name: str) -> Callable[..., Any]:
            # Only flushed, not sealed: `exec` may fail, and then the program continues.
            def call(*args: Any, **kwargs: Any) -> Any:
                _at_most(_EXIT_SECONDS, self.session.flush)
                return become[name](*args, **kwargs)

            return functools.wraps(become[name])(call)

        os._exit = functools.wraps(leave)(_exit)
        for name in become:
            setattr(os, name, after_writing(name))

    def _forked(self) -> None:
        """Start anew in a forked child, without what its parent has seen and written."""
        self.ended = False
        self.sink.forget()
        self.session.after_fork()
        self.session.steps_seen.clear()
        self.session.execution_order.clear()
        self.session.outside = 0

    def _make_sink(self) -> Sink:
        # A spawned process may be known to be a child of multiprocessing only now. Its finalizer
        # must run before the writer's.
        self._end_with_multiprocessing()
        rank, world_size = self._rank()
        if not self.plan.selection.takes_rank(rank):
            return Nowhere()
        # The limit is for the whole dump; each rank gets an equal share.
        share = self.plan.max_bytes // max(1, world_size)
        if self.plan.layout == "ait":
            return self._make_tree(share)
        from driftline.runs.writer import RunWriter

        writer = RunWriter(
            self.plan.output,
            rank=rank,
            world_size=world_size,
            command=self.plan.command,
            max_bytes=share or None,
            shard_bytes=self.plan.shard_bytes or SHARD_BYTES,
            # `end` seals the run, however the process ends.
            seal_at_exit=False,
        )
        writer.describe(**self._provenance().facts())
        if self.plan.selection.ranks:
            writer.describe(only_ranks=list(self.plan.selection.ranks))
        # Without tensors nothing else makes the writer create its files.
        if not self.plan.wants_tensors:
            writer.open()
        return Limited(writer, limit=share, say=self._say) if share else writer

    def _make_tree(self, share: int) -> Sink:
        tree = _load(AIT_TREE)(self.plan.output, max_bytes=share)
        if not self.plan.wants_tensors:
            tree.open()
        return Limited(tree, limit=share, say=self._say) if share else cast("Sink", tree)

    def _say(self, sentence: str) -> None:
        if self.plan.says("info"):
            print_to_stderr(sentence)

    def _provenance(self) -> Any:
        return importlib.import_module(FRAMEWORKS[self.framework].provenance)

    def _rank(self) -> tuple[int, int]:
        """Rank and world size, from the framework or else from the job's environment variables."""
        if self.framework != "torch":
            place = self._provenance().rank()
            return place or (self.place.rank, self.place.world_size)
        distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank()), int(distributed.get_world_size())
        return self.place.rank, self.place.world_size


def _at_most(seconds: float, act: Callable[[], None]) -> None:
    """Call a function in a thread and wait a limited time, so that the process can always end."""
    try:
        thread = threading.Thread(target=act, name=EXIT_THREAD, daemon=True)
        thread.start()
        thread.join(seconds)
    except RuntimeError:  # the interpreter is ending and starts no more threads
        return


def _load(address: str) -> Any:
    module, _, name = address.partition(":")
    return getattr(importlib.import_module(module), name)


# The error check of one launched process: it starts when torch is imported.


WATCH_MODULE = "driftline.captures.torch.errcheck.api"
STOPPED = 1
"""Exit status of a process that was stopped at a finding."""
MOST_SITES = 20_000
MOST_UNWRITTEN = 100
_MOST_ANCESTORS = 64


class Watched(Launched):
    """The error check of one launched process."""

    def __init__(self, watch: WatchPlan, plan_path: str) -> None:
        super().__init__(
            CapturePlan(
                output=watch.folder,
                levels=(),
                max_bytes=watch.max_bytes,
                log_level=watch.log_level,
                command=watch.command,
                facts=FactOptions(model=False),
            ),
            plan_path,
        )
        self.watch = watch
        errcheck = importlib.import_module(WATCH_MODULE)
        # With the engine atb, the library's probe itself writes text files to the output.
        texts = None if watch.engine == "atb" else Path(watch.output)
        self.file = FindingsFile(Path(watch.folder), texts)
        self.reporter: Any
        self.session, self.reporter = errcheck.make_watch(
            self.sink,
            self.file,
            errcheck.watch_options(watch.types, watch.allow),
            watch.level,
            rank=self.place.rank,
            after=self._found,
        )

    def end(self) -> None:
        if self.ended:
            return
        super().end()
        with contextlib.suppress(OSError):
            send_message(self.plan_path, "watched", json.dumps(self._counts()))

    def _counts(self) -> dict[str, Any]:
        reporter = self.reporter
        rows = headroom_rows(reporter.peaks, reporter.device_peaks)
        return {
            "pid": os.getpid(),
            "rank": self._rank()[0],
            "calls": reporter.calls,
            # The launcher reads findings from disk; these are sent if they could not be written.
            "unwritten_findings": [
                finding.to_json() for finding in reporter.findings[:MOST_UNWRITTEN]
            ]
            if self.file.failure
            else [],
            "propagators": reporter.propagators,
            "repeats": reporter.repeats,
            "remarks": [*reporter.remarks, *filter(None, (self.file.failure,))],
            # Enough for any model, and small enough for the limit on the size of messages.
            "headroom": rows[:MOST_SITES],
        }

    def _forked(self) -> None:
        super()._forked()
        self.reporter.after_fork()

    def _make_sink(self) -> Sink:
        from driftline.runs.writer import RunWriter

        rank, world_size = self._rank()
        writer = RunWriter(
            self.plan.output,
            rank=rank,
            world_size=world_size,
            command=self.plan.command,
            max_bytes=max(1, self.plan.max_bytes // max(1, world_size)),
            seal_at_exit=False,
        )
        writer.describe(**self._provenance().facts())
        return writer

    def _found(self, finding: Finding) -> None:
        if self.watch.exit:
            self._stop(finding)

    def _stop(self, finding: Finding) -> NoReturn:
        """End this process and all processes between it and the launcher.

        The launcher prints the finding.
        """
        # The process must end even if sending the message or closing the sink fails.
        with contextlib.suppress(Exception):
            send_message(self.plan_path, "stopped", finding.to_json())
        with contextlib.suppress(Exception):
            self.end()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        # A shell script or torchrun would otherwise continue after its child has ended.
        for pid in ancestors(self.watch.launcher):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        os._exit(STOPPED)


def ancestors(launcher: int) -> list[int]:
    """Processes between the launcher and this one, the launcher's child first.

    The list is empty if the parents cannot be followed up to the launcher.
    """
    pids: list[int] = []
    pid = os.getppid()
    while pid != launcher and pid > 1 and len(pids) < _MOST_ANCESTORS:
        pids.insert(0, pid)
        try:
            # The name, in parentheses, may contain blanks, so fields are counted after it.
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            pid = int(after_name[1])
        except (OSError, ValueError, IndexError):
            return []
    return pids if pid == launcher else []
