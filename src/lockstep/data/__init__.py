"""Data sets for what people have in files, and data sets made of others. A name is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.data.arrays import ArrayDataset as ArrayDataset
    from lockstep.data.arrays import filled as filled
    from lockstep.data.columns import ArrowFiles as ArrowFiles
    from lockstep.data.columns import ParquetFiles as ParquetFiles
    from lockstep.data.mixture import Mixture as Mixture
    from lockstep.data.packing import Packed as Packed
    from lockstep.data.packing import document_mask as document_mask
    from lockstep.data.records import ClassFolders as ClassFolders
    from lockstep.data.records import CsvFiles as CsvFiles
    from lockstep.data.records import JsonLines as JsonLines
    from lockstep.data.records import TarShards as TarShards
    from lockstep.data.records import TokenFile as TokenFile
    from lockstep.data.sampling import select as select

_HOMES = {
    "ArrayDataset": "arrays",
    "ArrowFiles": "columns",
    "ClassFolders": "records",
    "CsvFiles": "records",
    "JsonLines": "records",
    "Mixture": "mixture",
    "Packed": "packing",
    "ParquetFiles": "columns",
    "TarShards": "records",
    "TokenFile": "records",
    "document_mask": "packing",
    "filled": "arrays",
    "select": "sampling",
}

__all__ = [
    "ArrayDataset",
    "ArrowFiles",
    "ClassFolders",
    "CsvFiles",
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep.data' has no attribute {name!r}")
    return getattr(import_module(f"lockstep.data.{_HOMES[name]}"), name)
