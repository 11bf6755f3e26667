"""The same promises on a GPU: capture changes nothing, tells the truth, a clean port passes.

Skipped where there is no CUDA device.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import driftline

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

ROOT = Path(__file__).resolve().parents[2]


def llama(dtype: torch.dtype = torch.float32, device: str = "cuda") -> nn.Module:
    sys.path.insert(0, str(ROOT / "src" / "driftline" / "testing" / "demo"))
    try:
        import infer
    finally:
        sys.path.pop(0)
    return infer.build().to(device=device, dtype=dtype)


class OnDevice(nn.Module):
    """The demo's model makes its tables on the CPU; here they are made where the tokens are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.device(tokens.device):
            return self.model(tokens)


def tokens(device: str = "cuda") -> torch.Tensor:
    return torch.randint(0, 512, (2, 48), generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("levels", [("modules",), ("modules", "ops", "gradients", "params")])
def test_outputs_and_gradients_are_bitwise_what_they_are_without_capture(
    tmp_path: Path, dtype: torch.dtype, levels: tuple[str, ...]
) -> None:
    torch.use_deterministic_algorithms(False)

    def trained(capture: bool) -> list[torch.Tensor]:
        model = OnDevice(llama(dtype))
        step: Any = driftline.capture(model, tmp_path / "run", levels=levels) if capture else None
        if step is not None:
            step.__enter__()
        loss = model(tokens()).float().logsumexp(-1).mean()
        loss.backward()
        if step is not None:
            step.__exit__(None, None, None)
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    plain, again, watched = trained(False), trained(False), trained(True)
    # Some CUDA kernels add in an order of their own choosing; only what repeats can be asked to.
    steady = [torch.equal(a, b) for a, b in zip(plain, again, strict=True)]
    assert sum(steady) > len(steady) // 2
    assert all(torch.equal(a, b) for a, b, same in zip(plain, watched, steady, strict=True) if same)
    run = driftline.open_run(tmp_path / "run")
    assert any(t.key.port == "output" for t in run.tensors())
    if "gradients" in levels:
        assert any(t.key.port == "grad_input" for t in run.tensors())


def test_every_captured_output_is_what_a_plain_clone_hook_sees(tmp_path: Path) -> None:
    model = OnDevice(llama(torch.bfloat16))
    seen: dict[str, torch.Tensor] = {}
    handles = [
        module.register_forward_hook(
            lambda _m, _i, out, name=name: seen.__setitem__(name, out.detach().clone())
        )
        for name, module in model.named_modules()
        if name
    ]
    with torch.no_grad(), driftline.capture(model, tmp_path / "run"):
        model(tokens())
    for handle in handles:
        handle.remove()
    run = driftline.open_run(tmp_path / "run")
    captured = {t.key.site: t for t in run.tensors() if t.key.port == "output"}
    compared = 0
    for name, expected in seen.items():
        stored = torch.from_numpy(captured[name].float64())
        assert torch.equal(stored, expected.double().cpu()), name
        assert captured[name].record.device.startswith("cuda")
        compared += 1
    assert compared > 80


def test_summaries_of_cuda_tensors_are_those_of_their_copies(tmp_path: Path) -> None:
    model = OnDevice(llama(torch.float16))
    with torch.no_grad():
        with driftline.capture(model, tmp_path / "full"):
            model(tokens())
        with driftline.capture(model, tmp_path / "summary", keep="summary"):
            model(tokens())
    full, summary = (driftline.open_run(tmp_path / name) for name in ("full", "summary"))
    kept = {t.key: t for t in summary.tensors()}
    for tensor in full.tensors():
        values = tensor.float64()
        finite = values[abs(values) < 65504.0]
        assert kept[tensor.key].summary is not None
        if finite.size == values.size:
            assert abs(kept[tensor.key].summary.max - values.max()) == 0


def test_a_clean_bf16_port_to_the_gpu_passes_and_a_planted_fault_is_named(tmp_path: Path) -> None:
    with torch.no_grad():
        reference = OnDevice(llama(device="cpu"))
        with driftline.capture(reference, tmp_path / "cpu"):
            reference(tokens("cpu"))
        clean = OnDevice(llama(torch.bfloat16))
        with driftline.capture(clean, tmp_path / "clean"):
            clean(tokens())
        broken = OnDevice(llama(torch.bfloat16))
        broken.model.layers[3].mlp.act_fn = nn.GELU()
        with driftline.capture(broken, tmp_path / "broken"):
            broken(tokens())
    assert driftline.compare(tmp_path / "cpu", tmp_path / "clean").verdict == "pass"
    table = driftline.compare(tmp_path / "cpu", tmp_path / "broken")
    assert table.verdict == "fail"
    assert table.first_site == "model.layers.3.mlp.act_fn"


def test_an_unchanged_program_on_the_gpu_is_dumped(tmp_path: Path) -> None:
    script = tmp_path / "infer.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(inplace=True)).cuda()\n"
        "with torch.inference_mode():\n"
        "    print(model(torch.ones(2, 8, device='cuda')).sum().item())\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "driftline",
            "dump",
            "-o",
            "run",
            "-device",
            "0",
            "--exec",
            f"{sys.executable} infer.py",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = driftline.open_run(tmp_path / "run")
    before = run.get(site="1", port="input", slot="input").float64()
    after = run.get(site="1", port="output", slot="0").float64()
    assert (before < 0).any() and (after >= 0).all()


def test_a_compiled_model_on_the_gpu_gives_the_bits_of_the_uncaptured_compiled_one(
    tmp_path: Path,
) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    given = torch.randn(4, 64, device="cuda")
    with torch.no_grad():
        plain = torch.compile(model)(given)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(model)
        with driftline.capture(compiled, tmp_path / "run"):
            watched = compiled(given)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.equal(plain, watched)
    assert len(driftline.open_run(tmp_path / "run")) >= 2
