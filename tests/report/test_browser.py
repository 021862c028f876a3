"""Pages in a real browser, where there is one: sorting, saved tables, no error, no request."""

import csv
import json

import pytest

from tapfl.engine.run import run
from tapfl.report.html import write_report
from tests.experiment import tiny_experiment
from tests.experiments.test_page import written
from tests.report.browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")

# What tables show, as their reader sees it; what a column sorts by stands in data-v.
TABLES = """JSON.stringify(Array.from(document.querySelectorAll("main table"), (table) =>
  Array.from(table.rows, (row) => Array.from(row.cells, (cell) => cell.textContent.trim()))))"""
SORTABLE = "main table:has([aria-sort])"
COLUMN = """JSON.stringify((() => {{
  const table = document.querySelectorAll("main table:has([aria-sort])")[{table}];
  table.tHead.rows[0].cells[{column}].querySelector("button").click();
  return [table.tHead.rows[0].cells[{column}].getAttribute("aria-sort"),
          Array.from(table.tBodies[0].rows, (row) => row.cells[{column}].dataset.v)];
}})())"""
SAVE = """document.querySelectorAll("main .tools button")[{table}].click()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module", params=["run", "reproduction"])
def page(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    if request.param == "run":
        config = tiny_experiment(folder, methods=["local", "fedavg", "tap"],
                                 train={"rounds": 2, "local_steps": 1}, post={"steps": 1})
        run(config, folder / "out")
        return write_report([folder / "out"])
    from tapfl.experiments.page import write_reproduction

    return write_reproduction(written(folder)[1])


def test_it_opens_without_errors_and_asks_for_nothing(browser, page):
    for width, dark in ((1440, False), (390, True)):
        browser.window(width, 900, dark)
        browser.open(page.as_uri())
        assert not browser.problems
        # Pictures of samples are in the page itself.
        asked = [url for url in browser.requests if not url.startswith("data:image/")]
        assert asked == [page.as_uri()]
        # Wide tables scroll in frames of their own: the page itself does not.
        assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_headings_sort(browser, page):
    browser.open(page.as_uri())
    tables = json.loads(browser.evaluate(TABLES.replace("main table", SORTABLE)))
    sorted_ = 0
    for number, table in enumerate(tables[:6]):
        for column in range(1, len(table[0])):
            before, values = json.loads(browser.evaluate(COLUMN.format(table=number,
                                                                       column=column)))
            assert before == "ascending"
            try:
                numbers = [float(value) for value in values if value]
            except (TypeError, ValueError):
                continue
            assert numbers == sorted(numbers)
            after, values = json.loads(browser.evaluate(COLUMN.format(table=number,
                                                                      column=column)))
            assert after == "descending"
            assert [float(value) for value in values if value] == sorted(numbers, reverse=True)
            assert "" not in values[:len(numbers)]  # what is missing comes last, either way
            sorted_ += 1
    assert sorted_ > 5


def test_a_saved_table_is_the_table(browser, page, tmp_path):
    browser.downloads(tmp_path)
    browser.open(page.as_uri())
    tables = json.loads(browser.evaluate(TABLES))
    assert browser.evaluate("document.querySelectorAll('main .tools button').length") == len(tables)
    for number, table in enumerate(tables[:4]):
        browser.download(SAVE.format(table=number))
        (path,) = tmp_path.iterdir()
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        path.unlink()
        # A text that a spreadsheet would compute is marked as one.
        assert [[cell.removeprefix("'") for cell in row] for row in rows] == table
        assert all(cell[:1] not in ("=", "@") for row in rows for cell in row)
