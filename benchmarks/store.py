"""Speed and memory of the store beside raw reads and plain boto3, as ratios of one run.

    python benchmarks/store.py                        1,000,000 × 128 float16, about a minute on two cores
    python benchmarks/store.py --rows 100000 --no-s3  a few seconds

Contestants take turns; a ratio is the median over the rounds, so that a machine that slows down slows down both.
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lattqe.store import FeatureSet, open_place
from lattqe.store import parts as store_parts

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

BLOCK_ROWS = 8192
RAW_BUFFER = 1 << 20
MEMORY_LIMIT, DISK_RATIO, S3_RATIO = 1 << 30, 0.8, 0.7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-s3", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".", prefix="store-benchmark-") as folder:
        uri = f"{folder}/features"
        passed = [measure_memory(folder, uri, options.rows, options.dim), compare_disk(uri, options.repeats)]
        if not options.no_s3:
            passed.append(compare_s3(Path(folder), uri, options.repeats))
    sys.exit(0 if all(passed) else 1)


def measure_memory(folder: str, uri: str, rows: int, dim: int) -> bool:
    """Import a .npy of float32 with the job itself and read it back, in a process of its own; show its peak memory."""
    source = np.lib.format.open_memmap(f"{folder}/vectors.npy", "w+", np.float32, (rows, dim))
    rng = np.random.default_rng(0)
    for start in range(0, rows, BLOCK_ROWS):
        source[start : start + BLOCK_ROWS] = rng.standard_normal((min(BLOCK_ROWS, rows - start), dim), np.float32)
    source.flush()
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    child = multiprocessing.get_context("spawn").Process(
        target=import_and_read, args=(f"{folder}/vectors.npy", uri, answers)
    )
    child.start()
    child.join()
    Path(f"{folder}/vectors.npy").unlink()
    if child.exitcode:
        sys.exit("the import failed")
    before, peak, write_seconds, read_seconds = answers.get()
    size = FeatureSet.open(uri).manifest.total_bytes
    print(
        f"{rows:,} × {dim} float16 ({size / 1e6:.0f} MB): imported in {write_seconds:.1f} s, read back in "
        f"{read_seconds:.2f} s, peak memory {peak >> 20} MiB ({before >> 20} MiB before)"
    )
    return verdict("peak memory / 1 GiB", peak / MEMORY_LIMIT, at_most=1.0)


def import_and_read(source: str, uri: str, answers: "multiprocessing.SimpleQueue[tuple[float, ...]]") -> None:
    from jobs.import_ import app

    before, started = peak_memory(), time.perf_counter()
    app(args=[source, "--to", uri], standalone_mode=False)
    middle = time.perf_counter()
    rows = sum(len(block) for _, block in FeatureSet.open(uri).blocks(BLOCK_ROWS) if np.isfinite(block[0, 0]))
    ended = time.perf_counter()
    assert rows == FeatureSet.open(uri).rows
    answers.put((before, peak_memory(), middle - started, ended - middle))


def peak_memory() -> int:
    """Bytes; not ru_maxrss, which a new process inherits from the one that started it."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def compare_disk(uri: str, repeats: int) -> bool:
    """Sequential read with checksums and every page touched, beside `readinto` of one small buffer."""
    features = FeatureSet.open(uri)
    paths = [features.place.file(part.name) for part in features.manifest.parts]
    buffer = bytearray(RAW_BUFFER)

    def raw() -> None:
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def ours() -> None:
        store_parts._checked.clear()  # as in a new process: every checksum is checked again
        for _, block in FeatureSet.open(uri).blocks(BLOCK_ROWS):
            block.reshape(-1)[::2048].sum()  # one value of each page

    def forget() -> None:
        for path in paths:
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    size = features.manifest.total_bytes
    compare("disk, cold", size, {"raw": raw, "lattqe": ours}, repeats, before=forget)
    return verdict(
        "sequential read / raw read",
        compare("disk, cached", size, {"raw": raw, "lattqe": ours}, repeats),
        at_least=DISK_RATIO,
    )


def compare_s3(folder: Path, uri: str, repeats: int) -> bool:
    """Sequential read with checksums from a real S3 server, beside boto3's get_object of the same parts."""
    from s3_server import BUCKET, S3Server

    features = FeatureSet.open(uri)
    server = S3Server(folder / "s3").start()
    try:
        os.environ |= server.environment
        remote = server.fresh_uri()
        place, client = open_place(remote), server.client()
        for part in features.manifest.parts:
            place.create(part.name, features.place.fetch(part.name))
        place.create("manifest.json", features.manifest.to_json())

        def plain() -> None:
            for part in features.manifest.parts:
                client.get_object(Bucket=BUCKET, Key=f"{place.prefix}/{part.name}")["Body"].read()

        def ours() -> None:
            for _, block in FeatureSet.open(remote).blocks(BLOCK_ROWS):
                block.reshape(-1)[::2048].sum()

        ratio = compare("S3", features.manifest.total_bytes, {"boto3": plain, "lattqe": ours}, repeats)
    finally:
        server.kill()
        shutil.rmtree(folder / "s3", ignore_errors=True)
    return verdict("S3 read / plain boto3", ratio, at_least=S3_RATIO)


def compare(
    what: str, size: int, runs: dict[str, Callable[[], None]], repeats: int, before: Callable[[], None] = lambda: None
) -> float:
    """Run two things in turn and print their speeds; the median ratio of ours (the second) to the first."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            before()
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    theirs, ours = seconds.values()
    ratio = statistics.median(a / b for a, b in zip(theirs, ours))
    speeds = ", ".join(f"{name} {size / statistics.median(times) / 1e6:,.0f} MB/s" for name, times in seconds.items())
    print(f"{what}: {speeds}, ratio {ratio:.2f}")
    return ratio


def verdict(what: str, value: float, at_least: float | None = None, at_most: float | None = None) -> bool:
    good = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    wanted = f"at least {at_least}" if at_least is not None else f"at most {at_most}"
    print(f"  {'ok  ' if good else 'MISS'} {what}: {value:.2f} ({wanted})")
    return good


if __name__ == "__main__":
    main()
