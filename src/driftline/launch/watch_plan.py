"""What a launched program must know to watch itself for errors, as one frozen value.

The counterpart of the capture plan; a woken process tells the two apart by `task`. Starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, cast, get_args

from driftline.adapters.findings import TYPES
from driftline.errors import BadInput, did_you_mean
from driftline.launch.plan import LOG_LEVELS, LogLevel

TASK = "errcheck"
SCHEMA = 1
WatchLevel = Literal["operator", "module"]
Engine = Literal["torch", "atb"]


@dataclass(frozen=True, slots=True)
class WatchPlan:
    """What to look for in a program, and where to put what is found.

    Attributes:
        output: Absolute path of the user's folder: the seed's text goes there.
        folder: Absolute path of the findings and the run with their tensors; made with the first.
        types: overflow, nan, inf, saturation, underflow, all.
        level: operator or module.
        allow: Globs on sites and operators that may make what they like.
        exit: Stop the program at the first finding.
        max_bytes: Keep no more tensor bytes than this.
        log_level: How much is said.
        command: The program, word by word.
        engine: atb switches the probe of the ATB library on beside torch's watch.
        launcher: Process that waits for the program.
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
        for name, value, known in (
            ("type", self.types, TYPES),
            ("level", (self.level,), get_args(WatchLevel)),
            ("engine", (self.engine,), get_args(Engine)),
            ("log level", (self.log_level,), LOG_LEVELS),
        ):
            for word in value:
                if word not in known:
                    raise BadInput(f"there is no {name} '{word}'", hint=did_you_mean(word, known))

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
    """Whether a plan's text asks for the watch rather than for a capture."""
    try:
        data: object = json.loads(text)
    except ValueError:
        return False
    return isinstance(data, dict) and cast("Mapping[str, object]", data).get("task") == TASK
