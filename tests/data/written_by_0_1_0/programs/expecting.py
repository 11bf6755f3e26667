"""A test with the `expect` fixture, given to pytest by its name; see `expectations/`."""

from __future__ import annotations

from network import IDS, build


def test_network(expect) -> None:
    expect(build().eval(), IDS)
