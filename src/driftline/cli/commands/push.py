"""`driftline push`: send a run or a comparison from this machine to an address."""

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
    """Send a run or a comparison to an address, or send the rest of a dump.

        driftline push ref s3://bucket/ref
        driftline push ref.sending s3://bucket/ref

    Addresses are those of fsspec: s3://, gs://, hf://, memory:// and others. If the package for an
    address is missing, a message names it. Files that were sent before are not sent again. Exit
    code 2 if a file could not be sent.

    Args:
        folder: A run, a comparison, or the folder that `driftline dump -o URL` could not send.
        url: The address to send to.
        force: Replace an existing run or comparison at the address.
        patience: Stop after this many seconds without progress.
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
    print(f"  {sent.left} files not sent yet, in {sent.folder}", file=sys.stderr)
    print(f"  hint: continue with: {again}", file=sys.stderr)
    return EXIT_COULD_NOT
