"""Labels of seed 002: set in real processes, compared at the end."""

from __future__ import annotations

import csv
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import driftline
from driftline.dialects.aclcmp import labels as door
from driftline.dialects.aclcmp.label_store import Label, LabelWriter, Value, file_stem, read_labels
from driftline.dialects.aclcmp.report import COLUMNS, paired, report_tasks
from support.atb_files import write_bin

SOURCE = Path(driftline.__file__).parents[1]
HEAD = "import sys, os, numpy as np\nfrom driftline import set_label, gen_id, set_task_id\n"

Start = Callable[..., subprocess.Popen[str]]


def variables(**more: str) -> dict[str, str]:
    mine = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DRIFTLINE_LABELS", "AIT_CMP", "ACLTRANSFORMER", "ASDOPS"))
    }
    return {**mine, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **more}


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start a program that may label; it runs in the test's own folder."""

    def launch(body: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", HEAD + body],
            cwd=tmp_path,
            env=variables(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return launch


def end(program: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = program.communicate(timeout=60)
    return program.returncode, out, err


def command(folder: Path, *words: str, text: str = "", **more: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "driftline", "labels", *words],
        cwd=folder,
        env=variables(**more),
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        assert tuple(reader.fieldnames or ()) == COLUMNS
        return list(reader)


def by_id(folder: Path, task: str = "") -> Mapping[str, dict[str, str]]:
    return {row["data_id"]: row for row in rows_of(folder / f"{task}_cmp_result.csv")}


# --- the three functions ------------------------------------------------------------------------


def test_the_package_offers_the_three_functions_of_the_seed() -> None:
    assert driftline.set_label is door.set_label
    assert driftline.gen_id is door.gen_id
    assert driftline.set_task_id is door.set_task_id


def test_ids_are_unique_within_a_process_and_across_processes(start: Start) -> None:
    body = "print(*[gen_id() for _ in range(500)])"
    programs = [start(body) for _ in range(3)]
    ids = [word for program in programs for word in end(program)[1].split()]
    assert len(ids) == len(set(ids)) == 1500
    assert all(one.startswith("data_") for one in ids)


def test_a_round_is_named_after_the_process_and_counted(start: Start) -> None:
    body = (
        "set_task_id(); print(os.environ['AIT_CMP_TASK_ID'], os.getpid());"
        "set_task_id(); path = os.environ[f'{os.getpid()}_DUMP_PATH'];"
        "print(os.environ['AIT_CMP_TASK_ID'], path)"
    )
    first, pid, second, path = end(start(body))[1].split()
    assert (first, second, path) == (f"{pid}_1", f"{pid}_2", pid)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"data_src": "pta", "data_id": "x"}, "needs data_val"),
        ({"data_src": "pta", "data_id": "x", "tensor_path": "a.bin"}, "needs data_val"),
        ({"data_src": "acl", "data_id": "x"}, "data_val or tensor_path"),
        ({"data_src": "gpu", "data_id": "x", "data_val": np.ones(1)}, "'pta' or 'acl'"),
        ({"data_src": "pta", "data_id": "", "data_val": np.ones(1)}, "data_id is a text"),
        ({"data_src": "pta", "data_id": 3, "data_val": np.ones(1)}, "data_id is a text"),
        ({"data_src": "pta", "data_id": "x", "data_val": [1.0]}, "torch tensor or a numpy array"),
        ({"data_src": "pta", "data_id": "x", "data_val": np.array([None])}, "cannot be compared"),
        (
            {"data_src": "acl", "data_id": "x", "data_val": np.ones(1), "tensor_path": "a"},
            "not both",
        ),
        (
            {"data_src": "pta", "data_id": "x", "data_val": torch.ones(2, 2).to_sparse()},
            "cannot be compared",
        ),
    ],
)
def test_a_label_that_cannot_mean_anything_is_refused_at_once(
    words: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        driftline.set_label(**words)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


# --- pairs ----------------------------------------------------------------------------------------


def test_a_pair_is_compared_at_exit_and_the_program_ends_as_it_would(
    start: Start, tmp_path: Path
) -> None:
    code, _, err = end(
        start(
            "g = np.array([3.0, 4.0], np.float32)\n"
            "set_label('pta', 'x', g)\nset_label('acl', 'x', data_val=g * 2)\nsys.exit(5)"
        )
    )
    assert code == 5
    assert "_cmp_result.csv" in err
    (row,) = rows_of(tmp_path / "_cmp_result.csv")
    assert row["cmp_flag"] == "True"
    assert (row["pta_dtype"], row["acl_shape"]) == ("float32", "(2,)")
    assert float(row["cosine_similarity"]) == pytest.approx(1.0)
    assert float(row["max_relative_error"]) == pytest.approx(1.0)
    assert float(row["mean_relative_error"]) == pytest.approx(1.0)
    # With its root: sqrt(25 / 25). The original's first version gives the square.
    assert float(row["relative_euclidean_distance"]) == pytest.approx(1.0)
    assert row["cmp_fail_reason"] == ""
    for side in ("pta", "acl"):
        assert driftline.open_run(row[f"{side}_data_path"]).records[0].shape == (2,)


def test_the_distance_has_its_root(start: Start, tmp_path: Path) -> None:
    end(start("set_label('pta', 'x', np.array([4.0]))\nset_label('acl', 'x', np.array([5.0]))"))
    (row,) = rows_of(tmp_path / "_cmp_result.csv")
    assert float(row["relative_euclidean_distance"]) == 0.25  # not 0.0625


def test_the_low_level_order_of_the_seed_is_compared(start: Start, tmp_path: Path) -> None:
    """pta first, then acl with a path: the original leaves this row uncompared for ever."""
    home = tmp_path / "home"
    end(
        start(
            "set_task_id()\n"
            "v = np.arange(6, dtype=np.float16).reshape(2, 3)\n"
            "set_label('pta', 'x', data_val=v)\n"
            "set_label('acl', 'x', tensor_path='0_Model/3_Runner/after/outTensor0.bin')\n"
            "task = os.environ['AIT_CMP_TASK_ID']\n"
            "folder = os.path.join(os.environ['ACLTRANSFORMER_HOME_PATH'], 'tensors',"
            " str(os.getpid()), task, '0_Model/3_Runner/after')\n"
            "os.makedirs(folder)\n"
            "open(os.path.join(folder, 'outTensor0.bin'), 'wb').write(v.tobytes())\n",
            ACLTRANSFORMER_HOME_PATH=str(home),
        )
    )
    (csv_file,) = tmp_path.glob("*_1_cmp_result.csv")
    (row,) = rows_of(csv_file)
    assert row["cmp_flag"] == "True"
    assert row["acl_data_path"].endswith("0_Model/3_Runner/after/outTensor0.bin")
    assert (row["acl_dtype"], row["acl_shape"]) == ("float16", "(2, 3)")
    assert float(row["relative_euclidean_distance"]) == 0.0


def test_a_dump_of_the_second_library_is_found_below_its_token(
    start: Start, tmp_path: Path
) -> None:
    end(
        start(
            "v = np.arange(4, dtype=np.float32)\n"
            "root = os.environ['ASDOPS_LOG_TO_FILE_DIR']\n"
            "for token in (0, 1):\n"
            "    folder = f'{root}/tensors/thread_{os.getpid()}/{token}/{token}_Op/after'\n"
            "    os.makedirs(folder)\n"
            "    open(folder + '/outTensor0.bin', 'wb').write((v + token).tobytes())\n"
            "    twin = f'{root}/tensors/thread_{os.getpid()}/{token}/9_Op'\n"
            "    os.makedirs(twin)\n"
            "    open(twin + '/outTensor0.bin', 'wb').write((v + token).tobytes())\n"
            "for name, path in (('named', '1/1_Op/after/outTensor0.bin'),\n"
            "                   ('found', '0_Op/after/outTensor0.bin'),\n"
            "                   ('twins', '9_Op/outTensor0.bin'),\n"
            "                   ('gone', '5_Op/outTensor0.bin'),\n"
            "                   ('out', '../../../../secret.bin')):\n"
            "    set_label('pta', name, v)\n"
            "    set_label('acl', name, tensor_path=path)\n"
            "open('secret.bin', 'wb').write(v.tobytes())\n",
            ASDOPS_LOG_TO_FILE_DIR=str(tmp_path / "logs"),
        )
    )
    rows = by_id(tmp_path)
    assert float(rows["found"]["max_relative_error"]) == 0.0
    assert float(rows["named"]["max_relative_error"]) == math.inf
    assert rows["twins"]["cmp_flag"] == "False"
    assert "2 tokens have 9_Op/outTensor0.bin" in rows["twins"]["cmp_fail_reason"]
    assert "does not exist; looked for" in rows["gone"]["cmp_fail_reason"]
    assert rows["out"]["cmp_flag"] == "False"


def test_bare_bytes_of_another_size_are_a_row_with_a_reason(start: Start, tmp_path: Path) -> None:
    end(
        start(
            "open('short.bin', 'wb').write(b'1234')\n"
            "set_label('pta', 'x', np.ones(4, np.float32))\n"
            "set_label('acl', 'x', tensor_path='short.bin')\n"
        )
    )
    (row,) = rows_of(tmp_path / "_cmp_result.csv")
    assert row["cmp_flag"] == "False"
    assert "it has 4, not the 16" in row["cmp_fail_reason"]


def test_atb_files_are_read_with_their_own_type_and_damaged_ones_say_why(
    start: Start, tmp_path: Path
) -> None:
    values = np.arange(6, dtype=np.float16).reshape(2, 3)
    write_bin(tmp_path / "outtensor0.bin", values)
    whole = (tmp_path / "outtensor0.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(whole[:-3])
    (tmp_path / "twice.bin").write_bytes(whole + whole)
    write_bin(tmp_path / "told.bin", values, keep="description")
    end(
        start(
            "for name in ('outtensor0', 'cut', 'twice', 'told'):\n"
            "    set_label('pta', name, np.arange(6, dtype=np.float32).reshape(1, 2, 3))\n"
            "    set_label('acl', name, tensor_path=os.path.abspath(name + '.bin'))\n"
        )
    )
    rows = by_id(tmp_path)
    whole_row = rows.pop("outtensor0")
    assert (whole_row["acl_dtype"], whole_row["acl_shape"]) == ("float16", "(2, 3)")
    assert float(whole_row["relative_euclidean_distance"]) == 0.0
    for name, row in rows.items():
        assert row["cmp_flag"] == "False", name
        assert row["cmp_fail_reason"].startswith("acl: "), name
        assert row["acl_data_path"].endswith(f"{name}.bin")


def test_old_labels_in_a_run_of_the_command_are_found_by_the_hint(tmp_path: Path) -> None:
    body = "set_label('pta', 'x', np.ones(1)); set_label('acl', 'x', np.ones(1))"
    command(tmp_path, "-q", "--", sys.executable, "-c", HEAD + body)
    code, _, err = command(tmp_path, "--from", "cmp_dump_data")
    assert code == 2
    folder = err.split("--from ")[1].strip()
    assert command(tmp_path, "--from", folder)[0] == 0


def test_unpaired_labels_are_rows_with_reasons(start: Start, tmp_path: Path) -> None:
    end(
        start(
            "set_label('pta', 'left', np.ones(2))\nset_label('acl', 'right', np.ones(2))\n"
            "set_label('acl', 'file', tensor_path='a/b.bin')"
        )
    )
    rows = by_id(tmp_path)
    assert rows["left"]["cmp_fail_reason"] == "no acl label belongs to it"
    assert rows["left"]["pta_shape"] == "(2,)"
    assert rows["right"]["cmp_fail_reason"] == "no pta label belongs to it"
    assert rows["file"]["acl_data_path"] == "a/b.bin"
    assert {row["cmp_flag"] for row in rows.values()} == {"False"}


def test_other_shapes_are_a_row_with_a_reason_and_axes_of_one_are_no_other_shape(
    start: Start, tmp_path: Path
) -> None:
    end(
        start(
            "a = np.arange(6.0).reshape(2, 3)\n"
            "for name, other in (('turned', a.T), ('wrapped', a[None]), ('whole', a)):\n"
            "    set_label('pta', name, a)\n    set_label('acl', name, other)\n"
        )
    )
    rows = by_id(tmp_path)
    assert rows["turned"]["cmp_flag"] == "False"
    assert "shapes differ" in rows["turned"]["cmp_fail_reason"]
    assert rows["turned"]["acl_shape"] == "(3, 2)"
    assert rows["wrapped"]["cmp_flag"] == "True"
    assert rows["wrapped"]["acl_shape"] == "(1, 2, 3)"


def test_every_dtype_of_torch_and_numpy_comes_back_as_it_was(start: Start, tmp_path: Path) -> None:
    code, _, err = end(
        start(
            "import torch\n"
            "kinds = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16,\n"
            "         torch.int64, torch.bool, torch.complex64, torch.uint8]\n"
            "for kind in kinds:\n"
            "    value = torch.tensor([[0, 1, 2], [3, 1, 0]]).to(kind)\n"
            "    set_label('pta', str(kind), value)\n"
            "    set_label('acl', str(kind), value.t().contiguous().t())\n"
            "set_label('pta', 'scalar', torch.tensor(2.5))\n"
            "set_label('acl', 'scalar', np.float64(2.5))\n"
            "set_label('pta', 'big', np.arange(3, dtype='>f4'))\n"
            "set_label('acl', 'big', np.arange(3, dtype='<f4'))\n"
            "set_label('pta', 'empty', torch.ones(0, 4))\n"
            "set_label('acl', 'empty', torch.ones(0, 4))\n"
            "set_label('pta', 'ids', torch.tensor([2**53 + 1]))\n"
            "set_label('acl', 'ids', torch.tensor([2**53]))\n"
        )
    )
    assert (code, "could not" in err) == (0, False)
    rows = by_id(tmp_path)
    different = rows.pop("ids")
    assert len(rows) == 11
    for name, row in rows.items():
        assert row["cmp_flag"] == "True", (name, row)
        assert float(row["relative_euclidean_distance"]) == 0.0
    assert rows["torch.bfloat16"]["pta_dtype"] == "bfloat16"
    assert float(different["max_relative_error"]) > 0.0


def test_nan_on_one_side_only_is_said_and_the_rest_is_still_measured(
    start: Start, tmp_path: Path
) -> None:
    end(
        start(
            "g = np.array([1.0, 2.0, 3.0])\nm = g.copy(); m[1] = np.nan\n"
            "set_label('pta', 'x', g)\nset_label('acl', 'x', m)\n"
        )
    )
    (row,) = rows_of(tmp_path / "_cmp_result.csv")
    assert float(row["max_relative_error"]) == 0.0
    assert "NaN or Inf on one side only, the first at index" in row["cmp_fail_reason"]


def test_an_id_used_again_pairs_the_nth_with_the_nth(start: Start, tmp_path: Path) -> None:
    end(
        start(
            "for n in range(3):\n    set_label('pta', 'layer', np.full(2, 1.0 + n))\n"
            "for n in range(2):\n    set_label('acl', 'layer', np.full(2, 1.0 + n))\n"
        )
    )
    rows = rows_of(tmp_path / "_cmp_result.csv")
    assert [row["cmp_flag"] for row in rows] == ["True", "True", "False"]
    assert [row["max_relative_error"] for row in rows] == ["0.0", "0.0", ""]


# --- names ----------------------------------------------------------------------------------------


def test_an_id_with_path_characters_stays_inside_the_store(start: Start, tmp_path: Path) -> None:
    ids = ["../x", "../../etc/passwd", "/abs", "a/b", "..", ".", "层 0/注意力", "x" * 400, "a\nb"]
    end(
        start(
            f"for name in {ids!r}:\n    set_label('pta', name, np.ones(1))\n"
            "    set_label('acl', name, np.ones(1))\n"
        )
    )
    rows = by_id(tmp_path)
    assert set(rows) == set(ids)
    assert all(row["cmp_flag"] == "True" for row in rows.values())
    store = tmp_path / "cmp_dump_data"
    assert {path.name for path in tmp_path.iterdir()} == {"cmp_dump_data", "_cmp_result.csv"}
    assert {path.name for path in store.iterdir() if path.is_dir()} == {"pta_tensor", "acl_tensor"}
    assert len(list((store / "pta_tensor").iterdir())) == len(ids)


@given(st.text())
def test_a_file_name_has_no_separator_and_is_short(text: str) -> None:
    stem = file_stem(text)
    assert stem == Path(stem).name
    assert stem not in ("", ".", "..")
    assert "\0" not in stem
    assert len(os.fsencode(stem)) <= 160


def test_a_round_whose_name_is_a_path_writes_its_csv_here(start: Start, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    end(start("os.chdir('inner'); set_label('pta', 'x', np.ones(1))", AIT_CMP_TASK_ID="../escaped"))
    assert (inner / "escaped_cmp_result.csv").is_file()
    assert not list(tmp_path.glob("*.csv"))


# --- several processes ------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["pta", "acl"])
def test_two_processes_label_one_id_in_either_order(
    start: Start, tmp_path: Path, first: str
) -> None:
    second = "acl" if first == "pta" else "pta"
    for source in (first, second):
        assert end(start(f"set_label('{source}', 'shared', np.arange(4.0))"))[0] == 0
    (row,) = rows_of(tmp_path / "_cmp_result.csv")
    assert row["cmp_flag"] == "True"


def test_processes_that_label_at_the_same_time_lose_nothing(start: Start, tmp_path: Path) -> None:
    body = (
        "source, name = sys.argv[1:] if len(sys.argv) > 2 else ('{source}', '{name}')\n"
        "for n in range(60):\n    set_label(source, f'{{name}}-{{n}}', np.full(8, float(n)))\n"
    )
    programs = [
        start(body.format(source=source, name=name))
        for name in ("a", "b", "c")
        for source in ("pta", "acl")
    ]
    assert all(end(program)[0] == 0 for program in programs)
    rows = rows_of(tmp_path / "_cmp_result.csv")
    assert len(rows) == 180
    assert all(row["cmp_flag"] == "True" for row in rows)
    assert not list(tmp_path.glob(".*"))  # no scratch files


def test_a_killed_process_leaves_whole_labels_and_the_rest_is_compared(
    start: Start, tmp_path: Path
) -> None:
    program = start(
        "n = 0\nwhile True:\n"
        "    set_label('pta', str(n), np.full(4096, float(n)))\n"
        "    set_label('acl', str(n), np.full(4096, float(n)))\n"
        "    n += 1\n    print(n, flush=True)\n"
    )
    assert program.stdout is not None
    while int(program.stdout.readline()) < 20:
        pass
    program.send_signal(signal.SIGKILL)
    program.communicate()
    store = tmp_path / "cmp_dump_data"
    (lines,) = store.glob("labels-*.jsonl")
    with lines.open("ab") as stream:  # as if it had died in the middle of a line
        stream.write(b'{"task": "", "source": "pta", "id": "ha')
    code, out, _ = command(tmp_path, "--from", "cmp_dump_data")
    rows = rows_of(tmp_path / "_cmp_result.csv")
    # It may have died between the two labels of a pair: the lone one is no pass.
    whole = all(row["cmp_flag"] == "True" for row in rows)
    assert (code, out[:6]) == (0 if whole else 1, "labels")
    assert len(rows) >= 20
    assert all(row["cmp_flag"] == "True" for row in rows[:20])


def test_forked_and_spawned_workers_share_the_store(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(
        HEAD + "import multiprocessing as mp\n"
        "def work(n):\n    set_label('acl', str(n), np.full(2, float(n)))\n"
        "if __name__ == '__main__':\n"
        "    set_task_id()\n"
        "    for n in range(4):\n        set_label('pta', str(n), np.full(2, float(n)))\n"
        "    for way, ns in (('fork', (0, 1)), ('spawn', (2, 3))):\n"
        "        with mp.get_context(way).Pool(1) as pool:\n            pool.map(work, ns)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=variables(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (csv_file,) = tmp_path.glob("*_1_cmp_result.csv")
    assert [row["cmp_flag"] for row in rows_of(csv_file)] == ["True"] * 4


def test_a_child_of_multiprocessing_that_labels_alone_writes_the_csv(tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text(
        HEAD + "import multiprocessing as mp\n"
        "def work():\n"
        "    set_label('pta', 'x', np.ones(2))\n    set_label('acl', 'x', np.ones(2))\n"
        "if __name__ == '__main__':\n"
        "    child = mp.get_context('fork').Process(target=work)\n    child.start(); child.join()\n"
    )
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=variables(), check=True)
    assert by_id(tmp_path)["x"]["cmp_flag"] == "True"


def test_a_killed_round_does_not_shift_the_pairs_of_the_next_process() -> None:
    def label(source: str, process: str, number: int, at: int) -> Label:
        return Label("", source, "layer", at, process, number, 1)

    killed = label("pta", "1-a", 0, 1)
    ptas, acls = [label("pta", "2-b", 0, 2)], [label("acl", "2-b", 1, 3)]
    assert paired([killed, *ptas, *acls]) == [(killed, None), (ptas[0], acls[0])]


def test_many_labels_cost_as_much_each_as_few_do(tmp_path: Path) -> None:
    writer = LabelWriter(tmp_path / "store")
    value = Value("float32", (4,), np.ones(4, np.float32).view(np.uint8))

    def spent(count: int) -> float:
        began = time.process_time()
        for n in range(count):
            writer.add("", "pta", str(n), value, "")
        return (time.process_time() - began) / count

    early = min(spent(200) for _ in range(3))
    spent(2000)
    late = min(spent(200) for _ in range(3))
    assert late < 5 * early
    assert len(read_labels(tmp_path / "store")) == 3200


# --- a store that was tampered with ---------------------------------------------------------------


@pytest.mark.parametrize(
    "file",
    ["../outside.safetensors", "/etc/passwd", "pta_tensor/gone.safetensors", "pta_tensor", "pipe"],
)
def test_a_line_that_names_a_file_outside_the_store_reads_nothing(
    tmp_path: Path, file: str
) -> None:
    store = tmp_path / "store"
    writer = LabelWriter(store)
    value = Value("float32", (1,), np.ones(1, np.float32).view(np.uint8))
    for source in ("pta", "acl"):
        writer.add("", source, "x", value, "")
    writer.close()
    (tmp_path / "outside.safetensors").write_bytes(
        next((store / "pta_tensor").iterdir()).read_bytes()
    )
    os.mkfifo(store / "pipe")
    (lines,) = store.glob("labels-*.jsonl")
    text = lines.read_text()
    inner = next((store / "pta_tensor").iterdir()).name
    lines.write_text(text.replace(f"pta_tensor/{inner}", file))
    (outcome,) = report_tasks(store, tmp_path)
    (row,) = rows_of(outcome.csv)
    assert row["cmp_flag"] == "False"
    assert row["cmp_fail_reason"].startswith("pta: ")


def test_lines_that_are_no_labels_are_passed_over(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "labels-1-x.jsonl").write_text('{}\n[]\nnull\n"x"\nnot json\n{"source": "pta"}\n\n')
    assert read_labels(store) == []
    assert report_tasks(store, tmp_path) == []


# --- the command ----------------------------------------------------------------------------------

CHAT = """
for query in sys.stdin:
    set_task_id()
    a = np.arange(1.0, 5.0)
    set_label("pta", "out", a)
    set_label("acl", "out", a * (2 if query.strip() == "wrong" else 1))
"""


def test_the_command_compares_every_round_and_passes_input_on(tmp_path: Path) -> None:
    (tmp_path / "chat.py").write_text(HEAD + CHAT)
    code, out, err = command(tmp_path, "--exec", f"{sys.executable} chat.py", text="hi\nwrong\n")
    assert (code, err) == (1, "")
    first, second = sorted(tmp_path.glob("*_cmp_result.csv"))
    assert (first.name[-17:], second.name[-17:]) == ("_1_cmp_result.csv", "_2_cmp_result.csv")
    assert rows_of(first)[0]["max_relative_error"] == "0.0"
    assert rows_of(second)[0]["max_relative_error"] == "1.0"
    assert "PASS" in out
    assert "FAIL" in out


def test_the_commands_exit_code_is_the_programs_when_it_fails(tmp_path: Path) -> None:
    body = "set_label('pta', 'x', np.ones(1)); set_label('acl', 'x', np.ones(1)); os._exit(9)"
    code, _, err = command(tmp_path, "--", sys.executable, "-c", HEAD + body)
    assert code == 9
    assert "ended with status 9" in err
    assert by_id(tmp_path)["x"]["cmp_flag"] == "True"  # what was labelled is compared all the same


def test_a_pair_whose_file_is_missing_is_no_pass(tmp_path: Path) -> None:
    body = (
        "for name in 'xy': set_label('pta', name, np.ones(1))\n"
        "set_label('acl', 'x', np.ones(1)); set_label('acl', 'y', tensor_path='a/b.bin')"
    )
    code, out, _ = command(tmp_path, "--", sys.executable, "-c", HEAD + body)
    assert code == 1
    assert "could not be read" in out
    assert by_id(tmp_path)["y"]["cmp_fail_reason"].startswith("acl: a/b.bin does not exist")


def test_a_program_without_a_label_is_exit_code_2(tmp_path: Path) -> None:
    code, _, err = command(tmp_path, "--exec", f"{sys.executable} -c 'print(1)'")
    assert code == 2
    assert "no tensor was labelled" in err
    assert not list(tmp_path.iterdir())


def test_two_runs_of_the_command_do_not_mix_their_labels(tmp_path: Path) -> None:
    body = "set_label('pta', 'x', np.ones(1)); set_label('acl', 'x', np.ones(1))"
    for _ in range(2):
        assert command(tmp_path, "-q", "--", sys.executable, "-c", HEAD + body)[0] == 0
    assert len(rows_of(tmp_path / "_cmp_result.csv")) == 1


def test_the_three_variables_of_the_accelerator_library_are_passed_on(tmp_path: Path) -> None:
    names = ("", "_MAX", "_RUNNER")
    given = {f"ACLTRANSFORMER_SAVE_TENSOR{name}": f"v{name}" for name in names}
    body = "print(*(v for n, v in sorted(os.environ.items()) if n.startswith('ACLTRANSFORMER')))"
    _, out, _ = command(tmp_path, "--", sys.executable, "-c", HEAD + body, **given)
    assert out.split() == ["v", "v_MAX", "v_RUNNER"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "there is no program to run"),
        (("--exec", "python x.py | tee log"), "without a shell"),
        (("--exec", "no-such-program-here"), "command not found"),
        (("--from", "nowhere"), "there is no folder nowhere"),
        (("--from", ".", "--exec", "true"), "give one"),
    ],
)
def test_the_command_refuses_in_a_sentence(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    code, out, err = command(tmp_path, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
    assert "driftline dump" not in err


def test_a_folder_that_cannot_be_written_does_not_end_the_model(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "cmp_dump_data").write_text("a file is in the way")
    code, out, err = end(
        start("set_label('pta', 'x', np.ones(1)); set_label('pta', 'y', np.ones(1)); print('done')")
    )
    assert (code, out) == (0, "done\n")
    assert err.count("labels stop at 'x'") == 1
