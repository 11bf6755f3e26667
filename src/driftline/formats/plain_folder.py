"""A folder of tensor files without the layout of a known tool: a site is a file's path.

`layers/0/mlp.npy` is the output `0` of the site `layers/0/mlp`; a file with several tensors has one
site for each, such as `weights/layers.0`. If `driftline convert --to` left its list of keys next to
the files, that list identifies the tensors instead. The order of the files means nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from driftline.errors import BadFile
from driftline.formats.convert import targets
from driftline.formats.dump_run import Leaf, TreeRun
from driftline.formats.folder import Folder
from driftline.formats.registry import SUFFIXES, dump_format
from driftline.formats.tensor_files import describe, leaf
from driftline.runs.layout import INDEX, MANIFEST
from driftline.runs.records import TensorKey

NAME = "files"
MOST_FILES = 1_000_000
# Enough entries to find a tensor in any real dump; a home folder must not be searched completely.
_LOOKED_AT = 10_000
_CHILDREN = 16
# Files that mark a run or a comparison table of our own, which other code opens.
_OF_A_RUN = (MANIFEST, INDEX, "table.json")


def sniff(path: Path) -> bool:
    """Whether there is a tensor file somewhere below a folder."""
    waiting = [str(path)]
    looked = 0
    while waiting and looked < _LOOKED_AT:
        # Breadth first: tensors are more often near the top than deep below.
        folder = waiting.pop(0)
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    looked += 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif entry.name in _OF_A_RUN:
                        return False
                    elif entry.name.lower().endswith(SUFFIXES):
                        return True
        except OSError:
            continue
    return False


def open(path: Path) -> TreeRun:
    """Open the folder as a run.

    Raises:
        BadFile: Two tensors have the same name, or there is no tensor.
    """
    folder = Folder(path)
    # The list of a conversion has the keys; file names say less.
    if targets.has_list(path):
        return targets.open_exported(folder, NAME)
    names: list[str] = []
    for seen, name in enumerate(folder.files(named=_is_tensor_file)):
        # The user opened a disk by mistake: refuse it, instead of listing for hours.
        if seen >= MOST_FILES:
            raise BadFile(
                f"{path} holds more than {MOST_FILES} files", hint="give the dump's own folder"
            )
        if name.endswith(".npy") or _is_tensor_file(name):
            names.append(name)
    leaves: list[Leaf] = []
    for name, site in zip(folder.ahead(names), _sites(names), strict=True):
        members = describe(folder, name)
        if len(members) == 1:
            leaves.append(leaf(TensorKey(site, "output", "0"), name, members[0]))
            continue
        leaves += [
            leaf(TensorKey(f"{site}/{member.name}", "output", "0"), name, member)
            for member in members
        ]
    if not leaves:
        raise BadFile(f"{path} holds no tensor file")
    events = [{"kind": "skipped", "message": text} for text in folder.not_entered]
    events += [{"kind": "dump", "message": text} for text in _dumps_inside(path)]
    return TreeRun(path, NAME, leaves, order="none", events=events)


def _dumps_inside(path: Path) -> Iterator[str]:
    """A sentence for each inner folder that is a dump, because opening that gives better names."""
    with os.scandir(path) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    # Each test opens a few folders; sixteen tests are enough for a useful hint.
    for name in folders[:_CHILDREN]:
        if (reader := dump_format(path / name)) is not None:
            yield f"{name} is a dump by itself ({reader.NAME}); open it by its own path"


def _is_tensor_file(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def _sites(names: list[str]) -> list[str]:
    """The site of each file: its name without the suffix, unless another file has the same one."""
    stems = [name.rpartition(".")[0] for name in names]
    if len(set(stems)) == len(stems):
        return stems
    # `a.npy` and `a.pt` would be one site; their suffixes distinguish them.
    alike = Counter(stems)
    return [stem if alike[stem] == 1 else name for stem, name in zip(stems, names, strict=True)]
