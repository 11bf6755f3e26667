"""`errcheck --engine atb`: a small library, probe and program of the documented interface, since
nobody here has the hardware."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from driftline.captures.launch.errcheck import atb_orders
from driftline.captures.launch.jobs import WatchPlan
from driftline.cli.main import main

SOURCES = Path(__file__).parent / "atb"
COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler for the stand-in probe")
ADD = "ElewiseOperation_1:AddF32Tactic"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The library's folder, the toolkit's, and a program."""
    base = tmp_path_factory.mktemp("ascend")
    library = base / "atb" / "lib" / "libatb.so"
    probe = base / "toolkit" / "tools" / "ait_backend" / "dump" / "libatb_probe_abi0.so"
    program = base / "program"
    shared = ["-shared", "-fPIC", str(SOURCES / "overflow.c")]
    for output, words in (
        (library, shared),
        (probe, [*shared, "-DPROBE"]),
        (program, [str(SOURCES / "kernels.c"), str(library), f"-Wl,-rpath,{library.parent}"]),
    ):
        output.parent.mkdir(parents=True, exist_ok=True)
        assert COMPILER is not None
        subprocess.run(
            [COMPILER, "-Wall", "-Werror", "-o", str(output), *words], check=True, timeout=110
        )
    probe.chmod(0o755)
    return base / "atb", base / "toolkit", program


@pytest.fixture
def program(
    installed: tuple[Path, Path, Path], workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    monkeypatch.setenv("ATB_HOME_PATH", str(installed[0]))
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(installed[1]))
    return str(installed[2])


def test_an_overflow_of_a_kernel_is_found_and_said(program: str, workshop: Path, capfd) -> None:
    code = main(["errcheck", "--engine", "atb", "--", program, ADD])
    out, err = capfd.readouterr()
    assert code == 1 and f"overflow in {ADD}" in out and "all kernels ran" in out
    assert "torch: nothing was watched" in err and "1 finding" in err
    (path,) = workshop.glob("ait_overflow_res_*.txt")
    assert path.read_text() == f"Overflow detected! Operator name: {ADD}"


def test_a_clean_program_is_exit_0_and_leaves_nothing(program: str, workshop: Path, capfd) -> None:
    before = sorted(workshop.iterdir())
    code = main(["errcheck", "--engine", "atb", "--", program])
    out, err = capfd.readouterr()
    assert code == 0 and "nothing found" in err and "all kernels ran" in out
    assert sorted(workshop.iterdir()) == before


@pytest.mark.parametrize("spelling", [("errcheck", "--engine", "atb"), ("errcheck",)])
def test_a_new_output_folder_is_there_before_the_probe_looks(
    program: str, workshop: Path, capfd, spelling: tuple[str, ...]
) -> None:
    """The probe makes no folder and says nothing when it cannot write."""
    code = main([*spelling, "-o", "new/folder", "--", program, ADD])
    out, err = capfd.readouterr()
    assert code == 1 and f"overflow in {ADD}" in out, err
    (path,) = (workshop / "new" / "folder").glob("ait_overflow_res_*.txt")
    assert ADD in path.read_text()


def test_a_new_output_folder_is_not_left_without_a_finding(
    program: str, workshop: Path, capfd
) -> None:
    assert main(["errcheck", "--engine", "atb", "-o", "new/folder", "--", program]) == 0
    assert not (workshop / "new").exists()


def test_the_seeds_own_spelling_finds_it_in_a_new_folder(program: str, workshop: Path) -> None:
    ait = Path(sys.executable).parent / "ait"
    words = ["llm", "errcheck", "--exec", f"{program} {ADD}", "--type", "overflow", "-o", "found"]
    done = subprocess.run(
        [str(ait), *words], capture_output=True, text=True, cwd=workshop, timeout=110
    )
    assert done.returncode == 1 and f"overflow in {ADD}" in done.stdout, done.stderr
    assert list((workshop / "found").glob("ait_overflow_res_*.txt"))


def test_exit_is_handed_to_the_probe(program: str, capfd) -> None:
    code = main(["errcheck", "--engine", "atb", "--exit", "--", program, ADD])
    out, err = capfd.readouterr()
    assert "all kernels ran" not in out and f"overflow in {ADD}" in out
    assert code == 1 and "ended with status 5" in err


def test_an_old_result_file_is_nobodys_finding(program: str, workshop: Path, capfd) -> None:
    (workshop / "ait_overflow_res_1.txt").write_text("Overflow detected! Operator name: Old_1:K")
    assert main(["errcheck", "--engine", "atb", "--", program]) == 0
    assert "Old_1" not in capfd.readouterr().out


def test_a_set_up_library_chooses_the_engine_and_torch_is_watched_beside(
    program: str, workshop: Path, capfd
) -> None:
    (workshop / "prog.py").write_text("import torch\ntorch.log(torch.tensor([-1.0, 1.0]))\n")
    (workshop / "both.sh").write_text(f"{sys.executable} prog.py\n{program} {ADD}\n")
    code = main(["errcheck", "-o", "found", "--", "bash", "both.sh"])
    out, _ = capfd.readouterr()
    assert code == 1 and "aten.log" in out and ADD in out


def test_the_orders_are_the_documented_variables(tmp_path: Path) -> None:
    plan = WatchPlan(output=str(tmp_path / "x" / ".."), folder="f", exit=True, log_level="warning")
    env = atb_orders(plan, {"LD_PRELOAD": "/lib/other.so"}, Path("/opt/probe.so"))
    assert env == {
        "LD_PRELOAD": "/opt/probe.so:/lib/other.so",
        "ATB_CHECK_TYPE": "1",
        "ATB_EXIT": "1",
        "ATB_OUTPUT_DIR": str(tmp_path.resolve()),
        "ATB_AIT_LOG_LEVEL": "2",
    }


def test_without_a_probe_an_explicit_engine_is_refused(workshop: Path, capfd, monkeypatch) -> None:
    monkeypatch.delenv("ATB_HOME_PATH", raising=False)
    assert main(["errcheck", "--engine", "atb", "--", "true"]) == 2
    assert "ATB_HOME_PATH is not set" in capfd.readouterr().err
