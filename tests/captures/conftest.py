"""Exports of torch take seconds: one of each model, for all tests of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from onnx_runs import Exported


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    import onnx_zoo as zoo
    from onnx_runs import exported

    return exported(zoo.small_llama(), tmp_path_factory.mktemp("llama") / "llama.onnx")


@pytest.fixture(scope="session")
def cnn(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    import onnx_zoo as zoo
    from onnx_runs import exported

    return exported(zoo.conv_net(), tmp_path_factory.mktemp("cnn") / "cnn.onnx")
