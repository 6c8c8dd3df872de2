"""The page's modules and style sheets as one file each: a first visit needs few requests, and no build step."""

from __future__ import annotations

import re
from pathlib import Path

STATIC = Path(__file__).parent / "static"
_STYLES = ("vendor/uplot.css", "styles/base.css", "styles/layout.css", "styles/views.css")
_IMPORT = re.compile(r"import\s*(?:(\w+)|\{([^}]*)\})\s*from\s*[\"']([^\"']+)[\"'];?")
_EXPORT = re.compile(r"export\s*\{([^}]*)\}(?:\s*from\s*[\"']([^\"']+)[\"'])?;?")
_DEFAULT = re.compile(r"export\s*default\s+function\s*\(")
_DECLARED = re.compile(r"^export\s+((?:async\s+)?(?:function|class|const)\s+)(\w+)", re.MULTILINE)


def styles() -> bytes:
    """All style sheets, for an address in ``styles``."""
    return b"\n".join((STATIC / name).read_bytes() for name in _STYLES)


def script(main: str = "app/main.js") -> bytes:
    """``main`` and all that it imports as one script: each module is a function that returns its exports.

    It knows the forms of import and export that this page and its libraries use; modules must not import in a circle.
    """
    parts: list[str] = []
    names: dict[Path, str] = {}
    _add((STATIC / main).resolve(), parts, names)
    return '"use strict";\n{}\n'.format("\n".join(parts)).encode()


def _add(file: Path, parts: list[str], names: dict[Path, str]) -> str:
    """Append the module in ``file`` after those that it imports; the name of its exports."""
    if file in names:
        if not names[file]:
            raise ValueError(f"{file.name} is imported in a circle")
        return names[file]
    names[file] = ""
    exports: dict[str, str] = {}

    def module(place: str) -> str:
        return _add((file.parent / place).resolve(), parts, names)

    def pairs(text: str) -> list[tuple[str, str]]:  # `a as b` → (a, b)
        return [(one.split()[0], one.split()[-1]) for one in text.split(",") if one.strip()]

    def imported(found: re.Match[str]) -> str:
        default, some, place = found.groups()
        inner = f"default: {default}" if default else ", ".join(f"{a}: {b}" for a, b in pairs(some))
        return f"const {{ {inner} }} = {module(place)};"

    def exported(found: re.Match[str]) -> str:
        source = f"{module(found[2])}." if found[2] else ""
        exports.update({outer: f"{source}{inner}" for inner, outer in pairs(found[1])})
        return ""

    def declared(found: re.Match[str]) -> str:
        exports[found[2]] = found[2]
        return f"{found[1]}{found[2]}"

    text = _EXPORT.sub(exported, _IMPORT.sub(imported, file.read_text(encoding="utf-8")))
    if file.parent.name == "app":  # libraries have it in comments only
        text = _DECLARED.sub(declared, text)
    text, defaults = _DEFAULT.subn("const the_default = function (", text)
    if defaults:
        exports["default"] = "the_default"
    names[file] = name = f"module_{len(parts)}"
    returned = ", ".join(f"{outer}: {inner}" for outer, inner in exports.items())
    parts.append(f"const {name} = (() => {{\n{text};\nreturn {{ {returned} }};\n}})();")
    return name
