"""The commands, by name: where each one lives, and the line the overview shows for it.

A leaf that imports nothing: `driftline --help` is painted from this table alone, so that it costs
no more than starting Python. A command's module is imported when it is run or asked for help.
"""

from __future__ import annotations


class Command:  # no dataclass: importing those takes as long as starting Python
    """One command of the command line.

    Attributes:
        address: `module:function`. The function's signature is the command's options, its docstring
            the help, its return value the exit code (None is 0).
        group: Heading in the overview.
        summary: One line, no full stop.
        takes_program: The words after `--` are somebody's command line. A bare word before `--` is
            then a misspelt option, never the first word of that command.
    """

    __slots__ = ("address", "group", "summary", "takes_program")

    def __init__(
        self, address: str, group: str, summary: str, *, takes_program: bool = False
    ) -> None:
        self.address = address
        self.group = group
        self.summary = summary
        self.takes_program = takes_program


COMMANDS: dict[str, Command] = {
    "dump": Command(
        "driftline.cli.dump:dump",
        "Capture",
        "run an unchanged program and keep what its model computed",
        takes_program=True,
    ),
    "errcheck": Command(
        "driftline.cli.errcheck:errcheck",
        "Capture",
        "run an unchanged program: who made the first NaN or infinity",
        takes_program=True,
    ),
    "push": Command(
        "driftline.cli.push:push",
        "Capture",
        "send a run or a comparison to s3:// or another address",
    ),
    "compare": Command(
        "driftline.cli.compare:compare",
        "Compare",
        "two runs or tensor files: which layers differ, which one first",
    ),
    "merge": Command(
        "driftline.cli.merge:merge",
        "Compare",
        "the shards of a comparison: its table, as one process would make it",
    ),
    "calibrate": Command(
        "driftline.cli.calibrate:calibrate",
        "Compare",
        "clean comparisons: limits for every layer",
    ),
    "check": Command(
        "driftline.cli.check:check",
        "Compare",
        "a comparison against such limits: the first layer beyond its own",
    ),
    "labels": Command(
        "driftline.cli.labels:labels",
        "Compare",
        "run a program that labels tensors in pairs, and compare the pairs",
        takes_program=True,
    ),
    "check-hooks": Command(
        "driftline.cli.check_hooks:check_hooks",
        "Compare",
        "two trees of the saving hook: one csv of figures per rank",
    ),
    "opcheck": Command(
        "driftline.cli.opcheck:opcheck",
        "Operators",
        "single operators of a dump against what they should compute",
    ),
    "metrics": Command(
        "driftline.cli.metrics:metrics",
        "Decoders",
        "a decoder on two targets: scores of every generated token",
    ),
    "layer-metrics": Command(
        "driftline.cli.layer_metrics:layer_metrics",
        "Decoders",
        "a decoder on two targets: differences of every layer",
    ),
    "thresholds": Command(
        "driftline.cli.thresholds:thresholds",
        "Decoders",
        "metric files of clean runs: how much is normal, per model or layer",
    ),
    "validate": Command(
        "driftline.cli.validate:validate",
        "Decoders",
        "a decoder against such limits: equal tokens, or rates of failing ones",
    ),
    "diagnose": Command(
        "driftline.cli.diagnose:diagnose",
        "Diagnose",
        "two runs: where the drift starts, whether it is more than noise, what kind of bug it is",
    ),
    "replay": Command(
        "driftline.cli.replay:replay",
        "Diagnose",
        "run the reference program, its modules also on the candidate's inputs",
    ),
    "noise": Command(
        "driftline.cli.noise:noise",
        "Diagnose",
        "run a trusted program in other ways that are all right: what is normal",
        takes_program=True,
    ),
    "bisect": Command(
        "driftline.cli.bisect:bisect",
        "Diagnose",
        "run the candidate with outputs replaced: which block makes the error",
        takes_program=True,
    ),
    "repeat": Command(
        "driftline.cli.repeat:repeat",
        "Diagnose",
        "run a program several times: is it deterministic, is it batch-invariant",
        takes_program=True,
    ),
    "trend": Command(
        "driftline.cli.trend:trend",
        "Diagnose",
        "a figure of every layer over steps or releases: when did it start to grow",
    ),
    "report": Command(
        "driftline.cli.report:report",
        "Look",
        "a comparison as one HTML file: to look at, to attach to a bug, to keep",
    ),
    "view": Command(
        "driftline.cli.view:view",
        "Look",
        "two runs in a browser: the report's page, and every tensor behind it",
    ),
    "show": Command(
        "driftline.cli.show:show", "Look", "what is in a run, a comparison table or a tensor file"
    ),
    "convert": Command(
        "driftline.cli.convert:convert", "Look", "a dump of any kind into a run, or back out"
    ),
    "topology": Command(
        "driftline.cli.topology:topology", "Look", "the structure of a model, for a graph viewer"
    ),
    "doctor": Command(
        "driftline.cli.doctor:doctor", "Look", "versions, kernel path and devices of this machine"
    ),
}

EXIT_CODES = (
    "exit codes: 0 fine, 1 numbers differ beyond the thresholds, 2 could not do it "
    "(one sentence on stderr says why)"
)


def overview(version: str) -> str:
    """The text of `driftline --help`."""
    lines = [
        f"driftline {version}: two executions of one model disagree; where does it start, "
        "and is it more than noise?",
        "",
        "usage: driftline COMMAND ...",
    ]
    width = max(map(len, COMMANDS)) + 2
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines += ["", f"{group}:"]
        lines += [
            f"  {name:<{width}}{command.summary}"
            for name, command in COMMANDS.items()
            if command.group == group
        ]
    lines += [
        "",
        "driftline COMMAND --help   the options of one command",
        "driftline COMMAND --python the same as a Python program, printed and not run",
        "driftline --version        which version this is",
        "",
        EXIT_CODES,
    ]
    return "\n".join(lines) + "\n"
