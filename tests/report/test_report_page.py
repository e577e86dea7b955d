"""The report in a real browser: nothing on the console, everything there, sortable, and no wider than a phone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmark_sets import FIXED, small_run
from browser import browser

from jobs.benchmark import measure_run, publish
from lattqe.datasets.revisited import published_scores
from lattqe.report import render_page
from lattqe.report.views import regime_bars


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("run"))
    return measure_run(small_run(folder, FIXED[:2]), folder)


@pytest.fixture(scope="module")
def page(results: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    publish(results, str(folder))
    return folder / "report.html"


@pytest.fixture(scope="module", params=[1200, 390], ids=["desktop", "phone"])
def window(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile"), request.param) as made:
        yield made


@pytest.fixture
def opened(window: Any, page: Path) -> Any:
    """The page as it is when it is opened: another test may have sorted its tables."""
    window.get(page.as_uri())
    return window


@pytest.mark.slow
def test_it_opens_without_a_word_on_the_console_and_without_the_network(opened: Any) -> None:
    assert opened.get_log("browser") == []
    requests = opened.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in requests if not name.startswith("data:")] == []


def test_figures_and_tables_are_there(opened: Any, results: dict[str, Any]) -> None:
    sizes = opened.execute_script(
        "return [...document.querySelectorAll('figure svg')].map("
        "svg => [svg.clientWidth, svg.clientHeight, svg.querySelectorAll('path').length])"
    )
    # One trend, two setups of two regimes, two methods' weights, the queries of two sets in two setups.
    assert len(sizes) == 1 + 4 + 2 + 4
    assert all(width > 200 and height > 150 and paths > 10 for width, height, paths in sizes)
    titles = opened.execute_script("return [...document.querySelectorAll('h2')].map(h => h.textContent)")
    assert {"Query expansion", "Weights by rank", "Confidence intervals", "Time and memory"} <= set(titles)
    cells = opened.execute_script(
        "return [...document.querySelectorAll('table[data-kind=qe] tbody tr')].map("
        "row => [...row.cells].map(cell => cell.textContent))"
    )
    assert [row[0] for row in cells] == ["no expansion", "AQEnQE 4fixed", "DQEnQE 4, C 0.1, negatives 5fixed"]
    numbers = [value for setups in results["table3"][1]["map"].values() for value in setups.values()]
    assert cells[1][1:] == [f"{value:.1f}" for value in [*numbers, results["table3"][1]["mean"]]]


def test_a_click_sorts_and_another_turns_the_order(opened: Any) -> None:
    def column() -> list[float]:
        return opened.execute_script(
            "return [...document.querySelectorAll('table[data-kind=qe] tbody tr')].map("
            "row => parseFloat(row.cells[1].textContent))"
        )

    for expected in ("descending", "ascending"):
        state = opened.execute_script(
            "const heading = document.querySelector('table[data-kind=qe] th:nth-child(2)');"
            "heading.click(); return heading.getAttribute('aria-sort')"
        )
        assert state == expected
        assert column() == sorted(column(), reverse=expected == "descending")
    assert len(set(column())) > 1


def test_the_page_is_no_wider_than_the_window_and_wide_tables_scroll_in_their_box(opened: Any) -> None:
    width, window, boxes = opened.execute_script(
        "return [document.documentElement.scrollWidth, window.innerWidth, "
        "[...document.querySelectorAll('.scroll')].map("
        "box => [box.clientWidth, box.scrollWidth, getComputedStyle(box).overflowX])]"
    )
    assert width <= window
    assert all(style == "auto" and shown <= window for shown, _, style in boxes)
    if window < 500:
        assert any(whole > shown for shown, whole, _ in boxes), "nothing to scroll: the test tests nothing"


def test_details_unfold_to_the_inputs(opened: Any) -> None:
    text = opened.execute_script(
        "const box = document.querySelector('details'); box.open = true; return box.querySelector('pre').innerText"
    )
    assert {"oxford", "paris", "oxford+distractors"} <= set(json.loads(text))


def test_the_same_results_make_the_same_page(page: Path) -> None:
    results = json.loads((page.parent / "results.json").read_bytes())
    assert render_page(results) == page.read_text()


def test_published_numbers_ablations_and_markup_in_names(
    results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lattqe.report.page.illustrations", lambda results: [])  # drawn by the other tests
    paper = {name: published_scores()[name] for name in ("table2", "table3")}
    variant = {
        "label": "without <b>attention</b>",
        "nqe": 4,
        "mean": 26.1,
        "map": {"oxford": {"medium": 51.25, "hard": 1.0}},
    }
    page = render_page(
        {**results, "title": "A < B", "published": paper, "table2": [variant], "warnings": ["features & numbers"]}
    )
    assert "<title>A &lt; B</title>" in page
    assert "features &amp; numbers" in page
    assert "without &lt;b&gt;attention" in page
    assert "Without self-attention" in page
    assert "<td>51.2</td>" in page


def test_groups_without_queries_are_left_out_of_the_figure() -> None:
    """Where all queries have as many relevant images, ties leave one group of three."""
    series = [{"label": "AQE", "method": "aqe", "relative": [12.5, 0.0, 0.0]}]
    drawn = regime_bars("label", {"level": [7.0, 0.0, 0.0], "queries": [40, 0, 0], "series": series}, "relevant images")
    assert "(40 queries)" in drawn
    assert "(0 queries)" not in drawn
