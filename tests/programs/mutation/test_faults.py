"""The faults of the mutation program can be planted."""

import ast
import re

import pytest

from tests.programs.mutation.faults import FAULTS, PACKAGE, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_applies_once_and_its_tests_exist(fault: Fault) -> None:
    text = (ROOT / PACKAGE / fault.path).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1
    ast.parse(text.replace(fault.old, fault.new))
    for test in fault.tests:
        file, *names = test.split("::")
        tests = (ROOT / file).read_text(encoding="utf-8")
        assert all(re.search(rf"(def|class) {name}\b", tests) for name in names)


def test_each_room_has_a_fault() -> None:
    rooms = {path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py")}
    assert rooms == {fault.room for fault in FAULTS}
