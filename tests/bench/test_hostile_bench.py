"""Promise: the bench of hostile bodies sends them, watches who else asks, and fails where somebody has to wait."""

import json
from dataclasses import replace
from itertools import islice

import pytest

from orca_hf import cli
from orca_hf.bench import hostile
from orca_hf.bench.hostile_bodies import hostile as bodies
from orca_hf.bench.hostile_bodies import names

GOOD = hostile.Point("/tokenize", "text", 4.0, status=400, expected=400, seconds=1.0, health=0.01, pause=0.1)


@pytest.mark.parametrize("fault", [None, {"status": 500}, {"health": 0.11}, {"pause": 0.26}], ids=str)
def test_whatever_is_wrong_fails_it(fault):
    assert hostile.passed([GOOD, replace(GOOD, **(fault or {}))]) == (fault is None)


def test_bodies_are_as_long_as_wanted_and_have_names():
    made = list(bodies(10_000))
    assert [(each.path, each.name) for each in made] == names()
    assert all(0 < len(each.body) <= 10_000 for each in made)


def test_it_tells_of_each_body(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hostile, "hostile", lambda size: islice(bodies(size), 2))
    out, plot = tmp_path / "hostile.json", tmp_path / "hostile.png"
    status = cli.main(["bench", "hostile", "--out", str(out), "--plot", str(plot)])
    points = [hostile.Point(**point) for point in json.loads(out.read_text())["points"]]
    assert [point.name for point in points] == ["nothing", "negative tokens", "tokens"]
    assert all(point.status == point.expected and point.health > 0 and point.pause > 0 for point in points)
    assert status == (not hostile.passed(points))
    assert "negative tokens" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")
