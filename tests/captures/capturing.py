"""A capture into memory, as the tests of the gradient, operator and parameter levels use it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from driftline.captures.options import Reduction
from driftline.captures.selection import Selection
from driftline.captures.torch.session import CaptureSession
from driftline.runs.memory import MemorySink
from driftline.runs.records import TensorKey


class Captured:
    """What a capture left: `rows` by key and `events`, both filled when the capture is over."""

    def __init__(self) -> None:
        self.sink = MemorySink()
        self.rows: dict[TensorKey, torch.Tensor] = {}
        self.events: list[dict] = []
        self.classes: dict[TensorKey, str] = {}

    def finish(self) -> None:
        run = self.sink.run()
        self.events = [dict(event) for event in run.events()]
        for tensor in run.tensors():
            assert tensor.key not in self.rows, f"{tensor.key} was written twice"
            self.rows[tensor.key] = torch.from_numpy(tensor.numpy().astype("float64"))
            self.classes[tensor.key] = tensor.record.class_name

    def of(
        self, port: str, site: str | None = None, **fields: object
    ) -> dict[TensorKey, torch.Tensor]:
        return {
            key: value
            for key, value in self.rows.items()
            if key.port == port
            and (site is None or key.site == site)
            and all(getattr(key, name) == wanted for name, wanted in fields.items())
        }

    def one(self, port: str, site: str, **fields: object) -> torch.Tensor:
        found = self.of(port, site, **fields)
        assert len(found) == 1, f"{port} of {site}: {[str(key) for key in found]}"
        return next(iter(found.values()))

    def faults(self) -> list[dict]:
        return [
            e
            for e in self.events
            if "lost" in e["kind"] or e["kind"] in ("capture-fault", "refused")
        ]


@contextmanager
def capturing(
    *levels: str,
    model: nn.Module | None = None,
    ports: tuple[str, ...] = (),
    steps_by: str = "auto",
) -> Generator[Captured]:
    captured = Captured()
    selection = Selection(ports=ports) if ports else Selection()
    session = CaptureSession(
        captured.sink, selection, Reduction(), levels, model=model, steps_by=steps_by
    )
    session.start()
    try:
        yield captured
    finally:
        session.stop()
    captured.finish()
