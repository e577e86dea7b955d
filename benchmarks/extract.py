"""Images per second of the extraction job beside the bare network on decoded tensors, on this machine's CPUs.

    python benchmarks/extract.py            ResNet-101, three scales, 512 pixels: about fifteen minutes on two cores
    python benchmarks/extract.py --quick    ResNet-50, one scale, 256 pixels: two minutes, noisier

The job reads JPEG files of 1600 × 1200 from disk, decodes, scales, encodes, stores blocks, gathers them and publishes.
The bare network gets normalised float tensors that lie in memory, once as one process with all cores and once as one
process for each core; the faster of the two counts. Both use the same network with its batch norms folded.

Left out of the job's time: starting Ray and the workers, reading the network, and each worker's first block; a real run
spreads those over hours. Bare and job take turns, and a round's ratio is that of the job to the mean of its neighbors.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from cluster.extraction import ExtractionTask, extract_blocks, plan_workers
from cluster.session import ray_session
from lattqe.extraction import stage
from lattqe.extraction.encoder import PUBLISHED_SCALES, EncoderSpec, describe, open_encoder
from lattqe.extraction.image import Framing, decode, list_images
from lattqe.extraction.resnet import FEATURE_DIM, RetrievalNet
from lattqe.extraction.stage import DescribedImages, Destination, find_skipped, merge

GOAL = 0.85
BLOCK_IMAGES = 8  # a real job's blocks are eight times as large: this is the harder case
CPU = torch.device("cpu")


def write_photos(folder: Path, count: int) -> None:
    """Pictures with the detail, and so the bytes, of photographs."""
    rng = np.random.default_rng(0)
    for number in range(count):
        coarse, fine = (rng.integers(0, 256, (side * 3 // 4, side, 3), dtype=np.uint8) for side in (24, 400))
        images = [
            np.asarray(Image.fromarray(part).resize((1600, 1200), Image.Resampling.BICUBIC), dtype=np.float32)
            for part in (coarse, fine)
        ]
        mixed = (0.8 * images[0] + 0.2 * images[1]).astype(np.uint8)
        Image.fromarray(mixed).save(folder / f"{number:04}.jpg", quality=90)


def write_network(path: Path, architecture: str) -> None:
    meta = {
        "architecture": architecture,
        "pooling": "gem",
        "whitening": True,
        "regional": False,
        "local_whitening": False,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
    }
    torch.save({"meta": meta, "state_dict": RetrievalNet(architecture).state_dict()}, path)


def bare_process(
    network: str,
    files: list[str],
    framing: Framing,
    scales: tuple[float, ...],
    threads: int,
    barrier: Barrier,
    seconds: Any,
) -> None:
    """Encode decoded tensors; the clock starts when every process has them."""
    torch.set_num_threads(threads)
    encoder = open_encoder(EncoderSpec(network), CPU)
    decoded = (torch.from_numpy(decode(Path(file).read_bytes(), framing).copy()) for file in files)
    mean, std = torch.tensor(encoder.mean), torch.tensor(encoder.std)
    tensors = [((pixels / 255 - mean) / std).permute(2, 0, 1)[None] for pixels in decoded]
    with torch.inference_mode():
        describe(encoder.network, tensors[0], scales, encoder.scale_power)
        barrier.wait()
        started = time.perf_counter()
        for tensor in tensors:
            describe(encoder.network, tensor, scales, encoder.scale_power)
        seconds.put(time.perf_counter() - started)


def bare_rate(
    network: str, files: list[str], framing: Framing, scales: tuple[float, ...], processes: int, threads: int
) -> float:
    """Images per second of `processes` bare networks with `threads` threads each."""
    context = multiprocessing.get_context("spawn")
    barrier, seconds = context.Barrier(processes), context.Queue()
    running = [
        context.Process(
            target=bare_process, args=(network, files[number::processes], framing, scales, threads, barrier, seconds)
        )
        for number in range(processes)
    ]
    for process in running:
        process.start()
    slowest = max(seconds.get() for _ in running)
    for process in running:
        process.join()
    return len(files) / slowest


def job_rate(network: str, images: str, to: str, framing: Framing, scales: tuple[float, ...]) -> float:
    """Images per second of the job, from each worker's first block to the published manifest."""
    listed = list_images(images)
    inputs = {"images": {"uri": images, "digest": listed.digest(), "kind": "images"}}
    destination = Destination(to, FEATURE_DIM, "float16", {"scales": list(scales)}, inputs)
    pending = destination.begin(listed)
    task = ExtractionTask(
        destination.stage_uri, listed.root, EncoderSpec(network), framing, scales, 1, FEATURE_DIM, "float16"
    )
    workers = plan_workers(None, "cpu")
    finished: list[tuple[float, int]] = []
    extract_blocks(
        task, workers, pending.missing(), lambda report: finished.append((time.perf_counter(), report.images))
    )
    pending.finish()
    described = DescribedImages.open(destination.stage_uri)
    merge(destination, described, find_skipped(described))
    ended = time.perf_counter()
    return sum(count for _, count in finished[workers.count :]) / (ended - finished[workers.count - 1][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller network, smaller images, one scale")
    parser.add_argument("--rounds", type=int, default=3, help="turns of the job, each between two of the bare network")
    parser.add_argument("--images", type=int, help="images in a turn (default 96, quick 64)")
    parser.add_argument("--size", type=int, help="long side in pixels (default 512, quick 256)")
    parser.add_argument("--json", help="write the numbers to this file")
    options = parser.parse_args()
    architecture = "resnet50" if options.quick else "resnet101"
    scales = (1.0,) if options.quick else PUBLISHED_SCALES
    framing = Framing(size=options.size or (256 if options.quick else 512))
    cores = os.cpu_count() or 1
    stage.MIN_BLOCK = BLOCK_IMAGES
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "images").mkdir()
        write_photos(folder / "images", options.images or (64 if options.quick else 96))
        network = str(folder / "net.pth")
        write_network(Path(network), architecture)
        files = sorted(str(path) for path in (folder / "images").iterdir())
        ways = {(1, cores), (cores, 1)}

        def bare() -> float:
            rates = {way: bare_rate(network, files[: len(files) // 2], framing, scales, *way) for way in ways}
            for (processes, threads), rate in rates.items():
                print(f"bare, {processes} processes × {threads} threads: {rate:.3f} images/s", flush=True)
            return max(rates.values())

        bares, jobs = [bare()], []
        for number in range(options.rounds):
            with ray_session():
                jobs.append(job_rate(network, str(folder / "images"), str(folder / f"out-{number}"), framing, scales))
            print(f"job: {jobs[-1]:.3f} images/s", flush=True)
            bares.append(bare())
    ratios = [job / ((before + after) / 2) for job, before, after in zip(jobs, bares, bares[1:])]
    ratio = statistics.median(ratios)
    verdict = "met" if ratio >= GOAL else "MISSED"
    print(
        f"{verdict}: {architecture}, {len(scales)} scales, {framing.size} pixels: job / bare = {ratio:.3f} "
        f"(rounds {', '.join(f'{value:.3f}' for value in ratios)}), goal {GOAL}"
    )
    if options.json:
        numbers = {"bare": bares, "job": jobs, "ratios": ratios, "ratio": ratio}
        Path(options.json).write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
