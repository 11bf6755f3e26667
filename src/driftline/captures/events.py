"""The kinds of events that a run may contain, and which of them are shown to the user.

Events are written to a run's `events.jsonl` for its reader. Some of them are shown at the end of
`dump`, and each process sends some to the launcher. The summary describes the others in its own
words. A kind that is not listed here (of a plug-in, or of a newer version) is shown and sent.
"""

from __future__ import annotations

from typing import NamedTuple


class EventKind(NamedTuple):
    """One kind of event.

    Attributes:
        meaning: What has happened.
        shown: The summary of a dump repeats its message.
        sent: A launched process sends its message to the launcher.
    """

    meaning: str
    shown: bool = True
    sent: bool = True


EVENTS = {
    # Events that the summary of a dump describes in its own words, or that only a reader of the run
    # needs.
    "ended": EventKind("the program has ended", shown=False, sent=False),
    "estimate": EventKind("size of the first step", shown=False, sent=False),
    "label": EventKind("a label of the program", shown=False),
    "no-match": EventKind("a filter matched nothing", shown=False, sent=False),
    "step": EventKind("a step is over", shown=False, sent=False),
    "steps-skipped": EventKind("steps ran that were not selected", shown=False, sent=False),
    "thinned": EventKind("later steps were left out to keep within the budget"),
    "tiling": EventKind("tiling data do not exist here", sent=False),
    # Something was requested that this program cannot provide.
    "graph": EventKind("compiled graphs exist in torch only"),
    "level": EventKind("a level does not exist in this framework"),
    "no-graph": EventKind("the program compiled no graph"),
    "type": EventKind("a list exists for torch programs only"),
    # Something is not captured, and why.
    "backward-unseen": EventKind("operators of backward passes are not seen"),
    "compile-failed": EventKind("the program's backend failed"),
    "compiled": EventKind("modules inside of compiled regions are not seen"),
    "cuda-graph": EventKind("CUDA graphs were replayed, or not made"),
    "graph-unseen": EventKind("a graph could not be executed node by node"),
    "graphs-unseen": EventKind("this version of torch hides its graphs"),
    "inside": EventKind("the body of a loop or branch is not seen"),
    "kernels": EventKind("the profiler saw no kernel"),
    "kernels-unseen": EventKind("a program written in C++ shows no kernels"),
    "never-awaited": EventKind("results of collectives were never waited for"),
    "operators-left-out": EventKind("operators of a model's building were left out"),
    "operators-unseen": EventKind("operators that a watch would change are not seen"),
    "profiler": EventKind("the profiler could not run"),
    "weights-unknown": EventKind("parameters could not be recognised"),
    # Something was lost or reduced.
    "changed-unseen": EventKind("a tensor that was taken for unchanged had been written to"),
    "calls-limit": EventKind("the list of calls is full"),
    "capture-fault": EventKind("an error of the capture itself"),
    "degraded": EventKind("for lack of memory only summaries are kept"),
    "device-failed": EventKind("a device can be used no more"),
    "device-path": EventKind("tensors of devices are summarised on the host"),
    "disk": EventKind("the disk took nothing more"),
    "dropped": EventKind("tensors were dropped because writing was too slow"),
    "gradient-lost": EventKind("a gradient could not be captured"),
    "limit": EventKind("the size limit was reached"),
    "lost": EventKind("a tensor could not be converted"),
    "operator-lost": EventKind("an operator could not be captured"),
    "parameters-lost": EventKind("parameters could not be captured"),
    "refused": EventKind("a tensor cannot be stored"),
    "expanded": EventKind("a view that repeats its elements is kept as a summary"),
    "too-large": EventKind("a tensor exceeds the host budget"),
    "unsealed": EventKind("an earlier process left its part open"),
    "waited": EventKind("the program waited for the run to be written"),
    # Results of checks.
    "differs": EventKind("the captured run differs from one without capture"),
    "exception": EventKind("the program raised an exception"),
    "finding": EventKind("the error check found something"),
    "graphs": EventKind("what was done with compiled graphs"),
    "operators-off": EventKind("what a compiler made of an operator gives something else"),
}


def is_shown(kind: str) -> bool:
    """Whether the summary of a dump repeats events of a kind."""
    return kind not in EVENTS or EVENTS[kind].shown


def is_sent(kind: str) -> bool:
    """Whether a launched process sends events of a kind to the launcher."""
    return kind not in EVENTS or EVENTS[kind].sent
