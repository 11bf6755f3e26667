"""The words of `driftline dump`, read leniently where the seed is loose and refused where they mean
nothing.

Each function takes what was typed and returns a value or raises one sentence; none of them acts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from driftline import settings
from driftline.captures.launch.jobs import Engine
from driftline.captures.options import Budgets, budgets_from
from driftline.captures.selection import patterns
from driftline.errors import BadInput
from driftline.runs.layout import SENT_SHARD_BYTES as SENT_SHARD_BYTES
from driftline.units import size_of

if TYPE_CHECKING:
    from driftline.runs.stores.upload import Sent

_SEPARATORS = re.compile(r"[,，、\s]+")
_OPERATOR = re.compile(r"[<>|;&]+")
_YES = frozenset({"true", "yes", "y", "t", "1", "on"})
_NO = frozenset({"false", "no", "n", "f", "0", "off"})


def command_of(text: str, program: Sequence[str], command: str = "dump") -> list[str]:
    """The command, from `--exec TEXT` or from the words after `--`.

    >>> command_of("python x.py --name 'a > b'", [])
    ['python', 'x.py', '--name', 'a > b']
    """
    if text and program:
        raise BadInput(
            "the program is given twice, by --exec and after --", hint="give one of them"
        )
    if program:
        return list(program)
    if not text.strip():
        raise BadInput(
            "there is no program to run",
            hint=f'driftline {command} --exec "python infer.py", '
            f"or: driftline {command} -- python infer.py",
        )
    operator = shell_operator(text)
    if operator:
        raise BadInput(
            f"--exec starts one program without a shell, so it cannot do '{operator}'",
            hint="put the line into a script and give --exec 'bash script.sh', "
            f"or: driftline {command} -- bash -c '...'",
        )
    try:
        return shlex.split(text)
    except ValueError as problem:
        raise BadInput(
            f"--exec cannot be read: {str(problem).lower()}", hint="close every quotation mark"
        ) from None


def place_of_run(output: str, stage: str) -> tuple[str, str]:
    """The folder that is written, and the address it is sent to; empty if it stays there."""
    url = None
    if "://" in output:
        from driftline.runs.stores.addresses import last_part, place_of, url_of

        if (url := url_of(place_of(output))) is not None:
            from driftline.runs.stores.upload import staging_for

            return str(staging_for(last_part(url), stage)), url
        output = str(place_of(output))
    if stage:
        raise BadInput(
            "--stage is for runs that are sent elsewhere, and -o is a folder here",
            hint="leave it out, or give an address with -o, such as s3://bucket/run",
        )
    return str(Path(output or f"driftline_{datetime.now():%Y%m%d_%H%M%S}").absolute()), ""


def refuse_what_passes(url: str) -> None:
    """A program is not run for a place that is gone when the command ends."""
    from driftline.runs.stores.addresses import memory_warning

    if gone := memory_warning(url):
        raise BadInput(gone, hint="give -o a folder, or an address such as s3://bucket/run")


def shown(path: str) -> str:
    """A path as short as it still works from here."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


def said_unsent(sent: Sent, url: str) -> list[str]:
    """What waits here after a run was sent in part, and how to go on."""
    where = shown(str(sent.folder))
    files = "1 file" if sent.left == 1 else f"{sent.left} files"
    return [
        f"driftline: not all of it is at {sent.url}: {sent.reason}",
        f"  {files} wait in {where}",
        f"  hint: go on with: driftline push {shlex.quote(where)} {shlex.quote(url)}",
    ]


def shell_operator(text: str) -> str:
    """The first unquoted redirection, pipe or separator in a command line; empty if there is none.

    A `&` inside a word (an address with a query) is left alone.

    >>> shell_operator("a 2> log"), shell_operator("a '|' b"), shell_operator("get x?a=1&b=2")
    ('>', '', '')
    """
    quote = ""
    at = 0
    while at < len(text):
        letter = text[at]
        if letter == "\\" and quote != "'":
            at += 2
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            found = _OPERATOR.match(text, at)
            if found and (found[0] != "&" or not text[at + 1 : at + 2].strip()):
                return found[0]
        at += 1
    return ""


def steps_of(execute_range: str, step: Sequence[str] | None) -> tuple[str, ...]:
    """Step patterns from `-er` or `--step`; step 0 when neither is given.

    >>> steps_of("3,5,7,7", None), steps_of("", None), steps_of("", ["*"])
    (('3-5', '7-7'), ('0',), ())
    """
    if step is not None:
        if execute_range:
            raise BadInput(
                "the steps are given twice, by -er and by --step", hint="give one of them"
            )
        chosen = patterns(step)
        return () if "*" in chosen else chosen
    if not execute_range:
        return ("0",)
    words = [word for word in _SEPARATORS.split(execute_range.strip()) if word]
    for word in words:
        if word.startswith("-") and word[1:].isdecimal():
            raise BadInput(
                f"-er counts steps from 0 upwards, so it cannot begin at {word}",
                hint="write pairs of numbers, such as -er 0,3",
            )
        if not word.isdecimal():
            raise BadInput(
                f"-er takes pairs of step numbers, and '{word}' is no number",
                hint="-er 3,5,7,7 selects the steps 3, 4, 5 and 7",
            )
    numbers = [int(word) for word in words]
    if len(numbers) % 2 or not numbers:
        last = numbers[-1] if numbers else 0
        raise BadInput(
            f"-er takes pairs of numbers, and '{execute_range}' has an odd one left over",
            hint=f"a single step is a pair too: {last},{last}",
        )
    pairs = list(zip(numbers[0::2], numbers[1::2], strict=True))
    for first, last in pairs:
        if first > last:
            raise BadInput(
                f"-er {first},{last} ends before it begins", hint=f"did you mean {last},{first}?"
            )
    return tuple(f"{first}-{last}" for first, last in pairs)


def ids_of(given: Sequence[str] | None) -> tuple[str, ...]:
    """Places in the module tree; a blank after a comma and full-width commas are welcome.

    >>> ids_of(["2,", "3_1"]), ids_of(["2，3_1"])
    (('2', '3_1'), ('2', '3_1'))
    """
    return names_of(given)


def names_of(given: Sequence[str] | None) -> tuple[str, ...]:
    """A comma list that may have come as several words."""
    return tuple(word for word in _SEPARATORS.split(",".join(given or ())) if word)


def yes_or_no(option: str, word: str) -> bool:
    """
    >>> yes_or_no("-child", "True"), yes_or_no("-child", "n")
    (True, False)
    """
    if word.lower() in _YES:
        return True
    if word.lower() in _NO:
        return False
    raise BadInput(f"{option} takes true or false, not '{word}'")


def engine_of(given: Engine | None) -> tuple[Engine, bool]:
    """Which engine, and whether the user named it: ATB by itself where the library is set up."""
    if given is not None:
        return given, True
    return ("atb" if settings.atb_home() else "torch"), False


def device_of(index: int | None) -> int | None:
    if index is not None and index < 0:
        raise BadInput(f"-device takes the index of a device, from 0 upwards, not {index}")
    return index


def budgets_of(device: str, host: str, when_full: str) -> Budgets:
    """Memory for tensors of devices, from sizes as people write them."""
    return budgets_from(
        _budget("--device-budget", device), _budget("--host-budget", host), when_full
    )


def _budget(option: str, text: str) -> int | None:
    if not text:
        return None
    try:
        return 0 if text.strip() == "0" else size_of(text)
    except BadInput as error:
        raise BadInput(f"{option} is a size such as 500MB or 2GiB, or 0, not '{text}'") from error
