"""``lockstep.verification``: an error where devices differ."""

from __future__ import annotations

import dataclasses

import pytest

import lockstep
from lockstep.errors import ResultsDifferError
from lockstep.verification.diagnose import Cause
from tests.toys import Toy


@pytest.mark.slow
def test_a_difference_is_raised_with_its_cause() -> None:
    report = lockstep.verify(Toy(), devices="cpu,cpu", steps=4, batch_size=8)
    report.raise_if_different()
    cause = Cause("unseeded", "the data set draws from no generator of its own", "seed it")
    different = dataclasses.replace(report, outcome="different", verdict="DIFFERENT: from step 2 on", causes=(cause,))
    with pytest.raises(ResultsDifferError, match="from step 2 on") as caught:
        different.raise_if_different()
    assert (caught.value.why, caught.value.fix, caught.value.exit_code) == (cause.what, "seed it", 1)
