"""The order of the folders holds, and the house keeps its measure."""

from __future__ import annotations

from tests.support.house import ROOT, measure


def test_no_module_imports_itself_in_a_circle() -> None:
    assert measure(ROOT).circles == ()
