"""`dump --engine atb`: nobody here has the hardware, so a small library, probe and program of the
same interface are compiled, and every option is followed to the files it leads to."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from driftline import open_run
from driftline.captures.launch.atb import NoProbe, atb_environment, dynamic_names, find_probe
from driftline.captures.launch.jobs import CapturePlan
from driftline.runs.run import Run

SOURCES = Path(__file__).parent / "atb"
COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler for the stand-in probe")


class Installed(NamedTuple):
    """A library, its toolkit and a program, as they would be installed."""

    home: Path
    toolkit: Path
    program: Path

    @property
    def probe(self) -> Path:
        return self.toolkit / "tools" / "ait_backend" / "dump" / "libatb_probe_abi1.so"


def compile_(source: str, output: Path, *words: str) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-O1", "-Wall", "-Werror", "-o", str(output), str(SOURCES / source), *words],
        check=True,
        timeout=110,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    base = tmp_path_factory.mktemp("ascend")
    installed = Installed(base / "atb", base / "toolkit", base / "program")
    library = installed.home / "lib" / "libatb.so"
    compile_("library.c", library, "-shared", "-fPIC", "-DNEW_STRINGS")
    compile_("probe.c", installed.probe, "-shared", "-fPIC")
    compile_("probe.c", installed.probe.with_name("libatb_probe_abi0.so"), "-shared", "-fPIC")
    compile_("program.c", installed.program, str(library), f"-Wl,-rpath,{library.parent}")
    for path in installed.probe.parent.iterdir():
        path.chmod(0o755)
    return installed


@pytest.fixture
def atb(built: Installed, monkeypatch: pytest.MonkeyPatch) -> Installed:
    monkeypatch.setenv("ATB_HOME_PATH", str(built.home))
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(built.toolkit))
    return built


def only_dump(output: Path) -> Path:
    (root,) = output.glob("ait_dump*")
    return root


def places(run: Run) -> set[tuple[str, str, str]]:
    return {(r.key.site, r.key.port, r.key.moment) for r in run.records}


def test_what_the_probe_wrote_opens_as_a_run_and_is_said(dump, atb: Installed) -> None:
    done = dump("--engine", "atb", argv=[str(atb.program)])
    assert done.code == 0, done.err
    assert "the toy model has answered" in done.out
    assert "torch: nothing captured" in done.err
    assert "atb: 18 tensors" in done.err and "device 0" in done.err and "step 0" in done.err
    run = open_run(done.path)
    assert len(run) == 18
    out = run.get("2_Decoder_layer", "output")
    assert np.array_equal(out.numpy().ravel(), np.arange(12, dtype=np.float32) * 0.25 + 2.5)
    assert out.record.class_name == "Decoder_layer"


def test_a_set_up_library_chooses_the_engine_by_itself(dump, atb: Installed) -> None:
    assert "atb: 18 tensors" in dump(argv=[str(atb.program)]).err


def test_engine_torch_leaves_the_probe_off(quick, atb: Installed) -> None:
    done = quick("--engine", "torch", run=["infer.py"])
    assert done.code == 0
    assert "atb" not in done.err and not list(done.path.glob("ait_dump*"))


def test_torch_is_captured_beside_the_probe_and_each_is_said(
    dump, atb: Installed, workshop: Path, warm_python: str
) -> None:
    (workshop / "both.sh").write_text(f"{warm_python} infer.py\n{atb.program}\n")
    done = dump("--engine", "atb", argv=["bash", "both.sh"])
    assert done.code == 0, done.err
    assert "torch: " in done.err and "tensors" in done.err.split("atb:")[0]
    assert "atb: 18 tensors" in done.err
    assert "first" in {r.key.site for r in open_run(done.path).records}
    assert len(open_run(only_dump(done.path))) == 18


def test_the_seeds_layout_holds_both_trees(dump, atb: Installed, workshop: Path) -> None:
    (workshop / "both.sh").write_text(f"{sys.executable} infer.py\n{atb.program}\n")
    done = dump("--engine", "atb", "--layout", "ait", argv=["bash", "both.sh"])
    assert done.code == 0, done.err
    assert list((done.path / "ait_dump" / "torch_tensors").iterdir())
    assert list(done.path.glob("ait_dump_*/tensors/0_*/0/*"))


@pytest.mark.parametrize("root", ["-DOLD_ROOT", "-UOLD_ROOT"])
def test_a_second_dump_into_the_seeds_tree_adds_its_process(
    dump, atb: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    """Probes of the document's time write to one folder, `ait_dump`, whoever calls them."""
    probe = tmp_path / "kit" / "tools" / "ait_backend" / "dump" / "libatb_probe_abi1.so"
    compile_("probe.c", probe, "-shared", "-fPIC", root)
    probe.chmod(0o755)
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path / "kit"))
    for options in (("-time", "3"), ("-sd",)):
        done = dump("--layout", "ait", *options, argv=[str(atb.program)])
        assert done.code == 0, done.err
        assert "atb: 18 tensors" in done.err
    assert len(list(done.path.glob("ait_dump*/tensors/0_*"))) == 2


def test_the_seeds_own_spelling_dumps_twice_into_one_folder(atb: Installed, workshop: Path) -> None:
    ait = Path(sys.executable).parent / "ait"
    for options in (["-sd"], ["-time", "3"]):
        words = ["llm", "dump", "--exec", str(atb.program), "-o", "new/folder", *options]
        done = subprocess.run(
            [str(ait), *words], cwd=workshop, capture_output=True, text=True, timeout=110
        )
        assert done.returncode == 0 and "atb: 18 tensors" in done.stderr, done.stderr
    folders = list((workshop / "new" / "folder").glob("ait_dump*/tensors/0_*"))
    assert len(folders) == 2
    kept = [{record.kept for record in open_run(folder).records} for folder in folders]
    assert sorted(map(sorted, kept)) == [["describe"], ["full"]]


@pytest.mark.parametrize(
    ("options", "sites"),
    [
        (["-ids", "1_1"], {"1_Decoder_layer.1_LinearOperation", "…0_MatMulKernel"}),
        (["-ids", "1_1", "-child", "false"], {"1_Decoder_layer.1_LinearOperation"}),
        (["-ids", "0,", "2_0"], {"0_WordEmbedding", "2_Decoder_layer.0_RmsNormOperation"}),
        (
            ["-opname", "RMS,word"],
            {
                "0_WordEmbedding",
                "1_Decoder_layer.0_RmsNormOperation",
                "2_Decoder_layer.0_RmsNormOperation",
            },
        ),
        (
            ["-ids", "0", "-opname", "rms"],
            {
                "0_WordEmbedding",
                "1_Decoder_layer.0_RmsNormOperation",
                "2_Decoder_layer.0_RmsNormOperation",
            },
        ),
    ],
)
def test_ids_and_names_select_operations(dump, atb: Installed, options, sites) -> None:
    done = dump("--engine", "atb", *options, argv=[str(atb.program)])
    assert done.code == 0, done.err
    found = {r.key.site for r in open_run(done.path).records}
    kernel = "1_Decoder_layer.1_LinearOperation.0_MatMulKernel"
    assert found == {kernel if site.startswith("…") else site for site in sites}


@pytest.mark.parametrize(
    ("options", "moments"),
    [
        ([], {("input", "before"), ("output", "after")}),
        (["-time", "0"], {("input", "before"), ("output", "before")}),
        (["-time", "1"], {("input", "after"), ("output", "after")}),
        (
            ["-time", "2"],
            {(port, when) for port in ("input", "output") for when in ("before", "after")},
        ),
        (["-stp", "0"], {("input", "before")}),
        (["-stp", "1"], {("output", "after")}),
        (["-time", "2", "-stp", "1"], {("output", "before"), ("output", "after")}),
    ],
)
def test_time_and_part_select_sides(dump, atb: Installed, options, moments) -> None:
    done = dump("--engine", "atb", *options, argv=[str(atb.program)])
    assert done.code == 0, done.err
    assert {(port, when) for _, port, when in places(open_run(done.path))} == moments


def test_the_execute_range_selects_executions(dump, atb: Installed) -> None:
    done = dump("--engine", "atb", "-er", "1,2,4,4", argv=[str(atb.program), "6"])
    assert {r.key.step for r in open_run(done.path).records} == {1, 2, 4}
    assert "steps 1-2, 4" in done.err


def test_every_step_can_be_asked_for(dump, atb: Installed) -> None:
    done = dump("--engine", "atb", "--step", "*", argv=[str(atb.program), "3"])
    assert {r.key.step for r in open_run(done.path).records} == {0, 1, 2}


def test_a_device_selects_its_own_tensors(dump, atb: Installed) -> None:
    done = dump("--engine", "atb", "-device", "3", argv=[str(atb.program), "1", "3"])
    assert {r.key.rank for r in open_run(done.path).records} == {3}
    other = dump("--engine", "atb", "-device", "2", "--force", argv=[str(atb.program), "1", "3"])
    assert other.code == 2
    assert "the ATB probe wrote nothing" in other.err
    assert "and do --step, -ids, -opname and -device leave something of it?" in other.err
    words = ("--engine", "atb", "--layout", "ait", "-device", "2", "-o", "tree")
    theirs = dump(*words, argv=[str(atb.program), "1", "3"])
    assert theirs.code == 2 and "and do -er, -ids, -opname and -device leave" in theirs.err


def test_descriptions_only_have_shapes_and_no_values(dump, atb: Installed) -> None:
    done = dump("--engine", "atb", "-sd", argv=[str(atb.program)])
    records = open_run(done.path).records
    assert {r.kept for r in records} == {"describe"} and {r.shape for r in records} == {(3, 4)}


def test_summaries_become_statistics(dump, atb: Installed) -> None:
    done = dump("--engine", "atb", "--keep", "summary", argv=[str(atb.program)])
    summary = open_run(done.path).get("0_WordEmbedding", "input").summary
    assert summary is not None and summary.max == 11 and summary.l2 == pytest.approx(506**0.5)


def test_types_beside_tensors_are_written_and_said(dump, atb: Installed) -> None:
    types = ["tensor", "model", "op", "kernel", "cpu_profiling"]
    done = dump("--engine", "atb", "--type", *types, "-tiling", argv=[str(atb.program)])
    assert done.code == 0, done.err
    root = only_dump(done.path)
    assert sorted(p.name for p in root.iterdir()) == [
        "cpu_profiling",
        "kernel_io_tensors",
        "layer",
        "model",
        "operation_io_tensors",
        "tensors",
        "tiling",
    ]
    for word in ("model topology", "operation csv", "kernel csv", "cpu profile", "tiling data"):
        assert word in done.err


def test_a_topology_without_tensors_is_a_dump_too(dump, atb: Installed) -> None:
    done = dump("--engine", "atb", "--type", "layer", argv=[str(atb.program)])
    assert done.code == 0, done.err
    assert "layer topology" in done.err and not list(done.path.glob("ait_dump*/tensors"))


def test_the_probe_s_topology_is_drawn_beside_itself(dump, atb: Installed) -> None:
    import onnx

    done = dump("--engine", "atb", "--type", "layer", "onnx", argv=[str(atb.program)])
    assert done.code == 0, done.err
    drawn = sorted(only_dump(done.path).glob("layer/*/*.onnx"))
    assert drawn and len(drawn) == len(list(only_dump(done.path).glob("layer/*/*.json")))
    for path in drawn:
        onnx.checker.check_model(onnx.load(path), full_check=True)
    assert done.err.count(f"{len(drawn)} ONNX graph") == 1
    assert "torch: nothing captured" in done.err  # the sheets are the probe's


def test_a_library_that_is_preloaded_already_stays(
    dump, atb: Installed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other.so"
    compile_("library.c", other, "-shared", "-fPIC")
    monkeypatch.setenv("LD_PRELOAD", str(other))
    done = dump("--engine", "atb", argv=["bash", "-c", "echo $LD_PRELOAD"])
    assert done.out.strip() == f"{atb.probe}:{other}"


def test_orders_left_over_in_the_shell_do_not_filter(
    dump, atb: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATB_SAVE_TENSOR_IDS", "77")
    monkeypatch.setenv("ATB_DEVICE_ID", "5")
    assert "atb: 18 tensors" in dump("--engine", "atb", argv=[str(atb.program)]).err


def test_the_programs_own_failure_wins(dump, atb: Installed) -> None:
    done = dump("--engine", "atb", argv=[str(atb.program), "1", "0", "7"])
    assert done.code == 7
    assert "atb: 18 tensors" in done.err


def test_old_strings_get_the_other_probe(
    atb: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_("library.c", tmp_path / "lib" / "libatb.so", "-shared", "-fPIC")
    env = {"ATB_HOME_PATH": str(tmp_path), "ASCEND_TOOLKIT_HOME": str(atb.toolkit)}
    assert find_probe(env).name == "libatb_probe_abi0.so"
    env["ATB_HOME_PATH"] = str(atb.home)
    assert find_probe(env) == atb.probe


def test_a_probe_that_others_can_write_is_refused(dump, atb: Installed) -> None:
    atb.probe.chmod(0o775)
    try:
        done = dump("--engine", "atb", argv=[str(atb.program)])
    finally:
        atb.probe.chmod(0o755)
    assert done.code == 2
    assert "can be written by others" in done.err and "chmod go-w" in done.err
    assert not done.path.exists()


def test_a_missing_probe_is_one_sentence_that_says_where_it_was_looked_for(
    dump, atb: Installed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path / "empty"))
    done = dump("--engine", "atb", argv=[str(atb.program)])
    assert done.code == 2
    assert f"looked for in {tmp_path / 'empty' / 'tools' / 'ait_backend' / 'dump'}" in done.err
    assert "Traceback" not in done.err


def test_without_being_asked_a_missing_probe_is_a_note_and_torch_is_captured(
    quick, atb: Installed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path / "empty"))
    done = quick(run=["infer.py"])
    assert done.code == 0
    assert "note: there is no probe library" in done.err and "tensors" in done.err


def test_filters_the_probe_does_not_know_are_said(dump, atb: Installed) -> None:
    done = dump("--engine", "atb", "--site", "first", argv=[str(atb.program)])
    assert "--site selects what torch captures" in done.err
    refused = dump("--engine", "atb", "--step", "1?", "--force", argv=[str(atb.program)])
    assert refused.code == 2 and "ranges of executions" in refused.err


def test_a_home_without_a_library_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(NoProbe, match="cannot read"):
        find_probe({"ATB_HOME_PATH": str(tmp_path)})
    with pytest.raises(NoProbe, match="ATB_HOME_PATH is not set"):
        find_probe({})


def test_every_option_has_its_variable(tmp_path: Path) -> None:
    env = atb_environment(
        CapturePlan(str(tmp_path)), {"LD_PRELOAD": ""}, Path("/p.so"), timestamp="20240701_120000"
    )
    del env["ATB_CUR_PID"]
    assert env == {
        "ATB_SAVE_TENSOR": "1",
        "ATB_SAVE_TENSOR_TIME": "1",
        "ATB_SAVE_TENSOR_IN_BEFORE_OUT_AFTER": "1",
        "ATB_SAVE_TENSOR_RANGE": f"0,{2**31 - 1}",
        "ATB_SAVE_CHILD": "1",
        "ATB_SAVE_TENSOR_PART": "2",
        "ATB_SAVE_TILING": "0",
        "ATB_SAVE_CPU_PROFILING": "0",
        "ATB_DUMP_TYPE": "tensor",
        "ATB_OUTPUT_DIR": f"{tmp_path}/",
        "ATB_AIT_LOG_LEVEL": "1",
        "ATB_TIMESTAMP": "20240701_120000",
        "LD_PRELOAD": "/p.so",
    }


@pytest.mark.parametrize(
    "damage", [b"", b"\x7fELF", b"no library", b"\x7fELF\x02\x01" + b"\xff" * 90]
)
def test_a_damaged_library_has_no_names(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "libatb.so").write_bytes(damage)
    assert list(dynamic_names(tmp_path / "libatb.so")) == []
