"""The words of `driftline dump`, read leniently where the seed is loose and refused where they mean nothing.

Each function takes what was typed and returns a value or raises one sentence; none of them acts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from driftline.adapters.selection import patterns
from driftline.errors import BadInput

_COMMA = re.compile(r"[,，、\s]+")
_SHELL_WORDS = re.compile(r"\|\|?|&&?|;|\d*>{1,2}(&\d)?|\d*<{1,3}|&>{1,2}|\(|\)")
_GLUED = re.compile(r"(\d*|&)>{1,2}.*|<{1,3}.+|.*[;|&]$")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?", re.IGNORECASE)
_YES = frozenset({"true", "yes", "y", "t", "1", "on"})
_NO = frozenset({"false", "no", "n", "f", "0", "off"})


def command_of(text: str, program: Sequence[str]) -> list[str]:
    """The command, from `--exec TEXT` or from the words after `--`.

    >>> command_of("python x.py --name 'a b'", [])
    ['python', 'x.py', '--name', 'a b']
    """
    if text and program:
        raise BadInput("the program is given twice, by --exec and after --", hint="give one of them")
    if program:
        return list(program)
    if not text.strip():
        raise BadInput(
            "there is no program to run",
            hint='driftline dump --exec "python infer.py", or: driftline dump -- python infer.py',
        )
    # punctuation_chars splits unquoted operators into words of their own, as a shell would.
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        for word in lexer:
            if _SHELL_WORDS.fullmatch(word) and word in _unquoted_operators(text):
                raise BadInput(
                    f"--exec starts one program without a shell, so '{word}' would mean nothing",
                    hint="put the line into a script and give --exec 'bash script.sh', or use "
                    "driftline dump ... -- bash -c '...'",
                )
        return shlex.split(text)
    except ValueError as problem:
        raise BadInput(
            f"--exec cannot be read: {problem}", hint="close every quotation mark"
        ) from None
