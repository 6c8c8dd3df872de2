"""What the page is made of: vendored files as recorded, nothing from elsewhere, frames that the page can read."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep.studio
from tests.gloo import ROOT

STATIC = Path(lockstep.studio.__file__).parent / "static"
VENDOR = STATIC / "vendor"
OURS = sorted(file for file in STATIC.rglob("*") if file.is_file() and VENDOR not in file.parents)


def test_vendored_files_are_the_recorded_ones_with_their_licences() -> None:
    packages = json.loads((VENDOR / "VENDOR.json").read_text())["packages"]
    recorded = {entry["file"]: entry["sha256"] for package in packages for entry in package["files"]}
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in VENDOR.glob("*.*")}
    found.pop("VENDOR.json")
    assert found == recorded
    for package in packages:
        assert package["version"] and package["licence"]
        assert "opyright" in (VENDOR / package["licence_file"]).read_text() or package["licence"] == "Apache-2.0"


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.relative_to(STATIC).as_posix())
def test_our_files_ask_no_other_host_and_need_no_eval(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    addresses = set(re.findall(r"\bhttps?://[\w.-]+", text)) - {"http://www.w3.org"}
    assert not addresses
    assert not re.search(r"\beval\(|new Function\(|innerHTML|document\.write", text)
    if file.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)


def test_the_words_of_the_page_are_checked(tmp_path: Path) -> None:
    (tmp_path / "page.js").write_text("// fine\nconst title = `It goes on without ${name}`;\n")
    (tmp_path / "page.html").write_text("<body>\n<p>It goes on.</p>\n")
    words = [sys.executable, str(ROOT / "scripts" / "words.py")]
    found = subprocess.run([*words, str(tmp_path)], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert found.stderr.count(":2: 'goes on', use: resume, continue") == 2, found.stderr
    assert subprocess.run([*words, str(STATIC / "app")], check=False).returncode == 0


def test_every_import_of_the_page_leads_to_a_file_that_exports_the_name() -> None:
    for file in STATIC.glob("app/*.js"):
        text = file.read_text()
        for names, place in re.findall(r"(?:import|export)\s+\{([^}]*)\}\s+from\s+\"([^\"]+)\"", text):
            target = (file.parent / place).resolve()
            assert target.is_file(), f"{file.name}: {place}"
            if target.parent != VENDOR:
                for name in filter(None, (part.strip() for part in names.split(","))):
                    declared = re.compile(
                        rf"export (?:async )?(?:function|class|const|let) {name}\b|export \{{[^}}]*\b{name}\b"
                    )
                    assert declared.search(target.read_text()), f"{file.name} imports {name} from {place}"
