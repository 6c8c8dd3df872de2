"""Data sets for what people have in files, and data sets made of others. A name is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.data.arrays import ArrayDataset, filled
    from lockstep.data.mixture import Mixture
    from lockstep.data.packing import Packed, document_mask
    from lockstep.data.sampling import select
    from lockstep.readers.columns import ArrowFiles, ParquetFiles
    from lockstep.readers.records import ClassFolders, CsvFiles, JsonLines, TarShards, TokenFile

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
_MODULES = ("arrays", "columns", "mixture", "packing", "records", "sampling")


def __getattr__(name: str) -> Any:
    modules = (import_module(f"lockstep.data.{module}") for module in _MODULES if name in __all__)
    module = next((module for module in modules if name in vars(module)), None)
    if module is None:
        raise AttributeError(f"module 'lockstep.data' has no attribute {name!r}")
    return getattr(module, name)
