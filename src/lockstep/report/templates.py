"""Pages from jinja2 templates, with every value escaped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def render(package: str, name: str, filters: Mapping[str, Callable[..., Any]] | None = None, **values: Any) -> str:
    """The template ``name`` in the folder ``html`` of ``package``, filled with ``values``."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(
        loader=PackageLoader(package, "html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= filters or {}
    return pages.get_template(name).render(**values)
