"""A file that becomes shorter while it is mapped: a sentence and a row, never a dead process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from driftline.cli.main import main
from driftline.runs.files import mapped_file
from driftline.runs.records import Record, TensorKey
from driftline.runs.writer import RunWriter
from support.programs import running

pytestmark = pytest.mark.skipif(
    not Path(mapped_file.__file__).with_name("_mapped_file.so").exists(),
    reason="the C library was not built",
)
SIZE = 200_000
"""Elements of a tensor: some hundred pages."""


def write_run(path: Path, *, shift: float = 0.0, count: int = 6, elements: int = SIZE) -> Path:
    writer = RunWriter(path)
    for number in range(count):
        values = np.linspace(number, number + 1 + shift, elements, dtype=np.float32)
        record = Record(TensorKey.of(f"site.{number}", "output"), 0, "float32", (elements,))
        writer.put(record, values.view(np.uint8))
    writer.close()
    return path


CUTTING = """
import os, sys
from driftline.runs.files import local_files
from driftline.cli.main import main

real = local_files.Shards._map
done = []

def cut_after_mapping(self, shard):
    content = real(self, shard)
    path = self.root / self.name / shard
    if sys.argv[1] in str(path) and not done:
        done.append(path)
        os.truncate(path, int(sys.argv[2]))
    return content

local_files.Shards._map = cut_after_mapping
sys.exit(main(sys.argv[3:]))
"""


def run_while_cut(
    side: str, size: int, *words: str, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """A command, with a shard of a run cut to a size right after it was mapped."""
    command = [sys.executable, "-c", CUTTING, side, str(size), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return write_run(tmp_path / "good"), write_run(tmp_path / "short", shift=1e-3)


@pytest.mark.parametrize("size", [300_000, 1_500_000])
def test_compare_says_which_tensors_are_cut(runs: tuple[Path, Path], size: int) -> None:
    done = run_while_cut("/short/", size, "compare", *map(str, runs), "--format", "csv", "--all")
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "tensors-00000.safetensors became shorter while it was read" in done.stderr
    rows = [line for line in done.stdout.splitlines() if "site." in line]
    cut = [line for line in rows if "incomparable" in line]
    whole = (size - 262_144) // (4 * SIZE)  # tensors that lie in front of the cut
    assert len(rows) == 6 and len(cut) == 6 - max(0, whole)
    assert all("ends before its last byte" in line or "shorter" in line for line in cut)


def test_a_cut_inside_the_last_page_is_no_row_of_zeros(runs: tuple[Path, Path]) -> None:
    _, short = runs
    whole = (short / "rank0" / "tensors-00000.safetensors").stat().st_size
    words = ("compare", *map(str, runs), "--format", "csv", "--all")
    done = run_while_cut("/short/", whole - 40, *words)
    (last,) = (line for line in done.stdout.splitlines() if "site.5" in line)
    # Which of the two is seen first, the new length or the lost page, is a matter of threads.
    assert "incomparable" in last
    assert "became shorter while it was read" in last or "ends before its last byte" in last


REWRITING = """
import os, sys
from driftline.numerics import kernel
from driftline.cli.main import main

path = sys.argv[1]
content = open(path, "rb").read()
real = kernel.pair_moments_at

def measure_while_it_is_written_anew(*args, **options):
    moments = real(*args, **options)
    with open(path, "r+b") as file:
        file.write(content)
    return moments

def cut_and_measure(*args, **options):
    kernel.pair_moments_at = measure_while_it_is_written_anew
    os.truncate(path, 100_000)
    return kernel.pair_moments_at(*args, **options)

kernel.pair_moments_at = cut_and_measure
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("elements", [SIZE, 2000])
def test_a_shard_that_is_written_anew_is_measured_anew(tmp_path: Path, elements: int) -> None:
    """As long as before when all is done, so that nothing but the lost pages can show it."""
    runs = (tmp_path / "good", tmp_path / "short")
    for path, shift in zip(runs, (0.0, 1e-3), strict=True):
        write_run(path, shift=shift, count=100 if elements < SIZE else 6, elements=elements)
    words = ["compare", *map(str, runs), "--format", "csv", "--all", "--threads", "1"]
    plain = [sys.executable, "-m", "driftline", *words]
    before = subprocess.run(plain, capture_output=True, text=True, timeout=60, check=False)
    shard = str(runs[1] / "rank0" / "tensors-00000.safetensors")
    command = [sys.executable, "-c", REWRITING, shard, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "became shorter while it was read" in done.stderr
    assert done.stdout == before.stdout


def test_a_report_survives(runs: tuple[Path, Path], tmp_path: Path) -> None:
    good, short = runs
    page = tmp_path / "page.html"
    done = run_while_cut("/short/", 300_000, "report", str(good), str(short), "-o", str(page))
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "became shorter while it was read" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_count_of_faults_and_the_names(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\1" * (1 << 20))
    before = mapped_file.faults()
    values = mapped_file.map_range(path, 5000, 1_000_000)
    assert int(values.sum()) == 1_000_000 and mapped_file.faults() == before
    os.truncate(path, 9000)
    assert int(values.sum()) < 8192
    assert mapped_file.faults() == before + 1
    assert str(path) in mapped_file.cut_files()
    del values
    assert str(path) in mapped_file.cut_files()
    mapped_file.forget_cut_files()
    assert not mapped_file.cut_files()


def test_a_command_does_not_answer_for_what_was_cut_before_it_in_the_same_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A page was served from a file that was cut; its memory was given back a while later."""
    run = write_run(tmp_path / "run", count=2)
    path = tmp_path / "file"
    path.write_bytes(b"\1" * (1 << 20))
    values = mapped_file.map_range(path, 0, 1 << 20)
    os.truncate(path, 0)
    assert int(values.sum()) == 0
    assert main(["show", str(run)]) == 0
    del values
    assert main(["show", str(run)]) == 0
    assert "became shorter" not in capfd.readouterr().err


def test_another_programs_map_still_ends_as_it_would() -> None:
    program = """
import mmap, os, sys, tempfile
from driftline.runs.files import mapped_file
with tempfile.NamedTemporaryFile() as file:
    file.write(b"1" * (1 << 20)); file.flush()
    guarded = mapped_file.map_range(file.name, 0, 1000)
    own = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    os.truncate(file.name, 0)
    print(len(own[4096:8000]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, timeout=110
    )
    assert done.returncode == -signal.SIGBUS


def test_a_library_that_takes_the_signal_for_itself_does_not_keep_it(tmp_path: Path) -> None:
    """Paddle takes it when it is imported; faulthandler does, too, and starts faster."""
    program = f"""
import faulthandler, os
from driftline.runs.files import mapped_file
path = {str(tmp_path / "file")!r}
with open(path, "wb") as file:
    file.write(b"1" * (1 << 20))
first = mapped_file.map_range(path, 0, 1 << 20)
faulthandler.enable()
second = mapped_file.map_range(path, 0, 1 << 20)
os.truncate(path, 9000)
print(int(second.sum()) < int(b"1"[0]) * 20_000, mapped_file.faults())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "True 1\n"), done.stderr


def test_a_mapped_file_keeps_no_descriptor_that_the_program_could_lose(tmp_path: Path) -> None:
    """Python's own `mmap` closes the number of its duplicate at the end, whoever has it then."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)) * 100)
    before = len(list(Path("/proc/self/fd").iterdir()))
    some = [mapped_file.map_range(path, start, 5000) for start in (0, 7, 15_000)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert [int(values[0]) for values in some] == [0, 7, 0] and not some[0].flags.writeable
    for start, length in ((0, 20_001), (19_000, 1001), (20_000, 1)):
        with pytest.raises(ValueError, match="are not in a file of 20000"):
            mapped_file.map_range(path, start, length)


def test_many_files_are_guarded_and_given_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\1" * 8192)
    before = len(mapped_file._names)
    # More than the table has room for, one after the other and some at a time.
    for _ in range(30):
        some = [mapped_file.map_range(path, 0, 8192) for _ in range(200)]
        assert len(mapped_file._names) == before + 200
        del some
    assert len(mapped_file._names) == before


def test_a_child_forked_while_others_map_files_maps_its_own() -> None:
    """It hung in C, where no exception and no handler ends it, in four of seven forks."""
    program = """
import os, signal, threading
from driftline.runs.files import mapped_file

library = mapped_file._library()

def change():
    while True:
        library.driftline_unguard(library.driftline_guard(1 << 40, 4096))

for _ in range(3):
    threading.Thread(target=change, daemon=True).start()
for _ in range(100):
    child = os.fork()
    if not child:
        signal.alarm(10)
        library.driftline_guard(1 << 40, 4096)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr


def test_a_torch_file_is_guarded_too(tmp_path: Path) -> None:
    program = f"""
import os, sys, torch
from driftline import open_run
from driftline.runs.files import mapped_file
path = {str(tmp_path / "x.pt")!r}
torch.save({{"a": torch.ones(1 << 20), "b": torch.ones(7)}}, path)
run = open_run(path)
os.truncate(path, 8192)
print(float(run.get("a").float64().sum()) < 1e6, mapped_file.faults() > 0)
print(run.cut_off()(run.records[0]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=110
    )
    assert done.stdout.startswith("True True"), done.stderr
    assert "became shorter while it was read" in done.stdout


def test_tensors_behind_a_cut_are_refused_one_after_the_other(runs: tuple[Path, Path]) -> None:
    """The second one was read as zeros: the fault of the first had put them there."""
    program = f"""
import os
from driftline.diagnosis.experiments.live.captured_calls import tensor_of
from driftline.runs.reader import open_run
run = open_run({str(runs[1])!r})
run.memory(run.records[0])
os.truncate({str(runs[1] / "rank0" / "tensors-00000.safetensors")!r}, 300_000)
for read in (lambda n: tensor_of(run, run.records[n]), lambda n: run.raw(run.records[n])):
    for number in (3, 4):
        try:
            print(read(number))
        except Exception as refused:
            print(type(refused).__name__, refused)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=110
    )
    first, *others = done.stdout.splitlines()
    assert first.startswith("BadFile") and "became shorter while it was read" in first, done.stderr
    assert len(others) == 3
    for line in others:
        assert line.startswith("BadFile") and "ends before its last byte" in line


REPLAYED = """
import os, sys, torch
torch.manual_seed(0)
torch.set_num_threads(1)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(3))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number == 1 and len(sys.argv) > 1:
                os.truncate(sys.argv[1], int(sys.argv[2]))
            x = layer(x)
        return x

with torch.no_grad():
    Net()(torch.ones(64, 128))
print("the program went on")
"""


@pytest.mark.parametrize("cut", [100_000, 40])
def test_a_replay_of_a_run_that_is_cut_meanwhile_is_refused(
    tmp_path: Path, cut: int, warm_python: str
) -> None:
    """It said that all modules were replayed, from zeros. The smaller cut raises no signal."""
    program = tmp_path / "program.py"
    program.write_text(REPLAYED)
    own = [sys.executable, "-m", "driftline"]
    run, replay = tmp_path / "run", tmp_path / "replay"
    dump = [*own, "dump", "-o", str(run), "--exec", f"{warm_python} {program}"]
    subprocess.run(dump, capture_output=True, check=True, timeout=110)
    shard = run / "rank0" / "tensors-00000.safetensors"
    words = [*own, "replay", str(run), "-o", str(replay), "--", warm_python, str(program)]
    words += [str(shard), str(shard.stat().st_size - cut)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 2 and "the program went on" in done.stdout, done.stderr
    assert "tensors-00000.safetensors became shorter while it was read" in done.stderr
    assert "replayed" not in done.stderr and not replay.exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_cuts_at_any_moment(tmp_path: Path) -> None:
    """As a user meets it: a program writes a run anew while it is compared."""
    dice = random.Random(30)
    good, short = write_run(tmp_path / "good", count=40), tmp_path / "short"
    write_run(short, shift=1e-3, count=40)
    shard = short / "rank0" / "tensors-00000.safetensors"
    content = shard.read_bytes()
    words = [sys.executable, "-m", "driftline", "compare", str(good), str(short)]
    seconds = []
    for _ in range(3):
        begin = time.monotonic()
        subprocess.run(words, capture_output=True, check=False, timeout=110)
        seconds.append(time.monotonic() - begin)
    ends: list[int] = []
    for _ in range(100):
        shard.write_bytes(content)
        with running(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            time.sleep(dice.uniform(0.3, 1.0) * min(seconds))
            os.truncate(shard, dice.randrange(len(content)))
            _, said = child.communicate(timeout=60)
        ends.append(child.returncode)
        assert child.returncode >= 0, said
        assert b"Traceback" not in said
    print(f"100 cuts, exit codes {sorted(set(ends))}, {ends.count(2)} noticed")
