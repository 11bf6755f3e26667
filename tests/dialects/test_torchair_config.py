"""Configurations for torchair: every setting, with a stand-in that has these and no others."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import driftline
from driftline.dialects.ait.torchair import get_fx_dump_config, get_ge_dump_config
from driftline.errors import DriftlineError
from driftline.graphs.sources.graph_files import read_graphs
from driftline.runs.sidecars.calls import GRAPHS


class Section:
    """Settings of torchair: one that does not exist there cannot be set here."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in self.__dict__, f"torchair has no setting {name}"
        self.__dict__[name] = value


class CompilerConfig(Section):
    def __init__(self) -> None:
        super().__init__(
            debug=Section(
                graph_dump=Section(type=None, path="."), data_dump=Section(type=None, filter=None)
            ),
            dump_config=Section(enable_dump=False, dump_mode="all", dump_path=None),
            fusion_config=Section(fusion_switch_file=None),
            mode="max-autotune",
        )

    def shown(self) -> dict[str, Any]:
        return {
            "graph": vars(self.debug.graph_dump),
            "data": vars(self.debug.data_dump),
            "dump": vars(self.dump_config),
            "fusion": vars(self.fusion_config),
            "mode": self.mode,
        }


@pytest.fixture
def torchair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = ModuleType("torchair")
    module.__dict__.update(CompilerConfig=CompilerConfig)
    module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec("torchair", None)
    monkeypatch.setitem(sys.modules, "torchair", module)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("torchair")
def test_a_ge_configuration_has_every_field_and_a_folder_of_its_own(tmp_path: Path) -> None:
    config = get_ge_dump_config(dump_path="dump")
    (folder,) = (tmp_path / "dump").iterdir()
    assert re.fullmatch(r"dump_\d{8}_\d{6}", folder.name)
    path = f"dump/{folder.name}"
    assert config.shown() == {
        "graph": {"type": "txt", "path": path},
        "data": {"type": None, "filter": None},
        "dump": {"enable_dump": True, "dump_mode": "all", "dump_path": path},
        "fusion": {"fusion_switch_file": None},
        "mode": "max-autotune",
    }


@pytest.mark.usefixtures("torchair")
@pytest.mark.parametrize("mode", ["input", "output", "all"])
def test_mode_and_fusion_switch_file_are_handed_on(tmp_path: Path, mode: str) -> None:
    switch = tmp_path / "fusion_switch.json"
    switch.write_text('{"Switch": {"GraphFusion": {"ALL": "off"}}}')
    config = get_ge_dump_config("dump", mode, switch)
    assert config.dump_config.dump_mode == mode
    assert config.fusion_config.fusion_switch_file == str(switch)


@pytest.mark.usefixtures("torchair")
def test_two_configurations_of_one_second_do_not_share_a_folder(tmp_path: Path) -> None:
    paths = {get_ge_dump_config(tmp_path / "d").dump_config.dump_path for _ in range(3)}
    assert len(paths) == 3


@pytest.mark.usefixtures("torchair")
def test_what_is_wrong_with_a_ge_configuration_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one of input, output, all, not 'both'"):
        get_ge_dump_config(dump_mode="both")
    with pytest.raises(DriftlineError, match="no fusion switch file 'nowhere"):
        get_ge_dump_config(fusion_switch_file="nowhere.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("torchair")
def test_an_fx_configuration_of_torchair_saves_arrays() -> None:
    config = get_fx_dump_config()
    assert isinstance(config, CompilerConfig)
    assert config.shown()["data"] == {"type": "npy", "filter": None}
    assert config.shown()["dump"]["enable_dump"] is False


def test_without_torchair_the_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(DriftlineError, match="torchair cannot be imported") as caught:
        get_ge_dump_config(tmp_path / "dump")
    assert "torch_npu" in caught.value.hint
    assert not (tmp_path / "dump").exists()


def test_without_torchair_nodes_are_recorded_by_a_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    plain = model(torch.ones(2, 4))
    config = get_fx_dump_config()
    assert re.fullmatch(r"driftline_fx_\d{8}_\d{6}", config.path.name)
    assert not config.path.exists()
    compiled = torch.compile(model, backend=config.backend)
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(2, 4)), plain)
    config.close()
    compiled(torch.ones(2, 4))
    torch._dynamo.reset()
    run = driftline.open_run(config.path)
    computed = {(r.key.site, r.key.step) for r in run.records if r.class_name.startswith("aten.")}
    assert computed == {(site, step) for site in ("0/t", "0/addmm", "1/gelu") for step in range(2)}
    given = {r.key.site: r.class_name for r in run.records if r.class_name.startswith("param")}
    assert sorted(given.values()) == ["parameter bias", "parameter weight"]
    (graph,) = read_graphs(run.sheet(GRAPHS))
    assert graph.engine == "fx" and graph.kind == "forward"
