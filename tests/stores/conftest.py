"""Runs to send, a store in memory, and a real S3 server behind a proxy that cuts connections."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cutting import Proxy
from sent_runs import write_run

from support.commands import Said, caller

BUCKET = "drift"


@pytest.fixture
def driftline(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Said]:
    """Run a command line in this process; a store's library writes to the descriptors."""
    return caller(capfd, monkeypatch)


@pytest.fixture(scope="session")
def pair_of_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("runs")
    return write_run(place / "ref"), write_run(place / "cand", shift=1e-2)


@pytest.fixture
def memory() -> str:
    """An empty folder of the store in this process's memory."""
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def _server() -> Iterator[int]:
    here = Path(__file__).parent
    server = subprocess.Popen(
        [sys.executable, str(here / "s3_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        yield int(server.stdout.readline())
    finally:
        server.stdin.close()  # also when this process is killed: nothing stays behind
        server.kill()
        server.wait(timeout=60)
        server.stdout.close()


@dataclass(frozen=True)
class S3:
    """The store as a program sees it."""

    url: str
    proxy: Proxy


@pytest.fixture
def s3(_server: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3]:
    import boto3
    import s3fs

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    proxy = Proxy(_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATESTTESTTEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    s3fs.S3FileSystem.clear_instance_cache()
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{_server}").create_bucket(Bucket=BUCKET)
    try:
        yield S3(f"s3://{BUCKET}/{uuid.uuid4().hex}", proxy)
    finally:
        proxy.close()
        s3fs.S3FileSystem.clear_instance_cache()
