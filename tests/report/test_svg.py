"""Charts: round axes, nothing that is not finite, and lines that say what they show."""

import math

import pytest

from tapfl.report.markup import Cell, Html, join, table, tag, text
from tapfl.report.svg import Gain, Series, Square, dashes, gain_chart, line_chart, shade_map, ticks
from tapfl.report.timeline import cumulative, means
from tests.report.pages import Page


@pytest.mark.parametrize(("low", "high", "expected"), [
    (0, 10, [0, 2.5, 5, 7.5, 10]), (0, 100, [0, 25, 50, 75, 100]),
    (0.1, 0.19, [0.1, 0.125, 0.15, 0.175]),
    (-3, 3, [-2, 0, 2]), (5, 5, [5])])
def test_ticks(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize("scale", [1e-300, 1e-9, 1.0, 1e12, 1e300])
def test_ticks_of_any_scale_lie_within(scale):
    found = ticks(0.3 * scale, 1.7 * scale)
    assert 2 <= len(found) <= 8
    assert all(0.29 * scale < value < 1.71 * scale for value in found)


def test_a_line_goes_through_its_points():
    drawn = line_chart("a", "title", "words", [Series("one", [(0, 0), (5, 10), (10, 5)], 0)],
                       "x", "y")
    page = Page(drawn)
    assert not page.faults
    (points,) = page.attributes("points")
    places = [tuple(map(float, p.split(","))) for p in points.split()]
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert places[0][1] > places[2][1] > places[1][1]  # larger values stand higher
    assert (places[0][0] + places[2][0]) / 2 == pytest.approx(places[1][0], abs=0.1)
    assert "title" in page.text
    assert "words" in page.text


def test_charts_side_by_side_share_an_axis():
    lines = [line_chart("a", "t", "d", [Series("one", points, 0)], "x", "y", x_range=(0, 10))
             for points in ([(5, 1), (10, 2)], [(0, 7), (5, 8)])]
    first, second = ([float(p.split(",")[0]) for p in Page(drawn).attributes("points")[0].split()]
                     for drawn in lines)
    assert first[0] == second[1]


def test_long_lines_are_not_cut():
    drawn = line_chart("a", "t", "d", [Series("one", [(x, x % 7) for x in range(2000)], 0)], "x",
                       "y")
    (points,) = Page(drawn).attributes("points")
    assert len(points.split()) == 2000


def test_what_is_not_finite_is_left_out():
    points = [(0, 1.0), (1, math.nan), (2, math.inf), (3, 2.0)]
    drawn = line_chart("a", "t", "d", [Series("one", points, 0)], "x", "y")
    assert len(Page(drawn).attributes("points")[0].split()) == 2
    assert "nan" not in drawn
    for chart in (line_chart("a", "t", "d", [Series("one", [(0, math.nan)], 0)], "x", "y"),
                  gain_chart("a", "t", "d", [Gain("c", math.nan, math.nan, math.nan, "")], "x")):
        assert "nothing to draw" in chart
    mixed = gain_chart("a", "t", "d", [Gain("c", math.nan, math.nan, math.nan, ""),
                                       Gain("d", 1.0, math.nan, math.nan, "helped")], "x")
    assert "not finite" in mixed
    assert "nan" not in mixed


def test_lines_differ_in_more_than_their_colour():
    assert len({(look % 8, dashes(look)) for look in range(16)}) == 16


def test_a_map_has_a_square_where_there_is_one():
    drawn = shade_map("m", "t", "d", ["a", "b"], ["x", "y"],
                      {("a", "x"): Square(1.0, "3", "much"), ("b", "y"): Square(0.0, "", "none")})
    page = Page(drawn)
    classes = [a["class"] for name, a in page.elements if name == "rect"]
    assert classes == ["shade5", "shade0"]
    assert "much" in page.text


def test_text_is_escaped_unless_it_is_markup():
    assert tag("p", "<b>", Html("<i></i>"), title='"') == '<p title="&quot;">&lt;b&gt;<i></i></p>'
    assert join(["<", text("<")], "&") == "&lt;&amp;&lt;"
    assert tag("p", hidden=True, id=None, open=False) == "<p hidden></p>"


def test_tables_put_numbers_to_the_right_and_sort_what_is_missing_last():
    drawn = table("c", ["name", "value"], [["a", Cell("1.0", 1.0)], ["b", Cell("", math.nan)]])
    assert '<td class="n" data-v="1.0">1.0</td>' in drawn
    assert '<td class="n" data-v=""></td>' in drawn


def test_means_over_clients_and_long_runs():
    assert means({0: [1.0, 3.0], 4: [5.0]}) == [(1.0, 2.0), (5.0, 5.0)]
    assert means({}) == []
    long = means({round_: [float(round_)] for round_ in range(1000)}, most=100)
    assert len(long) == 100
    assert long[0] == (5.5, 4.5)  # rounds 1 to 10 hold the values 0 to 9


def test_cumulative_counts_of_a_seed():
    assert cumulative({1: 2, 3: 4}, last=9, seeds=2) == [(0, 0), (2, 1), (4, 3), (10, 3)]
