"""Hooks of mkdocs.yml: what the pages have for readers of the repository, and a site cannot show."""

import re

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):<code>[.~]?([^<]*)</code>")
OUTSIDE = re.compile(
    r"\[([^\]]+)\]\(\.\./(?:\.\./)?((?:README|CHANGELOG|CONTRIBUTING|benchmarks|examples|src|scripts)[^)]*)\)"
)
EXCERPT = re.compile(r"^<!-- excerpt: .* -->\n", re.M)


def on_page_markdown(markdown, **_):
    """Links to files outside of ``docs`` become their text and path."""
    return EXCERPT.sub("", OUTSIDE.sub(r"\1 (`\2`)", markdown))


def on_page_content(html, **_):
    """Sphinx roles of docstrings become plain code."""
    return ROLE.sub(lambda role: f"<code>{role[1].rpartition('.')[2]}</code>", html)
