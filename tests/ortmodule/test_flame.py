"""The flame chart: rows by level, widths by time."""

import xml.etree.ElementTree as ET

from onnxtrain import _flame

SVG = "{http://www.w3.org/2000/svg}"


def boxes(paths):
    """(title, class, x, y, width) of every box."""
    groups = ET.fromstring(_flame.chart(paths, "a < b")).iter(f"{SVG}g")
    return [(group.find(f"{SVG}title").text, *[box.get(name) for name in ("class", "x", "y", "width")])
            for group in groups for box in [group.find(f"{SVG}rect")]]


def test_a_box_is_as_wide_as_its_time_and_lies_within_its_parent():
    found = boxes([("forward", "a", 1.0), ("forward", "b<", 1.0), ("backward", "a", 2.0), ("forward", "a", 1.0)])
    whole = _flame.WIDTH - 2 * _flame.EDGE
    assert [(title.partition(",")[0], kind) for title, kind, *_ in found] == [
        ("all: 5000.000 ms", "root"), ("forward: 3000.000 ms", "forward"), ("a: 2000.000 ms", "forward"),
        ("b<: 1000.000 ms", "forward"), ("backward: 2000.000 ms", "backward"), ("a: 2000.000 ms", "backward")]
    assert [round(float(width) / whole, 2) for *_, width in found] == [1, 0.6, 0.4, 0.2, 0.4, 0.4]
    assert [(int(y) - _flame.TOP) // _flame.ROW for *_, y, _ in found] == [0, 1, 2, 2, 1, 2]
    assert found[4][2] == f"{_flame.EDGE + 0.6 * whole:.1f}"


def test_nothing_and_what_is_too_narrow_is_left_out():
    assert boxes([]) == []
    assert len(boxes([("forward", "wide", 1.0), ("forward", "narrow", 1e-6)])) == 3
