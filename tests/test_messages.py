"""What errors say, as far as words tell: read from the source, message by message."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Literal translations that no native engineer writes: "x is no matrix", "training wants 8", "'3' is not a int".
FOREIGN = re.compile(
    r"(?<!there )\bis no \w|\bwants?\b|\b(mend|whoever|somebody|nobody)\b|\ba (int|array|index|edge)\b"
)


def messages(path: Path) -> list[str]:
    """The texts of the errors that a module raises, with … for what is filled in."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            parts = [
                each for each in ast.walk(node.exc) if isinstance(each, ast.Constant) and isinstance(each.value, str)
            ]
            found.append("…".join(each.value for each in parts))
    return found


def test_errors_are_written_in_plain_english():
    said = [
        (path.name, text)
        for layer in ("lattqe", "cluster", "jobs")
        for path in sorted((ROOT / layer).rglob("*.py"))
        for text in messages(path)
    ]
    assert len(said) > 300
    assert [each for each in said if FOREIGN.search(each[1])] == []
