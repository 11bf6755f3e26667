"""Replay: apply the modules of a running program to the inputs that another run captured.

The program runs as usual. After each selected call the module is applied again. First it is applied
to its own inputs, which must give its own output bit for bit; then to the captured inputs, in the
captured run's number format and in wide arithmetic.

For a module with parts only its *own code* is repeated: its calls of its parts are answered with
the outputs of the captured run's parts. Thus a part is not computed again for each module around
it, and an error is seen only where it is introduced. If the own code cannot be repeated alone, the
module is applied as a whole. This file does not know files or the names of other runs.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from driftline.captures.naming import ROOT
from driftline.captures.selection import Selection
from driftline.captures.torch import layers
from driftline.captures.torch.layers import cache_part, unwrapped
from driftline.diagnosis.experiments.live.apply import CallApplier, Parts, RepeatedCall
from driftline.diagnosis.experiments.live.captured_calls import (
    Candidate,
    CandidateCall,
    NotReplayed,
    NotReproduced,
    OpenCall,
    OtherBorder,
    Part,
    Slots,
    WeightsUpdated,
    bytes_of,
    in_bytes,
    in_short,
    is_pure,
    likeness,
    why_never,
)
from driftline.diagnosis.experiments.live.number_formats import Recast
from driftline.diagnosis.experiments.live.repeat import (
    clone,
    copied,
    has_drawn,
    itself,
    random_state,
    repeat,
    same_bits,
    undrawn,
)
from driftline.diagnosis.experiments.live.report import Report
from driftline.diagnosis.experiments.live.results import Results
from driftline.diagnosis.experiments.replay_method import USUAL, ReplayMethod
from driftline.runs.sinks import Sink

if TYPE_CHECKING:
    from driftline.captures.torch.session import CaptureSession, Frame

CallName: TypeAlias = tuple[str, int, int]
"""Site of the captured run, step and visit."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[OpenCall | None] = []


class Replayer:
    """Replays calls while a session runs; it replaces the plain call of the session's modules.

    Args:
        session: Names the calls; it need not capture anything.
        candidate: The captured calls.
        match: Function that maps sites of the program's modules to sites of the captured run.
        exact: Receives the results of wide arithmetic.
        native: Receives the results in the captured run's format, unless that is wide. If it is
            None, they are not computed.
        selection: Which calls are replayed.
        method: How thoroughly they are replayed.
    """

    def __init__(
        self,
        session: CaptureSession,
        candidate: Candidate,
        match: Callable[[Iterable[str], Iterable[str]], Mapping[str, str]],
        exact: Sink,
        native: Sink | None,
        *,
        selection: Selection | None = None,
        method: ReplayMethod = USUAL,
    ) -> None:
        self._session = session
        self._candidate = candidate
        self._match = match
        self._selection = selection or Selection()
        self._most_held = method.most_held
        self._held, self._names = 0, -1
        self._sites: Mapping[str, str] = {}
        self._visits: Counter[tuple[str, int]] = Counter()
        self._visits_elsewhere: Counter[tuple[str, int]] = Counter()
        self._alike: dict[Any, str] = {}
        self._check_each = method.check_each
        self._thread = _Thread()
        self._learnt: set[int] = set()
        learnt = self._learnt

        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            learnt.update(id(p) for group in optimizer.param_groups for p in group["params"])

        # The hook is global to the process, so it is removed with the replayer even if nobody
        # calls `close`.
        self.close = weakref.finalize(self, register_optimizer_step_post_hook(note).remove)
        self.report = Report(candidate, partial=method.partial)
        self._recast = Recast(candidate, self._site_of)
        self._parts = Parts(self._recast, lambda m: self._site_of(m) in candidate.classes)
        self._apply = CallApplier(
            candidate,
            self._recast,
            self._parts,
            Results(candidate, exact, native, keep_all=method.keep_all),
            self.report,
            self._require_room,
            one_format=candidate.wide or native is None,
        )

    def __call__(
        self, frame: Frame, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a module of the program and replay the call."""
        stack = self._thread.stack
        depth = len(stack)
        opened: OpenCall | None = None
        called = ("", frame.step, frame.visit)
        try:
            self._learn_names()
            called = self._captured_name(frame)
            opened = self._before(frame, called, args, kwargs)
        except Exception as problem:  # an experiment never stops the program
            self.report.fault(frame.site, problem)
        stack.append(opened)
        try:
            result = call(frame.module, *args, **kwargs)
        except BaseException:
            if opened is not None:
                # The call failed: the memory held for it no longer counts, and the program gets
                # its own exception.
                self._held -= sum(bytes_of(held.slots) for held in opened.parts or ())
            raise
        finally:
            del stack[depth:]
        if opened is not None or (stack and stack[-1] is not None):
            try:
                self._after(frame, called, opened, stack[-1] if stack else None, result)
            except Exception as problem:
                self.report.fault(frame.site, problem)
        return result

    def _site_of(self, module: nn.Module) -> str | None:
        """The captured run's site of a module; None if it has none."""
        return self._sites.get(self._session.site_of(module))

    # --- before the call

    def _learn_names(self) -> None:
        """Match names again if there are new modules, because models may be built late."""
        names = self._session.names
        if names.count != self._names:
            self._names = names.count
            self._sites = self._match([p.site for p in names.places()], self._candidate.places)
            self.report.look_for_clashes(names, self._sites)

    def _captured_name(self, frame: Frame) -> CallName:
        """The captured run's name of a call of the program: site, step and visit.

        A module that several containers of the program share may be several modules in the captured
        run. Each of those has the name that its container uses, and visits are counted separately.
        """
        site, step = self._sites.get(frame.site, ""), frame.step
        own = self._site_in_container(frame)
        if own and own != site:
            visit = self._visits[own, step]
            self._visits[own, step] += 1
            self._visits_elsewhere[frame.site, step] += 1
            return own, step, visit
        return site, step, frame.visit - self._visits_elsewhere[frame.site, step]

    def _site_in_container(self, frame: Frame) -> str:
        """The captured run's site of a part, from its container's site and name for it.

        Empty if the captured run did not call such a site.
        """
        frames = self._session.frames()
        outer = frames[-2] if len(frames) > 1 and frames[-1] is frame else None
        container = None if outer is None else self._sites.get(outer.site)
        if outer is None or container is None:
            return ""
        name = next(
            (key for key, part in outer.module._modules.items() if part is frame.module), ""
        )
        path = name if container == ROOT else f"{container}.{name}"
        return path if name and (path, frame.step) in self._candidate.called else ""

    def _before(
        self, frame: Frame, called: CallName, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OpenCall | None:
        captured = self._captured_call(frame, called)
        if captured is None:
            return None
        site, candidate = captured
        opened = OpenCall(frame, args, kwargs)
        opened.site, opened.candidate = site, candidate
        module = frame.module
        opened.reason = why_never(module)
        if opened.reason:
            return opened
        forward = unwrapped(module).forward if frame.place.wraps else module.forward
        part = cache_part(module, self._session.frames())
        opened.inputs = layers.inputs(layers.binding_of(forward), args, kwargs, part)
        if not candidate.inputs and opened.inputs:
            opened.reason = "the candidate run holds no input of it from before the call"
            return opened
        if module._modules:
            opened.parts = []
        # Proving that a call reproduces its output costs a repetition, so calls of equal likeness
        # are proven only once.
        opened.proven = "" if self._check_each else self._alike.get(likeness(opened), "")
        if opened.proven:
            if not is_pure(module):
                opened.held = copied((args, kwargs), itself)
            return opened
        self._keep_arguments(opened)
        return opened

    def _captured_call(self, frame: Frame, called: CallName) -> tuple[str, CandidateCall] | None:
        """The captured site and call of a call of the program; None if it is not to be replayed."""
        if frame.recompute:
            return None
        site = called[0]
        candidate = self._candidate.calls.get(called)
        if candidate is None or not candidate.outputs:
            return None
        selected = self._selection.takes_step(frame.step) and self._selection.takes_place(
            frame.site, frame.class_name, frame.place.ids
        )
        if not selected:
            self.report.not_selected(site)
            return None
        return site, candidate

    def _keep_arguments(self, opened: OpenCall) -> None:
        """Copy the arguments of a call before it runs, since it may change them in place."""
        own = {id(tensor) for _, _, tensor in opened.inputs}
        try:
            self._require_room(bytes_of(opened.inputs))
        except NotReplayed as reason:
            opened.reason = str(reason)
            return
        # A cache belongs to all layers; only this layer's part is copied, the rest is shared.
        keep: dict[int, torch.Tensor] = {}

        def give(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in own:
                return tensor
            return keep.setdefault(id(tensor), clone(tensor))

        opened.held = copied((opened.args, opened.kwargs), give)
        opened.inputs = [
            (slot, alias, keep.get(id(tensor), tensor)) for slot, alias, tensor in opened.inputs
        ]

    def _require_room(self, size: int) -> None:
        if self._held + size > self._most_held:
            raise NotReplayed(f"holding its tensors takes more than {in_bytes(self._most_held)}")

    # --- after it

    def _after(
        self,
        frame: Frame,
        called: CallName,
        opened: OpenCall | None,
        parent: OpenCall | None,
        result: Any,
    ) -> None:
        part = cache_part(frame.module, self._session.frames())
        if parent is not None and parent.parts is not None:
            self._hold(frame, called, parent, result, part)
        if opened is None or opened.candidate is None:
            return
        try:
            if opened.reason:
                raise NotReplayed(opened.reason)
            self._replay(opened, layers.outputs(result, part), part)
        except OtherBorder as what:
            self.report.differs(opened.site, str(what))
        except WeightsUpdated:
            self.report.updated(opened.site)
        except NotReplayed as reason:
            failed = isinstance(reason, NotReproduced)
            self.report.unknown(opened.site, str(reason), not_reproduced=failed)
        except Exception as problem:
            self.report.unknown(opened.site, f"applying it again raised {in_short(problem)}")
        finally:
            for held in opened.parts or ():
                self._held -= bytes_of(held.slots)

    def _hold(
        self, frame: Frame, called: CallName, parent: OpenCall, result: Any, part: int
    ) -> None:
        """Keep a part's result, so that the code of its caller can be repeated."""
        assert parent.parts is not None
        slots = layers.outputs(result, part)
        size = bytes_of(slots)
        if self._held + size > self._most_held:
            parent.reason = (
                f"holding what its parts gave takes more than {in_bytes(self._most_held)}"
            )
            return
        keep: dict[int, torch.Tensor] = {}
        # If the caller is already proven, only the structure of the result is needed.
        own = itself if parent.proven else clone
        value = copied(result, lambda tensor: keep.setdefault(id(tensor), own(tensor)))
        self._held += size
        parent.parts.append(
            Part(
                frame.module,
                value,
                [(slot, alias, keep[id(t)]) for slot, alias, t in slots if id(t) in keep],
                self._candidate.calls.get(called),
            )
        )

    def _replay(self, opened: OpenCall, live: Slots, part: int) -> None:
        # Slots are compared by name; a result without a captured partner is no evidence.
        outputs = opened.candidate.outputs if opened.candidate is not None else {}
        wanted = [(slot, alias, t) for slot, alias, t in live if slot in outputs]
        if not wanted:
            raise NotReplayed("what it gives has other names than in the candidate run")
        # Without held arguments the module is a proven layer of torch, which draws nothing.
        with contextlib.nullcontext() if opened.held is None else undrawn() as before:
            way, good = self._way_that_reproduces(opened, wanted, part)
            self._require_weights(opened, way)

            def check() -> None:
                if before is not None and opened.proven and has_drawn(before):
                    raise self._drawing()

            kept = self._apply(RepeatedCall(opened, way, part, wanted, good, {}), check)
            if self._is_the_end(opened, way):
                self.report.end(
                    opened.site,
                    self._apply.from_end_to_end(RepeatedCall(opened, way, part, wanted, good, {})),
                )
        for slot in kept.left_out:
            self.report.left_out(opened.site, slot)
        self.report.replayed(
            opened.site,
            way,
            its_own=kept.is_its_own,
            near=kept.near,
            masks=self._recast.same_masks(opened.site),
        )

    def _is_the_end(self, opened: OpenCall, way: str) -> bool:
        """Whether a call is one of the model itself, and can be applied as a whole in its format.

        That is not possible for mixed formats or updated weights.
        """
        if len(self._session.frames()) > 1 or way != "own code":
            return False
        return self._candidate.format is not None and not self._learnt

    def _require_weights(self, opened: OpenCall, way: str) -> None:
        """Raise if an optimizer changed the weights and they are not known to equal the captured.

        Only the modules that run are checked: own code does not need the weights of its parts.
        """
        for module in self._parts.real(opened, way, own=False).values():
            learnt = any(id(p) in self._learnt for p in module._parameters.values())
            site = self._site_of(module) or ""
            if learnt and not self._candidate.has_weights(site, opened.frame.step, module):
                raise WeightsUpdated

    def _way_that_reproduces(
        self, opened: OpenCall, wanted: Slots, part: int
    ) -> tuple[str, set[str]]:
        """The way in which the module reproduces its output from its inputs, and the slots."""
        module = opened.frame.module
        everything = {slot for slot, _, _ in wanted}
        if opened.proven:
            return opened.proven, everything
        assert opened.held is not None
        drawn = False
        # Own code is tried first: it is cheaper, and it locates errors more precisely.
        for way in ("own code", "whole") if opened.parts else ("leaf",):
            if way == "whole":
                self._require_room(sum(p.nbytes for p in module.parameters()))
            args, kwargs = copied(opened.held, clone if way == "whole" else itself)
            before = random_state()
            real = self._parts.real(opened, way, own=True)
            script = self._parts.own(opened, way)
            tensors = self._recast.as_they_are(real)
            result = repeat(script, module, real, tensors, args, kwargs)
            if has_drawn(before):
                drawn = True
                continue
            again = {slot: tensor for slot, _, tensor in layers.outputs(result, part)}
            good = {
                slot
                for slot, _, tensor in wanted
                if slot in again and same_bits(again[slot], tensor)
            }
            if good:
                if good == everything:
                    self._alike[likeness(opened)] = way
                return way, good
            drawn = False
        if drawn:
            raise self._drawing()
        raise NotReproduced("applied to its own inputs again it does not give its own output")

    def _drawing(self) -> NotReplayed:
        """The exception for a call that draws random numbers.

        With equal seeds both programs draw the same numbers, so the call does not count as not
        reproduced, and the comparison of the two runs remains valid.
        """
        kind = NotReplayed if self._candidate.seed == torch.initial_seed() else NotReproduced
        return kind("it draws random numbers")
