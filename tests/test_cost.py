"""The model of cost against counters of real runs; its refusals; the tables of the documentation."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmark_sets import small_run
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from training_sets import TINY, write_set

import jobs.augment
import jobs.extract
import jobs.import_
import jobs.neighbors
import jobs.plan
import jobs.search
import jobs.train
from cluster.benchmark import Bench, plan_cells
from cluster.graph import Progress
from cluster.graph_worker import GraphWorker, agree_on_cut
from lattqe import adaptation
from lattqe.benchmark.cells import Cell
from lattqe.benchmark.spec import Setting as Step
from lattqe.cost import Cost, Machines, cut_rows
from lattqe.cost.augment import joined_rows, weighing
from lattqe.cost.graph import BASE_BYTES
from lattqe.cost.plans import Placement, PlannedRows, parse_assumption
from lattqe.cost.rows import COSTS, cut_owned
from lattqe.cost.work import GET_OPERATIONS, PUT_OPERATIONS, Work
from lattqe.errors import LattqeError
from lattqe.model import LAttQE, LAttQEConfig
from lattqe.search.stored import GraphTask, ProductClock, begin_graph
from lattqe.store import FeatureSet, FeatureWriter, open_place
from lattqe.store.place import traffic

DIM, K = 32, 16
DOCS = Path(__file__).resolve().parent.parent / "docs"
# Rows, and bytes of a part: many small parts, some, and few of several blocks each.
SIZES = [(1500, 1 << 14), (3000, 1 << 16), (6000, 1 << 18)]
CUTS = {"pairs": cut_rows, "rows": cut_owned}


def write(uri, rows, part_bytes, seed=0):
    """A set of so many rows in parts of so many bytes."""
    x = np.random.default_rng(seed).standard_normal((rows, DIM)).astype(np.float32)
    with FeatureWriter(uri, DIM, "float16", part_bytes=part_bytes) as writer:
        writer.append(x, [f"{seed}-{row:07d}" for row in range(rows)])
    return FeatureSet.open(uri)


def run(capsys, app, *arguments):
    """Run a verb in this process: its JSON, and what it read, wrote and asked for."""
    before = traffic.totals()
    capsys.readouterr()
    app([*map(str, arguments), "--json"], standalone_mode=False)
    return json.loads(capsys.readouterr().out), counted_since(before)


def counted_since(before):
    return {name: total - before.get(name, 0) for name, total in traffic.totals().items()}


def requests_of(counted):
    """PUT, GET and DELETE requests, as they are paid for."""
    kinds = (PUT_OPERATIONS, GET_OPERATIONS, ("DeleteObject",))
    return [sum(counted.get(name, 0) for name in kind) for kind in kinds]


def check(works, counted):
    """Bytes and requests of a plan's stages against the counters, to 5 %, or one request of a few."""
    for name in ("read", "written"):
        assert sum(work[f"bytes_{name}"] for work in works) == pytest.approx(counted[name], rel=0.05), name
    for kind, real in zip(("puts", "gets", "deletes"), requests_of(counted)):
        assert sum(work["requests"][kind] for work in works) == pytest.approx(real, rel=0.05, abs=1), kind


def jobs_of(base, queries):
    """Every job that works in this process, one after the other."""
    features, graph, index = f"{base}/features", f"{base}/graph", f"{base}/index"
    dba = ("--method", "alphaqe", "-k", 10, "--neighbors", graph)
    return [
        (jobs.neighbors.app, (features, "-k", K, "--to", graph)),
        (jobs.augment.app, (features, *dba, "--to", index)),
        (jobs.augment.app, (features, *dba, "--hops", 3, "--to", f"{base}/hopped")),
        (jobs.augment.app, (features, *dba[:-2], "--to", f"{base}/with-its-graph")),
        (jobs.augment.app, (features, *dba[:-2], "--adapt", "--to", f"{base}/adapted")),
        (jobs.search.app, (index, queries, "-k", 10, "--expand", "alphaqe", "--nqe", 5, "--to", f"{base}/ranks")),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "part_bytes"), SIZES)
def test_bytes_and_products_are_as_planned(tmp_path, capsys, rows, part_bytes):
    write(f"{tmp_path}/features", rows, part_bytes)
    queries = write(f"{tmp_path}/queries", rows // 5, part_bytes, seed=1)
    for job, arguments in jobs_of(tmp_path, queries.uri):
        plan, planning = run(capsys, job, *arguments, "--plan")
        assert planning["written"] == 0
        assert not open_place(str(arguments[-1])).list()
        done, counted = run(capsys, job, *arguments)
        check(plan["stages"], counted)
        if job is jobs.neighbors.app:
            assert plan["stages"][0]["products"] == pytest.approx(done["products_made"], rel=0.05)


def test_an_adaptation_compares_as_many_rows_as_planned(tmp_path, capsys, monkeypatch):
    features, met, real = write(f"{tmp_path}/features", 1500, 1 << 16), [], adaptation.nearest

    def counting(index, x, *more):
        met.append(len(x) * index.rows)
        return real(index, x, *more)

    for name, value in (("nearest", counting), ("SAMPLE", 600), ("SMALLEST_SAMPLE", 10), ("SEARCHED_BYTES", 10_000)):
        monkeypatch.setattr(adaptation, name, value)
    arguments = (features.uri, "--method", "alphaqe", "-k", 10, "--adapt", "--to", f"{tmp_path}/index")
    stage = run(capsys, jobs.augment.app, *arguments, "--plan")[0]["stages"][0]
    assert stage["stage"] == "adaptation"
    run(capsys, jobs.augment.app, *arguments)
    assert len(met) > 1
    assert stage["products"] == sum(met) == 600 * 1500


@pytest.mark.parametrize(("rows", "part_bytes"), SIZES)
def test_requests_to_s3_are_as_planned(s3_uri, capsys, rows, part_bytes):
    write(f"{s3_uri}/features", rows, part_bytes)
    queries = write(f"{s3_uri}/queries", rows // 5, part_bytes, seed=1)
    for job, arguments in jobs_of(s3_uri, queries.uri):
        plan, planning = run(capsys, job, *arguments, "--plan")
        assert planning["written"] == 0
        check(plan["stages"], run(capsys, job, *arguments)[1])


@pytest.mark.parametrize(("hops", "removed"), [(1, 0), (1, 3), (3, 0)])
def test_a_growth_is_as_planned(tmp_path, capsys, hops, removed):
    """What touches what is known only afterwards, but bytes and the products of newcomers are certain."""
    write(f"{tmp_path}/features", 3000, 1 << 16)
    new = write(f"{tmp_path}/new", 60, 1 << 16, seed=2)
    _, make, *_ = jobs_of(tmp_path, "")
    run(capsys, jobs.neighbors.app, f"{tmp_path}/features", "-k", K, "--to", f"{tmp_path}/graph")
    run(capsys, make[0], *make[1], "--hops", hops)
    (tmp_path / "gone").write_text("".join(f"0-{row:07d}\n" for row in range(removed)))
    arguments = [f"{tmp_path}/index", new.uri, "--to", f"{tmp_path}/grown"]
    arguments += ["--remove", tmp_path / "gone"] if removed else []
    stages = run(capsys, jobs.augment.append_app, *arguments, "--plan", "--assume", "nodes=2")[0]["stages"]
    assert [stage["stage"] for stage in stages] == ["growth", "hops"][: min(hops, 2)]
    if not removed:
        assert stages[0]["products"] == 60 * 3000 + 60 * 3060, "on workers newcomers and old rows meet for each side"
    stages = run(capsys, jobs.augment.append_app, *arguments, "--plan")[0]["stages"]
    done, counted = run(capsys, jobs.augment.append_app, *arguments)
    if not removed:
        assert stages[0]["products"] == pytest.approx(done["products"], rel=0.05)
    check(stages, counted)


def test_a_growth_writes_what_the_storage_does_not_copy():
    """Parts of half the usual size and more stay, unless they lose a row."""
    features = PlannedRows.sized(1_000_000, 512).stored
    grown, read, written = joined_rows(features, 1000, 0)
    assert grown.rows == 1_001_000
    assert read < features.bytes + 40_000_000, "all ids are looked through once"
    assert written < 40_000_000
    shrunk, read, written = joined_rows(features, 0, 100_000)
    assert shrunk.rows == 900_000
    assert written > shrunk.bytes, "some row of every part"


def test_other_jobs_are_planned_too_and_write_nothing(tmp_path, capsys):
    """Importing, describing images, training and benchmarks: each with an assumption, none with Ray."""
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((300, DIM)).astype(np.float32))
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (40, 30), "red").save(tmp_path / "photos" / "red.png")
    trained = write_set(tmp_path, "trained", 0, 8, 6)
    held_out = write_set(tmp_path, "held-out", 1, 8, 6, first_label=100)
    tiny = [word for change in TINY for word in ("--set", change)]
    train = [trained, "--val", held_out, "--preset", "paper", *tiny]
    extract = [f"{tmp_path}/photos", "--encoder", "tiny_encoder:make", "--size", "32"]
    assume = ["--plan", "--assume", "nodes=2,gpus=1,price=0.5", "--to", f"{tmp_path}/nothing"]
    for job, arguments in (
        (jobs.import_.app, [f"{tmp_path}/x.npy"]),
        (jobs.extract.app, extract),
        (jobs.train.app, train),
    ):
        plan, counted = run(capsys, job, *arguments, *assume)
        (stage,) = plan["stages"]
        assert counted["written"] == 0
        assert stage["rows"] > 0
        assert plan["seconds"] > 0
        assert plan["dollars"] > 0
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(LattqeError, match="--device cuda, but the planned machines have no GPU"):
        jobs.extract.app(
            [*extract, "--device", "cuda", "--plan", "--assume", "nodes=2", "--to", "x"], standalone_mode=False
        )


def test_a_benchmark_is_planned_as_far_as_it_is_chosen(tmp_path):
    chosen = small_run(tmp_path / "data")
    bench = Bench(chosen, f"{tmp_path}/results")
    *_, cells = plan_cells(bench, Placement(Machines(asked=1), here=True))
    assert cells.stage == "cells"
    assert cells.products > 0
    assert cells.worker_bytes > BASE_BYTES
    assert cells.requests.gets > 0
    assert "not planned" not in cells.facts
    assert not (tmp_path / "results").exists()
    before = traffic.totals()
    bench.fill(bench.cells_to_do(), lambda cell: None)
    counted = counted_since(before)
    assert cells.read == pytest.approx(counted["read"], rel=0.05)
    assert cells.written == pytest.approx(counted["written"], rel=0.3), "scores have as many digits as they need"


def test_rivals_that_a_benchmark_does_not_plan_are_named(tmp_path, monkeypatch):
    bench = Bench(small_run(tmp_path / "data"), f"{tmp_path}/results")
    rivals = [Step("propagation", 5), Step("diffusion", 5)]
    cells = [Cell("oxford", None, rivals[0], None), Cell("oxford", None, None, None, rivals[1])]
    monkeypatch.setattr(bench, "cells_to_do", lambda: cells)
    *_, planned = plan_cells(bench, Placement(Machines(asked=1), here=True))
    assert planned.facts["not planned"] == "diffusion, propagation: in one process, over the whole graph"


@pytest.mark.parametrize("schedule", ["pairs", "rows"])
@pytest.mark.parametrize(("rows", "part_bytes"), SIZES)
def test_blocks_cost_what_they_should(tmp_path, rows, part_bytes, schedule):
    blocks_as_planned(str(tmp_path), rows, part_bytes, schedule, remote=False)


@pytest.mark.parametrize("schedule", ["pairs", "rows"])
@pytest.mark.parametrize(("rows", "part_bytes"), SIZES)
def test_blocks_ask_s3_as_planned(s3_uri, rows, part_bytes, schedule):
    blocks_as_planned(s3_uri, rows, part_bytes, schedule, remote=True)


def blocks_as_planned(base, rows, part_bytes, schedule, remote):
    """A worker of the graph does all blocks without Ray; its counters are held against the model."""
    features = write(f"{base}/features", rows, part_bytes)
    task, cut = GraphTask(features.uri, f"{base}/graph", K), CUTS[schedule](rows, 0, 3, rows)
    threads = torch.get_num_threads()
    pending, made, before = begin_graph(task), [], traffic.totals()
    assert agree_on_cut(pending.place, cut) == cut
    worker = GraphWorker(task, cut)
    worker.clock = ProductClock(made.append)
    progress = Progress(task, cut, pending, 1, lambda products: None)
    items = progress.possible()
    while items:
        for item in items:
            if len(item) == 1:
                worker.assemble(*item)
            else:
                worker.own(item[0]) if schedule == "rows" else worker.compare(*item)
        told = {"peak_bytes": 0, "worker": "", "busy": 0.0, "seconds": {"waiting": 0.0}, "stale": False}
        items = [further for item in items for further in progress.done(item, told)]
    pending.finish()
    torch.set_num_threads(threads)
    counted = counted_since(before)
    work = COSTS[schedule]([PlannedRows.of(features).stored], DIM, K, cut, Machines(cpus=1), remote=remote)
    assert work.products == pytest.approx(sum(made), rel=0.05)
    # The verb opens its sets some more times than this loop, and claims the destination.
    assert work.read == pytest.approx(counted["read"], rel=0.05)
    assert work.written == pytest.approx(counted["written"], rel=0.05)
    if remote:
        puts, gets, deletes = requests_of(counted)
        assert work.requests.puts == pytest.approx(puts, rel=0.05, abs=3)
        assert work.requests.gets == pytest.approx(gets, rel=0.05, abs=15)
        assert work.requests.deletes == pytest.approx(deletes, rel=0.05)


@pytest.mark.parametrize(
    "network",
    [LAttQEConfig(dim=64, heads=4, layers=3), LAttQEConfig(dim=64, heads=4, layers=2, width=32, ffn=48)],
    ids=["paper", "narrow"],
)
def test_the_work_of_a_network_is_counted_as_torch_counts_it(network):
    n, k = 3, 20
    plain = sdpa_kernel(SDPBackend.MATH)  # the other kernels are not counted
    with FlopCounterMode(display=False) as counter, torch.inference_mode(), plain:
        LAttQE(network).eval()(torch.randn(n, 1 + k, network.dim), torch.ones(n, 1 + k, dtype=torch.bool))
    predicted = weighing(network.dim, k, k, network).flops
    assert predicted == pytest.approx(counter.get_total_flops() / n, rel=0.05)


def test_an_assumption_is_read_with_its_units():
    machines = parse_assumption("nodes=16, gpus=1,cpus=8,tflops=120,network=1.2GB/s,price=0.5,memory=64GiB")
    assert machines == Machines(16, 8, 1, 64 * 2**30, tflops=120.0, network=1.2e9, price=0.5)
    assert parse_assumption("network=300MB/s").network == 300e6
    assert machines.workers == 16


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nodse=16", "'nodse=16': keys are nodes, gpus, cpus"),
        ("nodes", "'nodes': keys are"),
        ("", "'': keys are"),
        ("nodes=0", "nodes is a whole number from 1"),
        ("nodes=1.5", "nodes is a whole number from 1"),
        ("gpus=-1", "gpus is a whole number from 0"),
        ("price=-0.5", "price is dollars per node and hour"),
        ("price=nan", "price is dollars"),
        ("network=1.2", "network is such as 1.2GB/s"),
        ("network=-1GB/s", "network is such as 1.2GB/s"),
        ("network=0GB/s", "network is such as 1.2GB/s"),
        ("network=fastGB/s", "network is such as 1.2GB/s"),
        ("memory=32", "memory is such as 32GB"),
        ("nodes=2,nodes=3", "names nodes twice"),
        ("tflops=120", "tflops needs a GPU, but gpus is 0: add gpus=1"),
        ("gpus=0,gpu_memory=24GB", "gpu_memory needs a GPU"),
        ("measured=/nothing/here", "measured=/nothing/here: cannot be read"),
    ],
)
def test_a_wrong_assumption_is_one_line_that_names_its_key(text, says):
    with pytest.raises(LattqeError, match=re.escape(says)) as caught:
        parse_assumption(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not written by doctor"),
        ("[]", "not written by doctor"),
        ('{"passed": true}', "not written by doctor"),
        ('{"passed": true, "machine": {"cpus": "many"}}', "not written by doctor"),
        ('{"passed": false, "machine": {"cpus": 2}}', "failed its checks"),
        ('{"passed": true, "machine": {"cpus": -2}}', "cpus is unknown or not a number above 0"),
        ('{"passed": true, "machine": {"wheels": 4}}', "wheels is unknown"),
    ],
)
def test_a_measured_machine_that_cannot_be_is_one_line(content, says, tmp_path):
    (tmp_path / "found.json").write_text(content)
    with pytest.raises(LattqeError, match=re.escape(says)):
        parse_assumption(f"measured={tmp_path}/found.json")


def test_a_measured_gpu_is_planned_with_unless_another_is_named(tmp_path):
    found = {"cpus": 96, "memory": 1e12, "gpus": 8, "gpu_memory": 8e10, "tflops": 300.5, "gflops": 50.0}
    (tmp_path / "found.json").write_text(json.dumps({"passed": True, "machine": found}))
    machines = parse_assumption(f"measured={tmp_path}/found.json,nodes=2,tflops=100")
    assert (machines.workers, machines.cpus, machines.tflops, machines.gpu_memory) == (16, 96, 100, 8e10)
    assert parse_assumption(f"gpus=0,measured={tmp_path}/found.json").flops == 50e9


def test_what_cannot_be_planned_is_refused(tmp_path):
    features = write(f"{tmp_path}/features", 200, 1 << 16)
    arguments = [features.uri, "--to", f"{tmp_path}/graph"]

    def refused(job, *more):
        with pytest.raises(LattqeError) as caught:
            job([*arguments, *more], standalone_mode=False)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "--assume needs --plan" in refused(jobs.neighbors.app, "--assume", "nodes=2")
    assert "keys are" in refused(jobs.neighbors.app, "--plan", "--assume", "nodse=2")
    assert "two blocks of 512 rows" in refused(jobs.neighbors.app, "--plan", "--assume", "nodes=2,memory=500MB,cpus=4")
    assert "use fewer workers" in refused(jobs.augment.app, "--plan", "--assume", "nodes=1,memory=500MB,cpus=1")
    with pytest.raises(LattqeError, match=r"needs .* for each of 8 workers"):
        Cost([Work("graph", 1, worker_bytes=10**12)], Machines()).check()
    with pytest.raises(LattqeError, match="'1Mx512' is not a size"):
        jobs.plan.app(["1Mx512"], standalone_mode=False)
    assert not open_place(f"{tmp_path}/graph").list()


def test_more_machines_take_less_time_and_products_stay(capsys):
    sizes = [jobs.plan.app, "10000000x512", "-k", 64]
    one, _ = run(capsys, *sizes, "--assume", "nodes=1,gpus=1,price=0.5")
    many, _ = run(capsys, *sizes, "--assume", "nodes=8,gpus=1,price=0.5")
    assert many[0]["stages"][0]["products"] == pytest.approx(one[0]["stages"][0]["products"], rel=0.02)
    assert many[0]["seconds"] < one[0]["seconds"] / 4
    assert one[0]["dollars"] > 0


def documented_tables():
    """Every table that the documentation says is printed by `lattqe plan`, after its command."""
    found = []
    for page in sorted(DOCS.rglob("*.md")):
        for command, table in re.findall(r"```bash\n(lattqe plan [^`]*?)```\n+((?:\|.*\n)+)", page.read_text()):
            name = str(page.relative_to(DOCS).with_suffix(""))
            found.append(pytest.param(command.replace("\\\n", " "), table, id=name))
    return found


def test_tables_are_documented():
    assert {each.id for each in documented_tables()} >= {"cluster", "scale", "results/scale"}


@pytest.mark.parametrize(("command", "table"), documented_tables())
def test_tables_of_the_documentation_are_what_the_command_prints(capsys, command, table):
    jobs.plan.app(shlex.split(command)[2:], standalone_mode=False)
    assert capsys.readouterr().out == table
