"""`driftline push`: a run or a comparison of this machine → an address elsewhere."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from driftline.cli import python_script as script
from driftline.cli.options import URLS, place
from driftline.errors import EXIT_COULD_NOT, EXIT_FINE


def push(
    folder: Annotated[Path, place("FOLDER")],
    url: Annotated[Path, URLS, place("URL")],
    /,
    *,
    force: bool = False,
    patience: Annotated[float, Parameter(metavar="SECONDS")] = 60.0,
) -> int:
    """Send a run or a comparison to an address, or go on sending what a dump left.

        driftline push ref s3://bucket/ref
        driftline push ref.sending s3://bucket/ref

    Addresses are those of fsspec: s3://, gs://, hf://, memory:// and others; what each of them
    needs is told when it is missing. What has arrived is not sent again. Exit code 2 if something
    did not arrive.

    Args:
        folder: A run, a comparison, or what `driftline dump -o URL` could not send.
        url: Where to.
        force: Replace the run or comparison that is there.
        patience: Give up after so many seconds in which nothing moved.
    """
    from driftline.runs.stores.addresses import memory_warning
    from driftline.runs.stores.api import push as push_folder
    from driftline.units import size_text

    sent = script.step("sent", push_folder, folder, url, force=force, patience=patience)
    script.end(sent)
    files = "1 file" if sent.files == 1 else f"{sent.files} files"
    if not sent.reason:
        print(f"driftline: {files}, {size_text(sent.size)}, sent to {sent.url}", file=sys.stderr)
        if warning := memory_warning(sent.url):
            print(f"  {warning}", file=sys.stderr)
        return EXIT_FINE
    # What has arrived is not sent again, so the same command goes on.
    again = f"driftline push {shlex.quote(str(folder))} {shlex.quote(str(url))}"
    print(f"driftline: not all of it is at {sent.url}: {sent.reason}", file=sys.stderr)
    print(f"  {sent.left} files wait in {sent.folder}", file=sys.stderr)
    print(f"  hint: go on with: {again}", file=sys.stderr)
    return EXIT_COULD_NOT
