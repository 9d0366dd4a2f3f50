"""A small twin of every experiment, its command line, and what its numbers claim to be."""

import copy
import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import quarflow as qf  # noqa: E402
from experiments import figure2, figure3, figures4_6, images, jobs, readme, reproduce, synthetic, table1  # noqa: E402
from experiments import stability as steadiness  # noqa: E402
from experiments.synthetic import Model  # noqa: E402
from quarflow.cli import app  # noqa: E402
from quarflow.data.images import load_images  # noqa: E402
from quarflow.data.toy import EightGaussians, GaussianMixture, TwoUniforms  # noqa: E402
from quarflow.transforms import Affine, Chain, Reverse  # noqa: E402

PNG = b"\x89PNG"
NUMBERS = {"test_nats", "test_nats_se", "parameters", "step_ms"}


def shrunk(models):
    """The same models with one small hidden layer, and two flows in place of 16."""
    found = {}
    for name, model in models.items():
        options = {**model.options, "hidden": (4,), "blocks": min(2, model.options["blocks"])}
        found[name] = Model(model.label, options, model.optimizer)
    return found


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(figure2, "MODELS", shrunk(figure2.MODELS))
    monkeypatch.setattr(figure3, "MODELS", shrunk(figure3.MODELS))
    monkeypatch.setattr(synthetic, "TEST_POINTS", 200)
    monkeypatch.setattr(synthetic, "CELLS", 40)
    monkeypatch.setattr(reproduce, "ROUNDS", 3)


def command(*words):
    return CliRunner().invoke(app, ["reproduce", *map(str, words)])


def times(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if "timing" not in path.name}


def checked(folder, name):
    """The result of a figure, with what holds for every one checked."""
    text = (folder / f"{name}.json").read_text()
    result = json.loads(text)
    assert set(result) >= {"figure", "command", "hardware", "versions", "date", "commit", "settings", "models"}
    assert str(ROOT) not in text
    assert os.uname().nodename not in text
    assert name in result["command"]
    assert readme.section(result).startswith("## Figure")
    return result


def test_every_figure_is_reproduced_kept_and_made_again_with_fresh(tiny, tmp_path):
    done = command("all", "--out", tmp_path, "--steps", 12, "--seeds", 2, "--batch-size", 32)
    assert done.exit_code == 0, done.output
    two, three, modes = (checked(tmp_path, name) for name in reproduce.FIGURES)

    assert set(two["models"]) == {"trick", "no-trick", "paths"}
    assert two["true_nats"] == pytest.approx(-math.log(2))
    assert two["trick"]["parameters_added"] == 1
    means = [two["models"][name]["test_nats"] for name in ("trick", "no-trick")]
    assert two["trick"]["gap_nats"] == pytest.approx(means[0] - means[1])
    assert len(two["trick"]["gaps"]) == 2
    assert set(three["models"]) == {"maf", "residual", "quar", "quar-coordinate"}
    for model in (*two["models"].values(), *three["models"].values()):
        assert set(model) >= NUMBERS
        assert model["step_ms"] > 0
        assert len(model["seeds"]) == 2
    assert three["models"]["maf"]["optimizer"] == "adamax"
    assert three["settings"]["steps"] == 12
    assert set(modes["models"]) == set(three["models"])
    assert modes["settings"]["seeds"] == 1
    pictures = [tmp_path / f"figure{n}.png" for n in range(2, 7)]
    assert {tmp_path / model["picture"] for model in modes["models"].values()} >= set(pictures[2:])
    for path in pictures:
        assert path.read_bytes().startswith(PNG)
        assert path.stat().st_size < 300_000
        assert str(path) in done.output

    before = times(tmp_path / "runs")
    assert not any(name.endswith(".training") for name in before)
    again = command("figure3", "--out", tmp_path, "--steps", 12, "--seeds", 2, "--batch-size", 32)
    assert again.exit_code == 0
    assert times(tmp_path / "runs") == before
    assert {**three, "command": None} == {**checked(tmp_path, "figure3"), "command": None}
    other = command("figure3", "--out", tmp_path, "--steps", 13, "--seeds", 2, "--batch-size", 32)
    assert other.exit_code == 2
    assert "--fresh" in other.output
    fresh = command("figure2", "--out", tmp_path, "--steps", 13, "--seeds", 1, "--batch-size", 32, "--fresh")
    assert fresh.exit_code == 0
    changed = {name for name, when in times(tmp_path / "runs").items() if before.get(name) != when}
    assert changed == {f"figure2-{m}-seed0.{end}" for m in two["models"] for end in ("json", "qf")}


def test_other_models_join_figure_3(tiny, tmp_path):
    words = ["--out", tmp_path, "--steps", 3, "--seeds", 1, "--batch-size", 16, "--models", "quar", "--also"]
    done = command("figure3", *words, "nice, planar")
    assert done.exit_code == 0, done.output
    result = checked(tmp_path, "figure3")
    assert list(result["models"]) == ["quar", "nice", "planar"]
    assert result["models"]["quar"]["test_nats_se"] is None
    assert result["command"].endswith("--models quar --also nice,planar")


def test_a_flow_of_zuko_joins(tiny, tmp_path, monkeypatch):
    pytest.importorskip("zuko")
    small = Model("zuko's NSF", {"model": "zuko:NSF", "features": 2, "hidden_features": (4,), "transforms": 1})
    assert figure3.also("zuko:NSF").options["model"] == "zuko:NSF"
    monkeypatch.setattr(figure3, "also", lambda name: small)
    words = ["--out", tmp_path, "--steps", 3, "--batch-size", 16, "--models", "quar", "--also", "zuko:NSF"]
    done = command("figures4-6", *words)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "figures4-6-zuko-NSF.png").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["figure9"], "figures4-6"),
        (["figure3", "--models", "glow"], "quar-coordinate"),
        (["figure3", "--also", "glow"], "nice"),
        (["table1", "--models", "maf"], "flowpp"),
        (["table1", "--minutes", "0"], "minutes"),
        (["table1", "--precision", "half"], "precision"),
        (["stability", "--rates", "fast"], "rates"),
        (["stability", "--rates", "-1"], "rates"),
        (["stability", "--data", "letters"], "data"),
        (["figure3", "--also", "zuko:Flow"], "zuko:NSF"),
        (["figure2", "--also", "nice"], "figure3"),
        (["figure2", "--steps", "0"], "steps"),
        (["figure2", "--learning-rate", "-1"], "learning_rate"),
        (["figure2", "--out", __file__], "file"),
    ],
)
def test_a_command_that_is_not_right(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command(*words)
    assert done.exit_code == 2
    assert says in done.output
    assert list(tmp_path.iterdir()) == []


def test_version_and_help():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"quarflow {qf.__version__}\n")
    assert "reproduce" in CliRunner().invoke(app, ["--help"]).output


def test_without_the_experiments_the_command_says_so(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "experiments"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(ROOT))])
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if "editable" not in str(f)])
    done = command("figure2")
    assert done.exit_code == 2
    assert "needs the package" in done.output


def test_a_run_that_fails_is_told_and_the_others_go_on(tiny, tmp_path, monkeypatch):
    whole = synthetic.build

    def build(job):
        flow = whole(job)
        if job.name == "no-trick":
            flow.register_forward_hook(lambda module, args, out: out * math.nan)
        return flow

    monkeypatch.setattr(synthetic, "build", build)
    done = command("figure2", "--out", tmp_path, "--steps", 5, "--seeds", 1, "--batch-size", 16)
    assert done.exit_code == 1
    assert "TrainingDiverged" in done.output
    assert (tmp_path / "runs" / "figure2-paths-seed0.qf").exists()
    assert not (tmp_path / "figure2.json").exists()


# The table of images.


@pytest.fixture
def tiny_table(monkeypatch):
    small = {"blocks": (1, 1), "hidden": 4}
    own = {"flowpp": {"depth": 1, "components": 2}, "residual": {"dense_blocks": 1, "dense_hidden": (4,)}}
    systems = {
        name: dataclasses.replace(system, of_data={"digits": small | own.get(name, {})})
        for name, system in table1.SYSTEMS.items()
    }
    monkeypatch.setattr(table1, "SYSTEMS", systems)
    monkeypatch.setattr(table1, "ROUNDS", 2)


def test_a_small_table_is_made_kept_and_goes_on(tiny_table, tmp_path, monkeypatch):
    words = ["table1", "--data", "digits", "--steps", 5, "--out", tmp_path]
    done = command(*words, "--models", "quar,glow", "--settings", "published")
    assert done.exit_code == 0, done.output
    shutil.rmtree(tmp_path / "runs")  # the table is enough to go on, on another machine
    kept = json.loads((tmp_path / "table1.json").read_text())["digits"]["glow"]

    # One of the runs that are left diverges: it has a row that says so, and the others go on.
    whole = table1.train

    def train(run, folder, *arguments, **options):
        if folder.name == "digits-residual-engine":
            raise qf.TrainingDiverged("the loss is NaN", qf.training.History([5]))
        return whole(run, folder, *arguments, **options)

    monkeypatch.setattr(table1, "train", train)
    done = command(*words)
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "runs" / "digits-glow-published").exists()
    result = json.loads((tmp_path / "table1.json").read_text())
    assert set(result["digits"]) == {"quar", "residual", "glow", "flowpp"}
    assert kept.items() <= result["digits"]["glow"].items()
    assert len(kept["curve"]) > 1
    for name, row in result["digits"].items():
        assert row["published_bpd"] is None
        for each in (row, row["engine"]):
            assert each["step_ms"] > 0
            assert 0 < each["parameters"] <= each["parameters_with_masked"]
            assert each["compile_seconds"] >= 0
            assert each["memory_mib"] is None
            if each is not result["digits"]["residual"]["engine"]:
                assert each["steps"] == 5, name
                assert 2 < each["test_bpd"] < 12
                assert each["test_bpd_se"] > 0
                assert each["sample_ms"] > 0
    assert result["digits"]["residual"]["engine"]["diverged"] == "the loss is NaN"
    assert "| digits | Residual flow | engine |  | diverged |" in done.output
    assert (tmp_path / "table1.png").read_bytes().startswith(PNG)
    samples = np.asarray(Image.open(tmp_path / "table1_digits_samples.png").convert("L"))
    tiles = samples.reshape(2, table1.TILE, 4, table1.TILE).transpose(2, 0, 1, 3).reshape(4, 2, -1)
    assert ((tiles == 255).mean(2) < 0.9).tolist() == [[True, True], [True, False], [True, True], [True, True]]
    assert str(tmp_path) not in (tmp_path / "table1.json").read_text()
    assert "--data digits --steps 5" in result["digits"]["quar"]["engine"]["command"]

    said = readme.with_results(readme.MARK, tmp_path)
    for text in (
        "## Results of table 1\n\n`quarflow reproduce table1 --data digits --models quar,glow --settings published",
        "*Lowest on digits, published settings:* ",
        "| digits | Residual flow | engine |  | diverged |",
        "(results/table1.png)",
        "(results/table1_digits_samples.png)",
    ):
        assert text in said

    other = command(*words[:-3], 6, *words[-2:])
    assert other.exit_code == 2
    assert "--fresh" in other.output


def test_the_sizes_and_settings_of_the_table():
    table = table1.Table()
    assert (table.minutes, table.steps) == (5.0, None)
    run = table.run("mnist", "glow", "published")
    assert dict(run.model) == {"name": "glow", "blocks": (32, 32)}
    assert (run.training.batch_size, run.training.optimizer, run.training.max_seconds) == (512, "adamax", 300)
    engine = table.run("cifar10", "flowpp", "engine")
    assert (engine.training.learning_rate, engine.training.max_steps, engine.model["dropout"]) == (1e-3, None, 0.2)
    assert table.run("cifar10", "quar", "engine").model["hidden"] == 528
    assert table.run("mnist", "residual", "engine").training.evaluate_every == 500
    assert (engine.graph, table1.Table(graph=False).run("mnist", "glow", "engine").graph) == (True, False)
    assert table1.Table(minutes=2.0, graph=False).command() == "quarflow reproduce table1 --minutes 2.0 --no-graph"
    assert steadiness.Stability(graph=False).command() == "quarflow reproduce stability --no-graph"
    with pytest.raises(ValueError, match="data: expected one of"):
        table1.Table(data=("letters",))
    with pytest.raises(ValueError, match="settings: expected one or more"):
        table1.Table(settings=())


def test_stability_says_what_trains_and_what_does_not(tiny_table, tmp_path):
    words = ["stability", "--steps", 6, "--out", tmp_path]
    assert command(*words, "--models", "quar", "--rates", "1e-3").exit_code == 0
    done = command(*words, "--models", "quar,glow", "--rates", "2e-5,1e-3")
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "stability_digits.json").read_text())
    assert len(result["runs"]) == 8  # the two of the first command are kept
    assert [row["rate"] for row in result["runs"]].count(1e-3) == 4
    assert sum("--models quar --" in row["command"] for row in result["runs"]) == 2
    for row in result["runs"]:
        assert row["before_bpd"] == pytest.approx(6, abs=2)
        if row["rate"] == 1e-3:
            assert row["steps"] == 6
            assert row["validation_bpd"] < row["before_bpd"] <= row["highest_bpd"] + 0.5
            assert row["train_bpd"] == pytest.approx(row["validation_bpd"], abs=0.3)
    assert (tmp_path / "stability_digits.png").read_bytes().startswith(PNG)
    said = readme.with_results(readme.MARK, tmp_path)
    assert "## Stability on digits\n" in said
    assert "That QuAR trains there holds." in said
    other = command("stability", "--steps", 7, "--out", tmp_path)
    assert other.exit_code == 2
    assert "--fresh" in other.output


def test_what_diverges_is_told_and_drawn(tmp_path, monkeypatch):
    def row(system, rate, batch, bits):
        found = {"system": system, "rate": rate, "batch": batch, "validation_bpd": bits, "before_bpd": 6.0}
        return found | {"highest_bpd": 13.0 if batch == 512 and system == "quar" else 8.0}

    runs = [row("quar", 1e-3, 64, 4.0), row("quar", 1e-3, 512, 4.05), row("quar", 0.1, 64, None)]
    runs += [row("glow", 1e-3, 64, 7.0), row("glow", 2e-5, 512, 5.0)]
    result = {"settings": {"steps": 9}, "runs": runs}
    quar, glow, claim = steadiness.verdicts(result)
    assert quar == (
        "*QuAR*: 1 of 3 runs diverge, or end worse than they begin; in 1 of the others a step is above twice the "
        "bits/dim of the beginning; the best ends at 4.00 bits/dim (0.001, batch 64); "
        "within 0.1 of that at batch 64: 0.001; within 0.1 of that at batch 512: 0.001; "
        "the paper's, 0.001, batch 64: 4.00 bits/dim."
    )
    assert glow == (
        "*Glow*: 1 of 2 runs diverge, or end worse than they begin; the best ends at 5.00 bits/dim (2e-05, batch 512); "
        "within 0.1 of that at batch 64: none; within 0.1 of that at batch 512: 2e-05; "
        "the paper's, 2e-05, batch 512: 5.00 bits/dim."
    )
    assert claim == (
        f'*"{steadiness.CLAIM}"* That QuAR trains there holds. That Glow needs the other holds: in as many steps it '
        "ends at 7.00 bits/dim with QuAR's rate and batch, at 5.00 bits/dim with its own."
    )
    steadiness.draw(result, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    runs[-2]["validation_bpd"] = 4.5
    assert "That Glow needs the other does not hold" in steadiness.verdicts(result)[-1]

    # A loss that is not finite is a row, not an error.
    what = steadiness.Stability(steps=3)
    flow = qf.models.quar_image((1, 8, 8), blocks=(1,), hidden=4)
    flow.register_forward_hook(lambda module, args, out: out * math.nan if torch.is_grad_enabled() else out)
    run = SimpleNamespace(build=lambda shape: flow, validation=0.1)
    monkeypatch.setattr(steadiness.Table, "run", lambda *names: run)
    found = steadiness.trained(what, load_images("digits"), "quar", 1e-3, 64)
    assert found["validation_bpd"] is None
    assert "the loss is nan" in found["diverged"]


def test_the_systems_of_the_table_have_their_published_number_of_parameters():
    shapes = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
    checked = []
    for name, system in table1.SYSTEMS.items():
        for data, published in system.size.items():
            options = dict(table1.Table().run(data, name, "published").model)
            with torch.device("cpu" if name == "residual" else "meta"):  # whose bounds look at its weights
                flow = getattr(qf.models, options.pop("name"))(shapes[data], **options)
            assert sum(p.numel() for p in flow.parameters()) == pytest.approx(published, rel=0.01)
            checked.append((name, data))
    assert checked == [("residual", "mnist"), ("residual", "cifar10"), ("glow", "cifar10"), ("flowpp", "cifar10")]


# Jobs.


def small_job(steps=60, **changes):
    model = Model("QuAR", {"model": "quar", "features": 1, "blocks": 1, "hidden": (4,)})
    job = synthetic.Job("figure2", "small", model, "two_uniforms", 0, steps, 16, 1e-2)
    return dataclasses.replace(job, **changes)


def test_a_run_that_was_cut_goes_on_to_the_same_end(tiny, tmp_path):
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    job, seen = small_job(), []

    def stop(trainer):
        seen.append(trainer.step)
        if trainer.step == 31 and len(seen) == 31:
            signal.raise_signal(signal.SIGINT)

    for folder in (cut, whole):
        folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        synthetic.train(job, cut, stop)
    assert jobs.finished(job, cut) is None
    assert (cut / f"{job.stem}.training").exists()
    found = synthetic.train(job, cut, stop)
    assert seen == list(range(1, 61))
    assert {path.suffix for path in cut.iterdir()} == {".json", ".qf"}
    twin = synthetic.train(job, whole, lambda trainer: None)
    assert found["test_nats"] == twin["test_nats"]
    assert jobs.finished(job, cut) == found


def test_ctrl_c_leaves_what_is_finished(tiny, tmp_path, monkeypatch):
    def stop(job, folder, show):
        if job.name == "paths":
            raise synthetic.Interrupted
        return synthetic.train(job, folder, show)

    monkeypatch.setattr(jobs, "train", stop)
    words = ["figure2", "--out", tmp_path, "--steps", 5, "--seeds", 1, "--batch-size", 16]
    done = command(*words)
    assert done.exit_code == 130
    assert "goes on" in done.output
    monkeypatch.undo()
    assert not (tmp_path / "figure2.json").exists()


def test_jobs_side_by_side_are_those_one_by_one(tmp_path):
    todo = [small_job(seed=seed) for seed in (0, 1)] + [small_job(name="broken", data="no such density")]
    told = []
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder, workers in ((alone, 1), (together, 2)):
        failed = jobs.run(todo, folder, workers, lambda job, state, value: told.append((job, state, value)))
        assert failed == [todo[2]]
    for job in todo[:2]:
        a, b = jobs.finished(job, alone), jobs.finished(job, together)
        assert a["test_nats"] == b["test_nats"]
        assert [state for j, state, _ in told if j == job and state != "step"] == ["started", "finished"] * 2
    assert all("no such density" in value for job, state, value in told if state == "failed")


def test_jobs_on_one_device_go_on_and_fail_alone(tiny, tmp_path, monkeypatch):
    """What a GPU runs, here on a CPU: cut after 31 rounds, they come to the end that they would have come to."""
    whole = synthetic.build

    def build(job):
        flow = whole(job)
        if job.name == "broken":
            flow.register_forward_hook(lambda module, args, out: out * math.nan)
        return flow

    monkeypatch.setattr(synthetic, "build", build)
    todo, cut, straight = [small_job(seed=0), small_job(seed=1)], tmp_path / "cut", tmp_path / "straight"
    for folder in (cut, straight):
        folder.mkdir()
    rounds = 0

    def stop(job, state, value):
        nonlocal rounds
        rounds += state == "step"
        if rounds == 31:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(synthetic, "SHOW_EVERY", 0.0)
        with pytest.raises(KeyboardInterrupt):
            jobs._on_one_device(todo, cut, stop)
    assert {path.suffix for path in cut.iterdir()} == {".json", ".training"}
    told = []
    todo.append(small_job(name="broken"))
    for folder in (cut, straight):
        failed = jobs._on_one_device(todo, folder, lambda job, state, value: told.append((job, state, value)))
        assert failed == [todo[2]]
    for job in todo[:2]:
        assert jobs.finished(job, cut)["test_nats"] == jobs.finished(job, straight)["test_nats"]
        assert [state for j, state, _ in told if j == job and state != "step"] == ["started", "finished"] * 2
    assert all("TrainingDiverged" in value for job, state, value in told if state == "failed")
    assert jobs.finished(todo[0], cut)["hardware"] == jobs.finished(todo[0], straight)["hardware"]
    assert not list(cut.glob("*-seed[01].training"))


def test_a_run_says_where_it_was_before_it_was_cut(tmp_path, monkeypatch):
    job, told = small_job(), {"hardware": "a large machine"}
    monkeypatch.setattr(synthetic, "provenance", lambda device: told)
    assert synthetic.begin(job, tmp_path) == {"hardware": "a large machine"}
    (tmp_path / f"{job.stem}.training").touch()
    told["hardware"] = "a small one"
    assert synthetic.begin(job, tmp_path) == {"hardware": "a large machine; then a small one"}
    assert synthetic.begin(job, tmp_path) == {"hardware": "a large machine; then a small one"}
    (tmp_path / f"{job.stem}.training").unlink()
    assert synthetic.begin(job, tmp_path) == {"hardware": "a small one"}


def test_the_longest_jobs_go_first(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(jobs, "train", lambda job, folder, show: order.append(job.name))
    todo = [small_job(name=name) for name in ("short", "long")]
    jobs.run(todo, tmp_path, cost={"figure2 short": 1.0, "figure2 long": 9.0})
    assert order == ["long", "short"]


@pytest.mark.parametrize("ignored", [False, True], ids=["", "where Ctrl-C is ignored"])
def test_a_real_process_is_interrupted_with_its_state_on_disk(tmp_path, ignored):
    words = ["reproduce", "figure2", "--out", str(tmp_path), "--steps", "20000", "--seeds", "1", "--jobs", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "quarflow.cli", *words],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored else None,
    )
    running = [tmp_path / "runs" / f"figure2-{name}-seed0.json" for name in ("trick", "no-trick")]
    deadline = time.monotonic() + 100
    while not all(path.exists() for path in running) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.5)
    process.terminate()  # as `timeout` does
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "goes on" in said
    for path in running:
        assert path.with_suffix(".training").exists(), said


# Numbers.


def standard_normal(scale=1.0):
    flow = qf.models.quar(2, blocks=1, hidden=(4,), actnorm=False)
    affine = Affine(2)
    affine.log_scale.data.fill_(-math.log(scale))
    flow.transform = Chain([affine])
    return flow.eval()


def test_numbers_in_the_plane_are_those_of_two_gaussians(monkeypatch):
    """``p = N(0, I)`` and ``q = N(0, 1.5^2 I)``, whose integrals outside a disc are known."""
    truth, s = GaussianMixture([[0.0, 0.0]], scale=1.0), 1.5
    monkeypatch.setattr(synthetic, "HALF_WIDTH", 9.0)
    found = synthetic.plane(truth, standard_normal(s))
    kl, reverse = 2 * math.log(s) + 1 / s**2 - 1, -2 * math.log(s) + s**2 - 1
    assert found["grid_kl"] == pytest.approx(kl, abs=1e-4)
    assert found["grid_reverse_kl"] == pytest.approx(reverse, abs=1e-4)
    assert abs(found["kl_nats"] - kl) < 4 * found["kl_nats_points_se"]
    assert found["grid_mass"] == pytest.approx(1, abs=1e-4)
    # Outside the disc that holds 95%, r^2 = 2 log 20, with t = r^2 / 2: log p/q = 2 log s - t (1 - 1/s^2).
    t = math.log(20)
    mass_p, mass_q = 0.05, 0.05 ** (1 / s**2)
    forward = mass_p * (2 * math.log(s) - (1 - 1 / s**2) * (t + 1))
    backward = mass_q * (-2 * math.log(s) + (1 - 1 / s**2) * (t + s**2))
    assert found["sparse_true_mass"] == pytest.approx(mass_p, abs=1e-3)
    assert found["sparse_mass"] == pytest.approx(mass_q, abs=4e-3)
    assert found["sparse_p_log_p_q"] == pytest.approx(forward, abs=2e-3)
    assert found["sparse_q_log_q_p"] == pytest.approx(backward, abs=1e-2)
    assert found["sparse_kl"] == pytest.approx(forward - mass_p + mass_q, abs=4e-3)
    assert found["sparse_rank"] == pytest.approx(1, abs=1e-4)  # points of a grid tie


def test_restricted_divergences_add_up_to_the_whole():
    truth, flow, x = EightGaussians(), standard_normal(2.0), synthetic.grid(6.0, 120)
    cell = 0.1**2
    log_p, log_q = truth.log_prob(x), synthetic.log_density(synthetic.judge(flow), x)
    part = log_p.exp() * (log_p - log_q) - log_p.exp() + log_q.exp()
    here = synthetic.sparse(log_p, cell)
    assert bool((part >= 0).all())
    assert (log_p.exp()[here].sum() * cell).item() == pytest.approx(0.05, abs=1e-3)
    assert log_p[here].max() <= log_p[~here].min()


def test_mass_outside_of_the_support(monkeypatch):
    monkeypatch.setattr(synthetic, "TEST_POINTS", 100)
    flow = qf.models.quar(1, blocks=1, hidden=(4,))
    flow.transform = Chain([])
    inside = torch.special.ndtr(torch.tensor([2.0, 1.0])).diff().abs().item() * 2
    assert synthetic.line(TwoUniforms(), flow)["mass_outside"] == pytest.approx(1 - inside, abs=2e-3)


def test_the_judge_of_a_residual_flow_is_exact_and_has_its_weights():
    flow = qf.models.residual(2, blocks=2, hidden=(8,)).eval()
    x = torch.randn(500, 2)
    mean, error = flow.log_prob_with_error(x, draws=64)
    exact = synthetic.judge(flow).log_prob(x.double())
    assert ((mean - exact).abs() < 6 * error + 1e-5).all()
    assert synthetic.judge(flow).exact


def test_stages_keep_axes_in_place_and_add_up():
    flow = qf.models.maf(2, blocks=3, hidden=(8,)).double()
    x, _ = figures4_6.points()
    flow.initialise(x)
    clouds = figures4_6.stages(flow, x)
    z, ladj = flow.transform(x)
    assert len(clouds) == 1 + 3 + 1
    # Two reversals between three flows: the last cloud has its axes as the base sees them.
    torch.testing.assert_close(clouds[-1].x, z)
    torch.testing.assert_close(sum(stage.ladj for stage in clouds), ladj)
    near = torch.cdist(clouds[1].x, clouds[0].x - x.mean(0))
    assert near.shape == (len(x), len(x))
    swapped = copy.deepcopy(flow)
    swapped.transform = Chain([Reverse(), *[s for s in flow.transform.steps if isinstance(s, Affine)][:1]])
    swapped.transform.steps[1].log_scale.data.zero_()
    swapped.transform.steps[1].shift.data.zero_()
    torch.testing.assert_close(figures4_6.stages(swapped, x)[-1].x, x)


def test_a_flow_that_only_rescales_has_no_path_and_no_stretch_and_all_its_volume_in_place():
    flow = standard_normal(3.0).double()
    x, modes = figures4_6.points()
    assert modes.bincount().min() > 100
    clouds = figures4_6.stages(flow, x)
    found = [figures4_6.numbers(flow, [clouds[0], *clouds], figures4_6.between())]
    assert found[0]["path"] == pytest.approx(0, abs=1e-6)
    assert found[0]["log_stretch"] == 0
    assert found[0]["volume_share"] == pytest.approx(0, abs=1e-6)


def test_parameters_are_those_the_paper_counts():
    counts = {name: synthetic.parameters(model.build())[1] for name, model in figure2.MODELS.items()}
    assert counts == {"trick": 33_414, "no-trick": 33_413, "paths": 33_414}
    every = [synthetic.parameters(model.build())[1] for model in figure3.MODELS.values()]
    assert max(every) < 1.02 * min(every)


# README.


def test_the_readme_is_that_of_the_results():
    text = (readme.FOLDER / "README.md").read_text()
    assert text == readme.with_results(text)
    guide = readme.WHICH.read_text()
    assert guide == readme.which_flow(guide), "results have changed: python -m experiments.readme"
    results = readme.FOLDER / "results"
    for name in readme.IMAGES:
        if (results / f"{name}.json").exists():
            assert all((results / f"{name}_{what}.png").stat().st_size < 500_000 for what in ("curve", "samples"))
    for path in results.glob("figure*.json") if results.exists() else []:
        result = json.loads(path.read_text())
        assert result["settings"]["steps"] == 20_000
        assert result["settings"]["seeds"] == (1 if path.stem == "figures4-6" else 5)
        for model in result["models"].values():
            assert (results / model.get("picture", f"{path.stem}.png")).stat().st_size < 300_000


def test_the_guide_has_figures_as_far_as_there_are_results(tmp_path):
    empty = readme.which_flow(f"before\n{readme.MARK}behind", tmp_path, tmp_path)
    assert empty == f"before\n{readme.MARK}\n"
    row = {"label": "Glow", "published_bpd": 1.05, "published_parameters": None, "test_bpd": 1.25, "test_bpd_se": 0.01}
    row |= {"parameters": 1000, "parameters_with_masked": 1000, "minutes": 5.0, "steps": 9, "step_ms": 2.4}
    row |= {"compile_seconds": 1.0, "memory_mib": 12.0, "config": "", "sample_ms": 0.5, "command": "made"}
    row |= synthetic.provenance("cpu")
    quar = row | {"label": "QuAR", "test_bpd": 1.24}
    (tmp_path / "table1.json").write_text(json.dumps({"mnist": {"glow": row, "quar": quar | {"engine": quar}}}))
    nats = [("QuAR", "wine", -1.0), ("zuko MAF", "wine", -1.5), ("QuAR", "shares", 2.0), ("zuko MAF", "shares", 2.5)]
    rows = [{"model": m, "data": d, "test_nats": x, "test_nats_se": 0.125} for m, d, x in nats]
    where = {"cpu": "C", "torch": "2", "date": "2026-01-01T00", "commit": "c"}
    (tmp_path / "tabular.json").write_text(json.dumps({"rows": rows, **where}))
    said = readme.which_flow(readme.MARK, tmp_path, tmp_path)
    assert "| wine | -1.00 ± 0.12 | -1.50 ± 0.12 |" in said
    assert "Highest of 2 tables: QuAR on 1, zuko MAF on 1." in said
    assert "| MNIST | QuAR | 1.240 ± 0.010 | 1,000 | 5.0 | 2 | 0.5 |\n| MNIST | Glow |" in said
    shown = readme.with_results(readme.MARK, tmp_path)
    assert "settings:* QuAR, 1.240 ± 0.010; within two standard errors Glow, 1.250 ± 0.010." in shown
    assert shown.count("Lowest on MNIST") == 1  # of the engine's settings there is one alone


def test_the_readme_shows_images_once_there_are_results(tmp_path):
    result = {
        "test_bpd": 1.23456,
        "test_bpd_se": 0.004,
        "test_bpd_noise_se": None,
        "validation_bpd": 1.25,
        "gpu_minutes": 24.04,
        "training_minutes": 22.0,
        "parameters": 1_234_567,
        "steps": 9876,
        "command": "python -m experiments.images mnist",
        "sampling": {
            "images": 64,
            "seconds": 2.5,
            "sweeps_per_block": 4.25,
            "most_sweeps": 7,
            "error_in_noise": 1e-5,
            "error_in_images": 3e-6,
        },
        "bits_from_full": {"tf32": 1e-5, "bf16": -2e-4},
        **synthetic.provenance("cpu"),
    }
    (tmp_path / "mnist.json").write_text(json.dumps(result))
    rows = [
        {"choice": "as it is", "validation_bpd": 2.0, "steps": 400},
        {"choice": "batch 64", "validation_bpd": 1.9, "steps": 700},
        {"choice": "activation: sine", "validation_bpd": None, "steps": None},
    ]
    choices = {"seconds": 100.0, "rows": rows, "command": "python -m C", **synthetic.provenance("cpu")}
    (tmp_path / "cifar10_choices.json").write_text(json.dumps(choices))
    said = readme.with_results("before\n" + readme.MARK + "behind", tmp_path)
    assert said.startswith(f"before\n{readme.MARK}\n\n## MNIST\n\n`python -m experiments.images mnist`\n\n|")
    for text in (
        "| 1.2346 ± 0.0040 | 0.963 | 1,234,567 | 9,876 | 22.0 | 24.0 |",
        "* The error is over images.\n",
        "(results/mnist_curve.png)",
        "(results/mnist_samples.png)",
        "+0.00001 (tf32), -0.00020 (bf16)",
        "## CIFAR-10\n\nWhat helps, in 100 s of training for each: `python -m C`",
        "| as it is | 2.0000 |  | 400 |\n| batch 64 | 1.9000 | -0.1000 | 700 |\n| activation: sine | diverged |  |  |",
        f"commit `{result['commit']}`.",
    ):
        assert text in said
    assert "cifar10_samples" not in said


# The optimiser of the autoregressive flow.


def test_adamax_is_that_of_torch():
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.manual_seed(0)
    flow = qf.models.maf(2, blocks=1, hidden=(4,)).double()
    twin = copy.deepcopy(flow)
    options = {"max_steps": 20, "batch_size": 64, "learning_rate": 1e-2, "clip": 0.5, "ema": 0.0, "warmup": 0.0}
    qf.fit(flow, x, validation=0, optimizer="adamax", **options)
    twin.initialise(x[qf.training.permutation(64, 0, 0)])
    optimizer = torch.optim.Adamax(twin.parameters())
    for step in range(20):
        optimizer.zero_grad()
        (-twin(x[qf.training.permutation(64, 0, step)]).mean()).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = 1e-2 * qf.training.schedule((step + 0.5) / 20, 0.0)
        optimizer.step()
    for ours, theirs in zip(flow.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_adamax_leaves_weights_alone_where_a_step_is_not_finite():
    x = torch.randn(64, 2)
    flow = qf.models.maf(2, blocks=1, hidden=(4,))
    calls = []
    flow.register_forward_hook(lambda module, args, out: out * (math.nan if calls.append(0) or len(calls) > 1 else 1))
    with pytest.raises(qf.TrainingDiverged):
        qf.fit(flow, x, validation=0, optimizer="adamax", max_steps=30)
    assert all(bool(torch.isfinite(p).all()) for p in flow.parameters())


def test_progress_may_be_a_function():
    seen = []
    qf.fit(
        qf.models.maf(2, blocks=1, hidden=(4,)), torch.randn(64, 2), max_steps=7, progress=lambda t: seen.append(t.step)
    )
    assert seen == list(range(1, 8))
    with pytest.raises(ValueError, match="optimizer: expected one of 'adam', 'adamax'"):
        qf.fit(qf.models.maf(2), torch.randn(64, 2), optimizer="sgd")


# Images.


def images_command(*words):
    images.main(list(map(str, words)))


def test_images_from_scratch_to_a_result(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("PIL")
    places = ["--out", tmp_path / "runs", "--results", tmp_path, "--device", "cpu"]
    images_command("digits", "--set", "training.max_steps=12", *places)
    found = json.loads((tmp_path / "digits.json").read_text())
    assert {"test_bpd", "test_bpd_se", "gpu_minutes", "parameters", "command", "commit"} <= found.keys()
    flow = qf.load(tmp_path / "runs" / "digits" / "model.qf")
    assert found["parameters"] == sum(p.numel() for p in flow.parameters())
    test = load_images("digits").test
    assert found["test_bpd"] == pytest.approx(qf.bits_per_dim(flow, test, draws=2).bpd, rel=1e-6)
    assert found["steps"] == 12
    assert found["validation_bpd"] == pytest.approx(min(bits for _, bits in found["curve"]), abs=0.05)
    assert 0 < abs(found["bits_from_full"]["bf16"]) < 0.02
    assert found["sampling"]["error_in_images"] < 1e-4
    assert found["sampling"]["error_in_noise"] < 1e-3
    assert 2 <= found["sampling"]["sweeps_per_block"] <= found["sampling"]["most_sweeps"]
    for picture in ("curve", "samples"):
        assert (tmp_path / f"digits_{picture}.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.glob("digits*"))) == 3
    # The same command again finds it finished.
    images_command("digits", "--set", "training.max_steps=12", *places)
    again = json.loads((tmp_path / "digits.json").read_text())
    assert again["test_bpd"] == found["test_bpd"]


def test_choices_are_made_on_validation_images_and_kept(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(images, "CHOICES", {"as it is": [], "order: channel": ["model.order=channel"]})
    digits = load_images("digits")
    monkeypatch.setattr(images.runs, "images_of", lambda *_: SimpleNamespace(train=digits.train, shape=digits.shape))
    words = ["digits", "--choose", "--seconds", 0.5, "--results", tmp_path, "--device", "cpu"]
    images_command(*words)
    rows = json.loads((tmp_path / "digits_choices.json").read_text())["rows"]
    assert [row["choice"] for row in rows] == ["as it is", "order: channel"]
    assert all(row["validation_bpd"] < 8 for row in rows)
    monkeypatch.setattr(images, "fit", lambda *arguments, **options: pytest.fail("trained again"))
    images_command(*words)


def test_every_configuration_of_images_builds():
    for name in images.CONFIGS:
        for settings in images.CHOICES.values():
            run = images.configuration(name, "somewhere", settings)
            assert run.data == {"folder": "somewhere"}
    assert images.configuration("mnist", None).training.max_seconds <= 25 * 60
