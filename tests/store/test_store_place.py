"""Places: plain names, whole files or none, one winner among many writers, errors in one line."""

import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lattqe.errors import AlreadyExistsError, LattqeError
from lattqe.store import ChangedError, MissingFileError, open_place
from lattqe.store.local import LocalPlace, explained, scratch_folder
from lattqe.store.place import absolute, node_folder


@pytest.fixture(params=["disk", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, tmp_path):
    return open_place(str(tmp_path / "place") if request.param == "disk" else request.getfixturevalue("s3_uri"))


def test_a_file_is_replaced_only_by_those_who_saw_it(place):
    with pytest.raises(ChangedError, match="another process"):
        place.replace("state", b"2", b"1")
    place.replace("state", b"1", None)
    with pytest.raises(ChangedError, match="another process"):
        place.replace("state", b"2", None)
    place.replace("state", b"2", b"1")
    with pytest.raises(ChangedError, match="another process"):
        place.replace("state", b"3", b"1")
    assert place.read("state") == b"2"


def test_of_many_who_saw_the_same_one_replaces_it(place):
    place.write("state", b"0")

    def attempt(number):
        try:
            place.replace("state", b"%d" % number, b"0")
        except ChangedError:
            return None
        return b"%d" % number

    with ThreadPoolExecutor(8) as pool:
        won = [found for found in pool.map(attempt, range(1, 9)) if found is not None]
    assert won == [place.read("state")]


def test_files_come_and_go(place):
    assert place.list() == []
    assert not place.exists("a")
    place.write("b/c", b"deep")
    place.write("a", b"0123456789")
    place.write("a", b"9876543210")
    assert place.sizes() == {"a": 10, "b/c": 4}
    assert place.read("a") == b"9876543210"
    assert place.read_range("a", 2, 3) == b"765"
    assert place.child("b").read("c") == b"deep"
    with place.open_input("a") as file:
        file.seek(8)
        assert file.read() == b"10"
    place.delete("a")
    place.delete("a")
    with pytest.raises(MissingFileError, match="no such"):
        place.read("a")
    with pytest.raises(LattqeError, match="ends at byte 4, not 9"):
        place.read_range("b/c", 1, 8)
    place.delete_tree()
    assert place.list() == []


def test_empty_file(place):
    place.write("empty", b"")
    assert (place.size("empty"), place.read("empty")) == (0, b"")


def test_output_shows_on_a_clean_exit_only(place):
    def fail() -> None:
        with place.open_output("half") as file:
            file.write(b"x" * 100_000)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert place.list() == []
    with place.open_output("whole") as file:
        file.write(b"x" * 100_000)
        assert place.list() == []
    assert place.size("whole") == 100_000


def test_one_of_eight_creates(place):
    won, lost = [], []
    start = threading.Barrier(8)

    def create(number: int) -> None:
        start.wait()
        try:
            place.create("once", bytes([number]) * 1000)
            won.append(number)
        except AlreadyExistsError:
            lost.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    assert place.read("once") == bytes(won) * 1000
    assert place.list() == ["once"]


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "./a", "a\\b", "a\nb", "a\0b"])
def test_names_that_could_leave_the_folder_are_refused(name, tmp_path):
    for place in (open_place(str(tmp_path)), open_place("s3://bucket/prefix")):
        with pytest.raises(LattqeError, match="refused file name"):
            place.read(name)
        with pytest.raises(LattqeError, match="refused file name"):
            place.write(name, b"")


@pytest.mark.parametrize("uri", ["", "  ", "ftp://host/x", "s3://", "s3:///x", "file://host/x", "a\nb"])
def test_unknown_addresses(uri):
    with pytest.raises(LattqeError, match="is not a valid address"):
        open_place(uri)


@pytest.mark.parametrize("uri", ["s3://key:hunter2@bucket/x", "s3://bucket/x?secret_key=hunter2"])
def test_credentials_in_an_address_are_refused_and_not_shown(uri):
    with pytest.raises(LattqeError, match="holds no credentials") as caught:
        open_place(uri)
    assert "hunter2" not in str(caught.value)


def test_one_folder_by_three_addresses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_place("a b").write("x", b"1")
    assert open_place(f"file://{tmp_path}/a%20b").read("x") == b"1"
    assert open_place(f"{tmp_path}/a b") == open_place("a b")
    assert open_place("s3://bucket/a//b/").uri == "s3://bucket/a/b"


def test_file_where_a_folder_is_needed(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    place = open_place(str(tmp_path / "file"))
    for action in (
        lambda: place.write("x", b""),
        lambda: place.create("x", b""),
        lambda: place.list(),
        lambda: open_place(str(tmp_path)).read_range("nothing/x", 0, 1),
    ):
        with pytest.raises(LattqeError, match=r"file|no such"):
            action()
    (tmp_path / "folder").mkdir()
    with pytest.raises(LattqeError, match="it is a folder"):
        open_place(str(tmp_path)).read("folder")


@pytest.mark.parametrize("error", [PermissionError(13, "x"), OSError(30, "x"), OSError(122, "x"), OSError(5, "x")])
def test_errors_of_the_system_become_one_line(error):
    with pytest.raises(LattqeError, match=r"^cannot write /there: [^\n]+$"), explained("write", Path("/there")):
        raise error


def test_a_link_to_itself_is_named(tmp_path):
    (tmp_path / "image.jpg").symlink_to("image.jpg")
    with pytest.raises(LattqeError, match=r"cannot list .*/image\.jpg: Too many levels"):
        LocalPlace(tmp_path).sizes()


def test_what_is_gone_since_it_was_listed_is_left_out(tmp_path):
    """Another driver may finish, and remove its temporary work, at any moment; a dangling link is like it."""
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "there").write_bytes(b"12")
    assert LocalPlace(tmp_path).sizes() == {"there": 2}


def test_file_too_large_leaves_nothing(tmp_path):
    place = open_place(str(tmp_path / "new" / "place"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        for action in (place.write, place.create):
            with pytest.raises(LattqeError, match=r"cannot write .*larger than"):
                action("x", b"x" * 200_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_leaves_nothing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True
        ).returncode
    ):
        pytest.skip("no right to mount a small file system: run the tests as root, or with CAP_SYS_ADMIN")
    try:
        with pytest.raises(LattqeError, match="no space left on that disk"):
            open_place(str(disk / "new")).create("x", b"x" * 200_000)
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(("action", "step"), [("create", "link"), ("write", "replace")])
def test_a_file_is_synced_before_it_takes_its_name(tmp_path, monkeypatch, synced, action, step):
    take_name = getattr(os, step)
    before = []
    monkeypatch.setattr(os, step, lambda *paths: (before.extend(synced), take_name(*paths)))
    getattr(LocalPlace(tmp_path), action)("x", b"1")
    assert (len(before), len(synced)) == (1, 2)  # the file before, its folder after


def test_leftovers_of_the_dead_are_swept_those_of_the_living_stay(tmp_path):
    place = LocalPlace(tmp_path)
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = os.uname().nodename
    alive = f".tmp-{host}-{os.getpid()}-aaaaaaaaaaaa"
    for name in (
        f".tmp-{host}-{dead.pid}-aaaaaaaaaaaa",
        alive,
        ".tmp-else-where-1-aaaaaaaaaaaa",
        ".tmp-else-2-bbbbbbbbbbbb",
    ):
        (tmp_path / name).write_bytes(b"")
    long_ago = time.time() - 100_000
    os.utime(tmp_path / ".tmp-else-where-1-aaaaaaaaaaaa", (long_ago, long_ago))
    assert place.list() == []
    place.sweep()
    assert {path.name for path in tmp_path.iterdir()} == {alive, ".tmp-else-2-bbbbbbbbbbbb"}


def test_addresses_mean_the_same_in_another_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute("set") == str(tmp_path / "set")
    assert absolute("s3://bucket/set") == "s3://bucket/set"
    assert node_folder("cache") == str(tmp_path / "cache")
    assert node_folder("~/cache") == "~/cache"
    assert node_folder(None) is None


def test_temporary_files_of_others_are_left_alone(tmp_path):
    """Names that only look like ours crash nothing and stay; those of a dead process go."""
    place = LocalPlace(tmp_path / "place")
    place.write("x", b"1")
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    dead = f".tmp-{socket.gethostname()}-{process.pid}-0123456789ab"
    kept = {".tmp-foo", ".tmp-", ".tmp-a-b-c", f".tmp-{socket.gethostname()}-{10**30}-0123456789ab", ".tmp-x-1-zz"}
    for name in (dead, *kept):
        (tmp_path / "place" / name).write_bytes(b"")
    place.sweep()
    assert {path.name for path in (tmp_path / "place").iterdir()} == {"x", *kept}


def test_a_scratch_folder_of_a_killed_process_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lines = f"""
        import sys, tempfile
        from lattqe.store.local import scratch_folder
        tempfile.tempdir = {str(tmp_path)!r}
        with scratch_folder("test") as folder:
            (folder / "downloaded").write_bytes(b"x")
            print(folder, flush=True)
            sys.stdin.read()
    """
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(lines)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    theirs = Path(other.stdout.readline().strip())
    (tmp_path / "lattqe-results").mkdir()  # a user's own
    with scratch_folder("test") as ours:
        assert (theirs / "downloaded").exists()  # its process lives
        assert ours.is_dir()
    assert not ours.exists()
    other.kill()
    other.communicate()
    with scratch_folder("test") as ours:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["lattqe-results", ours.name]
