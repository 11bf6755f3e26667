"""One reader under atheris, in a process of its own: `python -m fuzz.guided READER FOLDER CORPUS`.

Our package is instrumented while it is imported, so that inputs which reach new lines are kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["driftline", "zipfile"]):
    import driftline.formats.registry  # noqa: F401 - instrumented by being imported
    from fuzz.readers import chosen


def main() -> None:
    name, folder, *arguments = sys.argv[1:]
    reader = next(chosen([name]))
    with atheris.instrument_imports(include=["driftline", "zipfile"]):
        path = reader.prepare(Path(folder))
        # The first reading imports what a reader needs.
        for content in reader.corpus():
            reader.survives(Path(folder), path, content)

    def test_one(content: bytes) -> None:
        reader.survives(Path(folder), path, content)

    atheris.Setup([sys.argv[0], *arguments], test_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
