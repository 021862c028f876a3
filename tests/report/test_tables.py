from tapfl.report.tables import markdown, show, tabulate

ROWS = [
    {"dataset": d, "metric": m, "method": method, "value": v, "client": c}
    for d, m, values in (("agnews", "accuracy", {"a": (10, 30), "b": (40, 40), "c": (5, 5)}),
                         ("fmnist", "mse", {"a": (0.5, 0.5), "b": (0.7, 0.9), "c": (0.6, 0.6)}))
    for method, pair in values.items() for c, v in enumerate(pair)
]


def test_means_spreads_and_ranks():
    table = tabulate(ROWS)
    cell = table["agnews", "accuracy"]["a"]
    assert (cell.mean, cell.spread, cell.clients, cell.rank) == (20, 10, 2, 2)
    assert [table["fmnist", "mse"][m].rank for m in "abc"] == [1, 3, 2]


def test_markdown_marks_best_and_second():
    text = markdown(ROWS, ["a", "b", "c"])
    assert "| b | **40.0 ±0.0** | 0.800 ±0.100 |" in text
    assert "| a | <u>20.0 ±10.0</u> | **0.500 ±0.000** |" in text


def test_the_table_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    show(ROWS, ["a", "b", "c"])
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "40.0 ±0.0" in out
