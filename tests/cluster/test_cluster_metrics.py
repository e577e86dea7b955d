"""Metrics as Prometheus reads them and events as the log file keeps them, from a real Ray whose actors die."""

import json
import re
import time
import urllib.request

import pytest
import ray
from test_cluster_blocks import Squares

from cluster.blocks import BlockPolicy, run_blocks
from cluster.metrics import Watch, Work
from jobs.log_file import logging_to
from lattqe.store import open_place
from lattqe.store.traffic import traffic

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def metrics_url():
    """A local Ray that serves its metrics, and soon: not after the usual ten seconds."""
    context = ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20,
                       log_to_driver=False, _metrics_export_port=0, _system_config={"metrics_report_interval_ms": 500})
    port = ray.nodes()[0]["MetricsExportPort"]
    yield f"http://{context.address_info['node_ip_address']}:{port}/metrics"
    ray.shutdown()


def read_metrics(url):
    """{(name, kind, shard): value} of our metrics."""
    text = urllib.request.urlopen(url, timeout=5).read().decode()
    found = {}
    for name, labels, value in re.findall(r"^ray_(lattqe_\w+)\{(.*)\} (\S+)$", text, re.M):
        tags = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert tags["job"] == ray.get_runtime_context().get_job_id()
        key = (name, tags["kind"], tags.get("shard"))
        found[key] = found.get(key, 0.0) + float(value)
    return found


def wait_for(url, condition):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = read_metrics(url)
        if condition(found):
            return found
        time.sleep(0.2)
    raise AssertionError(f"metrics never became right: {found}")


def test_blocks_deaths_and_copies_are_counted_and_logged(metrics_url, tmp_path):
    work = Work("squares", rows=lambda block: 10, label=lambda block: f"block-{block}")
    with logging_to(str(tmp_path / "log"), "test", {}):
        summary = run_blocks(lambda number: Squares.remote(str(tmp_path), die_on=(2,), hang_on=(5,)), 2, range(8),
                             on_done=lambda block, result: None, policy=BlockPolicy(straggler_seconds=0.5), work=work)
    assert summary.actors_lost == 1

    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    events = [line["event"] for line in lines]
    done = [line for line in lines if line["event"] == "block done"]
    assert sorted(line["block"] for line in done) == [f"block-{number}" for number in range(8)]
    assert all(line["rows"] == 10 and line["shard"] in (0, 1) and line["kind"] == "squares" for line in done)
    assert events.count("actor lost") == 1
    assert events.count("actor started") == 3
    assert events.count("block retried") == summary.retries >= 1
    assert events.count("straggler copied") == summary.spare_copies >= 1
    failed = next(line for line in lines if line["event"] == "block failed" and line["block"] == "block-2")
    assert failed["level"] == "warning"

    def total(found, name):
        return sum(value for (metric, kind, _), value in found.items() if (metric, kind) == (name, "squares"))

    found = wait_for(metrics_url, lambda found: total(found, "lattqe_blocks_done_total") == 8)
    assert total(found, "lattqe_rows_done_total") == 80
    assert total(found, "lattqe_actors_lost_total") == 1
    assert total(found, "lattqe_retries_total") == summary.retries
    assert total(found, "lattqe_spare_copies_total") == summary.spare_copies
    assert total(found, "lattqe_block_seconds_count") == 8
    for shard, count in summary.blocks_by_worker.items():
        assert found["lattqe_blocks_done_total", "squares", str(shard)] == count
    wait_for(metrics_url, lambda found: found.get(("lattqe_rows_per_second", "squares", None)) == 0)


def test_rates_and_bytes(metrics_url, tmp_path):
    traffic.take()  # whatever was moved before
    watch, place = Watch("copying"), open_place(str(tmp_path))
    place.write("file", bytes(1000))
    assert len(place.read("file")) == 1000
    assert place.read_range("file", 5, 10) == bytes(10)
    watch.count_traffic(*traffic.take())
    time.sleep(0.2)
    watch.count_rows(50)
    watch.count_rows(0)
    found = wait_for(metrics_url, lambda found: ("lattqe_rows_done_total", "copying", None) in found)
    assert found["lattqe_bytes_written_total", "copying", None] == 1000
    assert found["lattqe_bytes_read_total", "copying", None] == 1010
    assert 25 < found["lattqe_rows_per_second", "copying", None] <= 250


def test_a_count_costs_microseconds(metrics_url):
    watch = Watch("cost")
    started = time.process_time()
    for number in range(2000):
        watch.done(number, shard=0, rows=2048, seconds=1.0)
    each = (time.process_time() - started) / 2000
    assert each < 1e-3, f"{each * 1e6:.0f} µs for each block"
