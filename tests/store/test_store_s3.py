"""A real S3 server under attack: killed and restarted, throttling, losing answers, refusing; and what a reader does."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import botocore.auth
import numpy as np
import pytest
from s3_proxy import FaultyProxy
from s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server

import lattqe.store.parts
from lattqe.errors import AlreadyExistsError, CorruptDataError, LattqeError
from lattqe.store import FeatureSet, FeatureWriter, Pending, UnavailableError, neighbors_table, open_place, s3_client
from lattqe.store.artifacts import verify_artifact
from lattqe.store.s3 import S3Place
from lattqe.store.s3_client import retry_seconds

pytestmark = pytest.mark.s3


def write(uri: str, rows: int = 2000, dim: int = 16, part_bytes: int = 8000) -> FeatureSet:
    x = np.random.default_rng(0).standard_normal((rows, dim))
    with FeatureWriter(uri, dim, part_bytes=part_bytes) as writer:
        for start in range(0, rows, 100):
            writer.append(x[start : start + 100], [f"row-{i}" for i in range(start, min(rows, start + 100))])
    return writer.close()


@pytest.fixture
def faults(s3: S3Server, monkeypatch):
    """The session's server behind a proxy; tests set `faults.fault`."""
    proxy = FaultyProxy(s3.endpoint, lambda method, path: None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    yield proxy
    proxy.close()


def every(kinds: list[str], calm: int = 1):
    """Each kind of fault in turn, with `calm` good requests after each."""
    state = {"count": 0}
    lock = threading.Lock()

    def fault(method: str, path: str) -> str | None:
        with lock:
            state["count"] += 1
            turn, rest = divmod(state["count"], calm + 1)
            return kinds[turn % len(kinds)] if rest == 0 else None

    return fault


def each_object(among: str, kinds: list[str]):
    """The first answers with each object whose name holds `among` are faulty, one of each kind; all others are good."""
    left: dict[str, list[str]] = {}
    lock = threading.Lock()

    def fault(method: str, path: str) -> str | None:
        with lock:
            waiting = left.setdefault(path, list(kinds)) if method == "GET" and among in path else []
            return waiting.pop(0) if waiting else None

    return fault


def test_throttling_failures_and_resets_are_retried(faults, s3_uri):
    faults.fault = every(["throttle", "fail", "hang up", "lose the answer"], calm=2)
    features = write(s3_uri, rows=300)
    faults.fault = every(["throttle", "fail", "hang up", "lose the answer"], calm=2)
    whole = FeatureSet.open(s3_uri).read()
    done = {what for _, what in faults.seen}
    faults.fault = lambda method, path: None
    assert done >= {"throttle", "fail", "hang up", "lose the answer"}
    assert whole.shape == (300, 16)
    assert features.digest == FeatureSet.open(s3_uri).digest
    verify_artifact(s3_uri)


def test_damage_on_the_way_is_read_again(faults, s3_uri, tmp_path, monkeypatch):
    """Some answers have a flipped bit or end early: of small objects, of large ones in ranges, of downloads."""
    features = write(f"{s3_uri}/features", rows=1000)
    expected, parts = features.read(), [part.name for part in features.manifest.parts]
    for small in (5000, 1 << 20):
        monkeypatch.setattr("lattqe.store.s3.RANGE_BYTES", small)
        faults.fault = each_object("part-", ["corrupt", "cut short"])
        np.testing.assert_array_equal(FeatureSet.open(features.uri).read(), expected)
    faults.fault = each_object("part-", ["corrupt", "cut short"])
    features.place.download(parts[0], tmp_path / "copy")
    assert faults.happened == {"corrupt": 2 * len(parts) + 1, "cut short": 2 * len(parts) + 1}
    faults.fault = lambda method, path: None
    assert (tmp_path / "copy").read_bytes() == features.place.read(parts[0])


def test_a_part_of_another_writer_is_adopted_as_it_is_stored(faults, s3_uri, monkeypatch):
    """The answer with that part is damaged, and so large that only we can notice."""
    monkeypatch.setattr("lattqe.store.s3.RANGE_BYTES", 1000)
    ids, scores = np.full((50, 4), -1, np.int32), np.zeros((50, 4), np.float32)
    first = Pending.begin(s3_uri, "neighbors", {"k": 4}, [50])
    first.publish(0, neighbors_table(ids, scores))
    damaged = []

    def fault(method: str, path: str) -> str | None:
        if method == "GET" and "part-00000.arrow" in path and len(damaged) < 2:
            damaged.append(path)  # the first is only looked at for its size
            return "corrupt"
        return None

    faults.fault = fault
    with pytest.raises(CorruptDataError, match="on its way"):
        Pending.attach(s3_uri).publish(0, neighbors_table(ids, scores))
    Pending.attach(s3_uri).publish(0, neighbors_table(ids, scores))
    assert verify_artifact(first.finish() and s3_uri).rows == 50


def test_a_wrong_clock_is_named(s3_uri, monkeypatch):
    true = botocore.auth.get_current_datetime
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *args: true(*args) + timedelta(hours=1))
    with pytest.raises(LattqeError, match="this machine's clock is off"):
        open_place(s3_uri).write("x", b"x")


def test_lost_answer_to_an_exclusive_write_is_no_defeat(faults, s3_uri):
    lost = []

    def lose_first_put(method: str, path: str) -> str | None:
        if method == "PUT" and not lost:
            lost.append(path)
            return "lose the answer"
        return None

    faults.fault = lose_first_put
    place = open_place(s3_uri)
    place.create("once", b"ours")
    assert lost
    assert [method for method, _ in faults.seen].count("PUT") == 2
    lost.clear()
    with pytest.raises(AlreadyExistsError):
        place.create("once", b"theirs")
    assert place.read("once") == b"ours"


def test_giving_up_after_the_time_allowed(faults, s3_uri, monkeypatch, caplog):
    monkeypatch.setenv("LATTQE_S3_RETRY_SECONDS", "4")
    faults.fault = lambda method, path: "throttle"
    started = time.monotonic()
    with pytest.raises(UnavailableError, match=r"503 SlowDown; gave up after 4 s \(LATTQE_S3_RETRY_SECONDS\)"):
        open_place(s3_uri).write("x", b"1")
    assert time.monotonic() - started > 3.5
    assert 2 <= len(faults.seen) <= 12  # backoff, not a storm; fewer on a crowded machine
    assert "trying for another" in caplog.text
    faults.fault = lambda method, path: None
    assert open_place(s3_uri).list() == []


def test_a_request_that_takes_all_the_time_is_asked_once_more(faults, s3_uri, monkeypatch):
    monkeypatch.setattr(faults, "stall_seconds", 3)
    monkeypatch.setenv("LATTQE_S3_ANSWER_SECONDS", "1")
    monkeypatch.setenv("LATTQE_S3_RETRY_SECONDS", "0.5")
    stalled = iter(["stall"])
    faults.fault = lambda method, path: next(stalled, None)
    open_place(s3_uri).write("x", b"x")
    assert open_place(s3_uri).read("x") == b"x"
    assert faults.happened["stall"] == 1


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "1e9"])
def test_time_allowed_must_be_seconds(text, monkeypatch):
    monkeypatch.setenv("LATTQE_S3_RETRY_SECONDS", text)
    with pytest.raises(LattqeError, match="LATTQE_S3_RETRY_SECONDS"):
        retry_seconds()


def test_server_killed_and_restarted_during_a_write(mortal_s3, monkeypatch):
    """It is gone when the fourth part is to be stored, and comes back when that was refused."""
    uri = mortal_s3.fresh_uri()
    refused, explain = threading.Event(), s3_client.explain
    create, stored = S3Place.create, []

    def create_or_kill(place: S3Place, name: str, data: bytes) -> None:
        stored.append(name)
        if len(stored) == 4:
            mortal_s3.kill()
            threading.Thread(target=lambda: refused.wait() and mortal_s3.start()).start()
        create(place, name, data)

    monkeypatch.setattr(S3Place, "create", create_or_kill)
    monkeypatch.setattr(s3_client, "explain", lambda *words: (refused.set(), explain(*words))[1])
    assert write(uri, rows=4000).rows == 4000
    assert refused.is_set()
    assert len(stored) > 8, "far more parts than came before the kill"
    verify_artifact(uri)
    assert not [name for name in open_place(uri).list() if name.startswith("_work")]


def test_storage_out_of_reach_then_the_same_command(faults, s3_uri, monkeypatch):
    monkeypatch.setenv("LATTQE_S3_RETRY_SECONDS", "1")
    x = np.random.default_rng(0).standard_normal((100, 16))
    ids = [f"row-{i}" for i in range(100)]

    def attempt(stop: bool) -> FeatureSet:
        with FeatureWriter(s3_uri, 16, part_bytes=1000) as writer:
            writer.append(x[:50], ids[:50])
            if stop:
                faults.fault = lambda method, path: "hang up"
            writer.append(x[50:], ids[50:])
        return writer.close()

    with pytest.raises(UnavailableError, match=r"the connection to S3 failed .*run the same command again"):
        attempt(stop=True)
    faults.fault = lambda method, path: None
    with pytest.raises(LattqeError, match="is not finished"):
        FeatureSet.open(s3_uri)
    assert attempt(stop=False).ids() == ids
    verify_artifact(s3_uri)


def assert_no_secrets(error: BaseException) -> None:
    assert not any(secret in str(error) for secret in (SECRET_KEY, ACCESS_KEY, "wrong-secret", "wrong-key"))


@pytest.mark.parametrize(
    ("variable", "value"), [("AWS_SECRET_ACCESS_KEY", "wrong-secret"), ("AWS_ACCESS_KEY_ID", "wrong-key")]
)
def test_wrong_credentials_are_final_and_not_shown(faults, s3_uri, monkeypatch, variable, value):
    write(s3_uri, rows=20)
    monkeypatch.setenv(variable, value)
    faults.seen.clear()
    place = open_place(s3_uri)
    actions = (
        lambda: FeatureSet.open(s3_uri),
        lambda: FeatureWriter(s3_uri, 4),
        lambda: place.list(),
        lambda: place.fetch("manifest.json"),
        lambda: place.write("x", b""),
        lambda: place.delete("x"),
        lambda: place.create("x", b""),
        lambda: place.open_input("manifest.json"),
    )
    for action in actions:
        with pytest.raises(LattqeError, match=r"S3 refused the credentials|permission denied") as caught:
            action()
        assert_no_secrets(caught.value)
    assert len(faults.seen) <= 2 * len(actions), "asked again, which cannot help"


def test_no_credentials(s3_uri, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(LattqeError, match="no S3 credentials were found"):
        FeatureSet.open(s3_uri)


def test_profile_serves_both_clients(s3_uri, monkeypatch, tmp_path):
    """Credentials and endpoint from files reach boto3 and pyarrow alike."""
    features = write(s3_uri, rows=20)
    credentials, config = tmp_path / "credentials", tmp_path / "config"
    credentials.write_text(f"[tests]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n")
    config.write_text(f"[profile tests]\nregion = us-east-1\nendpoint_url = {os.environ['AWS_ENDPOINT_URL']}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_PROFILE", "tests")
    np.testing.assert_array_equal(FeatureSet.open(s3_uri).read(), features.read())


def test_missing_bucket_is_final(faults):
    place = open_place("s3://no-such-bucket/x")
    actions = (
        lambda: FeatureSet.open(place.uri),
        lambda: FeatureWriter(place.uri, 4),
        lambda: place.list(),
        lambda: place.write("x", b""),
        lambda: place.exists("x"),
        lambda: place.fetch("x"),
    )
    for action in actions:
        with pytest.raises(LattqeError, match="the bucket 'no-such-bucket' does not exist"):
            action()
    assert len(faults.seen) <= 2 * len(actions), "asked again, which cannot help"


@pytest.mark.parametrize("address", ["nonsense", "http://"])
def test_wrong_endpoint(monkeypatch, s3, address):
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    with pytest.raises(LattqeError, match="AWS_ENDPOINT_URL"):
        open_place("s3://bucket/x").read("y")


def test_ranges_are_fetched_in_parallel(s3_uri, monkeypatch):
    monkeypatch.setattr("lattqe.store.s3.RANGE_BYTES", 1000)
    data = np.random.default_rng(0).bytes(123_456)
    place = open_place(s3_uri)
    place.write("x", data)
    assert place.read("x") == data
    assert place.read_range("x", 100_000, 20_000) == data[100_000:120_000]


def test_large_output_goes_up_in_pieces_and_abandoned_pieces_are_removed(s3, s3_uri, monkeypatch):
    place = open_place(s3_uri)
    with place.open_output("large") as file:
        file.write(bytes(20 << 20))
    assert place.size("large") == 20 << 20
    client = s3.client()
    prefix = s3_uri.removeprefix(f"s3://{BUCKET}/")
    upload = client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/dead")["UploadId"]
    client.upload_part(Bucket=BUCKET, Key=f"{prefix}/dead", UploadId=upload, PartNumber=1, Body=b"x" * 1000)

    def unfinished() -> list[str]:
        return [entry["Key"] for entry in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])]

    place.sweep()  # it may still be alive
    assert unfinished() == [f"{prefix}/dead"]
    monkeypatch.setattr("lattqe.store.s3.ABANDONED", timedelta(0))
    place.sweep()
    assert unfinished() == []
    assert place.list() == ["large"]


def test_damage_on_the_server_is_found(s3_uri):
    features = write(s3_uri, rows=300)
    name = features.manifest.parts[0].name
    data = bytearray(features.place.read(name))
    data[len(data) // 2] ^= 1
    features.place.write(name, bytes(data))
    with pytest.raises(CorruptDataError, match=f"{name} does not match its checksum"):
        FeatureSet.open(s3_uri).read()
    features.place.write(name, bytes(data[:-1]))
    with pytest.raises(CorruptDataError, match=f"{name} has {len(data) - 1} bytes"):
        FeatureSet.open(s3_uri).gather(np.array([0]))
    features.place.delete(name)
    with pytest.raises(CorruptDataError, match=f"{name} is missing"):
        next(FeatureSet.open(s3_uri).blocks(5))


def test_memory_of_remote_parts_is_bounded(s3_uri, monkeypatch):
    features = write(s3_uri, rows=1000)
    monkeypatch.setattr(lattqe.store.parts, "RESIDENT_BYTES", 20_000)
    rows = np.random.default_rng(0).integers(0, 1000, 200)
    reader = FeatureSet.open(s3_uri)
    np.testing.assert_array_equal(reader.gather(rows), features.read()[rows])
    assert 1 <= len(reader.parts._kept) <= 2


def test_cache_is_filled_part_by_part_and_repaired(s3_uri, tmp_path):
    features = write(s3_uri, rows=1000)
    cache = tmp_path / "cache"
    reader = FeatureSet.open(s3_uri, cache=str(cache))
    np.testing.assert_array_equal(reader.read(0, 10), features.read(0, 10))
    folder = cache / features.digest
    parts = [part.name for part in features.manifest.parts]
    assert sorted(path.name for path in folder.glob("*.arrow")) == parts[:1]
    np.testing.assert_array_equal(reader.read(), features.read())
    for name in parts:
        features.place.delete(name)  # from here on the cache is all there is
    np.testing.assert_array_equal(FeatureSet.open(s3_uri, cache=str(cache)).read(), reader.read())
    damaged = bytearray((folder / parts[0]).read_bytes())
    damaged[100] ^= 1
    (folder / parts[0]).unlink()
    (folder / parts[0]).write_bytes(damaged)
    with pytest.raises(CorruptDataError, match=f"{parts[0]} is missing"):
        FeatureSet.open(s3_uri, cache=str(cache)).read()


def test_cache_is_filled_once_by_many_readers(s3_uri, tmp_path, faults):
    """Locks on files hold among threads as among processes: each reader opens its own."""
    features = write(s3_uri, rows=1000)
    expected = features.read()
    faults.seen.clear()
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: FeatureSet.open(s3_uri, cache=str(tmp_path / "cache")).read(), range(6)))
    for rows in found:
        np.testing.assert_array_equal(rows, expected)
    # Each part is fetched once; each reader reads the manifest.
    assert [method for method, _ in faults.seen].count("GET") == len(features.manifest.parts) + 6
    assert not list(tmp_path.rglob(".tmp-*"))
