"""The look of figures: a mechanism is recognised in every one of them, and lines by their names."""

import itertools

from cases import cases

from lssar import MECHANISMS
from support import plots

MAIN = ("lssar", "softmax", "lssa", "ssmax")


def test_the_main_mechanisms_and_the_window_have_colours_of_their_own():
    found = [plots.style(name)["color"] for name in MAIN]
    found.append(plots.style("softmax", "window=128")["color"])
    assert len(set(found)) == 5
    assert plots.style("lssar", "window=384")["color"] == found[-1]


def test_every_mechanism_keeps_its_colour_whatever_else_is_drawn():
    for name in cases(MECHANISMS):
        found = [plots.style(name, "alpha=0.1", order) for order in range(3)]
        assert {style["color"] for style in found} == {plots.style(name)["color"]}
        assert len({str(style["linestyle"]) for style in found}) == 3
        if name not in MAIN:
            assert plots.style(name)["color"] not in [plots.style(main)["color"] for main in MAIN]


def test_a_busy_chart_has_four_lines_in_colour_and_never_a_grey_control():
    names = ("lssar", "softmax", "lssa", "ssmax", "sigmoid", "relu-l1")
    styles = [*map(plots.style, names), plots.style("softmax", "window=128")]
    shown = [style["color"] for style in plots.coloured(styles)]
    assert shown[:4] == [style["color"] for style in styles[:4]]
    assert shown[4:6] == [plots.GREY] * 2
    assert shown[6] == plots.INK
    assert plots.coloured(styles[:4]) == styles[:4]


def test_the_legend_names_every_line_where_there_are_several():
    for count in cases([1, 2, 3]):
        figure, axes = plots.figure()
        names = [f"line {i}" for i in range(count)]
        for name in names:
            axes.plot([0, 1], [1, 2], label=name)
        plots.legend_below(figure, axes)
        shown = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        assert shown == (names if count > 1 else [])


def test_names_at_the_ends_of_lines_do_not_overlap_and_stay_beside_the_axes():
    for ends in cases([[1.0, 1.0, 1.001, 2.0], [2.0] * 9, [1.0] * 9, []]):
        figure, axes = plots.figure()
        axes.plot([0, 1], [1, 2])
        lines = [(f"line {i}", y, plots.INK) for i, y in enumerate(ends)]
        plots.label_ends(axes, lines)
        figure.draw_without_rendering()
        boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
        assert len(boxes) == len(ends)
        assert all(upper.y0 >= lower.y1 - 1 for lower, upper in itertools.pairwise(boxes))
        assert all(box.x0 > axes.bbox.x1 for box in boxes)
        assert all(axes.bbox.y0 - 8 < (box.y0 + box.y1) / 2 < axes.bbox.y1 + 8 for box in boxes)
