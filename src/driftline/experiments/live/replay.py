"""Inside the reference program: its modules are also applied to what the candidate's were given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftline.adapters.selection import Selection
from driftline.alignment.normal import link_names
from driftline.experiments.folders import EXACT, NATIVE
from driftline.formats.opening import open_run
from driftline.launch.sinks import Late
from driftline.runs.writer import RunWriter

if TYPE_CHECKING:
    from driftline.adapters.torch.replaying import Replayer
    from driftline.adapters.torch.session import CaptureSession
    from driftline.adapters.torch.taps import Frame


class LiveReplay:
    """Opens the candidate run at the first call, when the rank is known, and replays from then on.

    Args:
        options: What `experiments.replay` wrote into the plan.
        session: Names the calls.
        rank: Says rank and world size.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        session: CaptureSession,
        rank: Callable[[], tuple[int, int]],
    ) -> None:
        self._options = options
        self._session = session
        self._rank = rank
        self._replayer: Replayer | None = None
        self._sinks: tuple[Late, ...] = ()
        self._problem = ""
        session.stand_in = self._call

    def _call(
        self, frame: Frame, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._replayer is None and not self._problem:
            try:
                self._replayer = self._opened()
            except Exception as problem:  # told at the end; the program goes on
                self._problem = f"{type(problem).__name__}: {problem}"
        if self._replayer is None:
            return call(frame.module, *args, **kwargs)
        return self._replayer(frame, call, args, kwargs)

    def _opened(self) -> Replayer:
        from driftline.adapters.torch.candidate import Candidate
        from driftline.adapters.torch.replaying import Replayer

        options = self._options
        rank, _ = self._rank()
        run = open_run(Path(options["candidate"]))
        self._sinks = tuple(Late(lambda name=name: self._writer(name)) for name in (EXACT, NATIVE))
        return Replayer(
            self._session,
            Candidate(run, rank),
            matching(options.get("links", {})),
            *self._sinks,
            selection=Selection.from_json(options["selection"]),
            most_held=int(options["most_held"]),
            partial=bool(options["partial"]),
            check_each=bool(options["check_each"]),
            keep_all=bool(options["keep_all"]),
        )

    def _writer(self, name: str) -> RunWriter:
        rank, world_size = self._rank()
        writer = RunWriter(
            Path(self._options["output"]) / name,
            rank=rank,
            world_size=world_size,
            command=self._options["command"],
            seal_at_exit=False,
        )
        writer.describe(replay=name, candidate=str(self._options["candidate"]))
        return writer

    def finish(self) -> Mapping[str, Any]:
        """Seal both runs; what became of each site."""
        for sink in self._sinks:
            if sink.tensors_written:
                from driftline.adapters.torch.tree import module_tree

                tree = module_tree(self._session.names, self._session.execution_order)
                sink.topology(tree.to_json())
            sink.close()
        if self._replayer is None:
            return {"problem": self._problem, "called": bool(self._session.execution_order)}
        return {"rank": self._rank()[0], "called": True, **self._replayer.report.to_json()}


def matching(
    links: Mapping[str, str],
) -> Callable[[Iterable[str], Iterable[str]], Mapping[str, str]]:
    """Equal names first, then what was said, then names that are alike."""

    def match(ours: Iterable[str], theirs: Iterable[str]) -> Mapping[str, str]:
        there = dict.fromkeys(theirs)
        here = list(ours)
        found = {site: links[site] for site in here if links.get(site) in there}
        taken = set(found.values())
        found |= {s: s for s in here if s not in found and s in there and s not in taken}
        taken = set(found.values())
        rest = [site for site in here if site not in found]
        if rest and len(taken) < len(there):
            found |= link_names(rest, [site for site in there if site not in taken])
        return found

    return match
