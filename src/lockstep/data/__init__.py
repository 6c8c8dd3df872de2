"""Data sets from arrays, files and other data sets. A name is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.data.arrays import ArrayDataset, filled
    from lockstep.data.mixture import Mixture
    from lockstep.data.packing import Packed, document_mask
    from lockstep.data.sampling import select
    from lockstep.readers.columns import ArrowFiles, ParquetFiles
    from lockstep.readers.frames import FrameEncoder
    from lockstep.readers.records import ClassFolders, CsvFiles, JsonLines, TarShards, TokenFile

__all__ = [
    "ArrayDataset",
    "ArrowFiles",
    "ClassFolders",
    "CsvFiles",
    "FrameEncoder",
    "JsonLines",
    "Mixture",
    "Packed",
    "ParquetFiles",
    "TarShards",
    "TokenFile",
    "document_mask",
    "filled",
    "select",
]
#: The public names of each module.
_EXPORTS = {
    "lockstep.data.arrays": ("ArrayDataset", "filled"),
    "lockstep.data.mixture": ("Mixture",),
    "lockstep.data.packing": ("Packed", "document_mask"),
    "lockstep.data.sampling": ("select",),
    "lockstep.readers.columns": ("ArrowFiles", "ParquetFiles"),
    "lockstep.readers.frames": ("FrameEncoder",),
    "lockstep.readers.records": ("ClassFolders", "CsvFiles", "JsonLines", "TarShards", "TokenFile"),
}
_HOMES = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep.data' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
