"""No reader of ours runs what it reads, by a scan of the sources; forged manifests; and the offline audit."""

import ast
import importlib.util
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lattqe.errors import LattqeError
from lattqe.store import FeatureSet, FeatureWriter

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for folder in ("lattqe", "cluster", "jobs") for path in (ROOT / folder).rglob("*.py"))
# Calls that can run code that is in a file, by the end of their dotted name.
ALWAYS_WRONG = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "cPickle.load",
    "cloudpickle.load",
    "cloudpickle.loads",
    "dill.load",
    "dill.loads",
    "joblib.load",
    "shelve.open",
    "marshal.load",
    "marshal.loads",
    "pd.read_pickle",
    "pandas.read_pickle",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "jsonpickle.decode",
    "os.system",
    "os.popen",
    "eval",
    "exec",
}
# A program is asked for by name with `--checkpoint` and read as one: docs/extraction.md says so.
PROGRAMS = {"lattqe/extraction/encoder.py": {"torch.jit.load", "torch.export.load"}}


def dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def is_constant(call, name, value):
    return any(
        word.arg == name and isinstance(word.value, ast.Constant) and word.value.value is value
        for word in call.keywords
    )


def dangerous_calls(source):
    """Names of calls in a source that could run what is in a file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "cPickle", "dill", "marshal", "shelve"):
            found.append(f"from {node.module} import")
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if (
            name in ALWAYS_WRONG
            or name in ("torch.jit.load", "torch.export.load")
            or (name == "torch.load" and not is_constant(node, "weights_only", True))
            or (name in ("np.load", "numpy.load") and not is_constant(node, "allow_pickle", False))
            or any(word.arg == "shell" and not is_constant(node, "shell", False) for word in node.keywords)
        ):
            found.append(name)
    return found


def test_nothing_runs_what_it_reads():
    assert len(SOURCES) > 100
    found = {
        name: set(dangerous_calls((ROOT / name).read_text())) - PROGRAMS.get(name, set())
        for name in (path.relative_to(ROOT).as_posix() for path in SOURCES)
    }
    assert not {name: calls for name, calls in found.items() if calls}


@pytest.mark.parametrize(
    "line",
    [
        "pickle.load(f)",
        "pickle.Unpickler(f).load()",
        "from pickle import loads",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "torch.load(f, weights_only=flag)",
        "np.load(f)",
        "eval(text)",
        "np.load(f, allow_pickle=True)",
        "yaml.load(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_scan_finds(line):
    assert dangerous_calls(line)


def test_the_scan_lets_pass():
    assert not dangerous_calls(
        "torch.load(f, weights_only=True); np.load(f, allow_pickle=False); pickle_file.load(f); "
        "network.eval(); safetensors.torch.load(data)"
    )


@pytest.mark.parametrize(
    "forged",
    [
        {"rows": 10**12},
        {"rows": 2**62},
        {"bytes": 10**15},
        {"name": "../outside.arrow"},
        {"name": "/etc/passwd"},
        {"name": "a/../../outside.arrow"},
    ],
)
@pytest.mark.parametrize("action", ["read", "ids", "verify"])
def test_a_forged_manifest_neither_leaves_its_folder_nor_takes_memory(tmp_path, forged, action):
    """Its own checksum and digest are right: only what it says is not."""
    with FeatureWriter(str(tmp_path / "features"), 8) as writer:
        writer.append(np.random.default_rng(0).standard_normal((50, 8)), [f"r{row}" for row in range(50)])
    manifest = FeatureSet.open(str(tmp_path / "features")).manifest
    (part,) = manifest.parts
    (tmp_path / "outside.arrow").write_bytes((tmp_path / "features" / part.name).read_bytes())
    part = replace(part, **forged)
    (tmp_path / "features" / "manifest.json").write_bytes(replace(manifest, rows=part.rows, parts=(part,)).to_json())
    tracemalloc.start()
    try:
        with pytest.raises(LattqeError):
            getattr(FeatureSet.open(str(tmp_path / "features")), action)()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def audit():
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_audit_finds_what_is_not_as_pinned(audit):
    pins = audit.read_pins("# comment\nA_b==1.0\nnumpy==2.4.6\nabsent==1\n")
    assert pins == {"a-b": "1.0", "numpy": "2.4.6", "absent": "1"}
    assert audit.compare(pins, {"a-b": "1.0", "numpy": "2.4.6+local", "pip": "26"}) == []
    assert audit.compare(pins, {"a-b": "1.1", "new": "3"}) == [
        "a-b: 1.1 is installed, 1.0 is pinned",
        "new: 3 is installed without a pin in constraints.txt",
    ]
    with pytest.raises(SystemExit, match="no exact version"):
        audit.read_pins("numpy>=1")
    found = audit.unsafe({"jinja2": "3.1.5"}, {"jinja2": {"since": "3.1.6", "id": "CVE-2025-27516", "what": "escape"}})
    assert found == ["jinja2: 3.1.5 is pinned, CVE-2025-27516 is fixed in 3.1.6: escape"]


def test_the_bill_of_materials_names_each_package_once(audit):
    numpy = ("numpy", "2.4.6", "BSD-3-Clause")
    bill = audit.bill_of_materials([numpy, ("b", "1", ""), numpy, ("lattqe", "0.2.0", "Apache-2.0")])
    assert [each["purl"] for each in bill["components"]] == ["pkg:pypi/b@1", "pkg:pypi/numpy@2.4.6"]
    assert bill["components"][1]["licenses"] == [{"license": {"name": "BSD-3-Clause"}}]
    assert "licenses" not in bill["components"][0]


def test_our_pins_are_above_every_advisory(audit):
    import tomllib

    pins = audit.read_pins((ROOT / "constraints.txt").read_text())
    advisories = tomllib.loads((ROOT / ".ci" / "advisories.toml").read_text())
    assert set(advisories) <= set(pins), "an advisory for something that is not used"
    assert audit.unsafe(pins, advisories) == []
