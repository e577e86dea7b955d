"""The three layers import in one direction only: jobs → cluster → lattqe, and the library never sees Ray."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {"lattqe": {"ray", "cluster", "jobs"}, "cluster": {"jobs"}, "jobs": set()}


def imported_packages(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_layer_imports_only_downwards(layer):
    files = sorted((ROOT / layer).rglob("*.py"))
    assert files
    wrong = {str(path.relative_to(ROOT)): sorted(imported_packages(path) & FORBIDDEN[layer]) for path in files}
    assert not {path: names for path, names in wrong.items() if names}
