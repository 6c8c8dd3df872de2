"""Hooks of mkdocs.yml: what the pages have for readers of the repository, and a site cannot show."""

import importlib.util
import re
from pathlib import Path

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):<code>[.~]?([^<]*)</code>")
OUTSIDE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./(?:\.\./)?)?((?:README|CHANGELOG|CONTRIBUTING|benchmarks|examples|src|scripts)[^)]*)\)"
)
DRAWING = re.compile(r'<img alt="[^"]*" src="(?:\.\./)*drawings/([\w-]+\.svg)" />')
EXCERPT = re.compile(r"^<!-- excerpt: .* -->\n", re.M)


def on_page_markdown(markdown, page, **_):
    """Links to files outside of ``docs`` become their text and path; errors and changelog get their text."""
    if page.file.src_uri == "errors.md":
        markdown = markdown.replace("<!-- messages -->", _generator().error_messages())
    if page.file.src_uri == "changelog.md":
        text = (Path(__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
        markdown = re.sub(r"\]\(docs/", "](", text)
    return EXCERPT.sub("", OUTSIDE.sub(r"\1 (`\2`)", markdown))


def on_page_content(html, **_):
    """Sphinx roles of docstrings become plain code; drawings become part of the page, and take its colours."""
    html = DRAWING.sub(lambda image: _drawing(image[1]), html)
    return ROLE.sub(lambda role: f"<code>{role[1].rpartition('.')[2]}</code>", html)


def _drawing(name):
    text = (Path(__file__).parent / "drawings" / name).read_text(encoding="utf-8")
    return re.sub(r"<style>.*?</style>", "", text, count=1)


def _generator():
    spec = importlib.util.spec_from_file_location("docs_generate", Path(__file__).parent / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
