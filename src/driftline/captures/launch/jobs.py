"""Plans for launched programs: to capture tensors, or to check for errors.

The command line or a caller of `run_command` makes a plan. It is written to a JSON file, read in
every process of the program that imports a framework, and printed by `--dry-run`. This file starts
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

from driftline.captures import framework
from driftline.captures.errcheck.findings import TYPES
from driftline.captures.model_facts import FactOptions
from driftline.captures.options import Budgets, Reduction
from driftline.captures.selection import Selection, require_visible
from driftline.errors import BadInput, did_you_mean
from driftline.runs.redaction import redact_argv

# Only the version that wrote a plan reads it; another version refuses it.
SCHEMA = 1

Layout = Literal["run", "ait"]
Level = Literal["modules", "ops", "gradients", "params"]
DumpType = Literal["tensor", "model", "layer", "op", "kernel", "cpu_profiling", "onnx"]
GraphEngine = Literal["", "auto", "fx", "inductor"]
Engine = Literal["torch", "atb"]
FRAMEWORKS = tuple(framework.FRAMEWORKS)
"""Frameworks that are captured if a program imports them."""
TORCH_LISTS: tuple[DumpType, ...] = ("op", "kernel", "cpu_profiling", "onnx")
"""Types of a dump that need torch's operators or its profiler."""
LogLevel = Literal["debug", "info", "warning", "error", "fatal", "critical"]

LEVELS: tuple[Level, ...] = get_args(Level)
LOG_LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """What to capture of a program, and where to write it.

    Attributes:
        output: Absolute path of the run, or of the folder for the tree of `ait llm dump`.
        selection: The tensors to capture.
        reduction: What to keep of each tensor.
        levels: One or more of modules, ops, gradients, params.
        types: What to write: `tensor` tensors; `model` and `layer` the module tree; `op` the list
            of operators; `kernel` and `cpu_profiling` the results of torch's profiler; `onnx` ONNX
            files of model or layer.
        layout: `run`, or `ait` for the tree of `ait llm dump`.
        max_bytes: No more values are stored beyond this size; 0 means no limit.
        tiling: Whether tiling data were requested. torch has none, so this becomes an event.
        log_level: The least severe messages that the launched processes and the launcher print.
        command: The program's command line, for the manifest; its secrets are removed at once.
        engine: `atb` also switches on the probe of the ATB library.
        frameworks: Frameworks that are captured if the program imports them.
        experiment: An experiment with the program: its `kind` and the parameters of that kind.
        url: Address to which the output is sent while the program runs; empty to send nothing.
        shard_bytes: Beyond this size, a new file of values begins; 0 means the format's default.
        graph: What to record of the graphs of torch.compile: `auto` what the program's backend
            runs, `fx` their nodes, executed one by one, `inductor` the kernels that inductor makes
            of them; empty for nothing.
        fusion: Whether inductor may fuse kernels.
        budgets: Memory for tensors of devices, and what happens if it is used up.
        facts: Which facts about the models are written.
        step_budget: Bytes of disk for the steps after the first if no steps were named; -1 means
            the default.
    """

    output: str
    selection: Selection = field(default_factory=Selection)
    reduction: Reduction = field(default_factory=Reduction)
    levels: tuple[Level, ...] = ("modules",)
    types: tuple[DumpType, ...] = ("tensor",)
    layout: Layout = "run"
    max_bytes: int = 0
    tiling: bool = False
    log_level: LogLevel = "info"
    command: tuple[str, ...] = ()
    engine: Engine = "torch"
    frameworks: tuple[str, ...] = FRAMEWORKS
    experiment: Mapping[str, Any] = field(default_factory=dict[str, Any])
    url: str = ""
    shard_bytes: int = 0
    budgets: Budgets = field(default_factory=Budgets)
    graph: GraphEngine = ""
    fusion: bool = True
    facts: FactOptions = field(default_factory=FactOptions)
    step_budget: int = -1

    # Checked here, before the program starts, because it may run for an hour.
    def __post_init__(self) -> None:
        # Plans are printed and stored in files, and nothing is started from this command.
        object.__setattr__(self, "command", tuple(redact_argv(self.command)))
        for name, value, allowed in (
            ("level", self.levels, LEVELS),
            ("type", self.types, get_args(DumpType)),
            ("layout", (self.layout,), get_args(Layout)),
            ("engine", (self.engine,), get_args(Engine)),
            ("graph", (self.graph,), get_args(GraphEngine)),
            ("log level", (self.log_level,), LOG_LEVELS),
        ):
            for word in value:
                if word not in allowed:
                    raise BadInput(f"there is no {name} '{word}'", hint=did_you_mean(word, allowed))
        # Without tensors the ports of the selection have no meaning.
        if self.wants_tensors:
            require_visible(self.selection.ports, self.levels)
        if "onnx" in self.types and not {"model", "layer"} & set(self.types):
            raise BadInput(
                "--type onnx draws what model or layer hold, and neither is given",
                hint="--type model onnx, or --type layer onnx",
            )
        self._check_graph()
        if self.max_bytes < 0:
            raise BadInput(
                "the limit of bytes cannot be negative", hint="leave --max-bytes out for no limit"
            )
        # The probe and the ait layout write many files in place; only a run can be sent while it
        # grows.
        if self.url and (self.layout != "run" or self.engine == "atb"):
            what = "the ait layout" if self.layout != "run" else "what the ATB probe writes"
            raise BadInput(
                f"{what} stays on this machine, and -o is an address elsewhere",
                hint="give a folder, and copy it afterwards; or --layout run --engine torch",
            )
        # The layout's statistics.csv has figures and shapes, but no field for other reductions.
        kept = self.reduction.kept
        if self.layout == "ait" and self.wants_tensors and kept in ("digest", "sample"):
            raise BadInput(
                f"the ait layout holds tensors, summaries or descriptions, and has no place for "
                f"'{self.reduction}'",
                hint="leave out --layout ait; a run holds every reduction",
            )

    def _check_graph(self) -> None:
        if not self.fusion and self.graph != "inductor":
            raise BadInput(
                "--no-fusion is for the kernels of inductor", hint="--graph inductor --no-fusion"
            )
        if not self.graph:
            return
        if self.layout == "ait" or not self.wants_tensors:
            raise BadInput(
                f"--graph {self.graph} records tensors into a run",
                hint="leave out --layout ait, and --type or give it tensor",
            )
        # Compiled graphs run no operators that the level ops could capture.
        if "ops" in self.levels:
            raise BadInput(
                f"--graph {self.graph} records the operators of compiled graphs, --level ops those "
                "of a program that is not compiled",
                hint="make two runs, the second with TORCHDYNAMO_DISABLE=1 and --level ops",
            )

    @property
    def wants_tensors(self) -> bool:
        return "tensor" in self.types

    @property
    def wants_calls(self) -> bool:
        """Whether the list of operators is needed; ait's topology files name tensors from it."""
        topology = "model" in self.types or "layer" in self.types
        return "op" in self.types or "onnx" in self.types or (self.layout == "ait" and topology)

    @property
    def wants_profile(self) -> bool:
        return "kernel" in self.types or "cpu_profiling" in self.types

    @property
    def step_option(self) -> str:
        """The option that selects steps; with the ait layout, the name of ait's option."""
        return "-er" if self.layout == "ait" else "--step"

    def advised_steps(self, first: int, last: int) -> str:
        """A sentence that says how to select these steps."""
        if self.layout == "ait":
            return f"select these with {self.step_option} {first},{last}"
        steps = f"{first}-{last}" if first != last else f"{first}"
        return f"select all steps with --step '*', or these with --step {steps}"

    def says(self, level: LogLevel) -> bool:
        """Whether a message of that level is to be shown."""
        return LOG_LEVELS.index(level) >= LOG_LEVELS.index(self.log_level)

    def to_json(self) -> str:
        """The plan as indented JSON, which `--dry-run` prints and the program reads."""
        return json.dumps(
            {
                "schema": SCHEMA,
                "output": self.output,
                "selection": self.selection.to_json(),
                "reduction": self.reduction.to_json(),
                "levels": self.levels,
                "types": self.types,
                "layout": self.layout,
                "max_bytes": self.max_bytes,
                "tiling": self.tiling,
                "log_level": self.log_level,
                "command": self.command,
                "engine": self.engine,
                # Defaults are left out, so that a printed plan shows what the user chose.
                **({"frameworks": self.frameworks} if self.frameworks != FRAMEWORKS else {}),
                **({"experiment": self.experiment} if self.experiment else {}),
                **({"url": self.url} if self.url else {}),
                **({"shard_bytes": self.shard_bytes} if self.shard_bytes else {}),
                **({"graph": self.graph, "fusion": self.fusion} if self.graph else {}),
                **({"budgets": self.budgets._asdict()} if self.budgets != Budgets() else {}),
                **({"facts": self.facts._asdict()} if self.facts != FactOptions() else {}),
                **({"step_budget": self.step_budget} if self.step_budget >= 0 else {}),
            },
            indent=2,
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            parsed: object = json.loads(text)
        except ValueError as problem:
            raise BadInput(f"the capture plan is no JSON: {problem}") from None
        if not isinstance(parsed, dict):
            raise BadInput("the capture plan is no JSON object")
        data = cast("Mapping[str, Any]", parsed)
        # A program may import its own installed Driftline instead of the launcher's.
        if data.get("schema") != SCHEMA:
            raise BadInput(
                f"the capture plan has schema {data.get('schema')!r}, this version reads {SCHEMA}",
                hint="the program sees another version of driftline than the one that launched it",
            )
        return cls(
            output=data["output"],
            selection=Selection.from_json(data["selection"]),
            reduction=Reduction.from_json(data["reduction"]),
            levels=tuple(data["levels"]),
            types=tuple(data["types"]),
            layout=data["layout"],
            max_bytes=data["max_bytes"],
            tiling=data["tiling"],
            log_level=data["log_level"],
            command=tuple(data["command"]),
            engine=data["engine"],
            # Keys that are written only if they differ from the default need a default here.
            frameworks=tuple(data.get("frameworks", FRAMEWORKS)),
            experiment=data.get("experiment", {}),
            url=data.get("url", ""),
            shard_bytes=data.get("shard_bytes", 0),
            graph=data.get("graph", ""),
            fusion=data.get("fusion", True),
            budgets=Budgets(**data.get("budgets", {})),
            facts=FactOptions(**data.get("facts", {})),
            step_budget=data.get("step_budget", -1),
        )


def read_plan(path: str | Path) -> CapturePlan:
    return CapturePlan.from_json(Path(path).read_text(encoding="utf-8"))


# The error check's plan.


TASK = "errcheck"
WatchLevel = Literal["operator", "module"]


@dataclass(frozen=True, slots=True)
class WatchPlan:
    """How to check a program for errors, and where to write the findings.

    Attributes:
        output: Absolute path of the user's folder, for ait's text file.
        folder: Absolute path of the folder for the findings and the run with their tensors; it is
            created with the first finding.
        types: One or more of overflow, nan, inf, saturation, underflow, all.
        level: operator or module.
        allow: Globs on sites and operators that may produce any value.
        exit: Whether to stop the program at the first finding.
        max_bytes: The run stores at most this many bytes of tensors.
        log_level: The least severe messages that are printed.
        command: The program's command line; its secrets are removed at once.
        engine: `atb` also switches on the probe of the ATB library.
        launcher: Id of the process that waits for the program.
    """

    output: str
    folder: str
    types: tuple[str, ...] = ("overflow",)
    level: WatchLevel = "operator"
    allow: tuple[str, ...] = ()
    exit: bool = False
    max_bytes: int = 256 << 20
    log_level: LogLevel = "info"
    command: tuple[str, ...] = ()
    engine: Engine = "torch"
    launcher: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", tuple(redact_argv(self.command)))
        for name, value, allowed in (
            ("type", self.types, TYPES),
            ("level", (self.level,), get_args(WatchLevel)),
            ("engine", (self.engine,), get_args(Engine)),
            ("log level", (self.log_level,), LOG_LEVELS),
        ):
            for word in value:
                if word not in allowed:
                    raise BadInput(f"there is no {name} '{word}'", hint=did_you_mean(word, allowed))

    def says(self, level: LogLevel) -> bool:
        """Whether a message of that level is to be shown."""
        return LOG_LEVELS.index(level) >= LOG_LEVELS.index(self.log_level)

    def to_json(self) -> str:
        return json.dumps({"task": TASK, "schema": SCHEMA, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        data = dict(cast("Mapping[str, Any]", json.loads(text)))
        if data.pop("task", None) != TASK or data.pop("schema", None) != SCHEMA:
            raise BadInput(
                "the plan is none of this version's error watch",
                hint="the program sees another version of driftline than the one that launched it",
            )
        for name in ("types", "allow", "command"):
            data[name] = tuple(data[name])
        return cls(**data)


def is_watch_plan(text: str) -> bool:
    """Whether the text is a plan of the error check, not of a capture."""
    try:
        data: object = json.loads(text)
    except ValueError:
        return False
    return isinstance(data, dict) and cast("Mapping[str, object]", data).get("task") == TASK
