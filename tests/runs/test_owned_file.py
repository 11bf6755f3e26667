"""What a program does to descriptors never leads our bytes into its files, and loses no tensor.

Real processes: each captures some tensors, takes descriptors away, writes files of its own and
captures more. Its own files must hold exactly what it wrote.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from driftline.runs.files.owned_file import FileTaken, OwnedFile, UnnamedFile
from driftline.runs.reader import DiskRun, open_run
from driftline.runs.verify import verify

PRELUDE = """
import os, sys
import numpy as np
from driftline.runs.records import TensorKey
from driftline.runs.records import Record
from driftline.runs.writer import RunWriter

writer = RunWriter("run", shard_bytes=1 << 20)
count = 0

def capture(tensors):
    global count
    for _ in range(tensors):
        data = np.full(50_000, count % 251, np.uint8)
        data[:8].view(np.int64)[0] = count
        key = TensorKey.of(f"site.{count}", "output")
        writer.put(Record(key, 0, "uint8", data.shape), data)
        count += 1
    writer.flush()

def own_files(number, folder="."):
    files = []
    for index in range(number):
        file = os.open(f"{folder}/mine{index}.bin", os.O_RDWR | os.O_CREAT, 0o644)
        assert os.write(file, b"0123456789") == 10
        files.append(file)
    return files

def descriptors_of_the_run():
    numbers = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            place = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if "/run/rank" in place:
            numbers[int(name)] = os.path.basename(place)
    return numbers
"""

LAST = 'os.sysconf("SC_OPEN_MAX")'


def start(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PRELUDE + textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, "program.py", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done


def check_complete(run: DiskRun, tensors: int) -> None:
    assert run.sealed and not run.losses and not list(verify(run))
    assert len(run) == tensors
    numbers = [int(tensor.raw()[:8].view("<i8")[0]) for tensor in run.tensors()]
    assert sorted(numbers) == sorted(range(tensors))


def check_user_files(folder: Path, number: int) -> None:
    contents = {path.name: path.read_bytes() for path in folder.glob("mine*.bin")}
    assert contents == {f"mine{index}.bin": b"0123456789" for index in range(number)}


@pytest.mark.parametrize("first", [3, 0])
@pytest.mark.parametrize("last", ["256", LAST])
def test_a_program_that_closes_all_descriptors_keeps_its_files_and_gets_its_run(
    tmp_path, first, last
):
    start(tmp_path, f"capture(30)\nos.closerange({first}, {last})\nown_files(60)\ncapture(60)")
    check_user_files(tmp_path, 60)
    check_complete(open_run(tmp_path / "run"), 90)


def test_a_descriptor_of_the_program_put_over_ours_is_not_written_and_not_closed(tmp_path):
    text = """
        capture(30)
        taken = descriptors_of_the_run()
        assert {"index.jsonl"} < set(taken.values()), taken
        (mine,) = own_files(1)
        for number in taken:
            os.dup2(mine, number)
        capture(60)
        writer.close()
        for number in taken:
            assert os.path.sameopenfile(mine, number), "closed"
    """
    start(tmp_path, text)
    check_user_files(tmp_path, 1)
    check_complete(open_run(tmp_path / "run"), 90)


def test_pipes_and_sockets_of_the_program_at_our_numbers_get_nothing(tmp_path):
    text = """
        import socket
        capture(30)
        taken = sorted(descriptors_of_the_run())
        here, there = socket.socketpair()
        out, into = os.pipe()
        for index, number in enumerate(taken):
            os.dup2((here.fileno(), into)[index % 2], number)
        capture(60)
        writer.close()
        for side in (out, there.fileno()):
            os.set_blocking(side, False)
            try:
                raise AssertionError(os.read(side, 100))
            except BlockingIOError:
                pass
    """
    start(tmp_path, text)
    check_complete(open_run(tmp_path / "run"), 90)


def test_our_descriptors_are_high_and_reach_no_other_program(tmp_path):
    text = """
        import subprocess
        capture(30)
        writer.event("note", "the file of events is open too")
        numbers = descriptors_of_the_run()
        assert len(numbers) == 3, numbers
        assert min(numbers) >= min(os.sysconf("SC_OPEN_MAX"), 1024) // 2
        assert not any(os.get_inheritable(number) for number in numbers)
        look = "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in "
        look += "os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')])"
        for options in ({"close_fds": True}, {"close_fds": False}, {"preexec_fn": os.getpid}):
            seen = subprocess.run([sys.executable, "-c", look], capture_output=True, **options)
            assert seen.returncode == 0 and b"/run/rank" not in seen.stdout, seen
        assert descriptors_of_the_run() == numbers
        capture(60)
    """
    start(tmp_path, text)
    check_complete(open_run(tmp_path / "run"), 90)


DAEMON = """
    capture(30)
    if os.fork():
        os.wait()
        capture(10)
        sys.exit()
    count = 0
    os.setsid()
    if os.fork():
        os._exit(0)
    capture(5)
    os.closerange(0, {last})
    own_files(60)
    capture(60)
    writer.close()
    os.rename("program.py", "daemon.ended")
    os._exit(0)
"""


@pytest.mark.parametrize("last", ["256", LAST])
def test_a_daemon_that_forks_twice_writes_a_part_of_its_own(tmp_path, last):
    start(tmp_path, DAEMON.format(last=last))
    wait_for(tmp_path / "daemon.ended")
    check_user_files(tmp_path, 60)
    run = open_run(tmp_path / "run")
    assert run.sealed and not run.losses and not list(verify(run))
    assert sorted(lines(tmp_path).items()) == [("rank0", 40), ("rank0.p1", 65)]


def test_a_fork_that_python_does_not_see_writes_a_part_of_its_own(tmp_path):
    """`daemon(3)` of the C library: no fork handlers run, and our thread is not in the child."""
    text = """
        import ctypes
        capture(30)
        count = 0
        assert ctypes.CDLL(None).daemon(1, 1) == 0
        os.closerange(3, 256)
        own_files(60)
        capture(60)
        writer.close()
        os.rename("program.py", "daemon.ended")
    """
    start(tmp_path, text)
    wait_for(tmp_path / "daemon.ended")
    check_user_files(tmp_path, 60)
    assert sorted(lines(tmp_path).items()) == [("rank0", 30), ("rank0.p1", 60)]
    assert not list(verify(open_run(tmp_path / "run")))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_close_what_they_inherit(tmp_path, method):
    text = """
        import multiprocessing

        def work(index, last):
            global count
            count = 0
            capture(5)
            os.closerange(3, last)
            os.mkdir(f"child{index}")
            own_files(60, f"child{index}")
            capture(20)

        if __name__ == "__main__":
            context = multiprocessing.get_context(sys.argv[1])
            capture(30)
            children = [context.Process(target=work, args=(i, (256, 20_000)[i])) for i in (0, 1)]
            for child in children:
                child.start()
            for child in children:
                child.join()
                assert child.exitcode == 0
            capture(60)
    """
    start(tmp_path, text, method)
    for index in (0, 1):
        check_user_files(tmp_path / f"child{index}", 60)
    run = open_run(tmp_path / "run")
    assert run.sealed and not run.losses and not list(verify(run))
    assert sorted(lines(tmp_path).items()) == [("rank0", 90), ("rank0.p1", 25), ("rank0.p2", 25)]


@pytest.mark.parametrize("name", ["index.jsonl", "tensors-00000.safetensors"])
@pytest.mark.parametrize("first", [3, 0])
def test_where_our_file_is_gone_too_writing_stops_and_the_run_says_so(tmp_path, name, first):
    text = f"""
        capture(1)
        os.closerange({first}, {LAST})
        os.rename("run/rank0/{name}", "{name}")
        with open("run/rank0/{name}", "wb") as file:
            file.write(b"0123456789")
        own_files(60)
        capture(60)
    """
    done = start(tmp_path, text)
    check_user_files(tmp_path, 60)
    assert (tmp_path / "run" / "rank0" / name).read_bytes() == b"0123456789"
    reason = f"the program closed a descriptor of Driftline, and {name} is another file now"
    facts = json.loads((tmp_path / "run/rank0/process.json").read_text())
    assert reason in facts["failure"]
    events = (tmp_path / "run/rank0/events.jsonl").read_text()
    assert reason in events
    if first:
        assert f"is incomplete: could not be written: {reason}" in done.stderr
    else:  # standard error is a file of the program now
        assert not done.stderr


def test_a_thread_that_closes_and_opens_all_the_time_gets_its_files_untouched(tmp_path):
    text = """
        import threading
        stop = threading.Event()
        wrong = []

        def disturb():
            turn = 0
            while not stop.is_set():
                os.closerange(3, (256, 20_000)[turn % 2])
                files = own_files(8)
                stop.wait(0.001)
                for index, file in enumerate(files):
                    with open(f"mine{index}.bin", "rb") as again:
                        if (content := again.read()) != b"0123456789":
                            wrong.append(content[:100])
                turn += 1

        capture(1)
        thread = threading.Thread(target=disturb)
        thread.start()
        for _ in range(40):
            capture(25)
        stop.set()
        thread.join()
        assert not wrong, wrong
    """
    start(tmp_path, text)
    check_user_files(tmp_path, 8)
    check_complete(open_run(tmp_path / "run"), 1001)


def test_files_of_ours_that_lose_their_numbers_to_each_other_keep_their_own_bytes(tmp_path):
    """Two threads write, a third closes everything. A number that was taken away must not be
    another file of ours at once, or a write that was checked before goes there."""
    text = """
        import threading
        from driftline.runs.files.owned_file import OwnedFile
        stop = threading.Event()
        wrong = []

        def disturb():
            while not stop.is_set():
                os.closerange(3, 20_000)
                stop.wait(0.0005)

        def write(which):
            try:
                for index in range(40):
                    mode = ("new", "replace", "append", "shared")[index % 4]
                    with OwnedFile(f"file{which}.{index}", mode, locked=index % 3 == 0) as file:
                        for turn in range(100):
                            file.append_all(bytes([65 + which]) * (turn + 1))
            except Exception as error:
                wrong.append(repr(error))

        threads = [threading.Thread(target=write, args=(which,)) for which in range(2)]
        closing = threading.Thread(target=disturb)
        for thread in (closing, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        stop.set()
        closing.join()
        assert not wrong, wrong[:3]
    """
    start(tmp_path, text)
    for path in tmp_path.glob("file*.*"):
        letter = bytes([65 + int(path.name[4])])
        assert path.read_bytes() == letter * 5050, path.name


def lines(folder: Path) -> dict[str, int]:
    """How many tensors each part of the run lists."""
    return {
        path.parent.name: path.read_text().count("\n")
        for path in (folder / "run").glob("rank*/index.jsonl")
    }


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} does not come"
        time.sleep(0.05)


def test_a_file_is_opened_again_only_if_it_is_the_same_and_whole(tmp_path):
    path = tmp_path / "file"
    for damage, reason in (
        (path.unlink, "is no longer there"),
        (lambda: os.truncate(path, 2), "is shorter than what was written to it"),
        (lambda: (tmp_path / "other").replace(path), "is another file now"),
    ):
        path.unlink(missing_ok=True)
        (tmp_path / "other").write_bytes(b"theirs")
        file = OwnedFile(path, "new")
        file.append_all(b"first")
        os.close(file._file)
        file.append_all(b" second")
        assert path.read_bytes() == b"first second"
        os.close(file._file)
        damage()
        with pytest.raises(FileTaken, match=reason):
            file.append(b" third")
        file.close()


class Raced(OwnedFile):
    """Another thread puts a file of the program over the descriptor, around the next write."""

    __slots__ = ("mine", "moment")

    def _write(self, file, data, offset):
        moment, self.moment = self.moment, ""
        if moment == "before":
            os.dup2(self.mine, file)
        count = super()._write(file, data, offset)
        if moment == "after":
            os.dup2(self.mine, file)
        return count


@pytest.mark.parametrize("mode", ["new", "shared"])
def test_a_descriptor_replaced_between_check_and_write_is_noticed_and_said(tmp_path, mode):
    """No check can rule that out, but it never stays without a word."""
    mine = os.open(tmp_path / "mine", os.O_RDWR | os.O_CREAT)
    with Raced(tmp_path / "file", mode) as file:
        file.mine, file.moment = mine, ""
        file.append_all(b"abc")
        file.moment = "after"
        file.append_all(b"def")
        assert (tmp_path / "mine").read_bytes() == b""
        file.moment = "before"
        with pytest.raises(FileTaken, match="3 bytes may be in that file"):
            file.append_all(b"ghi")
        assert (tmp_path / "file").read_bytes() == b"abcdef"
    os.close(mine)


def test_bytes_go_on_at_our_own_end_whatever_others_appended(tmp_path):
    path = tmp_path / "file"
    with OwnedFile(path) as file:
        file.append_all(b"abc")
        os.close(file._file)
        with path.open("ab") as other:
            other.write(b"XY")
        file.append_all(b"def")
        assert path.read_bytes() == b"abcdef"
    with OwnedFile(path, "shared") as first, OwnedFile(path, "shared") as second:
        first.append_all(b"1")
        second.append_all(b"2")
        first.append_all(b"3")
    assert path.read_bytes() == b"abcdef123"


def test_a_forked_child_cannot_write_a_file_of_its_parent(tmp_path):
    with OwnedFile(tmp_path / "file") as file:
        file.append_all(b"parent")
        child = os.fork()
        if not child:
            try:
                file.append(b"child")
            except FileTaken as taken:
                os._exit(3 if "the process that this one is a copy of" in str(taken) else 4)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        file.append_all(b"!")
    assert (tmp_path / "file").read_bytes() == b"parent!"


def test_a_child_of_a_fork_in_c_cannot_write_a_file_of_its_parent(tmp_path):
    """No handler of ours runs there, so the child still has the descriptor open."""
    text = """
        import ctypes
        from driftline.runs.files.owned_file import FileTaken, OwnedFile
        file = OwnedFile("file")
        file.append_all(b"parent")
        child = ctypes.CDLL(None).fork()
        if not child:
            try:
                file.append(b"child")
            except FileTaken:
                os._exit(3)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        file.append_all(b"!")
    """
    start(tmp_path, text)
    assert (tmp_path / "file").read_bytes() == b"parent!"


def test_a_temporary_file_is_never_mistaken_for_one_of_the_program(tmp_path):
    spool = UnnamedFile("driftline-test-")
    assert (spool.append(b"abc"), spool.append(b"def")) == (0, 3)
    assert spool.read(2, 3) == b"cde"
    number = spool._file
    with (tmp_path / "mine").open("w+b", buffering=0) as mine:
        mine.write(b"0123456789")
        os.dup2(mine.fileno(), number)
        with pytest.raises(FileTaken, match="temporary file"):
            spool.append(b"ghi")
        with pytest.raises(FileTaken, match="temporary file"):
            spool.read(0, 3)
        del spool
        assert os.path.sameopenfile(mine.fileno(), number), "closed"
        os.close(number)
    assert (tmp_path / "mine").read_bytes() == b"0123456789"


LABELS = """
    from driftline.dialects.aclcmp.labels import set_label

    set_label("pta", "before", np.arange(4.0))
    os.closerange(3, {last})
    own_files(60)
    set_label("pta", "after", np.arange(4.0))
"""


@pytest.mark.parametrize("last", ["256", LAST])
def test_labels_of_a_program_that_closes_descriptors_are_whole(tmp_path, last):
    from driftline.dialects.aclcmp.label_store import STORE, read_labels

    start(tmp_path, LABELS.format(last=last))
    check_user_files(tmp_path, 60)
    assert [label.data_id for label in read_labels(tmp_path / STORE)] == ["before", "after"]


def test_saved_files_of_a_program_that_closes_descriptors_are_whole(tmp_path):
    """They are written by a thread while the program opens and closes its own."""
    text = """
        from pathlib import Path
        from driftline.dialects.paddle_hook.files import SavedFiles
        files = SavedFiles(lambda path, problem: print(path, problem))
        for index in range(100):
            data = np.full(100_000, index, np.float32)
            files.save(Path(f"saved/{index}.npy"), "float32", (100, 1000), data.view(np.uint8))
            os.closerange(3, 256)
            own_files(8)
    """
    assert not start(tmp_path, text).stdout
    check_user_files(tmp_path, 8)
    for index in range(100):
        values = np.load(tmp_path / f"saved/{index}.npy")
        assert values.shape == (100, 1000) and (values == index).all()
