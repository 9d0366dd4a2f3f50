"""Commands on files of tables: CSV, Parquet, gzip, pipes, errors with row and column, and bounded memory."""

import functools
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import quarflow as qf
from quarflow import table_runs
from quarflow.cli import app
from quarflow.table_files import batches, take, to_table, writing
from quarflow.table_flow import fit_table
from quarflow.tables import Schema, as_table

arrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")
ROOT = Path(__file__).parent.parent
RNG = np.random.default_rng(0)
QUICK = ["--max-steps", 5, "--set", "blocks=1", "--set", "hidden=[4]"]
TABLE = {
    "size": RNG.normal(5, 2, 200),
    "colour": RNG.choice(["red", "pale, blue"], 200).astype(object),
    "count": RNG.poisson(3, 200).astype(float),
    "year": RNG.integers(2000, 2010, 200).astype(float),
}


def command(*words, stdin=None):
    return CliRunner().invoke(app, list(map(str, words)), input=stdin)


def said(done):
    """Everything printed, without the frame of an error."""
    return " ".join("".join(c for c in done.output if c not in "│╭╮╰╯─").split())


def write(path, table=None):
    with writing(path) as put:
        put(table or TABLE)
    return path


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.qf"
    flow, _ = fit_table(as_table(TABLE), context=["year"], max_steps=5, model_options={"blocks": 1, "hidden": (4,)})
    qf.save(flow, path)
    return path


def test_fit_score_and_sample(tmp_path):
    data, model = write(tmp_path / "data.csv"), tmp_path / "m.qf"
    done = command("fit", data, "-o", model, "--context", "year", "--bounds", "count=0:", *QUICK)
    assert done.exit_code == 0, done.output
    assert "colour: 2 categories" in done.output
    assert "count: whole numbers from 0" in done.output
    assert "200 of 200 rows, 5 steps" in done.output
    flow = qf.load(model)
    expected = flow.score(TABLE)

    done = command("score", model, data)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "log_prob"
    assert np.array(lines[1:], dtype=float) == pytest.approx(expected, abs=1e-9)
    assert f"200 rows: {expected.mean():.4f} ± {expected.std(ddof=1) / 200**0.5:.4f} nats" in done.stderr

    done = command("score", model, data, "--json")
    found = json.loads(done.stdout)
    assert found["nats"] == pytest.approx(expected.mean(), abs=1e-9)
    assert found["standard_error"] == pytest.approx(expected.std(ddof=1) / 200**0.5, rel=1e-6)
    assert (found["rows"], found["impossible"]) == (200, 0)

    out = tmp_path / "draws.parquet"
    done = command("sample", model, "-n", 30, "-o", out, "--given", "year=2003")
    assert done.exit_code == 0, done.output
    draws = to_table(take(out, 99)[0], flow.schema)
    assert list(draws) == list(TABLE)
    assert (draws["year"] == 2003).all()
    assert set(draws["colour"]) <= {"red", "pale, blue"}
    assert np.isfinite(flow.score(draws)).all()
    again = command("sample", model, "-n", 30, "--given", "year=2003").stdout
    assert again == command("sample", model, "-n", 30, "--given", "year=2003").stdout
    assert len(again.splitlines()) == 31


def test_columns_given_others(tmp_path):
    data, model = write(tmp_path / "data.csv"), tmp_path / "m.qf"
    done = command("fit", data, "-o", model, "--context", "year", "--first", "colour,count", *QUICK)
    assert done.exit_code == 0, done.output
    assert "in this order: colour, count, size" in done.output
    flow = qf.load(model)
    expected = flow.score(TABLE, columns=["count"], given=["colour"])
    # The file need not have the columns behind.
    first = write(tmp_path / "first.csv", {name: TABLE[name] for name in ("year", "count", "colour")})
    junk = write(tmp_path / "junk.csv", TABLE | {"size": TABLE["colour"]})
    assert command("score", model, junk, "--columns", "colour").exit_code == 0
    assert "expected the columns 'size' too" in said(command("score", model, first))
    done = command("score", model, first, "--columns", "count", "--given", "colour,year")
    assert done.exit_code == 0, done.output
    assert np.array(done.stdout.splitlines()[1:], dtype=float) == pytest.approx(expected, abs=1e-9)
    assert f"{expected.mean():.4f}" in done.stderr
    done = command("sample", model, "-n", 20, "--given", "year=2003", "--given", "colour=red", "--given", "count=2")
    draws = [line.split(",") for line in done.stdout.splitlines()]
    assert draws[0] == ["size", "colour", "count", "year"]
    assert {tuple(row[1:]) for row in draws[1:]} == {('"red"', "2", "2003")}
    assert len({row[0] for row in draws[1:]}) == 20
    for words, message in (
        (["score", model, first, "--columns", "size"], "columns: expected the first columns of the model's order"),
        (["sample", model, "--given", "colour=red"], "expected values of 'year', and of any first ones of 'colour'"),
        (["sample", model, "--given", "year=2003", "--given", "count=2"], "given: expected the first columns"),
        (["fit", data, "-o", model, "--first", "size"], "expected categories before numbers"),
    ):
        done = command(*words)
        assert done.exit_code == 2
        assert message in said(done)


def test_rows_with_gaps(tmp_path):
    table = TABLE | {"size": np.where(RNG.random(200) < 0.3, np.nan, TABLE["size"])}
    data, model = write(tmp_path / "data.csv", table), tmp_path / "m.qf"
    assert "missing='marginal'" in said(command("fit", data, "-o", model, *QUICK))
    done = command("fit", data, "-o", model, "--missing", "marginal", *QUICK)
    assert done.exit_code == 0, done.output
    assert "in this order: colour, count, year, size" in done.output
    done = command("score", model, data)
    scores = np.array(done.stdout.splitlines()[1:], dtype=float)
    flow = qf.load(model)
    assert scores == pytest.approx(flow.score(table), abs=1e-9)
    alone, gap = flow.score(table, columns=["colour", "count", "year"]), np.isnan(table["size"])
    assert scores[gap] == pytest.approx(alone[gap], abs=1e-9)
    assert (np.abs(scores - alone)[~gap] > 0.1).all()


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet"])
def test_kinds_of_files(tmp_path, name, model):
    path, out = write(tmp_path / name), tmp_path / f"out-{name}"
    done = command("score", model, path, "-o", out)
    assert done.exit_code == 0, done.output
    assert to_table(take(out, 999)[0])["log_prob"] == pytest.approx(qf.load(model).score(TABLE), abs=1e-9)
    if name.endswith("gz"):
        assert gzip.decompress(path.read_bytes()).startswith(b"size,colour,count,year\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, f"out-{name}"])


def test_types_of_parquet(tmp_path):
    table = arrow.table(
        {
            "on": [True, False, True, True] * 10,
            "kind": arrow.array(["u", "v", "v", "u"] * 10).dictionary_encode(),
            "small": arrow.array([1, 2, 3, 5] * 10, type=arrow.int8()),
            "size": arrow.array(RNG.normal(size=40), type=arrow.float32()),
        }
    )
    arrow.parquet.write_table(table, tmp_path / "t.parquet")
    found = json.loads(command("fit", tmp_path / "t.parquet", "-o", tmp_path / "m.qf", "--json", *QUICK).stdout)
    assert list(found["columns"].values()) == ["2 categories", "2 categories", "whole numbers", "numbers"]
    expected = json.loads(command("score", tmp_path / "m.qf", tmp_path / "t.parquet", "--json").stdout)
    # The same rows as text, where truth values are words.
    lines = [f"{str(r['on']).lower()},{r['kind']},{r['small']},{r['size']!r}\n" for r in table.to_pylist()]
    (tmp_path / "t.csv").write_text("on,kind,small,size\n" + "".join(lines))
    assert json.loads(command("score", tmp_path / "m.qf", tmp_path / "t.csv", "--json").stdout) == expected
    dates = arrow.table({"day": arrow.array([1, 2], type=arrow.date32())})
    arrow.parquet.write_table(dates, tmp_path / "d.parquet")
    done = command("fit", tmp_path / "d.parquet", "-o", tmp_path / "m.qf")
    assert done.exit_code == 2
    assert "column 'day': expected numbers, text or truth values" in said(done)
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    assert command("score", tmp_path / "m.qf", tmp_path / "bad.parquet").exit_code == 2


def test_standard_input(tmp_path, model):
    text = write(tmp_path / "t.csv").read_bytes()
    done = command("score", model, "-", "--json", stdin=text)
    assert json.loads(done.stdout)["rows"] == 200
    assert json.loads(command("fit", "-", "-o", tmp_path / "m.qf", "--json", *QUICK, stdin=text).stdout)["rows"] == 200


def test_kinds_and_bounds_are_declared(tmp_path):
    table = {"zip": np.array(["01234", "94110"] * 30, dtype=object), "price": RNG.integers(1, 99, 60) / 100}
    path = write(tmp_path / "t.csv", table | {"id": np.arange(60.0)})
    words = ["--column", "zip=category", "--column", "price=0.01", "--column", "id=drop", "--bounds", "price=0:1"]
    found = json.loads(command("fit", path, "-o", tmp_path / "m.qf", "--json", *words, *QUICK).stdout)
    assert found["columns"] == {"zip": "2 categories", "price": "multiples of 0.01 from 0 to 1", "id": "dropped"}
    assert json.loads(command("score", tmp_path / "m.qf", path, "--json").stdout)["impossible"] == 0
    sampled = command("sample", tmp_path / "m.qf", "-n", 5).stdout.splitlines()
    assert sampled[0] == "zip,price"
    assert {line.split(",")[0].strip('"') for line in sampled[1:]} <= {"01234", "94110"}


def test_rows_are_drawn_from_a_long_file(tmp_path):
    path = write(tmp_path / "t.parquet", {"a": np.arange(70_000.0)})
    kept, rows = take(path, 500, seed=1)
    values = to_table(kept)["a"]
    assert (len(values), rows) == (500, 70_000)
    assert len(set(values)) == 500
    assert values.mean() == pytest.approx(35_000, abs=4 * 70_000 / (12 * 500) ** 0.5)
    assert (values == to_table(take(path, 500, seed=1)[0])["a"]).all()


def test_values_that_the_model_has_not_seen_are_impossible(tmp_path, model):
    table = {name: values[:5].copy() for name, values in TABLE.items()}
    table["colour"][3] = "mauve"
    done = command("score", model, write(tmp_path / "t.csv", table))
    assert done.exit_code == 0
    assert done.stdout.splitlines()[4] == "-inf"
    assert "warning: column 'colour': categories that were not in the training table in 1 of 5 rows, first in" in (
        done.stderr
    )
    assert "1 of them impossible" in done.stderr
    found = json.loads(command("score", model, tmp_path / "t.csv", "--json").stdout)
    assert (found["impossible"], found["nats"]) == (1, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("size,colour,count,year\n1.5,red,1,2001\nbig,red,1,2001\n", "column 'size', row 2: expected a number"),
        ("size,colour,count,year\n1.5,red,1,2001\n,red,1,2001\n", "'size' (1 of 2 rows, first in row 2)"),
        ("size,colour,count,year\n1.5,red,1,2001\n1.5,red,1.5,2001\n", "column 'count', row 2: expected whole numbers"),
        ("size,colour,count,year\n1.5,red,1,2001\n1.5,red\n", "row 2: expected 4 values; got 2"),
        ("size,colour,count\n1.5,red,1\n", "expected the columns 'year' too"),
        ("size,size\n1.5,2\n", "header of different names"),
        ("size,colour,count,year\n", "expected rows; got none"),
        ("1.5,2,3,2001\n1.5,2,3,2001\n", "expected a header of names; got numbers, '1.5', '2'"),
        ("", "header of different names"),
        ("size,colour,count,year\n1.5,\udcff,1,2001\n", "UTF8"),
    ],
)
def test_errors_in_a_file(tmp_path, model, text, message):
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    done = command("score", model, path, "-o", tmp_path / "out.csv")
    assert done.exit_code == 2, done.output
    assert message in said(done)
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["score", "MODEL", "none.csv"], "none.csv: there is no such file"),
        (["score", "IMAGES", "t.csv"], "expected a model of a table"),
        (["score", "MODEL", "t.csv", "-o", "none/out.csv"], "does not exist"),
        (["fit", "t.csv", "-o", "none/m.qf"], "does not exist"),
        (["fit", "t.csv", "-o", "m.qf", "--context", "age"], "context: expected columns of the table"),
        (["fit", "t.csv", "-o", "m.qf", "--bounds", "size=0-1"], "expected size=LOW:HIGH"),
        (["fit", "t.csv", "-o", "m.qf", "--column", "size"], "expected NAME=VALUE"),
        (["fit", "t.csv", "-o", "m.qf", "--model", "spline"], "model: expected one of"),
        (["fit", "t.csv", "-o", "m.qf", "--set", "depth=3"], "no option 'depth'"),
        (["fit", "mixed.csv", "-o", "m.qf"], "column 'a', row 3: expected a number, as in other rows; got 'x'"),
        (["sample", "MODEL"], "given: expected values of 'year'"),
        (["sample", "IMAGES", "--given", "a=1"], "given: expected class=NUMBER, as the model is of images"),
    ],
)
def test_errors(tmp_path, monkeypatch, model, words, message):
    monkeypatch.chdir(tmp_path)
    write("t.csv")
    Path("mixed.csv").write_text("a\n1\n2\nx\n")
    qf.save(qf.models.quar_image((1, 4, 4), blocks=(1,), hidden=4), "images.qf")
    done = command(*[{"MODEL": model, "IMAGES": "images.qf"}.get(word, word) for word in words])
    assert done.exit_code == 2, done.output
    assert message in said(done)


def test_without_pyarrow(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'quarflow\[tables\]'"):
        next(batches("-"))


SCORE = """
import resource, sys
import quarflow as qf
from quarflow import table_runs
table_runs.score(qf.load(sys.argv[1]), sys.argv[2], sys.argv[3], workers=2)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_memory_does_not_grow_with_the_file(tmp_path):
    block = RNG.normal(size=(20_000, 10))
    lines = "\n".join(",".join(f"{v:.15f}" for v in row) for row in block) + "\n"
    header = ",".join(f"c{i}" for i in range(10)) + "\n"
    schema = Schema.of(as_table({f"c{i}": block[:100, i] for i in range(10)}))
    torch.manual_seed(0)
    qf.save(qf.models.table(schema, model="maf", blocks=1, hidden=(4,)), tmp_path / "m.qf")
    peaks = []
    for name, copies in (("small.csv", 1), ("large.csv", 20)):
        with open(tmp_path / name, "w") as file:
            file.write(header)
            for _ in range(copies):
                file.write(lines)
        words = [sys.executable, "-c", SCORE, str(tmp_path / "m.qf"), str(tmp_path / name), str(tmp_path / "out.csv")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    size = (tmp_path / "large.csv").stat().st_size / 2**20
    assert (tmp_path / "out.csv").read_bytes().count(b"\n") == 400_001
    # A fraction of the file, which as text and as numbers would take twice its size.
    assert size > 65
    assert peaks[1] - peaks[0] < 0.75 * size, (peaks, size)


def test_an_interrupt_keeps_the_best_weights(tmp_path, monkeypatch):
    def stop(trainer):
        if trainer.step == 3:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(table_runs, "fit_table", functools.partial(fit_table, progress=stop))
    done = command("fit", write(tmp_path / "t.csv"), "-o", tmp_path / "m.qf", "--json")
    assert done.exit_code == 130, done.output
    assert json.loads(done.stdout)["steps"] == 3
    assert np.isfinite(qf.load(tmp_path / "m.qf").score(TABLE)).all()
