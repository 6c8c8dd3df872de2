"""Arm the observer in a process of the audited script; this folder is the first on its PYTHONPATH."""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

if "LOCKSTEP_AUDIT" in os.environ:
    from lockstep.audit.observer.arm import arm

    arm(os.environ["LOCKSTEP_AUDIT"], int(os.environ["LOCKSTEP_AUDIT_STEPS"]))
# The file of the same name that this one hides.
_search_path = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
_hidden = PathFinder.find_spec("sitecustomize", _search_path)
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(module_from_spec(_hidden))
