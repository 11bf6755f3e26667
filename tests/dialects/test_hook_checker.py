"""`driftline check-hooks` (seed 004): two trees of the saving hook, one csv of figures per rank."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from driftline import register_saving_hook
from driftline.cli.main import main
from driftline.dialects.paddle_hook.tree_checker import COLUMNS

Check = Callable[..., tuple[int, str, str]]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    def run(a: Path, b: Path, *more: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["check-hooks", "--pathA", str(a), "--pathB", str(b), *more])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def tensor_name(index: int, class_name: str, layer: str, step: int = 0) -> str:
    return f"tensor_idx_{index}_layer_class_{class_name}_layer_name_{layer}_micro_step_{step}"


def save(tree: Path, values: dict[str, np.ndarray], kind: str = "tensors", rank: int = 0) -> Path:
    folder = tree / kind / f"rank_{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        np.save(folder / f"{name}.npy", value)
    return tree


def layers(count: int, *, seed: int = 0, shift: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        tensor_name(n, "Linear", f"linear_{n + shift}"): generator.standard_normal((3, 5)).astype(
            np.float32
        )
        for n in range(count)
    }


def rows_of(tree: Path, kind: str = "tensors", rank: int = 0) -> list[list[str]]:
    with (tree / kind / "compare_rst" / f"rank_{rank}_rst.csv").open(newline="") as stream:
        rows = list(csv.reader(stream))
    assert tuple(rows[0]) == COLUMNS
    return rows[1:]


def numbers(row: Sequence[str]) -> list[float]:
    return [float(cell) for cell in row[1:]]


def test_the_eleven_columns_are_the_seeds_in_its_order() -> None:
    assert COLUMNS == (
        "tensor_name",
        "cosine similarity",
        "meanA",
        "meanB",
        "meanA - meanB",
        "stdA",
        "stdB",
        "stdA - stdB",
        "varA",
        "varB",
        "varA - varB",
    )


def test_figures_are_those_of_numpy_in_float64(tmp_path: Path, check: Check) -> None:
    ours, theirs = layers(12, seed=1), layers(12, seed=2)
    a, b = save(tmp_path / "a", ours), save(tmp_path / "b", theirs)
    code, out, err = check(a, b)
    assert (code, err) == (0, "driftline: note: neither tree holds grads\n")
    assert "tensors rank_0: 12 tensors compared" in out
    rows = rows_of(a)
    assert [row[0] for row in rows] == list(ours)  # idx_2 before idx_10
    for row in rows:
        x, y = (side[row[0]].astype(np.float64).reshape(-1) for side in (ours, theirs))
        assert numbers(row) == pytest.approx(
            [
                x @ y / np.linalg.norm(x) / np.linalg.norm(y),
                *(x.mean(), y.mean(), x.mean() - y.mean()),
                *(x.std(), y.std(), x.std() - y.std()),
                *(x.var(), y.var(), x.var() - y.var()),
            ],
            rel=1e-9,
            abs=1e-12,
        )


def test_only_the_intersection_is_compared_and_the_leftovers_are_printed(
    tmp_path: Path, check: Check
) -> None:
    ours, theirs = layers(4), layers(4)
    alone = tensor_name(9, "Norm", "norm_0")
    del theirs[tensor_name(1, "Linear", "linear_1")]
    theirs[alone] = np.ones(2)
    a, b = save(tmp_path / "a", ours), save(tmp_path / "b", theirs)
    code, out, _ = check(a, b)
    assert code == 0
    assert len(rows_of(a)) == 3
    assert f"only in {a}: 1\n    {tensor_name(1, 'Linear', 'linear_1')}\n" in out
    assert f"only in {b}: 1\n    {alone}\n" in out


def test_long_lists_of_leftovers_are_cut_unless_asked_for(tmp_path: Path, check: Check) -> None:
    a, b = save(tmp_path / "a", layers(40)), save(tmp_path / "b", layers(3))
    assert "and 27 more; --all lists them" in check(a, b)[1]
    assert check(a, b, "--all")[1].count("tensor_idx_") == 37


def test_ranks_and_kinds_that_one_tree_lacks_are_said(tmp_path: Path, check: Check) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for rank in (0, 1, 10):
        save(a, layers(2), rank=rank)
    save(b, layers(2), rank=0)
    save(b, layers(2), rank=2)
    save(b, {"grad_idx_0_of_param_name_w_micro_step_0": np.ones(2)}, kind="grads")
    code, out, err = check(a, b)
    assert code == 0
    assert f"tensors: {b} has no ranks 1, 10" in err
    assert f"tensors: {a} has no rank 2" in err
    assert f"grads: {a} has no rank 0" in err
    assert "tensors rank_0: 2 tensors compared" in out
    assert not (a / "grads").exists()


def test_gradients_have_a_csv_of_their_own_under_both_namings(tmp_path: Path, check: Check) -> None:
    values = {
        "grad_idx_0_of_param_name_linear_0.w_0_micro_step_0": np.ones((2, 2)),
        "tensor_idx_1_layer_class_Linear_layer_name_linear_0_micro_step_0": np.ones(3),
    }
    a = save(save(tmp_path / "a", layers(2)), values, kind="grads", rank=3)
    b = save(save(tmp_path / "b", layers(2)), values, kind="grads", rank=3)
    assert check(a, b)[0] == 0
    assert {row[0] for row in rows_of(a, "grads", 3)} == set(values)


def test_names_that_differ_by_paddles_numbering_pair_by_class_order_and_micro_step(
    tmp_path: Path, check: Check
) -> None:
    def saved(shift: int) -> dict[str, np.ndarray]:
        order = [("Linear", 0), ("Norm", 0), ("Linear", 1), ("Linear", 2)]
        return {
            tensor_name(step * 4 + n, kind, f"{kind.lower()}_{number + shift}", step): np.full(
                (2, 2), 1.0 + n + 10 * step
            )
            for step in (0, 1)
            for n, (kind, number) in enumerate(order)
        }

    grads = "grad_idx_{}_of_param_name_linear_{}.w_0_micro_step_0"
    a, b = save(tmp_path / "a", saved(0)), save(tmp_path / "b", saved(1))
    save(a, {grads.format(n, n): np.full(2, float(n)) for n in (0, 1)}, kind="grads")
    save(b, {grads.format(n, n + 1): np.full(2, float(n)) for n in (0, 1)}, kind="grads")
    code, out, _ = check(a, b)
    assert code == 0
    assert out.count("by class, order and micro step, as no name agrees") == 2
    for kind, count in (("tensors", 8), ("grads", 2)):
        rows = rows_of(a, kind)
        assert len(rows) == count
        assert all(float(row[4]) == 0.0 for row in rows)  # meanA - meanB


def test_a_class_whose_names_are_shifted_pairs_beside_one_whose_names_agree(
    tmp_path: Path, check: Check
) -> None:
    values = {n: np.full(2, 1.0 + n) for n in range(4)}

    def saved(shift: int) -> dict[str, np.ndarray]:
        return {
            tensor_name(0, "Norm", f"norm_{shift}"): values[0],
            tensor_name(1, "Linear", "linear_0"): values[1],
            tensor_name(2, "Norm", f"norm_{shift + 1}"): values[2],
            tensor_name(3, "Linear", "linear_1"): values[3],
        }

    a, b = save(tmp_path / "a", saved(0)), save(tmp_path / "b", saved(1))
    code, out, _ = check(a, b)
    assert code == 0 and "only in" not in out
    assert "4 tensors compared, 2 of them by class, order and micro step" in out
    assert [float(row[4]) for row in rows_of(a)] == [0.0] * 4


def test_a_class_that_one_side_has_more_often_is_not_guessed_at(
    tmp_path: Path, check: Check
) -> None:
    a = save(tmp_path / "a", {**layers(3), tensor_name(3, "Norm", "norm_0"): np.ones(2)})
    b = save(tmp_path / "b", {**layers(4, shift=1), tensor_name(4, "Norm", "norm_7"): np.ones(2)})
    code, out, _ = check(a, b)
    assert code == 0
    assert [row[0] for row in rows_of(a)] == [tensor_name(3, "Norm", "norm_0")]
    assert f"only in {a}: 3" in out
    assert f"only in {b}: 4" in out


def test_trees_without_a_common_tensor_are_exit_code_2(tmp_path: Path, check: Check) -> None:
    a = save(tmp_path / "a", {"one": np.ones(2)})
    b = save(tmp_path / "b", {"two": np.ones(2)})
    code, _, err = check(a, b)
    assert code == 2
    assert "no tensor in common" in err


def test_nan_and_inf_count_as_they_do_in_numpy(tmp_path: Path, check: Check) -> None:
    plain = np.array([1.0, 2.0, 3.0], np.float32)
    values = {
        "nan": np.array([1.0, np.nan, 3.0], np.float32),
        "inf": np.array([1.0, np.inf, 3.0], np.float32),
        "lowest": np.array([1.0, -65504.0, 3.0], np.float16),
        "huge": np.array([1e200, 2e200, 3e200]),
    }
    a = save(tmp_path / "a", values)
    b = save(tmp_path / "b", dict.fromkeys(values, plain))
    assert check(a, b)[0] == 0
    rows = {row[0]: numbers(row) for row in rows_of(a)}
    assert all(math.isnan(number) for number in (rows["nan"][0], rows["nan"][1], rows["nan"][4]))
    assert rows["inf"][1] == math.inf
    assert math.isnan(rows["inf"][0])
    # Kernel sums take a format's lowest value for minus infinity; a checker must not.
    low = values["lowest"].astype(np.float64)
    assert rows["lowest"][1] == pytest.approx(low.mean())
    assert rows["lowest"][4] == pytest.approx(low.std())
    assert rows["lowest"][0] == pytest.approx(
        low @ plain / np.linalg.norm(low) / np.linalg.norm(plain.astype(np.float64))
    )
    assert rows["huge"][0] == pytest.approx(1.0)
    assert rows["nan"][2] == pytest.approx(2.0)  # the other side keeps its figures


def test_what_cannot_be_compared_is_a_row_and_a_reason_and_exit_code_1(
    tmp_path: Path, check: Check
) -> None:
    good = layers(2)
    a, b = save(tmp_path / "a", good), save(tmp_path / "b", good)
    folder = a / "tensors" / "rank_0"
    save(a, {"turned": np.ones((2, 3)), "waves": np.ones(2, np.complex64)})
    save(b, {"turned": np.ones((3, 2)), "waves": np.ones(2, np.complex64)})
    for name in ("damaged", "objects", "away", "folder"):
        save(b, {name: np.ones(2)})
    (folder / "damaged.npy").write_bytes(b"\x93NUMPY\x01\x00\xff\xff")
    np.save(folder / "objects.npy", np.array([{}], dtype=object))
    (folder / "away.npy").symlink_to("/etc/hostname")
    (folder / "folder.npy").mkdir()
    code, out, _ = check(a, b)
    assert code == 1
    assert "could not be compared: 6" in out
    rows = {row[0]: row for row in rows_of(a)}
    assert len(rows) == 8
    assert rows["turned"][1] == ""
    assert float(rows["turned"][2]) == 1.0  # each side has its own mean all the same
    assert set(rows["damaged"][1:]) == {""}
    assert "turned: the shapes differ: 2x3 against 3x2" in out  # as `compare` says it
    assert "objects: " in out
    assert "leads out of" in out


def test_a_link_inside_the_tree_is_followed(tmp_path: Path, check: Check) -> None:
    good = layers(1)
    a, b = save(tmp_path / "a", good), save(tmp_path / "b", good)
    (name,) = good
    for rank, linked in ((1, a), (1, b)):
        folder = linked / "tensors" / f"rank_{rank}"
        folder.mkdir()
        (folder / f"{name}.npy").symlink_to(f"../rank_0/{name}.npy")
    code, out, _ = check(a, b)
    assert code == 0, out
    assert rows_of(a, rank=1) == rows_of(a, rank=0)


def test_empty_tensors_have_no_mean(tmp_path: Path, check: Check) -> None:
    values = {"empty": np.ones((0, 3), np.float32)}
    a, b = save(tmp_path / "a", values), save(tmp_path / "b", values)
    assert check(a, b)[0] == 0
    assert all(math.isnan(number) for number in numbers(rows_of(a)[0]))


@pytest.mark.parametrize("missing", ["pathA", "pathB", "no tree", "no option"])
def test_paths_that_are_no_trees_are_refused_in_a_sentence(
    tmp_path: Path, check: Check, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    good, empty = save(tmp_path / "good", layers(1)), tmp_path / "empty"
    empty.mkdir()
    if missing == "no option":
        assert main(["check-hooks", "--pathA", str(good)]) == 2
        assert "needs --pathA and --pathB" in capsys.readouterr().err
        return
    a = {"pathA": tmp_path / "nowhere", "no tree": empty}.get(missing, good)
    b = tmp_path / "nowhere" if missing == "pathB" else good
    code, _, err = check(a, b)
    assert code == 2
    assert (
        "is no tree of the saving hook" if missing == "no tree" else "there is no folder"
    ) in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_tree_that_cannot_be_written_is_said(tmp_path: Path, check: Check) -> None:
    a, b = save(tmp_path / "a", layers(1)), save(tmp_path / "b", layers(1))
    (a / "tensors").chmod(0o500)
    assert "cannot write" in check(a, b)[2]


def test_a_result_that_cannot_be_written_is_said(tmp_path: Path, check: Check) -> None:
    a, b = save(tmp_path / "a", layers(1)), save(tmp_path / "b", layers(1))
    (a / "tensors" / "compare_rst").write_text("in the way")
    code, _, err = check(a, b)
    assert code == 2
    assert "cannot write" in err


def test_a_second_check_replaces_the_first(tmp_path: Path, check: Check) -> None:
    a, b = save(tmp_path / "a", layers(3)), save(tmp_path / "b", layers(3))
    check(a, b)
    (b / "tensors" / "rank_0" / f"{tensor_name(0, 'Linear', 'linear_0')}.npy").unlink()
    check(a, b)
    assert len(rows_of(a)) == 2
    assert [path.name for path in (a / "tensors" / "compare_rst").iterdir()] == ["rank_0_rst.csv"]


def test_the_trees_of_our_own_hook_are_checked(tmp_path: Path, check: Check) -> None:
    for name, scale in (("a", 1.0), ("b", 2.0)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        with torch.no_grad():
            model[1].weight.mul_(scale)
        register_saving_hook(model, tmp_path / name, ["Linear", "LayerNorm"])
        model(torch.ones(2, 4)).sum().backward()
    code, out, _ = check(tmp_path / "a", tmp_path / "b")
    assert code == 0
    assert "tensors rank_0: 2 tensors compared" in out
    assert "grads rank_0: 4 tensors compared" in out
    linear, norm = (numbers(row) for row in rows_of(tmp_path / "a"))
    assert linear[6] == 0.0  # stdA - stdB
    assert norm[4] == pytest.approx(norm[5] / 2, rel=1e-5)
