"""A folder in a store, accessed through fsspec: names, sizes, ranges, and writing files.

Every call is repeated if the connection fails, and raises a one-sentence error if it keeps failing.
Only this file imports fsspec, when an address is first used. It does not know what the files mean.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from driftline.errors import BadInput, BadRun, DriftlineError, NotInstalled, Unreachable
from driftline.runs.stores.addresses import shown

T = TypeVar("T")

# Six tries with doubling waits bridge an outage of about six seconds.
TRIES = 6
_FIRST_WAIT = 0.2
_LONGEST_WAIT = 5.0
_CREDENTIALS = re.compile(
    r"credential|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken|Unauthorized"
    r"|\b401\b|DefaultCredentialsError",
    re.IGNORECASE,
)
_DENIED = re.compile(r"\bForbidden\b|\bAccessDenied\b")
# As a whole word, because the request ids that errors repeat contain any digits.
_PRECONDITION = re.compile(r"PreconditionFailed|\b412\b")
_NO_REPOSITORY = re.compile(r"RepositoryNotFound|repository not found", re.IGNORECASE)
_NO_BUCKET = re.compile(
    r"NoSuchBucket|bucket does not exist|bucket.{0,40}not found|RepositoryNotFound", re.IGNORECASE
)
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
_EXTRAS = {"s3fs": "s3fs"}
_SECRETS_OF = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile of ~/.aws",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login",
    "hf": "HF_TOKEN, or hf auth login",
}


class Gone(FileNotFoundError):
    """A file is missing, as opposed to a store that cannot be reached."""


class Store:
    """A folder at an address.

    Attributes:
        url: The address.
        name: The address as messages may show it.
    """

    def __init__(self, url: str, *, tries: int = TRIES) -> None:
        """Make no request yet.

        Raises:
            DriftlineError: The kind of address is unknown, or its package is not installed.
        """
        self.url = url
        self.name = shown(url)
        self.scheme = url.partition(":")[0].lower()
        # gcsfs itself repeats requests for half a minute, which cannot be turned off.
        self._tries = 1 if self.scheme in ("gs", "gcs") else tries
        self._fs, root = _file_system(url, self.scheme, self.name)
        self._root = str(root).rstrip("/")

    def path(self, name: str) -> str:
        """Path of a file of the folder in its file system.

        Names are ours or were checked; a name that could lead out of the folder is refused.
        """
        parts = name.split("/")
        if name and ("" in parts or "." in parts or ".." in parts or "\\" in name):
            raise BadInput(f"'{name[:60]}' is no name of a file in {self.name}")
        return f"{self._root}/{name}" if name else self._root

    def sizes(self, folder: str = "") -> dict[str, int | None]:
        """Content of a folder by name: the size of a file, None for a folder. Empty if missing.

        Raises:
            DriftlineError: The store cannot be reached.
        """
        place = self.path(folder)
        try:
            entries = self._trying(lambda: self._fs.ls(place, detail=True))
        except Gone:
            return {}
        sizes: dict[str, int | None] = {}
        for entry in entries:
            own = str(entry.get("name", "")).rstrip("/")
            name = own.rpartition("/")[2]
            if not name or own.strip("/") == place.strip("/"):
                continue  # some stores list the folder itself
            is_folder = entry.get("type") == "directory"
            sizes[name] = None if is_folder else int(entry.get("size") or 0)
        return sizes

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None if there is no such file.

        Raises:
            DriftlineError: The store cannot be reached.
        """
        place = self.path(name)
        try:
            about = self._trying(lambda: self._fs.info(place))
        except Gone:
            return None
        return None if about.get("type") == "directory" else int(about.get("size") or 0)

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Read the bytes from `start` to `stop` of a file.

        Raises:
            Gone: There is no such file, or it is shorter.
            DriftlineError: The store cannot be reached.
        """
        if stop <= start:
            return b""
        place = self.path(name)

        def fetch() -> bytes:
            content = bytes(self._fs.cat_file(place, start=start, end=stop))
            # A short answer means the end of the file or a broken connection; only the latter is
            # retried.
            if len(content) < stop - start:
                size = self._fs.info(place).get("size")
                if size is not None and int(size) < stop:
                    raise Gone(2, f"{name} ends before its last byte")
                raise ConnectionError(f"{len(content)} of {stop - start} bytes came")
            return content[: stop - start]

        return self._trying(fetch)

    def read_all(self, name: str, limit: int) -> bytes:
        """Read a complete small file.

        Raises:
            OSError: There is no such file, or it is larger than the limit.
            DriftlineError: The store cannot be reached.
        """
        size = self.size(name)
        if size is None:
            raise Gone(2, f"there is no {name}")
        if size > limit:
            raise OSError(0, f"has {size} bytes, more than anybody would write there")
        return self.read(name, 0, size)

    def put(self, name: str, content: bytes) -> None:
        """Write a complete file.

        Raises:
            DriftlineError: The store cannot be reached or written.
        """
        place = self.path(name)
        self._parent_of(place)
        self._writing(lambda: self._fs.pipe_file(place, content))

    def put_new(self, name: str, content: bytes) -> bool:
        """Write a file that does not exist yet; returns False if it exists.

        Some stores decide which of two writers is first (S3, Google Cloud). For others, the file is
        looked for, written and read back, and two simultaneous writers may both get True.

        Raises:
            DriftlineError: The store cannot be reached or written.
        """
        place = self.path(name)
        self._parent_of(place)
        if self.size(name) is not None:
            return False

        def write() -> bool:
            try:
                self._fs.pipe_file(place, content, mode="create")
            except FileExistsError:
                return False
            except Exception as trouble:
                # Stores answer a failed condition with 412, in the wording of their own libraries.
                if _status_of(trouble) == 412 or _PRECONDITION.search(str(trouble)):
                    return False
                if not isinstance(trouble, (TypeError, NotImplementedError)) and (
                    "NotImplemented" not in str(trouble)
                ):
                    raise
                self._fs.pipe_file(place, content)  # a store without such a condition
            return True

        written = self._writing(write)
        if written:
            return True
        # If the answer of the first request was lost, the existing file is our own.
        try:
            return self.read_all(name, len(content) + (1 << 20)) == content
        except OSError:
            return False

    def send(self, source: Path, name: str) -> int:
        """Copy a local file to the store; returns its size, which is checked there.

        Raises:
            DriftlineError: The store cannot be reached or written.
            OSError: The local file cannot be read.
        """
        place = self.path(name)
        self._parent_of(place)
        size = source.stat().st_size

        def copy() -> None:
            self._fs.put_file(str(source), place)
            # Some stores accept a broken upload without an error.
            arrived = self._fs.info(place).get("size")
            if arrived is not None and int(arrived) != size:
                raise ConnectionError(f"{arrived} of {size} bytes arrived")

        self._writing(copy)
        return size

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with its content; it need not exist.

        Raises:
            DriftlineError: The store cannot be reached.
        """
        place = self.path(name)
        with contextlib.suppress(Gone):
            self._trying(lambda: self._fs.rm(place, recursive=True))

    def _parent_of(self, place: str) -> None:
        """Create the parent folder in file systems with real folders; buckets are never created."""
        if self.scheme in ("s3", "s3a", "gs", "gcs", "hf"):
            return
        with contextlib.suppress(Exception):
            self._fs.makedirs(place.rpartition("/")[0], exist_ok=True)

    def _writing(self, act: Callable[[], T]) -> T:
        """As `_trying`, for writing: a missing target means that the bucket does not exist."""
        try:
            return self._trying(act)
        except Gone as trouble:
            raise self._no_bucket() from trouble

    def _no_bucket(self) -> BadRun:
        return BadRun(
            f"{self.name}: there is no '{self._root.partition('/')[0] or self.name}'",
            hint="buckets are not made by driftline: make it, or check its name",
        )

    def _trying(self, act: Callable[[], T]) -> T:
        wait = _FIRST_WAIT
        for left in range(self._tries - 1, -1, -1):
            try:
                return act()
            except (Gone, DriftlineError):
                raise
            except Exception as trouble:
                # Missing buckets and wrong credentials do not change, so they are reported at once.
                self._raise_if_final(trouble)
                if not left:
                    raise Unreachable(
                        f"{self.name} cannot be reached: {_in_words(trouble)}",
                        hint=f"{_tried(self._tries)}is the address right, and the network up?",
                    ) from trouble
            time.sleep(wait * (0.5 + random.random()))  # random: ranks must not all retry at once
            wait = min(2 * wait, _LONGEST_WAIT)
        raise AssertionError("never here")

    def _raise_if_final(self, trouble: Exception) -> None:
        """Raise an error that repeating the request would not change."""
        words = f"{type(trouble).__name__}: {trouble}"
        code = _status_of(trouble)
        gone = isinstance(trouble, FileNotFoundError)  # for a file the hub's status is 404, too
        if self.scheme == "hf" and (
            _NO_REPOSITORY.search(words) or (code in (401, 404) and not gone)
        ):
            # The hub gives the same answer for a missing and for a private repository.
            raise BadRun(
                f"{self.name}: there is no such repository, or only for those with a token",
                hint="`hf repo create` makes one; for a private one set HF_TOKEN, or hf auth login",
            ) from trouble
        # Before the credentials, because the text about a missing bucket may mention both.
        if _NO_BUCKET.search(words):
            raise self._no_bucket() from trouble
        if code == 401 or _CREDENTIALS.search(words):
            variables = _SECRETS_OF.get(self.scheme.replace("s3a", "s3").replace("gcs", "gs"))
            raise BadRun(
                f"{self.name}: no credentials that are accepted there were found",
                hint=f"set {variables}"
                if variables
                else "see fsspec's documentation on credentials of this store",
            ) from trouble
        if code == 403 or isinstance(trouble, PermissionError) or _DENIED.search(words):
            raise BadRun(
                f"{self.name}: access was denied",
                hint="may these credentials read, list and write there?",
            ) from trouble
        if code == 404 or gone:
            raise Gone(2, "is not there") from trouble
        if isinstance(trouble, (TypeError, AttributeError, NotImplementedError)):
            raise BadInput(
                f"{self.name}: this kind of store cannot do what is needed ({_in_words(trouble)})",
                hint="use s3://, gs:// or hf://, or copy the run to this machine",
            ) from trouble


def _tried(times: int) -> str:
    return f"it was tried {times} times; " if times > 1 else ""


def _status_of(trouble: BaseException) -> int | None:
    """The HTTP status of a failed request, wherever it is stored in the chain of causes."""
    link: BaseException | None = trouble
    while link is not None:
        answer = getattr(link, "response", None)
        for code in (getattr(answer, "status_code", None), getattr(link, "code", None)):
            if isinstance(code, int) and 400 <= code < 500:
                return code
        link = link.__cause__
    return None


def _in_words(trouble: BaseException) -> str:
    """The first cause of an error, in one line: a person can act on that."""
    while trouble.__cause__ is not None:
        trouble = trouble.__cause__
    text = str(trouble).strip().split("\n")[0][:200]
    return shown(text) or type(trouble).__name__


def _file_system(url: str, scheme: str, name: str) -> tuple[Any, str]:
    try:
        core = importlib.import_module("fsspec.core")
        conf = importlib.import_module("fsspec.config").conf
    except ImportError:
        package = _PACKAGES.get(scheme, "")
        raise NotInstalled(
            f"{name}: addresses need the package fsspec",
            hint=f"pip install {_EXTRAS.get(package, 'fsspec')}",
        ) from None
    options: dict[str, Any] = {"use_listings_cache": False}  # the content changes meanwhile
    if scheme in ("s3", "s3a") and "config_kwargs" not in conf.get("s3", {}):
        # `_trying` repeats requests; three layers of repetition would take minutes.
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}}
    try:
        system, root = core.url_to_fs(url, **options)
    except ImportError as absent:
        package = _PACKAGES.get(scheme, "")
        match = re.search(r"[Ii]nstall (?:the )?[\"'`]?([\w.-]+)", str(absent))
        package = package or (match[1] if match else scheme)
        raise NotInstalled(
            f"{name}: addresses of {scheme}:// need the package {package}",
            hint=f"pip install '{_EXTRAS.get(package, package)}'",
        ) from None
    except ValueError as unknown:
        if "protocol" not in str(unknown).lower():
            raise BadInput(
                f"{name} is no address: {_in_words(unknown)}", hint="such as s3://BUCKET/FOLDER"
            ) from None
        raise BadInput(
            f"{name}: no store is called {scheme}://",
            hint="such as s3://BUCKET/FOLDER, gs://, hf:// or memory://",
        ) from None
    except Exception as trouble:
        raise BadInput(
            f"{name} cannot be opened: {_in_words(trouble)}",
            hint="is the address right, and does this machine reach it?",
        ) from None
    if scheme in ("s3", "s3a"):
        # s3fs has its own retries, in addition to those of its HTTP library.
        system.retries = 1
    if scheme in ("gs", "gcs"):
        # gcsfs logs the traceback of every failure, which our own message replaces.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL + 1)
    return system, root
