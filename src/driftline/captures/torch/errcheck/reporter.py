"""Turn verdicts into findings, write them to disk at once, and keep their tensors for replay.

One reporter serves all levels and devices of a process. `rules` decides what is a finding; the
session's sink stores the run.
"""

# pyright: reportUnknownMemberType=false, reportPrivateUsage=false
from __future__ import annotations

import fnmatch
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from driftline.captures.errcheck.findings import Finding, FindingsFile, Side
from driftline.captures.recorder import TensorAddress
from driftline.captures.torch.errcheck.inspect import Origin, Reading
from driftline.captures.torch.errcheck.rules import Verdict
from driftline.captures.torch.errcheck.source_lines import Line
from driftline.captures.torch.tensors import dtype_name, undisturbed
from driftline.runs.sidecars.calls import CALLS, CallTensor
from driftline.runs.sidecars.calls import Call as CallLine
from driftline.runs.sinks import Sheets, Sink

_ONCE = frozenset({"saturation", "underflow"})
"""Types that are reported once per site, because a layer has them in every step."""


class WatchOptions(NamedTuple):
    """Options of the error check.

    Attributes:
        types: Types of findings: nan, inf, saturation, underflow.
        allow: Globs on sites and operators whose results are not reported.
    """

    types: frozenset[str] = frozenset({"nan", "inf"})
    allow: tuple[str, ...] = ()


class Call(NamedTuple):
    """One call that was judged.

    Attributes:
        site: `{module}/{operator}`, or the site of a module.
        module: The module's site.
        operator: Full name of the operator, or the module's class.
        param: Arguments other than tensors, as JSON; None for a module.
    """

    site: str
    module: str
    operator: str
    phase: str
    step: int
    visit: int
    lines: Sequence[Line] = ()
    forward_line: str = ""
    param: Mapping[str, Any] | None = None


class Part(NamedTuple):
    """One tensor of a call, with its reading.

    Attributes:
        tensor: The tensor; None if its values do not exist any more.
        reading: Its reading; None for dtypes that are always finite.
    """

    name: str
    tensor: torch.Tensor | None
    reading: Reading | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    alias: str = ""


class Reporter:
    """Writes findings, and counts calls that are none.

    Attributes:
        calls: Number of operator or module calls that were checked.
        propagators: Number of calls that only passed on bad values of their inputs.
        unwritten: Number of calls that read values which are not finite from unwritten memory.
        received: Whether values that are not finite from a collective were reported.
        repeats: Number of saturations and underflows at sites that were already reported.
        peaks: Bit pattern of the largest magnitude, by site and element type.
        device_peaks: Largest magnitude read on a device, by site and element type.
        remarks: Sentences for the user, each once.
    """

    def __init__(
        self,
        session: Any,
        options: WatchOptions,
        file: FindingsFile,
        after: Callable[[Finding], None] | None = None,
    ) -> None:
        self.session = session
        self.options = options
        self.file = file
        self._after = after
        self.findings: list[Finding] = []
        self._seen_events: set[tuple[str, str]] = set()
        self._allowed: dict[tuple[str, str], bool] = {}
        self.peaks: dict[tuple[str, str], int] = {}
        self.device_peaks: dict[tuple[str, str], float] = {}
        self.remarks: dict[str, None] = {}
        self.after_fork()

    def after_fork(self) -> None:
        self.lock = threading.RLock()
        self.calls = self.propagators = self.unwritten = self.repeats = 0
        self.received = False
        self.findings.clear()

    def allows(self, site: str, operator: str) -> bool:
        """Whether the user's options exclude a site or operator from findings."""
        # Most users allow nothing, and this is called for every suspicious call.
        if not self.options.allow:
            return False
        key = (site, operator)
        allowed = self._allowed.get(key)
        if allowed is None:
            # A pattern may name an operator with or without its overload.
            short = operator.rpartition(".")[0]
            allowed = self._allowed[key] = any(
                fnmatch.fnmatchcase(text, pattern)
                for pattern in self.options.allow
                for text in (site, operator, short)
            )
        return allowed

    def origin(self, origin: Origin, *, single: bool = False) -> Origin:
        """The origin by which a tensor is judged.

        Values made by other ranks are reported once, and are consequences afterwards. In a job of
        several ranks, values of unknown origin are treated likewise after the first finding,
        because collectives also fill memory without being observed.

        Args:
            origin: The known origin of the tensor.
            single: Whether it is one number without a gradient, which the program itself wrote.
        """
        if origin is Origin.RECEIVED and self.received:
            return Origin.MADE
        if origin is Origin.UNKNOWN and self.findings and _several_ranks():
            return Origin.MADE
        return Origin.MEANT if single and origin is Origin.UNKNOWN else origin

    def note(self, verdict: Verdict, site: str) -> None:
        """Count a call whose results are not finite but that is no finding."""
        if verdict.propagates:
            self.propagators += 1
        elif verdict.origin is Origin.RAW:
            self.unwritten += 1
            if self.unwritten == 1:
                self.remarks.setdefault(
                    f"{site} read memory that was allocated and never written, and got what is not "
                    "finite from it; such calls are not judged"
                )

    def report(
        self,
        verdict: Verdict,
        call: Call,
        inputs: Sequence[Part],
        outputs: Sequence[Part],
        *,
        exact: bool = True,
    ) -> None:
        """Write a finding and keep its tensors; both survive a kill after the return."""
        with self.lock:
            # A layer that saturates does so in every step, so it is reported once per site.
            types = [t for t in verdict.types if t not in _ONCE or self._is_new(call.site, t)]
            if not types:
                self.repeats += 1
                return
            inner = call.lines[0] if call.lines else None
            finding = Finding(
                number=self.file.next_number(),
                types=tuple(types),
                cause="entered" if verdict.entered else "made",
                operator=call.operator,
                site=call.site,
                module=call.module,
                phase=call.phase,
                step=call.step,
                visit=call.visit,
                rank=self.session.rank,
                pid=os.getpid(),
                entered=verdict.entered,
                line=str(inner) if inner else "",
                code=inner.text if inner else "",
                stack=tuple(map(str, call.lines[1:])),
                forward_line=call.forward_line,
                reason=verdict.reason,
                inputs=tuple(map(_side, inputs)),
                outputs=tuple(map(_side, outputs)),
                exact=exact,
                time=time.time(),
            )
            self.received = self.received or verdict.received
            # The finding is written before its tensors, which may be large or cannot be stored.
            self.file.write(finding)
            self.findings.append(finding)
            self._keep(finding, call, inputs, outputs)
        # Called outside the lock, because the callback may end the process.
        if self._after is not None:
            self._after(finding)

    def _is_new(self, site: str, kind: str) -> bool:
        new = (site, kind) not in self._seen_events
        self._seen_events.add((site, kind))
        return new

    def _keep(
        self, finding: Finding, call: Call, inputs: Sequence[Part], outputs: Sequence[Part]
    ) -> None:
        session = self.session
        with undisturbed():
            for port, moment, parts in (("input", "before", inputs), ("output", "after", outputs)):
                for part in parts:
                    if part.tensor is not None:
                        address = TensorAddress(
                            call.site,
                            port,
                            part.name,
                            call.step,
                            call.visit,
                            call.phase,
                            moment,
                            part.alias,
                            call.operator,
                        )
                        session.guarded(call.site, session.take, address, part.tensor)
        session.guarded(call.site, self._flush, finding, call, inputs, outputs)

    def _flush(
        self, finding: Finding, call: Call, inputs: Sequence[Part], outputs: Sequence[Part]
    ) -> None:
        sink: Sink = self.session.recorder._open_sink()
        # With its arguments a finding can be replayed like a call of a capture.
        if call.param is not None and isinstance(sink, Sheets):
            line = CallLine(
                finding.number - 1,
                "operator",
                call.site,
                call.operator,
                step=call.step,
                visit=call.visit,
                phase=call.phase,
                inputs=tuple(map(_described, inputs)),
                outputs=tuple(map(_described, outputs)),
                param=call.param,
            )
            sink.sheet(CALLS, line.to_line())
        self.session.event("finding", finding.sentence(), number=finding.number, site=finding.site)
        self.session.recorder._open_sink().flush()


def _several_ranks() -> bool:
    group: Any = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def _described(part: Part) -> CallTensor:
    return CallTensor(part.name, dtype_name(part.dtype) or str(part.dtype), part.shape, part.alias)


def _side(part: Part) -> Side:
    reading = part.reading
    dtype = str(part.dtype).removeprefix("torch.")
    if reading is None:
        return Side(part.name, dtype, part.shape, math.prod(part.shape))
    return Side(
        name=part.name,
        dtype=dtype,
        shape=part.shape,
        elements=reading.elements,
        peak=reading.peak if math.isfinite(reading.peak) else None,
        nan=reading.nan,
        pos_inf=reading.pos_inf,
        neg_inf=reading.neg_inf,
        at_limit=reading.top + reading.bottom,
    )
