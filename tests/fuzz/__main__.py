"""Spend a time budget on fuzzing: `python -m fuzz --seconds 60 [READER ...]`, as `make fuzz` does.

Each reader gets a process of its own and an equal share of the time, or `--inputs` of them. With
atheris installed the inputs are guided by coverage of our readers; without it they are damaged at
random. A finding is written to `fuzz-output/`, named on the terminal, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from fuzz.mutation import stream
from fuzz.readers import CORPUS, Reader, chosen

LONGEST = 10
"""Seconds that one input may take."""
MEMORY = 6 << 30
"""Bytes of address space: a reader that allocates what a header claims passes it."""
OUTPUT = Path("fuzz-output")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("readers", nargs="*", help="names, or `binary`, or `text`; all without one")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all readers together")
    parser.add_argument("--inputs", type=int, default=0, help="for each reader, whatever the time")
    parser.add_argument("--seed", type=int, default=0, help="of the random damage")
    parser.add_argument("--random", action="store_true", help="no coverage, even with atheris")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    readers = list(chosen(options.readers))
    if not readers:
        parser.error("no such reader")
    guided = not options.random and importlib.util.find_spec("atheris") is not None
    if options.one:
        return _fuzz(readers[0], options, guided)
    print(f"{len(readers)} readers, {'atheris' if guided else 'random damage'}", flush=True)
    share = options.seconds / len(readers)
    failed = 0
    for reader in readers:
        words = [sys.executable, "-m", "fuzz", "--one", reader.name, "--seed", str(options.seed)]
        words += ["--seconds", str(share), "--inputs", str(options.inputs)]
        words += ["--random"] if options.random else []
        failed += subprocess.run(words, check=False).returncode != 0
    print(f"{failed} of {len(readers)} readers have findings; see {OUTPUT}" if failed else "clean")
    return 1 if failed else 0


def _fuzz(reader: Reader, options: argparse.Namespace, guided: bool) -> int:
    # Shared memory where there is some: a disk would be what is measured.
    room = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{reader.name}-", dir=room))
    try:
        if guided:
            return _guided(reader, folder, options)
        return _random(reader, folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _random(reader: Reader, folder: Path, options: argparse.Namespace) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    path = reader.prepare(folder / "dump")
    began = time.monotonic()
    count = accepted = 0
    slowest = 0.0
    for content in stream(reader.corpus(), options.seed):
        if options.inputs and count >= options.inputs:
            break
        if not options.inputs and time.monotonic() - began > options.seconds:
            break
        # A hang ends the process with a traceback. Not with every input: each begins a thread.
        if count % 256 == 0:
            faulthandler.dump_traceback_later(60 + LONGEST, exit=True)
        before = time.thread_time()
        try:
            accepted += reader.survives(folder / "dump", path, content)
        except Exception:
            _keep(reader, content)
            traceback.print_exc()
            return 1
        slowest = max(slowest, time.thread_time() - before)
        assert slowest < LONGEST
        count += 1
    faulthandler.cancel_dump_traceback_later()
    rate = count / (time.monotonic() - began)
    print(
        f"{reader.name:22} {count:9} inputs, {accepted} accepted, {rate:.0f} a second, "
        f"slowest {slowest * 1000:.0f} ms",
        flush=True,
    )
    return 0


def _keep(reader: Reader, content: bytes) -> None:
    OUTPUT.mkdir(exist_ok=True)
    path = OUTPUT / f"{reader.name}-{time.time_ns():x}"
    path.write_bytes(content)
    print(f"{reader.name}: {path}", file=sys.stderr)


def _guided(reader: Reader, folder: Path, options: argparse.Namespace) -> int:
    """Runs libFuzzer in a child: it ends its process itself, and prints more than anybody reads."""
    corpus = folder / "corpus"
    shutil.copytree(CORPUS / reader.name, corpus)
    OUTPUT.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "fuzz.guided", reader.name, str(folder / "dump"), str(corpus)]
    words += [f"-artifact_prefix={OUTPUT}/{reader.name}-", f"-timeout={LONGEST}", "-max_len=8192"]
    words += [f"-seed={options.seed + 1}", f"-rss_limit_mb={MEMORY >> 20}", "-print_final_stats=1"]
    if options.inputs:
        words.append(f"-runs={options.inputs}")
    else:
        words.append(f"-max_total_time={max(1, round(options.seconds))}")
    began = time.monotonic()
    child = subprocess.run(words, check=False, capture_output=True, text=True, errors="replace")
    lines = child.stderr.splitlines()
    stats = dict(
        line.removeprefix("stat::").split(":", 1) for line in lines if line.startswith("stat::")
    )
    count = int(stats.get("number_of_executed_units", "0"))
    last = next((line for line in reversed(lines) if " cov: " in line), "")
    covered = last.partition(" cov: ")[2].split(" ")[0]
    seconds = time.monotonic() - began
    print(
        f"{reader.name:22} {count:9} inputs, {covered or '?'} places covered, "
        f"{len(list(corpus.iterdir()))} inputs kept, {count / seconds:.0f} a second",
        flush=True,
    )
    if child.returncode:
        print("\n".join(lines[-40:]), file=sys.stderr, flush=True)
    if os.environ.get("FUZZ_KEEP"):
        shutil.copytree(corpus, Path(os.environ["FUZZ_KEEP"]) / reader.name, dirs_exist_ok=True)
    return 1 if child.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
