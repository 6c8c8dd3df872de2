"""Count vague names and roundabout sentences: ``python scripts/names.py [--check] [PATH...]``.

Prints one row for each package of ``src/lockstep`` and one for all files. ``--check`` fails above the limits below.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "lockstep"

#: Vague names, packed lines and splats for each thousand lines of code, functions with too many parameters, and "what
#: it …", "where it …" and "own" for each ten thousand words of comments, docstrings and messages; docstrings of
#: functions, other than properties and hooks of a loop ("After …"), that begin with no verb.
MEASURES = ("vague", "packed", "splat", "long", "what", "where", "own", "noun")
#: Figures that were reached, by package of ``src/lockstep``: lower them with each change, never raise them.
LIMITS: dict[str, tuple[float, ...]] = {
    "all": (0.6, 0.15, 0, 17, 0, 0, 0.1, 0),
    "_compat": (0, 0, 0, 0, 0, 0, 0, 0),
    "api": (0, 0, 0, 1, 0, 0, 0, 0),
    "audit": (0, 0, 0, 1, 0, 0, 0, 0),
    "checkpoint": (0, 0, 0, 0, 0, 0, 0, 0),
    "cli": (0, 0, 0, 2, 0, 0, 0, 0),
    "config": (0, 0, 0, 0, 0, 0, 0, 0),
    "data": (0, 0.9, 0, 0, 0, 0, 0, 0),
    "engine": (0, 0, 0, 2, 0, 0, 0.5, 0),
    "events.py": (0, 0, 0, 0, 0, 0, 0, 0),
    "hardware": (0, 0, 0, 0, 0, 0, 0, 0),
    "lab": (1.1, 0, 0, 4, 0, 0, 0, 0),
    "launch": (1.15, 0, 0, 1, 0, 0, 0, 0),
    "lightning": (0, 0.5, 0, 1, 0, 0, 0, 0),
    "planning": (0.9, 0, 0, 1, 0, 0, 0, 0),
    "readers": (0, 0, 0, 0, 0, 0, 0, 0),
    "recipes": (0, 0, 0, 3, 0, 0, 0, 0),
    "rundir": (0.6, 0, 0, 0, 0, 0, 0, 0),
    "strategies.py": (0, 0, 0, 0, 0, 0, 0, 0),
    "studio": (1, 0, 0, 1, 0, 0, 0, 0),
    "tasks": (0, 0, 0, 1, 0, 0, 0, 0),
    "telemetry": (0, 0, 0, 0, 0, 0, 0, 0),
    "verification": (1.8, 0, 0, 0, 0, 0, 0, 0),
}

VAGUE_NAMES = {
    *("asked", "begun", "came", "found", "given", "held", "how", "kept", "known", "least", "middle", "most", "one"),
    *("demands", "everyones", "fitting", "mine"),
    *("others", "own", "place", "said", "seen", "these", "those", "told", "wanted", "what", "where", "why"),
}
MAX_PARAMETERS = 6
#: Words that begin a docstring without a verb.
NOUN_BEGINNINGS = {
    *("a", "all", "an", "as", "both", "each", "every", "everything", "from", "how", "in", "inside", "its", "no", "of"),
    *("on", "one", "such", "that", "the", "these", "this", "those", "to", "two", "what", "whatever", "where"),
    *("whether", "which", "while", "why", "with", "raises", "returns", "yields"),
}
#: Calls whose keywords are a user's or data: a signature's, a saved array's or field's name, Lightning's ``max_time``.
TAKE_ANY = {"bind", "savez", "create_model", "update", "timedelta", "Trainer", "Config"}
PHRASES = {
    "what": r"\bwhat (it|they|this|that|these|those|is|are|was|were|has|have|had|does|do|did|a|an|the|each|every)\b",
    "where": r"\bwhere (it|they|this|that|these|those|there)\b",
    "own": r"(?<!-)\bown\b(?!-)",  # not that of docs/own-loop.md
}


def count(source: str) -> Counter[str]:
    """Count measures, ``lines`` of code and ``words`` of prose in the text of a module."""
    tree = ast.parse(source)
    counts = Counter(_names(tree))
    docstrings = {
        row
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for row in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    comments: list[str] = []
    code_rows: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.append(token.string.lstrip("#: "))
        elif token.string.strip():
            code_rows.update(range(token.start[0], token.end[0] + 1))
    counts["lines"] = len(code_rows - docstrings)
    # Joined, since a line break may be inside a phrase.
    prose = " ".join(comments) + "\n" + "\n".join(_texts(tree))
    prose = re.sub(r"`[^`]*`", "code", prose)
    counts["words"] = len(re.findall(r"[^\W\d_][\w'’-]*", prose))
    for measure, pattern in PHRASES.items():
        counts[measure] = len(re.findall(pattern.replace(" ", r"\s+"), prose, re.IGNORECASE))
    return counts


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield the measure of each finding in names, assignments, calls and signatures."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    forwarded = {id(keyword) for function in functions for keyword in _forwarded(function)}
    for function in functions:
        parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        if len([p for p in parameters if p.arg not in ("self", "cls")]) > MAX_PARAMETERS:
            yield "long"
        if _begins_with_noun(function):
            yield "noun"
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else None
        if name in VAGUE_NAMES:
            yield "vague"
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            if any(isinstance(target, ast.Tuple) for target in node.targets):
                yield "packed"
        elif isinstance(node, ast.keyword) and node.arg is None and id(node) not in forwarded:
            yield from ["splat"] * isinstance(node.value, ast.Name | ast.Attribute)


def _begins_with_noun(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    is_property = any(ast.unparse(decorator).endswith("property") for decorator in function.decorator_list)
    first_word = (ast.get_docstring(function) or "").partition(" ")[0].rstrip(",:").lower()
    return not is_property and (first_word in NOUN_BEGINNINGS or first_word.startswith(("``", ":")))


def _forwarded(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.keyword]:
    """Yield the splats in ``function`` that cannot be written as arguments by name.

    They pass on ``**kwargs`` of the function, or go to a parameter of it, to an entry of a table or to one of
    ``TAKE_ANY``: the names are chosen by the caller or the data.
    """
    signature = function.args
    parameters = {a.arg for a in (*signature.posonlyargs, *signature.args, *signature.kwonlyargs)} - {"self", "cls"}
    keywords = signature.kwarg and signature.kwarg.arg
    for call in ast.walk(function):
        if not isinstance(call, ast.Call):
            continue
        callee = call.func
        name = callee.attr if isinstance(callee, ast.Attribute) else getattr(callee, "id", None)
        takes_any = name in TAKE_ANY or isinstance(callee, ast.Subscript)
        if takes_any or (isinstance(callee, ast.Name) and name in parameters):
            yield from call.keywords
        else:
            yield from (k for k in call.keywords if isinstance(k.value, ast.Name) and k.value.id == keywords)


def _texts(tree: ast.Module) -> Iterator[str]:
    """Yield docstrings and messages: string literals of two words or more."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in parts else None
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "value" for part in node.values)
        if isinstance(text, str) and re.search(r"\w\s+\w", text):
            yield text


def rates(counts: Counter[str]) -> dict[str, float]:
    """Convert counts to the figures of the table."""
    thousand_lines = max(1, counts["lines"]) / 1_000
    ten_thousand_words = max(1, counts["words"]) / 10_000
    units = dict.fromkeys(PHRASES, ten_thousand_words) | dict.fromkeys(("vague", "packed", "splat"), thousand_lines)
    return {measure: counts[measure] / units.get(measure, 1) for measure in MEASURES}


def package_of(path: Path) -> str:
    """Return the package of ``src/lockstep`` that contains ``path``, or the file's name."""
    resolved = path.resolve()
    return resolved.relative_to(SOURCE).parts[0] if resolved.is_relative_to(SOURCE) else resolved.name


def table(files: Iterable[Path]) -> dict[str, Counter[str]]:
    """Count by package, with ``all`` as the last row."""
    rows: dict[str, Counter[str]] = {}
    for file in sorted(files):
        rows.setdefault(package_of(file), Counter()).update(count(file.read_text(encoding="utf-8")))
    return {**rows, "all": sum(rows.values(), Counter())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, default=[SOURCE])
    parser.add_argument("--check", action="store_true", help="fail above the limits of this script")
    arguments = parser.parse_args()
    files = [file for path in arguments.paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    failures = []
    print(f"{'':16}" + "".join(f"{title:>8}" for title in (*MEASURES, "lines", "words")))
    for name, counts in table(files).items():
        figures = rates(counts)
        cells = "".join(f"{figures[measure]:8.1f}" for measure in MEASURES)
        print(f"{name:16}{cells}{counts['lines']:8}{counts['words']:8}")
        for measure, limit in zip(MEASURES, LIMITS.get(name, ()), strict=False):
            if figures[measure] > limit:
                failures.append(f"{name}: {measure} is {figures[measure]:.1f}, limit {limit:g}")
    if arguments.check and failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
