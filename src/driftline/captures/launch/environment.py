"""Make the folder in front of a program's PYTHONPATH, for environments without Driftline.

Such an environment has no `driftline-launch.pth`. The folder holds a `sitecustomize`, which starts
the bootstrap and then loads the program's own `sitecustomize`, and a link to the `driftline`
package. No other package of the launcher's environment becomes importable, because it would shadow
the program's own numpy and torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from driftline import settings

PLAN = "plan.json"
MESSAGES = "messages"
_CUSTOMIZE = '''\
"""Written by `driftline dump` for one program; wakes its capture, then makes way for yours."""
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
try:
    from driftline.captures.launch.bootstrap import wake

    wake(os.path.join(os.path.dirname(_here), "plan.json"))
except Exception:
    pass


def _next(name):
    folders = [p for p in sys.path if os.path.abspath(p or ".") != _here]
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        spec = find(name, folders) if find else None
        if spec is not None and spec.loader is not None:
            return spec
    return None


_spec = _next(__name__)
if _spec is not None:
    from importlib.util import module_from_spec as _module

    _own = sys.modules[__name__] = _module(_spec)
    _spec.loader.exec_module(_own)
'''


class Plan(Protocol):
    """A plan for the launched processes, which they read as JSON."""

    def to_json(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ProgramEnvironment:
    """The private folder of one launch: the plan, the processes' messages and the path entry."""

    folder: Path

    @property
    def plan_path(self) -> Path:
        return self.folder / PLAN

    @property
    def messages(self) -> Path:
        return self.folder / MESSAGES

    @property
    def path_entry(self) -> Path:
        return self.folder / "path"

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` with the path of the plan, and the path entry in front of its PYTHONPATH."""
        env = dict(base)
        own = env.get("PYTHONPATH", "")
        # An empty PYTHONPATH entry would mean the current folder.
        env["PYTHONPATH"] = f"{self.path_entry}:{own}" if own else str(self.path_entry)
        env[settings.LAUNCH] = str(self.plan_path)
        return env


def build_environment(folder: Path, plan: Plan) -> ProgramEnvironment:
    """Fill an empty folder for one launch."""
    program_environment = ProgramEnvironment(folder)
    program_environment.messages.mkdir()
    program_environment.path_entry.mkdir()
    # The folder of the package `driftline` itself.
    package = Path(__file__).resolve().parents[2]
    link = program_environment.path_entry / package.name
    try:
        link.symlink_to(package, target_is_directory=True)
    except OSError:  # a file system without links
        shutil.copytree(package, link, ignore=shutil.ignore_patterns("__pycache__"))
    # `usercustomize` is used too, because a script may put its own `sitecustomize` before ours.
    for name in ("sitecustomize.py", "usercustomize.py"):
        (program_environment.path_entry / name).write_text(_CUSTOMIZE, encoding="utf-8")
    program_environment.plan_path.write_text(plan.to_json(), encoding="utf-8")
    return program_environment
