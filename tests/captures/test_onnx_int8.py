"""ONNX Runtime's int8 graphs against the float model: what pairs, what passes, what is named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from benchmarks.engines.cases import counted
from benchmarks.engines.onnx_quantised import Scheme, export, quantise, with_scale_doubled
from onnx import numpy_helper
from onnx_runs import Exported, exported
from test_onnx_quantised import quiet
from torch import Tensor, nn
from torch.nn import functional

import driftline
from driftline.comparison.table.table import Table
from driftline.graphs.sources.exported import exported_graph
from driftline.runs.memory import MemorySink

SCHEMES = (
    Scheme(True, "QDQ"),
    Scheme(True, "QDQ", per_channel=True, prepared=True, signed=True),
    Scheme(False, "QDQ", per_channel=True),
    Scheme(True, "QOperator", prepared=True),
    Scheme(False, "QOperator"),
    Scheme(True, "dynamic"),
    Scheme(False, "dynamic", per_channel=True, prepared=True),
)


class Files:
    """The float models of both exporters, and the int8 models made of them, each once."""

    def __init__(self, cnn: Exported, folder: Path) -> None:
        self._cnn, self._folder = cnn, folder
        self._made: dict[Any, Path] = {}

    def plain(self, *, dynamo: bool) -> Path:
        if dynamo not in self._made:
            path = self._folder / f"float{dynamo}.onnx"
            self._made[dynamo] = export(self._cnn.model, self._cnn.given, path, dynamo=dynamo)
        return self._made[dynamo]

    def int8(self, scheme: Scheme) -> Path:
        if scheme not in self._made:
            path = self._folder / f"{len(self._made)}.onnx"
            source = self.plain(dynamo=scheme.dynamo)
            self._made[scheme] = quantise(source, self._cnn.given, scheme, path)
        return self._made[scheme]


@pytest.fixture(scope="module")
def files(cnn: Exported, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(cnn, tmp_path_factory.mktemp("int8"))


def compared(reference: Path, candidate: Path, optimize: Any = "all") -> Table:
    with quiet():
        plain = driftline.run_onnx(reference, optimize=optimize)
        return driftline.compare(plain, driftline.run_onnx(candidate, plain, optimize=optimize))


def paired(table: Table) -> float:
    """The share of the float model's tensors that were compared."""
    own = {row.key for row in table.rows if row.compared}
    alone = {row.key for row in table.rows if row.status in ("missing", "incomparable")}
    return len(own) / len(own | alone)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.words)
def test_nine_tenths_of_the_float_model_pair_and_a_clean_int8_model_passes(
    files: Files, scheme: Scheme
) -> None:
    # The inputs are others than those of the calibration.
    table = compared(files.plain(dynamo=scheme.dynamo), files.int8(scheme))
    assert table.verdict == "pass", table.finding
    assert paired(table) >= 0.9
    assert all(row.metrics["relative_l2"] < 0.05 for row in table.rows if row.compared)


@pytest.mark.parametrize("scheme", SCHEMES[::3], ids=lambda scheme: scheme.words)
def test_a_folded_convolution_is_the_partner_of_the_norm_never_of_the_bare_convolution(
    cnn: Exported, files: Files, scheme: Scheme
) -> None:
    with quiet():
        candidate = driftline.run_onnx(files.int8(scheme), cnn.run)
    table = driftline.compare(cnn.run, candidate)
    assert table.verdict == "pass", table.finding
    outputs = {row.key.site: row for row in table.rows if row.key.port == "output" and row.compared}
    # These norms are followed by a sum, not by a rectifier: what they give is still there.
    assert {"stages.0.bn2", "stages.1.bn2", "stages.1.down.1"} <= set(outputs)
    convolutions = {"conv", "stages.0.conv1", "stages.0.conv2", "stages.1.conv1", "stages.1.down.0"}
    assert convolutions.isdisjoint(outputs)
    assert all(row.metrics["relative_l2"] < 0.05 for row in outputs.values())


def planted(source: Path, path: Path, node: Any, position: int, change: Any) -> Path:
    """The model with one scale or zero point changed where one node reads it, and nowhere else."""
    model = onnx.load(str(source))
    reader = next(n for n in model.graph.node if n.name == node)
    old = next(t for t in model.graph.initializer if t.name == reader.input[position])
    array = numpy_helper.to_array(old)
    new = numpy_helper.from_array(np.asarray(change(array), array.dtype), f"{old.name}_planted")
    model.graph.initializer.append(copy.deepcopy(new))
    reader.input[position] = new.name
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("position", "change", "words"),
    [
        (1, lambda scale: scale * 2, "with the scale"),
        (2, lambda zero: zero + 1, "with the zero point 1, and it was made with 0"),
    ],
)
def test_a_node_that_misreads_its_operand_is_named(
    files: Files, tmp_path: Path, position: int, change: Any, words: str
) -> None:
    source = files.int8(Scheme(False, "QOperator"))
    node = "/stages/stages.0/conv2/Conv_quant"
    broken = planted(source, tmp_path / "broken.onnx", node, position, change)
    table = compared(files.plain(dynamo=False), broken)
    assert table.verdict == "fail"
    assert table.first_site == "stages.0.conv2", table.finding
    assert words in table.finding


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_a_weight_s_scale_off_by_two_is_named_at_its_own_node(
    files: Files, tmp_path: Path, form: str
) -> None:
    source = files.int8(Scheme(False, form))
    node = "fc.weight_DequantizeLinear" if form == "QDQ" else "/fc/Gemm_quant"
    broken = planted(
        source, tmp_path / "broken.onnx", node, 1 if form == "QDQ" else 4, lambda scale: scale * 2
    )
    table = compared(files.plain(dynamo=False), broken)
    assert table.verdict == "fail"
    assert (table.first_site or "").partition("/")[0] == "fc", table.finding


def test_a_dropped_rectifier_leaves_what_is_before_it_inside_the_node(files: Files) -> None:
    scheme = Scheme(True, "QOperator", prepared=True)
    table = compared(files.plain(dynamo=True), files.int8(scheme), "none")
    assert table.verdict == "pass", table.finding
    alone = [row for row in table.rows if row.status == "missing"]
    assert alone
    assert all("inside a fusion" in row.reason for row in alone)


class Rectified(nn.Module):
    """A convolution whose norm and rectifier are in its own code, as torchvision writes them."""

    def __init__(self, into: int, out: int, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(into, out, size, padding=size // 2, bias=False)
        self.bn = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.bn(self.conv(x)), inplace=True)


class Branches(nn.Module):
    """A tensor in two parts, each through a sequence; a quantiser writes their nodes mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Rectified(3, 6, 3)
        self.left = nn.Sequential(Rectified(3, 8, 1), Rectified(8, 8, 3))
        self.right = nn.Sequential(Rectified(3, 4, 1), Rectified(4, 8, 3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.stem(x).chunk(2, 1)
        return self.head(torch.cat([self.left(left), self.right(right)], 1).mean([2, 3]))


@pytest.fixture(scope="module")
def branches(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    torch.manual_seed(5)
    model = Branches().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias, 0, 0.1)
            nn.init.uniform_(module.weight, 0.7, 1.3)
    path = tmp_path_factory.mktemp("branches") / "branches.onnx"
    return exported((model, torch.randn(2, 3, 12, 12)), path)


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_a_norm_is_compared_with_what_a_dropped_rectifier_has_left_of_it(
    branches: Exported, tmp_path: Path, form: str
) -> None:
    scheme = Scheme(True, form, per_channel=True)
    int8 = quantise(branches.path, branches.given, scheme, tmp_path / "int8.onnx")
    table = driftline.compare(branches.run, driftline.run_onnx(int8, branches.run))
    assert table.verdict == "pass", table.finding
    recipes = {r.key.site: r.reference_recipe for r in table.rows if r.key.port == "output"}
    for site in ("left.0.bn", "left.1.bn", "right.1.bn"):
        assert recipes[site].startswith("rectify"), site
    alone = [row for row in table.rows if row.status == "missing"]
    assert all("inside a fusion" in row.reason for row in alone)
    broken, _ = with_scale_doubled(int8, tmp_path / "broken.onnx", 2)
    faulty = driftline.compare(branches.run, driftline.run_onnx(broken, branches.run))
    assert faulty.first_site == "left.1.bn", faulty.finding


def test_a_value_that_is_also_kept_in_blocks_is_recorded_once(branches: Exported) -> None:
    with quiet():
        run = driftline.run_onnx(branches.path, branches.run)
    assert not [site for site in run.sites() if "reorder" in site.lower()]


def test_a_file_with_open_axes_is_given_what_the_other_file_takes(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from driftline.cli.main import main

    fixed, loose = files.plain(dynamo=False), tmp_path / "loose.onnx"
    model = onnx.load(str(fixed))
    for axis in (2, 3):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = f"size{axis}"
    onnx.save(model, str(loose))
    assert main(["compare", str(loose), str(fixed)]) == 0
    assert "none differs" in capsys.readouterr().out


def test_two_files_are_compared_straight_from_the_command_line(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from driftline.cli.main import main

    plain, int8 = str(files.plain(dynamo=False)), str(files.int8(Scheme(False, "QOperator")))
    assert main(["compare", plain, int8, "--seed", "5"]) == 0
    assert capsys.readouterr().out.startswith("PASS")
    given = tmp_path / "x.npz"
    name = onnx.load(plain).graph.input[0].name
    np.savez(given, **{name: np.zeros((2, 3, 16, 16), np.float32)})
    assert main(["compare", plain, plain, "--inputs", str(given), "--optimize", "none"]) == 0
    assert "none differs" in capsys.readouterr().out
    assert main(["compare", plain, plain, "--providers", "Nonesuch"]) == 2
    assert "has no provider 'Nonesuch'" in capsys.readouterr().err
    # A profile of the session without capture, as ONNX Runtime writes it.
    words = ["dump", "--model", plain, "--inputs", str(given), "-o", str(tmp_path / "run")]
    assert main([*words, "--profile", str(tmp_path / "nodes.json")]) == 0
    assert '"cat"' in (tmp_path / "nodes.json").read_text()


class Gated(nn.Module):
    """A depthwise convolution, channels weighed by what they hold, and tokens made of the image."""

    def __init__(self) -> None:
        super().__init__()
        # With biases of their own, which keep their names when the norms are worked in.
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, 2, 1), nn.BatchNorm2d(12), nn.LeakyReLU(0.1))
        self.depthwise = nn.Conv2d(12, 12, 5, 1, 2, groups=12)
        self.norm = nn.BatchNorm2d(12)
        self.act = nn.Hardswish()
        self.squeeze = nn.Conv2d(12, 6, 1)
        self.excite = nn.Conv2d(6, 12, 1)
        self.project = nn.Conv2d(12, 12, 4, 4)
        self.tokens = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.depthwise(self.stem(x))))
        gate = functional.silu(self.squeeze(x.mean([2, 3], keepdim=True)))
        x = self.project(x * torch.sigmoid(self.excite(gate)))
        return self.head(self.tokens(x.flatten(2).transpose(1, 2)))


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    torch.manual_seed(6)
    model = Gated().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.2)
            nn.init.uniform_(module.weight, 0.7, 1.3)
    path = tmp_path_factory.mktemp("gated") / "gated.onnx"
    return exported((model, torch.randn(2, 3, 24, 24)), path)


def against_torch(network: Exported, candidate: Path) -> Table:
    with quiet():
        run = driftline.run_onnx(candidate, network.run)
    return driftline.compare(network.run, run)


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_an_activation_that_onnx_runtime_takes_apart_does_not_end_the_pairs(
    gated: Exported, tmp_path: Path, form: str
) -> None:
    int8 = quantise(gated.path, gated.given, Scheme(True, form), tmp_path / "int8.onnx")
    table = against_torch(gated, int8)
    assert table.verdict == "pass", table.finding
    pairs, inside, tensors = counted(table)
    assert pairs + inside >= 0.9 * tensors


def test_a_convolution_with_a_bias_of_its_own_is_not_what_the_norm_gives(
    gated: Exported, tmp_path: Path
) -> None:
    int8 = quantise(gated.path, gated.given, Scheme(True, "QOperator"), tmp_path / "int8.onnx")
    table = against_torch(gated, int8)
    compared_sites = {r.key.site for r in table.rows if r.key.port == "output" and r.compared}
    assert {"stem.1", "norm"} <= compared_sites
    assert {"stem.0", "depthwise"}.isdisjoint(compared_sites)


def test_a_misread_zero_point_is_named_where_its_numbers_are_first_compared(
    gated: Exported, tmp_path: Path
) -> None:
    int8 = quantise(gated.path, gated.given, Scheme(True, "QDQ"), tmp_path / "int8.onnx")
    # Its reader is in the model's own code, and what that makes is compared nowhere.
    reader = next(
        node.name
        for node in onnx.load(str(int8)).graph.node
        if node.op_type == "DequantizeLinear" and node.name.startswith("conv2d_3")
    )
    broken = planted(int8, tmp_path / "broken.onnx", reader, 2, lambda zero: zero + 1)
    table = against_torch(gated, broken)
    assert table.verdict == "fail"
    assert table.first_site == "project", table.finding
    assert "takes or gives what comes of '(root)/sigmoid'" in table.finding
    assert "and it was made with" in table.finding


def test_what_rounding_explains_is_recorded_of_the_weights_of_each_node(
    gated: Exported, tmp_path: Path
) -> None:
    int8 = quantise(gated.path, gated.given, Scheme(True, "QDQ"), tmp_path / "int8.onnx")
    sink = MemorySink()
    with quiet():
        driftline.capture_onnx(int8, gated.run, sink)
    graph = exported_graph(sink.run())
    assert graph is not None
    # The steps of 8 bits are 1/255 of the range of a weight.
    errors = [graph.rounded[site] for site in ("squeeze", "excite", "project")]
    assert all(0.001 < error < 0.02 for error in errors), errors
    assert "(root)" not in graph.rounded


def test_weights_of_integers_are_compared_as_the_numbers_they_are(
    gated: Exported, tmp_path: Path
) -> None:
    sink = MemorySink(name="torch")
    with torch.no_grad(), driftline.capture(gated.model, sink, levels=("modules", "params")):
        gated.model(gated.given)
    int8 = quantise(gated.path, gated.given, Scheme(True, "QDQ"), tmp_path / "int8.onnx")

    def table(path: Path) -> Table:
        candidate = MemorySink(name=path.stem)
        with quiet():
            driftline.capture_onnx(path, gated.run, candidate, levels=("modules", "params"))
        return driftline.compare(sink.run(), candidate.run())

    clean = table(int8)
    assert clean.verdict == "pass", clean.finding
    weights = {r.key.site for r in clean.rows if r.key.slot == "weight" and r.compared}
    assert {"squeeze", "excite", "project"} <= weights
    node = "excite.weight_DequantizeLinear"
    broken = planted(int8, tmp_path / "broken.onnx", node, 2, lambda zero: zero + 1)
    faulty = table(broken)
    assert faulty.first_site == "excite", faulty.finding
    assert "the parameter 'weight' of 'excite'" in faulty.finding
