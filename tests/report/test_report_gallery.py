"""The gallery: real small photographs made here, ranked before and after, looked at in a real browser."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from browser import browser
from PIL import Image, ImageDraw, ImageFilter

from jobs import cli
from jobs.benchmark import look, measure_run
from lattqe.benchmark.spec import Dataset, Run
from lattqe.datasets.revisited import from_gnd, save_gnd
from lattqe.evaluation import average_precision
from lattqe.report import render_page
from lattqe.report.gallery import Card, Thumbnails, choose
from lattqe.report.page import find_extremes
from lattqe.search import topk
from lattqe.store import FeatureSet, FeatureWriter, Pending, open_place, ranks_table

CLASSES, EACH, QUERIES = 5, 8, 2
MARKUP = "<img src=x onerror=alert(1)>\"&'"


def photograph(label, seed):
    """A scene with the shape and colours of its class, and noise, blur and light of its own."""
    rng = np.random.default_rng([label, seed])
    sky = np.linspace(200, 120, 90)[:, None, None] * np.array([[[0.6, 0.8, 1.0]]]) * np.ones((90, 120, 1))
    image = Image.fromarray(sky.astype(np.uint8))
    draw = ImageDraw.Draw(image)
    x, y, size = rng.integers(30, 80), rng.integers(35, 60), rng.integers(18, 30)
    colour = tuple(
        int(c)
        for c in np.clip(
            np.array([[200, 60, 40], [40, 160, 70], [230, 200, 60], [90, 60, 160], [240, 240, 240]][label])
            + rng.normal(0, 12, 3),
            0,
            255,
        )
    )
    shape = [draw.rectangle, draw.ellipse, draw.rounded_rectangle, draw.rectangle, draw.ellipse][label]
    shape((x - size, y - size // (1 + label % 2), x + size, y + size), fill=colour, outline=(30, 30, 30))
    noisy = np.asarray(image.filter(ImageFilter.GaussianBlur(rng.uniform(0, 1.5)))) + rng.normal(0, 8, (90, 120, 3))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def describe(image):
    """A descriptor that anybody could make: a small picture, less its mean."""
    small = np.asarray(image.resize((6, 6)), dtype=np.float32).reshape(-1)
    return small - small.mean()


def write_features(uri, names, images, labels):
    with FeatureWriter(str(uri), 108, "float32", labels=labels is not None) as writer:
        writer.append(
            np.stack([describe(image) for image in images]),
            names,
            None if labels is None else np.array(labels, dtype=np.int32),
        )
    return FeatureSet.open(str(uri))


def write_ranks(uri, database, queries, rows, scores, expand=None):
    pending = Pending.begin(
        str(uri),
        "ranks",
        {"k": rows.shape[1]},
        [len(rows)],
        config={"job": "search", "k": rows.shape[1], "expand": expand},
        inputs={"database": database.as_input(), "queries": queries.as_input()},
    )
    pending.publish(0, ranks_table(queries.ids(), rows, scores))
    pending.finish()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Photographs of five classes, features with labels, plain ranks, and ranks after averaging four neighbors."""
    root = tmp_path_factory.mktemp("gallery")
    folder = root / "images" / "sub"
    folder.mkdir(parents=True)
    names, images, labels = [], [], []
    for label in range(CLASSES):
        for number in range(EACH):
            names.append(f"sub/{label}-{number}.jpg")
            images.append(photograph(label, number))
            labels.append(label)
            images[-1].save(root / "images" / names[-1], quality=85)
    names[3] = MARKUP  # a name that no file can have everywhere, and no page must run
    (root / "images" / "sub" / "0-5.jpg").write_bytes(b"broken")
    (root / "images" / "sub" / "1-1.jpg").unlink()
    asked = [photograph(label, 100 + number) for label in range(CLASSES) for number in range(QUERIES)]
    asked_labels = [label for label in range(CLASSES) for _ in range(QUERIES)]
    asked_names = [f"query-{number}" for number in range(len(asked))]
    for name, image in zip(asked_names, asked):
        image.save(root / "images" / f"{name}.png")
    database = write_features(root / "database", names, images, labels)
    queries = write_features(root / "queries", asked_names, asked, asked_labels)
    xb, xq = database.read(), queries.read()
    scores, rows = topk(xq, xb, 20)
    write_ranks(root / "plain", database, queries, rows, scores)
    expanded = xq + xb[rows[:, :4]].sum(axis=1)
    scores, rows = topk(expanded / np.linalg.norm(expanded, axis=1, keepdims=True), xb, 20)
    write_ranks(root / "expanded", database, queries, rows, scores, {"method": "aqe", "k": 4, "params": {}})
    return root


@pytest.fixture
def run(call_lattqe):
    """Call `lattqe gallery` in this process: (exit code, stdout, stderr)."""
    return partial(call_lattqe, "gallery")


@pytest.fixture(scope="module")
def page(world):
    """The page of both ranks, made by the command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys,
            "argv",
            [
                "lattqe",
                "gallery",
                str(world / "expanded"),
                "--against",
                str(world / "plain"),
                "--images",
                str(world / "images"),
                "--to",
                str(world / "page.html"),
                "--title",
                f"Shapes {MARKUP}",
            ],
        )
        cli.main()
    return world / "page.html"


@pytest.fixture(scope="module", params=[1200, 390], ids=["desktop", "phone"])
def window(request, tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile"), request.param) as made:
        yield made


@pytest.fixture
def opened(window, page):
    """The page as it is when it is opened: another test may have scrolled, and pictures stay."""
    window.get(page.as_uri())
    return window


def expected_ap(world, name, query):
    """AP of one query within its 20 results, by hand."""
    ranks, database = open_ranks(world / name), FeatureSet.open(str(world / "database"))
    label = FeatureSet.open(str(world / "queries")).labels()[query]
    found = np.flatnonzero(database.labels()[ranks.read(query, query + 1)[0][0]] == label)
    return 100 * average_precision(found, int((database.labels() == label).sum()))


def open_ranks(path):
    from lattqe.store import Ranks

    return Ranks.open(str(path))


def test_nothing_on_the_console_and_nothing_from_the_network(opened):
    assert opened.get_log("browser") == []
    requests = opened.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in requests if not name.startswith("data:")] == []


def test_queries_lists_frames_and_weights(opened, world):
    cards = opened.execute_script("""return [...document.querySelectorAll('article')].map(card => ({
        number: +card.dataset.number, id: card.dataset.id, head: card.querySelector('h2').textContent,
        lists: [...card.querySelectorAll('.list')].map(list => [...list.querySelectorAll('figure')].map(tile => [
            tile.className, tile.querySelector('.name').textContent,
            tile.querySelector('figcaption').textContent]))}))""")
    database = FeatureSet.open(str(world / "database"))
    labels, asked = database.labels(), FeatureSet.open(str(world / "queries")).labels()
    names = database.ids()
    assert len(cards) == CLASSES * QUERIES
    gains = []
    for card in cards:
        query = card["number"]
        before, after = expected_ap(world, "plain", query), expected_ap(world, "expanded", query)
        assert f"AP {before:.1f} → {after:.1f}" in card["head"]
        gains.append(abs(after - before))
        for ranks, tiles in zip(("plain", "expanded"), card["lists"]):
            rows = open_ranks(world / ranks).read(query, query + 1)[0][0, :10]
            assert [name for _, name, _ in tiles] == [names[row] for row in rows]
            assert [mark for mark, _, _ in tiles] == [
                "right" if labels[row] == asked[query] else "wrong" for row in rows
            ]
        first = [text for _, _, text in card["lists"][0]]
        assert all("w 1.000" in text for text in first[:4]), "AQE's neighbors weigh 1"
        assert not any(re.search(r"w \d", text) for text in first[4:])
    assert gains == sorted(gains, reverse=True), "the largest changes first"


def test_pictures_come_when_they_are_near_and_are_real(opened):
    near, far = opened.execute_async_script("""const done = arguments[0]; const look = () => {
        const images = [...document.querySelectorAll('img[data-picture]')];
        const top = image => image.getBoundingClientRect().top;
        const near = images.filter(i => top(i) < innerHeight && i.getBoundingClientRect().left < innerWidth);
        if (!near.length || near.every(i => i.naturalWidth))
            done([near.map(i => i.naturalWidth),
                  images.filter(i => top(i) > innerHeight + 1200).map(i => i.hasAttribute('src'))]);
        else setTimeout(look, 50)}; look()""")
    assert near
    assert all(width >= 60 for width in near)
    assert far, "nothing is far away: the test tests nothing"
    assert not any(far)


def test_missing_and_broken_images_are_grey_tiles_with_their_id(opened):
    grey = opened.execute_script("return [...document.querySelectorAll('.none')].map(tile => tile.textContent)")
    assert {"sub/0-5.jpg", "sub/1-1.jpg", MARKUP} >= set(grey)
    assert grey


def test_markup_in_names_stays_text(opened, page):
    assert opened.execute_script("return document.querySelectorAll('img[src=x]').length") == 0
    assert opened.title == f"Shapes {MARKUP}"
    assert "<img src=x" not in page.read_text()


def test_order_find_and_keys(opened):
    from selenium.webdriver import ActionChains

    def numbers():
        return opened.execute_script(
            "return [...document.querySelectorAll('article:not([hidden])')].map("
            "card => [+card.dataset.gain, +card.dataset.ap, card.dataset.id])"
        )

    def choose_order(name):
        opened.execute_script(
            "const box = document.getElementById('order'); box.value = arguments[0];"
            "box.dispatchEvent(new Event('change'))",
            name,
        )

    for name, column, reverse in (("gain", 0, True), ("loss", 0, False), ("worst", 1, False), ("best", 1, True)):
        choose_order(name)
        values = [row[column] for row in numbers()]
        assert values == sorted(values, reverse=reverse)
    box = opened.find_element("id", "find")
    box.send_keys("query-7")
    assert [row[2] for row in numbers()] == ["query-7"]
    box.clear()
    box.send_keys("q")
    assert len(numbers()) == CLASSES * QUERIES
    opened.execute_script("document.activeElement.blur()")
    for key, expected in (("j", 0), ("j", 1), ("j", 2), ("k", 1), ("#next", 2), ("#next", 3), ("#previous", 2)):
        if key.startswith("#"):
            opened.find_element("css selector", key).click()
        else:
            ActionChains(opened).send_keys(key).perform()
        here = opened.execute_script("return [...document.querySelectorAll('article')].indexOf(document.activeElement)")
        assert here == expected, key
    assert opened.execute_script(
        "const box = document.activeElement.getBoundingClientRect(),"
        "bar = document.querySelector('nav').getBoundingClientRect();"
        "return box.top >= bar.bottom && box.top < innerHeight"
    )


def test_no_wider_than_the_window(opened):
    width, window = opened.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert width <= window


def test_summary_and_size(world, run):
    code, out, err = run(
        world / "expanded",
        "--against",
        world / "plain",
        "--images",
        world / "images",
        "--to",
        world / "again.html",
        "--queries",
        "3",
        "--json",
    )
    assert code == 0, err
    told = json.loads(out)
    assert (told["queries"], told["bytes"]) == (3, (world / "again.html").stat().st_size)
    gains = [expected_ap(world, "expanded", query) - expected_ap(world, "plain", query) for query in range(10)]
    assert told["gained"] == sum(gain > 1e-9 for gain in gains)
    assert told["lost"] == sum(gain < -1e-9 for gain in gains)


def test_one_list_without_labels_in_the_order_of_the_file(world, run, tmp_path):
    database, queries = FeatureSet.open(str(world / "database")), FeatureSet.open(str(world / "queries"))
    images = [photograph(label, number) for label in range(CLASSES) for number in range(EACH)]
    plain = write_features(tmp_path / "database", database.ids(), images, None)
    write_ranks(tmp_path / "ranks", plain, queries, *open_ranks(world / "plain").read())
    code, _, err = run(tmp_path / "ranks", "--images", world / "images", "--to", tmp_path / "page.html")
    assert code == 0, err
    page = (tmp_path / "page.html").read_text()
    assert re.findall(r'data-id="(query-\d)"', page) == queries.ids()
    assert 'class="right"' not in page
    code, _, err = run(tmp_path / "ranks", "--images", world / "images", "--to", tmp_path / "x.html", "--sort", "best")
    assert (code, "--sort best needs to know what is relevant" in " ".join(err.split())) == (2, True)


def test_a_ground_truth_with_crops_and_junk(world, run, tmp_path):
    """Frames by setup, and the query cropped to its box."""
    database, queries = FeatureSet.open(str(world / "database")), FeatureSet.open(str(world / "queries"))
    labels = database.labels()
    gnd = []
    for query, label in enumerate(queries.labels()):
        rows = np.flatnonzero(labels == label).tolist()
        gnd.append(
            {"easy": rows[:3], "hard": rows[3:6], "junk": rows[6:], **({"bbx": [10, 10, 70, 40]} if query == 0 else {})}
        )
    truth = from_gnd({"imlist": database.ids(), "qimlist": queries.ids(), "gnd": gnd})
    save_gnd(tmp_path / "gnd.json", truth)
    for setup, grades in (
        ("hard", {"right": ("hard",), "junk": ("easy", "junk")}),
        ("medium", {"right": ("easy", "hard"), "junk": ("junk",)}),
    ):
        code, _, err = run(
            world / "plain",
            "--images",
            world / "images",
            "--truth",
            tmp_path / "gnd.json",
            "--setup",
            setup,
            "--sort",
            "order",
            "--to",
            tmp_path / "page.html",
        )
        assert code == 0, err
        marks = re.findall(r'<figure class="(\w+)"', (tmp_path / "page.html").read_text())
        expected = []
        for query, rows in enumerate(open_ranks(world / "plain").read()[0][:, :10]):
            for row in rows:
                grade = next((name for name in ("easy", "hard", "junk") if row in gnd[query][name]), None)
                expected.append(next((mark for mark, names in grades.items() if grade in names), "wrong"))
        assert marks == expected
    thumbnails = Thumbnails([str(world / "images")])
    whole, cropped = thumbnails.get("query-0"), thumbnails.get("query-0", (10, 10, 70, 40))
    assert whole != cropped
    code, _, err = run(world / "plain", "--images", world / "images", "--setup", "hard", "--to", tmp_path / "x.html")
    assert (code, "there is no setup 'hard'" in err) == (2, True)


def test_images_on_s3(world, run, s3_uri, tmp_path):
    place = open_place(f"{s3_uri}/images")
    for path in (world / "images").rglob("*.*"):
        place.write(path.relative_to(world / "images").as_posix(), path.read_bytes())
    code, out, err = run(
        world / "expanded",
        "--against",
        world / "plain",
        "--images",
        f"{s3_uri}/images",
        "--queries",
        "2",
        "--results",
        "3",
        "--to",
        f"{s3_uri}/gallery.html",
        "--json",
    )
    assert code == 0, err
    assert open_place(s3_uri).size("gallery.html") == json.loads(out)["bytes"]
    local = run(
        world / "expanded",
        "--against",
        world / "plain",
        "--images",
        world / "images",
        "--queries",
        "2",
        "--results",
        "3",
        "--to",
        tmp_path / "gallery.html",
    )
    assert local[0] == 0
    assert open_place(s3_uri).read("gallery.html") == (tmp_path / "gallery.html").read_bytes()


@pytest.mark.parametrize("limit", [400_000, 120_000, 60_000])
def test_pictures_shrink_until_the_page_fits(world, limit):
    """Whatever the budget, what comes out is within it, or nothing comes out."""
    thumbnails = Thumbnails([str(world / "images")])
    for name in FeatureSet.open(str(world / "database")).ids():
        thumbnails.get(name)
    encoded = thumbnails.encoded(limit)
    assert encoded is not None
    assert sum(map(len, encoded)) <= limit
    assert thumbnails.encoded(2_000) is None


def test_of_many_queries_half_gained_and_half_lost():
    cards = [
        Card(number, f"q{number}", ap=50 + gain, before=50.0)
        for number, gain in enumerate([5, -1, 0, 9, -8, 2, -3, 0.5])
    ]
    assert [card.gain for card in choose(cards, "change", 4)] == [9, -8, 5, -3]
    assert [card.gain for card in choose(cards, "loss", 3)] == [-8, -3, -1]
    assert [card.number for card in choose(cards, "order", 2)] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["NOWHERE", "--images", "IMAGES"], "NOWHERE"),
        (["plain", "--images", "IMAGES", "--to", "page.txt"], "give the name of an HTML file"),
        (["plain", "--images", "IMAGES", "--sort", "gain"], "--sort gain needs --against"),
        (["plain", "--images", "IMAGES", "--sort", "beauty"], "unknown order 'beauty'"),
        (["plain", "--images", "IMAGES", "--database", "queries"], "was made from another database"),
        (["database", "--images", "IMAGES"], "database"),
    ],
)
def test_mistakes_are_one_line(world, run, tmp_path, arguments, message):
    full = [
        str(world / "images") if word == "IMAGES" else str(world / word) if (world / word).exists() else word
        for word in arguments
    ]
    if "--to" not in full:
        full += ["--to", str(tmp_path / "page.html")]
    code, out, err = run(*full)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert err.count("error:") == 1


def test_ids_never_lead_out_of_the_folder(tmp_path):
    photograph(0, 0).save(tmp_path / "secret.jpg")
    (tmp_path / "images").mkdir()
    thumbnails = Thumbnails([str(tmp_path / "images")])
    for name in ("../secret.jpg", str(Path(tmp_path, "secret.jpg")), "sub/../../secret", ""):
        assert thumbnails.get(name) is None
    assert len(thumbnails.missing) == 4


@pytest.mark.usefixtures("no_figures")
def test_a_report_with_the_largest_gains_and_losses(world, tmp_path, tmp_path_factory):
    """`lattqe benchmark --images`: the queries of the table, with pictures, in the report itself."""
    from benchmark_sets import FIXED

    dataset = Dataset("shapes", str(world / "database"), str(world / "queries"))
    chosen = Run("Shapes", (dataset,), FIXED[:1], nqe_sweep=(1, 4), bootstrap=50)
    results = measure_run(chosen, str(tmp_path))
    gains, losses = find_extremes(results)
    table = results["per_query"][0]
    change = {name: after - before for name, before, after in zip(table["ids"], table["before"], table["after"]["AQE"])}
    assert [each.id for each in gains] == sorted(
        (name for name in change if change[name] > 0), key=lambda name: -change[name]
    )[:10]
    assert {each.id for each in losses} == {name for name in change if change[name] < 0}
    assert find_extremes(results, 2)[0] == gains[:2]
    examples = look(results, chosen, [str(world / "images")])
    (tmp_path / "report.html").write_text(render_page(results, examples))
    with browser(tmp_path_factory.mktemp("profile"), 390) as window:
        window.get((tmp_path / "report.html").as_uri())
        assert window.get_log("browser") == []
        shown = window.execute_script("""return [...document.querySelectorAll('.example')].map(card => [
            card.querySelector('strong').textContent, card.querySelectorAll('.right, .wrong').length])""")
        assert [name for name, _ in shown] == [each.id for each in (*gains, *losses)]
        assert {count for _, count in shown} == {16}
        widths = window.execute_async_script("""const done = arguments[0];
            const images = [...document.querySelectorAll('.example img')]; images.forEach(i => i.loading = 'eager');
            Promise.all(images.map(i => i.decode())).then(() => done(images.map(i => i.naturalWidth)))""")
        assert min(widths) > 60
        assert window.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        weights = window.execute_script("""return [...document.querySelectorAll('.example figcaption')].map(
            caption => caption.textContent)""")
    assert any("w 1.00" in text for text in weights)
    assert look(results, chosen, None) is None
