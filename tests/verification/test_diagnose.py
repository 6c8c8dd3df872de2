"""Causes have stable codes, each of which is explained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from lockstep.verification.diagnose import Code

PAGE = Path(__file__).parents[2] / "docs" / "same-result.md"


def test_every_cause_is_explained() -> None:
    assert re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE) == list(get_args(Code))
