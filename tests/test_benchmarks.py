"""The benchmarks run, and what they write and claim to measure is what they say it is."""

import dataclasses
import importlib
import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as everything  # noqa: E402
from benchmarks import defaults, harness, lanes, outliers, scaling, shares, speed, table2, tabular, vectors  # noqa: E402
from quarflow.bench import peak_memory  # noqa: E402

KEYS = {
    "benchmark",
    "quick",
    "date",
    "commit",
    "cpu",
    "cores",
    "threads",
    "load",
    "python",
    "torch",
    "packages",
}


def quick(name, folder, capsys, tables=1):
    """The result of a quick run, with what holds for every benchmark checked."""
    importlib.import_module(f"benchmarks.{name}").main(["--quick", "--out", str(folder)])
    text = (folder / f"{name}.json").read_text()
    result = json.loads(text)
    assert set(result) >= KEYS | {"settings", "rows"}
    assert result["benchmark"] == name
    assert result["quick"]
    assert result["threads"] == 1
    assert str(ROOT) not in text
    assert os.uname().nodename not in text
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) > 2
    assert len({line.count(" | ") for line in lines}) <= tables  # every row of a table is whole
    assert everything.provenance(harness.load(folder / f"{name}.json")).startswith(result["cpu"])
    return result


def test_import_time(tmp_path, capsys):
    result = quick("import_time", tmp_path, capsys)
    assert [row["import"] for row in result["rows"]] == ["torch", "quarflow"]
    assert result["loaded"] == []  # `import quarflow` loads torch alone


def test_inverse(tmp_path, capsys):
    rows = quick("inverse", tmp_path, capsys)["rows"]
    assert {row["solver"] for row in rows} == {"newton", "banach", "bracketing"}
    for row in rows:
        eps = torch.finfo(getattr(torch, row["dtype"])).eps
        assert row["failed"] == 0
        assert row["residual"] < 1e3 * eps
        assert row["round_trip"] < 1e4 * eps


def test_scaling(tmp_path, capsys):
    rows = quick("scaling", tmp_path, capsys)["rows"]
    memory = {(row["call"], row["d"]): row["mebibytes"] for row in rows}
    assert memory["forward", 4] < memory["forward", 8] < memory["forward and backward", 8]


def test_vectors_cpu(tmp_path, capsys):
    pytest.importorskip("zuko")
    pytest.importorskip("normflows")
    rows = quick("vectors_cpu", tmp_path, capsys)["rows"]
    target = rows[0]["parameters"]
    for row in rows:
        assert abs(row["parameters"] - target) <= 0.05 * target
        assert row["round_trip"] < 1e-2  # normflows stops its inverse early
        assert row["live"] <= row["parameters"]
    live = {row["model"]: row["live"] / row["parameters"] for row in rows}
    assert live["QuAR"] < 1 == live["normflows residual"]


def test_residual_cost(tmp_path, capsys):
    pytest.importorskip("normflows")
    rows = {row["model"]: row for row in quick("residual_cost", tmp_path, capsys)["rows"]}
    assert all(row["hidden"] == [8, 8] for name, row in rows.items() if name.startswith("QuAR"))
    assert rows["our residual flow"]["hidden"] == rows["normflows residual"]["hidden"] == [16, 16]
    assert all(row["transforms"] == 3 for row in rows.values())
    assert rows["QuAR"]["train_ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}


def test_tabular(tmp_path, capsys, monkeypatch):
    pytest.importorskip("zuko")
    pytest.importorskip("sklearn")
    result = quick("tabular", tmp_path, capsys)
    rows, runs = result["rows"], result["runs"]
    assert [row["model"] for row in rows] == list(tabular.MODELS)
    for row in rows:
        nats = [run["nats"] for run in runs if run["model"] == row["model"]]
        assert row["test_nats"] == pytest.approx(sum(nats) / 2)
        assert row["test_nats_se"] == pytest.approx(abs(nats[0] - nats[1]) / 2)
        assert row["rows"] == 142  # of 178: 18 for validation, 18 for the test
        assert row["seconds"] > 0
    # What is there is not measured again, what was cut is, and nothing is mixed with what other settings give.
    asked = []
    monkeypatch.setattr(tabular, "side_by_side", lambda work, jobs, *place: asked.extend(jobs) or [])
    tabular.main(["--quick", "--out", str(tmp_path)])
    assert asked == []
    path = tmp_path / "tabular.json"
    path.write_text(json.dumps(result | {"runs": runs[1:]}))
    tabular.main(["--quick", "--out", str(tmp_path)])
    (job,) = asked
    assert (job.data, job.model, job.seed) == (runs[0]["data"], runs[0]["model"], runs[0]["seed"])
    with pytest.raises(SystemExit, match="other settings"):
        tabular.main(["--out", str(tmp_path), "--seconds", "1"])


def where(seconds):
    time.sleep(seconds)
    return os.getpid(), os.sched_getaffinity(0), torch.get_num_threads()


def fails(job):
    raise [ValueError("no"), FileNotFoundError("gone")][job]


def test_lanes_have_cores_of_their_own():
    there = os.sched_getaffinity(0)
    count = min(2, len(there))
    found = [place for _, place in lanes.side_by_side(where, [0.5] * count, count, 1, seconds=0)]
    assert len({pid for pid, _, _ in found} - {os.getpid()}) == count
    assert set.union(*(cores for _, cores, _ in found)) <= there
    assert sum(len(cores) for _, cores, _ in found) == len(set.union(*(cores for _, cores, _ in found))) == count
    assert {threads for _, _, threads in found} == {1}
    assert os.sched_getaffinity(0) == there
    with pytest.raises(SystemExit, match="Take fewer"):
        next(lanes.side_by_side(where, [0], len(there) + 1, 1, seconds=0))


def test_lanes_end_in_time_and_say_what_failed(capsys):
    assert list(lanes.side_by_side(where, [1.0], 1, 1, seconds=10, minutes=0.1)) == []
    assert "1 jobs are left" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1 jobs failed"):
        list(lanes.side_by_side(fails, [0], 1, 1, seconds=0))
    assert "0: ValueError('no')" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="gone"):
        list(lanes.side_by_side(fails, [1], 1, 1, seconds=0))


def test_defaults(tmp_path, capsys):
    pytest.importorskip("zuko")
    pytest.importorskip("sklearn")
    rows = quick("defaults", tmp_path, capsys)["rows"]
    first, *others = rows
    assert first["gain"] == first["gains"]["wine"] == 0
    assert [row["setting"] for row in others] == ["Gaussian mixture", "zuko MAF, 1e-2"]
    assert all(row["gain"] != 0 for row in others)


def test_settings_are_chosen_without_test_rows():
    parts = [torch.arange(100.0)[:, None], torch.arange(100.0, 112)[:, None], torch.arange(112.0, 124)[:, None]]
    for ordered in (False, True):
        found = defaults.choosing(tabular.Split(*parts), seed=1, ordered=ordered)
        rows = torch.cat([found.train, found.validation, found.test])
        assert torch.equal(rows.sort(0).values, torch.cat(parts[:2]))
        assert len(found.validation) == len(found.test) == 11
        assert torch.equal(rows, torch.cat(parts[:2])) == ordered


def test_outliers(tmp_path, capsys, monkeypatch):
    pytest.importorskip("sklearn")
    rows = quick("outliers", tmp_path, capsys)["rows"]
    auc = {row["model"]: row["auc"] for row in rows}
    assert list(auc) == list(outliers.MODELS)
    assert all(row["rows"] == 180 and row["features"] == 3 for row in rows)
    # The outliers lie in the bow of a parabola, near the middle of all rows.
    assert auc["FlowDensity"] > 0.95
    assert outliers.means(rows, "auc")["mean", "FlowDensity"] == auc["FlowDensity"]
    # What is there is not measured again.
    monkeypatch.setattr(outliers, "side_by_side", lambda work, jobs, *place: iter(() if not jobs else None))
    outliers.main(["--quick", "--out", str(tmp_path)])
    assert harness.load(tmp_path / "outliers.json")["rows"] == rows


def test_outliers_train_on_inliers_alone():
    x, y = outliers.made()
    train, test, labels = outliers.halves(x, y, seed=1)
    inliers = {tuple(row) for row in x[y == 0]}
    assert {tuple(row) for row in train} | {tuple(row) for row in test[labels == 0]} == inliers
    assert len(train) + (labels == 0).sum() == len(inliers)
    assert labels.sum() == y.sum()


def test_impossible_rows_are_the_most_surprising():
    x, _ = outliers.made()
    letters = np.array(["a", "b"], dtype=object)[np.arange(len(x)) % 2]
    whole = np.concatenate([x.astype(object), letters[:, None]], 1)
    new = whole[:3].copy()
    new[1, 3] = "c"  # a category that training has not seen: minus infinity
    with pytest.warns(UserWarning, match="probability zero"):
        scores = outliers.flow(whole, 0, max_steps=5)(new)
    assert np.isfinite(scores).all()
    assert scores.argmin() == 1


def test_shares(tmp_path, capsys):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    result = quick("shares", tmp_path, capsys, tables=3)
    rows = {(row["question"], row["model"]): row for row in result["rows"]}
    assert rows["one day", "Gaussian"]["test_nats"] < rows["one day", "Student t"]["test_nats"]
    assert rows["next day", "DCC Gaussian"]["test_nats"] < rows["next day", "DCC Student t"]["test_nats"]
    assert len(rows["one day", "QuAR"]["nats"]) == 2
    scenario = result["scenario"]
    assert [row["share"] for row in scenario["shares"]] == ["B", "C"]
    assert all(row["QuAR"] == sorted(row["QuAR"]) for row in scenario["shares"])
    assert scenario["nats_near"]
    assert (tmp_path / "shares.png").read_bytes()[1:4] == b"PNG"


def test_shares_baselines():
    """The Student t that made the rows is found again, and what is moving knows of no day but those before."""
    rng = np.random.default_rng(0)
    truth = np.array([[2.0, 0.6], [0.6, 1.0]])
    z = rng.normal(size=(4000, 2)) @ np.linalg.cholesky(truth).T
    x = 1 + z * np.sqrt(5 / rng.chisquare(5, 4000))[:, None]
    mean, covariance, nu = shares.student_by_em(x)
    assert np.allclose(mean, 1, atol=0.1)
    assert np.allclose(covariance, truth, rtol=0.1)
    assert nu == pytest.approx(5, rel=0.15)
    normal, ladj = shares.whitened(x - mean, covariance)
    known = torch.distributions.MultivariateNormal(torch.from_numpy(mean), torch.from_numpy(covariance))
    assert np.allclose(shares.gaussian(normal, ladj), known.log_prob(torch.from_numpy(x)))
    r, dates = shares.Days.made(600).r, np.where(np.arange(600) < 500, "2012-01-01", "2016-01-01")
    other = np.where(np.arange(600)[:, None] < 550, r, 5.0)
    first, second = (shares.moving(shares.Days(x, dates, ("A", "B", "C"))) for x in (r, other))
    for kind, found in first.items():
        for setting, (z, ladj) in found.items():
            assert np.allclose(z[:550], second[kind][setting][0][:550])
            assert np.allclose(ladj[:551], second[kind][setting][1][:551])
            assert not np.isclose(ladj[551], second[kind][setting][1][551])


def power_file(folder, rows=200):
    counts = np.random.default_rng(0).integers(0, 100, (rows, 8)).astype(np.int16)
    np.savez(folder / "power.npz", q=counts, scale=np.array([1000, 1000, 100, 10, 1, 1, 1, 1]))
    return counts


def test_tabular_power_by_its_protocol(tmp_path, capsys):
    counts = power_file(tmp_path)
    data = tabular.power(tmp_path)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [162, 18, 20]
    known = torch.cat([data.train, data.validation]).double()
    assert torch.allclose(known.mean(0), torch.zeros(6, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(known.std(0, correction=0), torch.ones(6, dtype=torch.float64), atol=1e-6)
    # The sub-meterings, back in their unit and rounded down, are those of the file, in the order of the generator.
    order = np.arange(200)
    np.random.RandomState(42).shuffle(order)
    rows = torch.cat([data.train, data.validation, data.test])
    rank = rows[:, 2].argsort().argsort()
    whole = torch.from_numpy(counts[order, 4].astype(float))
    assert all(rank[i] < rank[j] for i in range(50) for j in range(50) if whole[i] < whole[j])
    minutes = np.unique(counts[:, 7])
    assert [len(column.unique()) for column in rows.T] == [200, 200, 200, 200, 200, len(minutes)]

    command = ["--quick", "--out", str(tmp_path), "--data", str(tmp_path), "--power", "--variants", "conditioned"]
    command += ["--steps", "4", "--batch", "16"]
    with pytest.raises(SystemExit, match="goes on from"):
        tabular.main([*command, "--minutes", "0"])
    assert (tmp_path / "power" / "conditioned.training").exists()
    tabular.main(command)
    (row,) = harness.load(tmp_path / "tabular.json")["power_gpu"]
    assert row["steps"] == 4
    assert row["validation_nats"] is not None
    assert "POWER, all rows" in capsys.readouterr().out

    # By the clock, without a number of steps.
    command = ["--quick", "--out", str(tmp_path), "--data", str(tmp_path), "--power", "--batch", "16"]
    with pytest.raises(SystemExit, match="expected --steps, --minutes"):
        tabular.main([*command, "--variants", "plain"])
    tabular.main([*command, "--variants", "plain", "--minutes", "0.02"])
    rows = harness.load(tmp_path / "tabular.json")["power_gpu"]
    found = [(row["model"], row["stopped"]) for row in rows]
    assert found == [("conditioned, rate 0.002", "max_steps"), ("plain, rate 0.002", "max_seconds")]


def test_tables_without_their_folder_say_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="--data or the variable QUARFLOW_TABLES"):
        tabular.TABLES["protein"](tmp_path)


def test_noise_keeps_the_order_of_columns_and_fills_their_steps():
    x = np.stack([np.arange(2000) % 7 * 2.0, np.linspace(0, 1, 2000)], 1)
    noisy = tabular.continuous(x)
    assert torch.equal(noisy[:, 1], torch.from_numpy(x[:, 1]))  # nothing is repeated there
    added = noisy[:, 0] - torch.from_numpy(x[:, 0])
    assert added.min() >= 0
    assert 1.99 < added.max() < 2
    assert len(noisy[:, 0].unique()) == 2000
    assert torch.equal(noisy, tabular.continuous(x))


def test_a_kernel_density_is_a_density():
    torch.manual_seed(0)
    centres = torch.randn(20, 2)
    axis = torch.linspace(-8, 8, 161)
    total = tabular.kernel_log_prob(centres, torch.cartesian_prod(axis, axis), [0.5, 1.0]).exp().sum(1) * 0.01
    assert torch.allclose(total, torch.ones(2), atol=1e-4)


def test_scoring(tmp_path, capsys):
    pytest.importorskip("zuko")
    rows = quick("scoring", tmp_path, capsys)["rows"]
    for row in rows:
        if row["model"] in ("QuAR", "QuAR, float64"):
            size = row["parameters"]
            assert row["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
        elif "as many" in row["model"]:
            assert abs(row["parameters"] - size) <= 0.05 * size
        assert row["rows_per_second"]["median"] > 0


def test_states(tmp_path, capsys):
    rows = {row["state"]: row for row in quick("states", tmp_path, capsys)["rows"]}
    assert rows["one file"]["most_bits_from_whole"] == rows["in pieces of 64 KiB"]["most_bits_from_whole"] == 0
    assert 0 < rows["compact"]["most_bits_from_whole"] < 0.01
    assert rows["compact"]["bytes_per_parameter"] < 0.75 * rows["one file"]["bytes_per_parameter"]


def test_table2(tmp_path, capsys):
    """Its twin on a CPU, or on a GPU if there is one."""
    result = quick("table2", tmp_path, capsys, tables=2)
    rows = {(row["what"], row["model"], row["how"]): row for row in result["rows"]}
    assert {model for _, model, _ in rows} == {"QuAR", "residual", "QuAR, MNIST"}
    assert rows["test", "QuAR", "full"]["bits_from_full"] == 0
    for model in ("QuAR", "residual"):
        assert 0 < abs(rows["test", model, "bf16"]["bits_from_full"]) < 0.02
    assert (result["gpu"] is None) == all(row["gibibytes"] is None for row in rows.values())
    assert 0 < rows["sample", "QuAR", "banach"]["apart"] < 1e-3
    for name, key in {
        "train_recomputation_ms": ("train", "QuAR", "bf16, graph, recomputation"),
        "test_ms_bf16": ("test", "QuAR", "bf16"),
        "test_ms_fp32": ("test", "QuAR", "tf32"),
        "sample_ms": ("sample", "QuAR", "newton"),
        "sample_banach_ms": ("sample", "QuAR", "banach"),
        "mnist_train_ms": ("train", "QuAR, MNIST", "bf16, graph"),
    }.items():
        assert result[name] == rows[key]["milliseconds"]["median"]
    for name, what, model in (
        ("train_ms", "train", "QuAR"),
        ("residual_train_ms", "train", "residual"),
        ("residual_test_ms", "test", "residual"),
    ):
        assert result[name] == min(
            row["milliseconds"]["median"] for (w, m, _), row in rows.items() if (w, m) == (what, model)
        )
    for row in result["rows"]:
        assert ("share_of_products" in row) == (row["model"] != "residual" and row["what"] != "sample")
    assert rows["train", "QuAR", "bf16"]["operations"] > rows["test", "QuAR", "bf16"]["operations"]  # of half as many
    # What was cut is said to be missing.
    assert table2.summary(harness.load(tmp_path / "table2.json")["rows"][:1])["sample_ms"] is None


@pytest.mark.parametrize("name", everything.ON_A_GPU)
def test_those_on_a_gpu_need_one(name):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match=f"{name}: expected a GPU"):
        importlib.import_module(f"benchmarks.{name}").main(["--out", "nowhere"])


def test_growth(tmp_path, capsys):
    rows = quick("growth", tmp_path, capsys, tables=2)["rows"]
    memory = {(row["axis"], row["value"], row["call"]): row["mebibytes"] for row in rows}
    assert {axis for axis, _, _ in memory} == {"batch", "size", "D of vectors"}
    for axis, small, large in (("batch", 2, 4), ("size", 4, 8), ("D of vectors", 2, 4)):
        for call in ("log_prob", "training step"):
            assert memory[axis, small, call] < memory[axis, large, call]
    assert "exponent" not in scaling.growth(harness.load(tmp_path / "growth.json")["rows"][:2], "value", "batch")


def test_vectors(tmp_path, capsys):
    pytest.importorskip("zuko")
    rows = quick("vectors", tmp_path, capsys)["rows"]
    assert {row["way"] for row in rows} == {"eager", "CUDA graph"}
    assert {row["model"] for row in rows} == {"QuAR", "zuko MAF", "zuko NSF"}
    for row in rows:
        assert abs(row["parameters"] - rows[0]["parameters"]) <= 0.05 * rows[0]["parameters"]
        assert (row["ratio"]["median"] == 1) == (row["model"] == "zuko MAF")


def test_vectors_go_on_without_what_fails(monkeypatch):
    def prepared(way, model, x):
        if model == "bad":
            raise RuntimeError("no kernel\nmore")
        return lambda: None

    model = vectors.Contestant(nn.Linear(2, 2), 1, (2,), None, None, None)
    monkeypatch.setattr(vectors, "prepared", prepared)
    monkeypatch.setattr(vectors, "parameters", lambda module: (6, 6))
    models = {"QuAR": model, vectors.REFERENCE: dataclasses.replace(model, module=model.module)}
    monkeypatch.setattr(vectors, "prepared", lambda way, each, x: prepared(way, "bad" if each is model else "", x))
    bad, good = vectors.measure(2, "eager", models, torch.zeros(1, 2), 2)
    assert bad["failed"] == "RuntimeError: no kernel"
    assert good["ratio"].median == 1
    assert "| failed | failed |" in vectors.show({"rows": [bad, good], "settings": {"batch": 1}})


def test_picture_of_speed(tmp_path):
    """From results of the form that the benchmarks write."""
    assert speed.draw(tmp_path) is None
    spread = {"median": 2.0, "low": 1.0, "high": 3.0}
    names = ("train_ms", "residual_train_ms", "test_ms_bf16", "residual_test_ms", "sample_ms", "sample_banach_ms")
    steps = [
        {"axis": axis, "value": value, "call": "training step", "milliseconds": spread}
        for axis in ("batch", "D of vectors")
        for value in (24, 96)
    ]
    ways = [{"d": 6, "way": "eager", "model": name, "milliseconds": spread} for name in ("QuAR", "zuko MAF")]
    made = {
        "table2": dict.fromkeys(names[:4], 5.0) | dict.fromkeys(names[4:], None),
        "growth": {"rows": steps, "settings": {"images": {"batch": 96}}},
        "vectors": {"rows": [*ways, ways[0] | {"failed": "no"}], "settings": {"batch": 4096}},
    }
    widths = []
    for name, result in made.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result | {"gpu": None, "cpu": "a processor"}))
        path = speed.draw(tmp_path)
        widths.append(int.from_bytes(path.read_bytes()[16:20], "big"))
    assert widths[0] < widths[1] < widths[2]  # a panel for each


def test_ratio_is_round_by_round():
    slow, fast = [2.0, 20.0, 4.0], [1.0, 10.0, 2.0]  # a machine that was ten times slower for one round
    assert harness.ratio(slow, fast) == harness.Spread(2.0, 2.0, 2.0)


def test_interleave_calls_everything_once_a_round():
    calls = []

    def measure(name):
        return lambda: calls.append(name) or float(len(calls))

    found = harness.interleave({name: measure(name) for name in "abc"}, rounds=5, warmup=2)
    assert len(calls) == 3 * 7
    rounds = [calls[i : i + 3] for i in range(6, 21, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1
    assert all(len(times) == 5 for times in found.values())


def test_peak_memory_counts_what_lives_at_once():
    def call():
        a = torch.zeros(1000)
        del a
        b, c = torch.zeros(2000), torch.zeros(500)
        return b.sum() + c.sum()

    assert 10_000 <= peak_memory(call) < 10_100


def test_exponent():
    assert scaling.exponent([8, 16, 32], [3 * d**1.7 for d in (8, 16, 32)]) == pytest.approx(1.7)


def test_results_are_numbers_that_json_knows(tmp_path):
    options = harness.start("A test.", ["--quick", "--out", str(tmp_path)])
    spread = harness.Spread.of([1.0, 2.0, 3.0])
    path = harness.save(options, "test", {}, [{"time": spread}])
    assert harness.load(path)["rows"] == [{"time": spread}]
    with pytest.raises(ValueError, match="JSON"):
        harness.save(options, "test", {}, [{"time": math.nan}])
    with pytest.raises(TypeError, match="Module"):
        harness.save(options, "test", {}, [{"time": nn.Module()}])
    assert harness.load(path)["rows"] == [{"time": spread}]  # the result before is still whole


def test_quick_results_are_not_kept():
    with pytest.raises(SystemExit):
        harness.start("A test.", ["--quick"])


def test_the_tables_of_the_readme_are_those_of_the_results():
    readme = everything.README.read_text()
    assert readme == everything.with_tables(readme)
    for path in harness.RESULTS.glob("*.json"):
        result = harness.load(path)
        assert not result["quick"]
        assert result["benchmark"] == path.stem in (*everything.NAMES, *everything.ON_A_GPU)
