"""The Python interface of the viewer: `driftline.view(reference, candidate)` serves a page."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from driftline.alignment.align import AlignOptions
from driftline.comparison.measure.scheduler import Progress
from driftline.comparison.pipeline import RowCache
from driftline.comparison.table.files import TABLE_FILE, is_table, open_table
from driftline.comparison.table.table import Table
from driftline.diagnosis.evidence.files import Evidence, Replay
from driftline.errors import BadInput
from driftline.reporting.html.report import Page, PageOptions, Source, page_of
from driftline.reporting.viewer.server import Server, check_port, open_server
from driftline.reporting.viewer.session import Session
from driftline.runs.layout import MANIFEST
from driftline.runs.run import Run
from driftline.runs.stores.addresses import url_of

if TYPE_CHECKING:
    from _typeshed import StrPath

    from driftline.comparison.tolerance.thresholds import Thresholds


class Viewer:
    """A page that is served in the background by its own thread; made by `serve`.

    Attributes:
        url: Address of the page, including the token.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = server.url
        self._thread = threading.Thread(target=server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<viewer at {self.url}>"

    def _repr_html_(self) -> str:
        return f'<a href="{self.url}" target="_blank" rel="noopener">{self.url}</a>'


def view(
    subject: Source,
    candidate: Run | StrPath | None = None,
    *,
    port: int | None = None,
    browser: bool = False,
    thresholds: Thresholds | StrPath | None = None,
    replay: Replay | StrPath | None = None,
    noise: Sequence[Evidence] = (),
    options: AlignOptions | None = None,
    diagnosis: bool = True,
    title: str = "",
    threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Serve a comparison with its tensors as a web page on this machine until it is interrupted.

    The address is printed. Only those who know it can read the two runs.

    Args:
        subject: The reference; or, without a candidate, a comparison whose runs are still at their
            paths.
        candidate: The run to test.
        port: The first port to try; if it is in use, the next free one.
        browser: Open the page in the browser of this machine.
        thresholds: As for `driftline.report`, like the arguments below.
        replay: What `driftline replay` wrote.
        noise: What `driftline noise` wrote, or trusted runs.
        options: How the runs are aligned.
        diagnosis: Whether to look for the place and cause of the drift.
        title: Title of the page.
        threads: Worker threads of the comparison.
        progress: Called with (pairs done, pairs in total) for the first page.

    Raises:
        DriftlineError: The runs cannot be opened or compared.
    """
    server = _server(
        subject,
        candidate,
        port=port,
        progress=progress,
        about={
            "thresholds": thresholds,
            "replay": replay,
            "noise": noise,
            "options": options,
            "diagnosis": diagnosis,
            "title": title,
            "threads": threads,
        },
    )
    ended = getattr(progress, "close", None)
    if ended is not None:  # its line must be gone before the address is printed
        ended()
    on_end = _stop_when_asked()
    try:
        print(server.url, flush=True)
        print("driftline: the page is there until Ctrl-C stops it", file=sys.stderr, flush=True)
        if browser:
            import webbrowser

            if not webbrowser.open(server.url):
                print("driftline: there is no browser to open it with", file=sys.stderr)
        server.serve_forever()
    except KeyboardInterrupt:
        print("driftline: stopped", file=sys.stderr)
    finally:
        server.server_close()
        on_end()


def serve(
    subject: Source,
    candidate: Run | StrPath | None = None,
    *,
    port: int | None = None,
    **about: Any,
) -> Viewer:
    """Serve the page in the background, for a notebook; the arguments are those of `view`."""
    return Viewer(_server(subject, candidate, port=port, progress=None, about=about))


def _server(
    subject: Source,
    candidate: Run | StrPath | None,
    *,
    port: int | None,
    progress: Progress | None,
    about: dict[str, Any],
) -> Server:
    if candidate is None and _is_lone_run(subject):
        raise BadInput(
            f"there is only one run: {subject}",
            hint="driftline view REF CAND; `driftline show` looks at one run",
        )
    check_port(port)  # before the work is done
    cache = None if candidate is None else RowCache()

    def make() -> Page:
        nonlocal progress
        # Only the first page shows progress; later ones are awaited in a browser.
        shown, progress = progress, None
        wanted = PageOptions(pictures=0, progress=shown, **about)
        return page_of(subject, candidate, wanted, measurer=cache)

    return open_server(Session(make, _watched(subject, candidate)), port)


def _watched(subject: Source, candidate: Run | StrPath | None) -> list[Path]:
    """Files and folders that may change under the page."""
    paths: list[Path] = []
    for source in (subject, candidate):
        if source is not None and not isinstance(source, (Run, Table)):
            paths.append(Path(source))
    for path in tuple(paths):
        if path.name == TABLE_FILE or is_table(path):
            table = open_table(path)
            paths += [Path(side.path) for side in (table.reference, table.candidate) if side.path]
    return paths


def _is_lone_run(subject: Source) -> bool:
    """Whether it is a run of ours; for other folders, the page reports the problem."""
    if isinstance(subject, Run):
        return True
    if not isinstance(subject, Table) and url_of(subject) is not None:
        return not is_table(subject)
    return not isinstance(subject, Table) and (Path(subject) / MANIFEST).is_file()


def _stop_when_asked() -> Any:
    """End on SIGTERM as on Ctrl-C; returns a function that restores the earlier handler."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def stop(number: int, frame: Any) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    return lambda: signal.signal(signal.SIGTERM, before)
