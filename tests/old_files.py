"""Unpacks `data/written_by_0_1_0`: what version 0.1.0 wrote, as it lay on the disk."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

DATA = Path(__file__).parent / "data"
SOURCE = DATA / "written_by_0_1_0"
TEXT = (".json", ".jsonl", ".csv", ".toml", ".txt", ".md", ".py", ".xml")
BIN = b"/opt/python/bin"
"""Of one length everywhere: command lines are shown, and wrapped by their width."""
NOT_WRITTEN = ("make.py", "programs", "__pycache__")


def unpack(place: Path) -> Path:
    """Put all of it into a folder that need not exist yet, and the programs beside it.

    Compressed files are expanded; `@FOLDER@` in texts becomes this folder, as if everything had
    been written here, and `@BIN@` the folder of some Python.
    """
    for path in sorted(SOURCE.rglob("*")):
        parts = path.relative_to(SOURCE).parts
        if not path.is_file() or parts[0] in NOT_WRITTEN:
            continue
        target = place.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes()
        if path.suffix == ".gz":
            target, content = target.with_suffix(""), gzip.decompress(content)
        elif path.suffix in TEXT:
            # Lines of a compiled program are only shown, and tables are as wide as they are long.
            folder = "/network" if path.name == "graphs.jsonl" else str(place)
            content = content.replace(b"@FOLDER@", folder.encode())
            content = content.replace(b"@BIN@", BIN)
        target.write_bytes(content)
    for program in sorted((SOURCE / "programs").glob("*.py")):
        shutil.copy(program, place)
    return place
