"""`quarflow bench`: what it measures is there, and what cannot be measured is said."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import quarflow as qf
from quarflow import bench
from quarflow.cli import app

STEP = "training step"
CPU = torch.device("cpu")
TINY = ("--quick", "--device", "cpu", "--set", "blocks=2", "--set", "hidden=[4,4]")


def command(*words):
    return CliRunner().invoke(app, ["bench", *map(str, words)])


def test_json_has_every_row():
    done = command(*TINY, "--features", 3, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["config"]["features"] == 3
    assert found["parameters"] == sum(p.numel() for p in qf.models.quar(3, blocks=2, hidden=(4, 4)).parameters())
    rows = {(row["what"], row["how"]): row for row in found["rows"]}
    assert set(rows) == {*((STEP, how) for how in ("plain", "recomputation")), ("log_prob", ""), ("sampling", "")}
    for row in rows.values():
        assert row["rows_per_second"] == pytest.approx(1e3 * row["rows"] / row["milliseconds"]["median"])
        assert set(row["forms"]) == {"layers: general (not on a GPU)"}
    assert rows[STEP, "plain"]["forms"] == {"layers: general (not on a GPU)": 2}
    assert rows[STEP, "recomputation"]["forms"] == {"layers: general (not on a GPU)": 4}
    step, log_prob = rows[STEP, "plain"], rows["log_prob", ""]
    assert 2 * log_prob["operations"] < step["operations"] < 4 * log_prob["operations"]
    seconds = 1e-3 * step["milliseconds"]["median"]
    assert step["share_of_products"] * seconds * found["operations_per_second"] == pytest.approx(step["operations"])


def test_lines_say_what_ran(monkeypatch):
    monkeypatch.setenv("QUARFLOW_KERNELS", "0")
    done = command("--quick", "--device", "cpu", "--shape", "1,4,4", "--set", "blocks=[1,1]", "--set", "hidden=4")
    assert done.exit_code == 0, done.output
    assert "quar_image, " in done.stdout
    assert "TFLOP/s" in done.stdout
    assert "runs: 2 x layers: reference (QUARFLOW_KERNELS=0)" in done.stdout
    assert "floors: products" in done.stdout


def test_conditional_and_other_models():
    context = bench.Bench("residual", features=2, options={"context": 2, "blocks": 1, "hidden": (4,)}, quick=True)
    rows = list(bench.measure(context, CPU))[1:]
    assert [(row["what"], row["how"]) for row in rows] == [(STEP, "plain"), ("log_prob", ""), ("sampling", "")]
    assert all(row["forms"] == {} and row["milliseconds"].median > 0 for row in rows)
    assert "no network that has a kernel" in "".join(bench.lines(rows[0]))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--shape", "3,a"), "channels, height and width"),
        (("--shape", "3,0,8"), "integer >= 1"),
        (("--model", "glow"), "such as 3,32,32"),
        (("--features", 3, "--shape", "1,4,4"), "alone"),
        (("--model", "maf", "--shape", "1,4,4"), "of vectors"),
        (("--model", "table"), "expected one of"),
        (("--set", "nonsense=3"), "no option 'nonsense'"),
        (("--set", "blocks"), "NAME=VALUE"),
        (("--set", "features=3"), "on its own (--features)"),
        (("--precision", "bf8"), "bf8"),
        (("--features", 0), "'--features'"),
    ],
)
def test_wrong_commands_are_told_so(words, expected):
    done = command("--quick", *words)
    assert done.exit_code == 2, done.output
    assert expected in " ".join(done.output.replace("│", " ").split())


def test_what_does_not_fit_is_said_and_the_rest_measured(monkeypatch):
    def full(*_args, **_more):
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr(bench, "training", full)
    done = command(*TINY)
    assert done.exit_code == 1
    assert "training step, plain: not measured: OutOfMemoryError: CUDA out of memory." in done.stdout
    assert "sampling: " in done.stdout
    monkeypatch.setattr(bench, "training", lambda *a, **k: (_ for _ in ()).throw(ValueError("graph: no")))
    assert command(*TINY).exit_code == 0  # nothing that any machine could


def test_operations_are_those_of_the_formula():
    flow = qf.models.quar(features=3, blocks=1, hidden=(5,))
    seven, six = (bench.operations(lambda n: flow(torch.zeros(n, 3)), batch) for batch in (7, 6))
    # Of a row: two dense layers of 3 x 15, and the diagonal blocks of the second one.
    assert seven - six == 2 * (15 * 3 + 3 * 15) + 2 * 3 * 5
