"""Refuse the words that the vocabulary of CONTRIBUTING.md replaces: ``python scripts/words.py [PATH...]``.

Of a Python file, the comments and string literals are checked, of the page's scripts and templates everything but
vendored files. Default: README, CONTRIBUTING, benchmarks/README, ``docs`` and ``src/lockstep``.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: What is not checked: the vocabulary itself, and a table that a test generates.
SKIPPED = {"CONTRIBUTING.md": r"## Vocabulary.*?(?=\n## )", "ordinary-pytorch.md": r"### Models.*"}
#: What the table cannot express.
PATTERNS = {
    r"(?<!there )\bis no (?!longer\b|more\b)\w+": "is not a …",
    r"\bcannot be(?=\s*[.,;:|])": "the reason",
}


def vocabulary() -> dict[str, str]:
    """Pattern to replacement, from the first table of the section."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("| not | but |\n| --- | --- |\n")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    words = {word.strip(): use for cell, use in rows for word in cell.split(",")}
    patterns = {r"\b" + r"\s+".join(map(re.escape, word.split())) + r"\b": use for word, use in words.items()}
    return patterns | PATTERNS


def prose(path: Path) -> str:
    """What is written for people in a file, at the lines where it stands there."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    lines: list[list[str]] = [[] for _ in range(text.count("\n") + 2)]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for row, part in enumerate(re.sub(r"^[rbuf]*[\"']+|[\"']+$|^#:?", "", token.string).split("\n")):
                lines[token.start[0] - 1 + row].append(part)
    return "\n".join(" ".join(parts) for parts in lines)


def written_in(folder: Path) -> list[Path]:
    """The files of a folder that are checked."""
    kinds = {".py", ".js", ".html"}
    return sorted(file for file in folder.rglob("*") if file.suffix in kinds and "vendor" not in file.parts)


def findings(paths: list[Path]) -> Iterator[str]:
    words = vocabulary()
    for path in paths:
        quoted = r"```.*?```|`[^`\n]+`" if path.suffix != ".js" else r"\Z"  # a script's templates are what users read
        code = "|".join(filter(None, [quoted, SKIPPED.get(path.name)]))
        text = re.sub(code, lambda part: "\n" * part[0].count("\n"), prose(path), flags=re.S)
        for pattern, use in words.items():
            for found in re.finditer(pattern, text, re.I):
                line = text.count("\n", 0, found.start()) + 1
                yield f"{path}:{line}: {' '.join(found[0].split())!r}, use: {use}"


def main() -> int:
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]
    pages += (ROOT / "docs").rglob("*.md")
    pages += [ROOT / "src" / "lockstep"]
    paths = [Path(name) for name in sys.argv[1:]] or pages
    files = [file for path in paths for file in (written_in(path) if path.is_dir() else [path])]
    found = sorted(findings(files))
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
