"""`driftline repeat`: is a program deterministic, and is it batch-invariant?"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Literal

from driftline.captures.selection import Selection, patterns
from driftline.cli import dump_words as words
from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.diagnosis.experiments.repeat import lines
from driftline.diagnosis.experiments.repeat import repeat as run_repeat
from driftline.errors import EXIT_DIFFERENT, EXIT_FINE

_WHICH = "Which tensors"


def repeat(
    *program: str,
    exec_: Annotated[str, Option(metavar="COMMAND")] = "",
    times: Annotated[int, Option(names=("--times", "-k"), metavar="N")] = 5,
    vary: Annotated[list[str] | None, Option(several=True, metavar="threads,batch,order")] = None,
    site: Annotated[list[str] | None, Option(several=True, metavar="GLOB", group=_WHICH)] = None,
    class_: Annotated[list[str] | None, Option(several=True, metavar="GLOB", group=_WHICH)] = None,
    step: Annotated[list[str] | None, Option(several=True, metavar="GLOB", group=_WHICH)] = None,
    format_: Literal["table", "json"] = "table",
) -> int:
    """Run a program several times: which site differs first between the repeats?

        driftline repeat --exec "python infer.py" -k 5 --vary threads,batch,order

    Digests of all tensors are compared. --vary also asks whether the number of threads matters,
    whether a sequence gives the same bits alone as in its batch, and whether the order of the batch
    matters; the program is not changed for that. The exit code is 1 where something differs.

    Args:
        program: The program and its arguments, after two dashes.
        exec_: The program as one text; no pipes or redirection.
        times: How often it is run as it is.
        vary: What else is changed: threads, batch, order; with commas.
        site: Only module paths that match.
        class_: Only classes that match.
        step: Steps as numbers, ranges (3-5, 3-) or globs; '*' is all of them. Default: step 0.
        format_: json prints one object.
    """
    asked = [word for text in vary or () for word in text.replace(",", " ").split()]
    found = script.step(
        "found",
        run_repeat,
        words.command_of(exec_, program, "repeat"),
        times=times,
        vary=asked,
        selection=Selection(
            sites=patterns(site), classes=patterns(class_), steps=words.steps_of("", step)
        ),
        tell=lambda sentence: print(f"driftline: {sentence}", file=sys.stderr),
    )
    script.end(found)
    if format_ == "json":
        print(json.dumps(found.to_json(), indent=1))
    else:
        for line in lines(found):
            print(line)
    return EXIT_FINE if found.same else EXIT_DIFFERENT
