import csv
import io
import math

import pytest

from tapfl.errors import TapflError
from tapfl.report.paper import published
from tapfl.report.sheets import build, split, tabulate
from tapfl.report.tables import render, show

ROWS = [
    {"dataset": d, "metric": m, "method": method, "value": v, "client": c}
    for d, m, values in (("agnews", "accuracy", {"a": (10, 30), "b": (40, 40), "c": (5, 5)}),
                         ("fmnist", "mse", {"a": (0.5, 0.5), "b": (0.7, 0.9), "c": (0.6, 0.6)}))
    for method, pair in values.items() for c, v in enumerate(pair)
]


def rows_of(dataset, metric, **methods):
    return [{"dataset": dataset, "metric": metric, "method": method, "value": value,
             "client": str(client)}
            for method, values in methods.items() for client, value in enumerate(values)]


TEXTS = [*rows_of("mmlu", "meteor", tap=[40.0], fedavg=[10.0]),
         *rows_of("vqa", "meteor", tap=[60.0, 60.0], fedavg=[30.0, 50.0]),
         *rows_of("commongen", "meteor", tap=[20.0, 30.0], fedavg=[10.0, 10.0])]
IMAGES = [*rows_of("fmnist", "mse", tap=[0.5], fedavg=[0.7]),
          *rows_of("caltech256", "mse", tap=[0.4, 0.4], fedavg=[0.2, 0.4])]


def test_means_spreads_and_ranks():
    table = tabulate(ROWS)
    cell = table["agnews", "accuracy"]["a"]
    assert (cell.mean, cell.spread, cell.clients, cell.rank) == (20, 10, 2, 2)
    assert [table["fmnist", "mse"][m].rank for m in "abc"] == [1, 3, 2]


def test_equal_means_share_a_rank_and_the_constant_answer_has_none():
    table = tabulate(rows_of("agnews", "accuracy", a=[9.0], b=[9.0], c=[5.0], constant=[5.0]))
    ranks = {method: cell.rank for method, cell in table["agnews", "accuracy"].items()}
    assert ranks == {"a": 1, "b": 1, "c": 2, "constant": 0}


@pytest.mark.parametrize("values", [[math.nan], [math.inf, 1.0], [1.0, math.nan]])
def test_what_is_not_finite_has_no_deviation(values):
    assert math.isnan(tabulate(rows_of("agnews", "accuracy", a=values))["agnews", "accuracy"][
        "a"].spread)


def test_methods_that_are_not_shown_take_no_rank():
    rows = rows_of("agnews", "accuracy", tap=[70.0], fedavg=[60.0], local=[90.0], ditto=[80.0])
    shown = render(rows, ["tap", "fedavg"], "markdown")
    assert "| TAP | **70.0 ±0.0** |" in shown
    assert "| FedAvg | <u>60.0 ±0.0</u> |" in shown


def test_where_all_are_equal_there_is_no_best():
    table = tabulate(rows_of("mmlu", "exact_match", a=[0.0], b=[0.0], c=[math.nan]))
    assert [cell.rank for cell in table["mmlu", "exact_match"].values()] == [0, 0, 0]


def test_columns_stand_by_family_and_in_the_papers_order():
    rows = [*TEXTS, *IMAGES, *rows_of("agnews", "accuracy", tap=[1.0]),
            *rows_of("mmlu", "bertscore(m,6)", tap=[1.0]),
            *rows_of("mmlu", "exact_match", tap=[1.0]), *rows_of("mmlu", "token_f1", tap=[1.0]),
            *rows_of("own", "accuracy", tap=[1.0])]
    sheet = build(rows, ["tap"])
    assert [(c.dataset, c.metric) for c in sheet.columns] == [
        ("fmnist", "mse"), ("caltech256", "mse"), ("agnews", "accuracy"),
        ("mmlu", "bertscore(m,6)"), ("mmlu", "meteor"), ("mmlu", "exact_match"),
        ("vqa", "meteor"), ("commongen", "meteor"), ("own", "accuracy")]
    own = build(rows, ["tap"], kinds={"own": "image_classification"})
    assert own.columns[0].dataset == "own"
    assert [[c.dataset for c in piece.columns] for piece in split(sheet, 4, by_dataset=True)] == [
        ["fmnist", "caltech256"], ["agnews", "mmlu", "mmlu", "mmlu", "vqa", "commongen"], ["own"]]


def test_the_papers_order_does_not_depend_on_that_of_the_results():
    def columns(rows):
        return [(c.dataset, c.metric) for c in build(rows, ["tap"]).columns]

    rows = [*IMAGES, *TEXTS]
    assert columns(rows[::-1]) == columns(rows)


def test_scores_on_others_data_stand_behind_a_clients_own():
    metrics = ("general_bertscore(m,6)", "general_token_f1", "general_meteor", "meteor")
    rows = [row for metric in metrics for row in rows_of("mmlu", metric, tap=[1.0])]
    assert [c.metric for c in build(rows, ["tap"]).columns] == [
        "meteor", "general_bertscore(m,6)", "general_meteor"]  # words' F1 is needless there too


def test_what_fits_stays_whole_and_averages_are_no_data_sets():
    sheet = build([*TEXTS, *IMAGES], ["tap"], averages=True)
    datasets, columns = len({c.dataset for c in sheet.columns if not c.average}), len(sheet.columns)
    assert (datasets, columns) == (5, 7)
    assert split(sheet, 5, by_dataset=True) == [sheet]
    assert split(sheet, 7, by_dataset=False) == [sheet]
    assert len(split(sheet, 6, by_dataset=False)) == 2


def test_a_piece_has_no_line_of_a_method_without_results_in_it():
    rows = [*TEXTS, *IMAGES, *rows_of("mmlu", "meteor", local=[1.0])]
    pieces = split(build(rows, ["tap", "local"]), 3, by_dataset=True)
    assert [[line.method for line in piece.lines] for piece in pieces] == [
        ["tap"], ["tap", "local"]]


def test_averages_weigh_texts_by_clients_and_images_plainly():
    sheet = build([*TEXTS, *IMAGES], ["fedavg", "tap"], averages=True)
    found = {(c.kind, line.method): line.cells[c] for line in sheet.lines
             for c in sheet.columns if c.average}
    assert found["text_generation", "tap"].mean == pytest.approx((40 + 2 * 60 + 2 * 25) / 5)
    assert found["text_generation", "tap"].rank == 1
    assert found["text_generation", "tap"].spread is None
    assert found["text_generation", "tap"].clients == 5
    assert found["image_generation", "tap"].mean == pytest.approx(0.45)
    assert found["image_generation", "fedavg"].rank == 2
    labels = [*rows_of("agnews", "accuracy", tap=[10.0]),
              *rows_of("own", "accuracy", tap=[40.0, 40.0])]
    labels = build(labels, ["tap"], averages=True, kinds={"own": "text_classification"})
    assert labels.lines[0].cells[labels.columns[-1]].mean == pytest.approx(30)
    plain = build(TEXTS, ["tap"], paper="flava-100", averages=True)
    assert plain.lines[0].cells[plain.columns[-1]].mean == pytest.approx((40 + 60 + 25) / 3)


def test_a_method_that_lacks_a_data_set_has_no_average():
    sheet = build([*TEXTS, *rows_of("mmlu", "meteor", local=[1.0])], ["tap", "local"],
                  averages=True)
    assert [sheet.columns[-1] in line.cells for line in sheet.lines] == [True, False]


def test_markdown_marks_best_and_second():
    text = render(ROWS, ["a", "b", "c"], "markdown", averages=False)
    assert text.startswith("| method | FMNIST MSE ↓ | AG News Acc ↑ |\n|---|---|---|\n")
    assert "| b | 0.800 ±0.100 | **40.0 ±0.0** |" in text
    assert "| a | **0.500 ±0.000** | <u>20.0 ±10.0</u> |" in text


def test_the_constant_answer_is_last_and_not_ranked():
    rows = [*rows_of("agnews", "accuracy", constant=[99.0, 99.0]), *ROWS]
    for text in (render(rows, ["a", "b", "c"], "markdown"), render(rows, None, "markdown")):
        assert text.splitlines()[-1] == "| *constant* |  | 99.0 ±0.0 |"
        assert "**40.0 ±0.0**" in text
    latex = render(rows, None, "latex").splitlines()
    assert latex[-4:-2] == [r"\midrule", r"constant &  & $99.00 \scriptstyle\pm 0.00$ \\"]
    assert "rank" not in render(rows, None, "csv").splitlines()[-1]
    assert render(rows, None, "csv").splitlines()[-1].endswith(",2,")


def test_published_figures_stand_under_each_method():
    rows = [*TEXTS, *IMAGES, *rows_of("fmnist", "mse", **{"mine:Own": [9.0]})]
    text = render(rows, ["fedavg", "tap", "mine:Own"], "markdown", paper="flava")
    figure = published("flava")["tap", "fmnist", "mse"]
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    assert "TAP (paper)" in lines
    assert f"**{figure.mean:.4f} ±{figure.deviation:.4f}**" in text
    assert "| 0.4688 |" in text or "**0.4688**" in text  # the published average
    assert "mine:Own (paper)" not in text
    assert [line.split(" |")[0] for line in text.split("\n\n")[0].splitlines()[2:]] == [
        "| FedAvg", "| FedAvg (paper)", "| TAP", "| TAP (paper)", "| mine:Own"]
    found = list(csv.DictReader(io.StringIO(render(rows, None, "csv", paper="flava"))))
    (row,) = [r for r in found if (r["method"], r["dataset"], r["source"]) == (
        "tap", "fmnist", "paper")]
    assert (float(row["mean"]), float(row["deviation"])) == (figure.mean, figure.deviation)


def test_a_published_figure_stands_by_its_metric_whatever_model_measures_it():
    figure = published("flava")["tap", "mmlu", "bertscore"]
    text = render(rows_of("mmlu", "bertscore(m,6)", tap=[40.0]), ["tap"], "markdown",
                  paper="flava")
    assert f"{figure.mean:.2f} ±{figure.deviation:.2f}" in text


def test_other_metrics_than_the_papers_have_no_published_figure():
    rows = rows_of("mmlu", "meteor-nosyn", tap=[40.0])
    assert "paper" not in render(rows, ["tap"], "markdown", paper="flava")
    rows = rows_of("agnews", "general_accuracy", tap=[40.0])
    assert "paper" not in render(rows, ["tap"], "markdown", paper="flava")


def test_latex():
    rows = [*TEXTS, *rows_of("mmlu", "token_f1", tap=[50.0], fedavg=[math.nan]),
            *rows_of("a_b", "accuracy", **{"x&y_{z}": [1.0]})]
    text = render(rows, ["fedavg", "tap", "x&y_{z}"], "latex", width=9)
    lines = text.splitlines()
    assert lines[0] == r"\begin{tabular}{lcccccc}"
    assert lines[2].startswith(r"Method & \multicolumn{2}{c}{MMLU} & VQA & CommonGen & Avg. Gen.")
    assert lines[3].startswith(r"\cmidrule(lr){2-3} \cmidrule(lr){4-4}")
    assert r"METEOR $(\uparrow)$ & token\_f1 $(\uparrow)$" in lines[4]
    assert r"$\mathbf{40.00} \scriptstyle\pm 0.00$" in text
    assert r"$\underline{40.00} \scriptstyle\pm 10.00$" in text
    assert r"x\&y\_\{z\} & " in text
    assert "nan" in text
    # Every row has as many cells, and braces close.
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
    assert {line.replace(r"\&", "").count("&") for line in lines[6:9]} == {6}


def test_csv_keeps_all_digits():
    found = list(csv.DictReader(io.StringIO(
        render(rows_of("own, data", "accuracy", m=[1 / 3, 1 / 3]), None, "csv"))))
    assert found == [{"method": "m", "source": "tapfl", "kind": "classification",
                      "dataset": "own, data", "metric": "accuracy", "mean": repr(1 / 3),
                      "deviation": "0.0", "count": "2", "rank": "1"}]


def test_the_table_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    show(ROWS, ["a", "b", "c"])
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "40.0 ±0.0" in out


def test_names_are_no_markup():
    out = render(rows_of("t[b]", "accuracy", **{"x[/]": [1.0]}), None)
    assert "x[/]" in out
    assert "t[b]" in out


def test_what_a_metric_depends_on_is_said_once():
    out = render(rows_of("mmlu", "bertscore(model,6)", tap=[40.0]), None)
    assert out.splitlines()[-1] == "bertscore: model, layer 6"


def test_bad_formats_and_settings():
    with pytest.raises(TapflError, match="--format html: expected terminal, markdown"):
        render(ROWS, None, "html")
    with pytest.raises(TapflError, match="no tables of 'bert'"):
        render(ROWS, None, "csv", paper="bert")
