"""What the documents say can be typed: verbs, options, make targets, Ray's commands and links all exist."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
import typer.main

from jobs.cli import VERBS
from lattqe.formats import open_source

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PROGRAMS = ("lattqe", "ray", "make", "python")
# Parts of a usage line, not words to type: [--option X], UPPER-CASE names, dots.
PLACEHOLDER = re.compile(r"[\[\]…]|\.\.\.|\b[A-Z][A-Z_]+\b")


def blocks(text):
    """Fenced and indented code, with continued lines joined and comments taken away."""
    fenced = re.findall(r"^```(?:bash|console|)\n(.*?)^```", text, re.S | re.M)
    indented = re.findall(r"^    (\S.*)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    for line in re.sub(r" *\\\n *", " ", "\n".join([*fenced, *indented])).splitlines():
        yield re.split(r"\s+#\s", line)[0].strip()


def commands(document):
    """Every command line of a document as (words, whether it can be typed as it stands)."""
    text = document.read_text()
    inline = [" ".join(found.split()) for found in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    for line, whole in [(line, True) for line in blocks(text)] + [(line, False) for line in inline]:
        for piece in re.split(r"\s*(?:&&|\||;)\s+", line):
            words = piece.split()
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # settings before a command
                words.pop(0)
            if len(words) > 1 and words[0] in PROGRAMS:
                yield piece, words, whole and not PLACEHOLDER.search(piece)


CASES = [
    pytest.param(piece, words, whole, id=f"{document.name}:{piece[:60]}")
    for document in DOCUMENTS
    for piece, words, whole in commands(document)
]


def options_of(command):
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}


def check_options(words, known):
    for word in words:
        name = word.strip("[]().,:").split("=")[0]
        if re.fullmatch(r"--[\w-]+|-[a-zA-Z]", name):
            assert name in known, f"{name} is not an option of this command"


def find_verb(name):
    assert name in {verb.name for verb in VERBS}, f"{name} is not a verb"
    return typer.main.get_command(next(verb for verb in VERBS if verb.name == name).load())


def check_lattqe(piece, words, whole):
    if words[0] in ("VERB", "JOB", "NAME", "--help", "--version", "...", "…"):
        check_options(words[1:], options_of(find_verb("augment")))
        return
    command = find_verb(words[0])
    arguments = shlex.split(piece)[2:] if whole else words[1:]
    if words[0] == "submit" and "--" in arguments:
        rest = arguments[arguments.index("--") + 1 :]
        check_lattqe(f"lattqe {shlex.join(rest)}", rest, whole)
        check_options(arguments[: arguments.index("--")], options_of(command))
        return
    if hasattr(command, "commands") and arguments:
        assert arguments[0] in command.commands or arguments[0] == "--help"
        command = command.commands.get(arguments[0], command)
        arguments = arguments[1:]
    check_options(arguments, options_of(command))
    if whole and "--help" not in arguments:
        command.make_context(words[0], list(arguments))


def check_ray(words):
    from ray.scripts.scripts import cli

    command = cli
    while hasattr(command, "commands") and words:
        assert words[0] in command.commands, f"ray has no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    own = words[: words.index("--")] if "--" in words else words
    check_options(own, options_of(command))


@pytest.mark.parametrize(("piece", "words", "whole"), CASES)
def test_a_command_is_one_that_exists(piece, words, whole):
    program, *rest = words
    if program == "lattqe":
        check_lattqe(piece, rest, whole)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert rest[0] in targets, f"there is no make {rest[0]}"
    elif program == "ray":
        check_ray(rest)
    elif rest[:2] == ["-m", "jobs.cli"]:
        check_lattqe(piece, rest[2:], False)
    elif rest[0] == "-m" and rest[1].startswith("jobs.") and rest[1].islower():
        verb = next(verb for verb in VERBS if (verb.module, verb.app) == (rest[1], "app"))
        check_options(rest[2:], options_of(find_verb(verb.name)))
    elif rest[0].endswith(".py"):
        assert (ROOT / rest[0]).exists(), f"there is no {rest[0]}"


def test_there_are_many_commands_and_wrong_ones_are_found():
    assert len([case for case in CASES if case.values[2]]) > 40
    with pytest.raises(AssertionError, match="not an option"):
        check_lattqe("lattqe augment f --wokers 2 --to i", ["augment", "f", "--wokers", "2", "--to", "i"], True)
    with pytest.raises(AssertionError, match="not a verb"):
        check_lattqe("lattqe agument f", ["agument", "f"], False)
    with pytest.raises(AssertionError, match="no command"):
        check_ray(["upp", "ray_cluster.yaml"])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_pictures_are_there_and_small():
    found = {
        (document.parent / name).resolve()
        for document in [*DOCUMENTS, *(ROOT / "docs" / "results").glob("*.md")]
        for name in re.findall(r"!\[[^]]+\]\(([^)]+)\)", document.read_text())
    }
    assert found == set((ROOT / "docs" / "pictures").resolve().iterdir())
    assert len(re.findall(r"^!\[", (ROOT / "README.md").read_text(), re.M)) == 2
    for picture in found:
        assert 1_000 < picture.stat().st_size < 100_000, picture


def test_the_digits_are_pictures_and_tables_that_import_reads(tmp_path):
    runpy.run_path(str(ROOT / "docs" / "examples" / "digits.py"))["main"](str(tmp_path))
    rows = 0
    for kind in ("database", "queries"):
        for block in open_source([str(tmp_path / f"{kind}.parquet")]).blocks(8192):
            assert block.vectors.shape == (len(block.ids), 64)
            assert [name[0] for name in block.ids] == [str(label) for label in block.labels]
            assert all((tmp_path / "images" / f"{name}.png").stat().st_size for name in block.ids)
            rows += len(block.ids)
    assert rows == 1797


def test_the_map_names_every_file_and_no_other():
    """docs/architecture.md has a line for each module, under the heading of its folder."""
    text = (ROOT / "docs" / "architecture.md").read_text().split("## Every file")[1].split("## Terms")[0]
    named = set()
    for table in text.split("\n\n"):
        title, _, lines = table.partition("\n")
        for line in lines.splitlines()[1:]:
            room = "" if "/`" not in title else title.split("`")[1].removeprefix("lattqe/").strip("/")
            for name in re.findall(r"`([\w/]+\.py)`", line.split("|")[1]):
                room = name.rpartition("/")[0] or room
                named.add(f"{room}/{name.rpartition('/')[2]}".lstrip("/"))
    layers = [path for layer in ("jobs", "cluster", "lattqe") for path in (ROOT / layer).rglob("*.py")]
    modules = {path.relative_to(ROOT).as_posix() for path in layers if path.name != "__init__.py"}
    assert named == {name.removeprefix("lattqe/") for name in modules}
