"""Runs on images: their options, their files, and that one that was cut comes to the same end."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import quarflow as qf
from quarflow import pixels, runs
from quarflow.checkpoint import read_tensors
from quarflow.cli import app
from quarflow.data.images import load_images
from quarflow.pixels import reconstruction_error
from quarflow.runs import Run

pytest.importorskip("sklearn")
pytest.importorskip("PIL")
ROOT = Path(__file__).parent.parent
TINY = ["--set", "model.blocks=[1, 1]", "--set", "model.hidden=8", "--set", "training.max_steps=20"]


def command(*words):
    return CliRunner().invoke(app, list(map(str, words)))


def curve(out):
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {(line["step"], key): line[key] for line in lines for key in ("train_bpd", "validation_bpd") if key in line}


def test_a_run_writes_everything(tmp_path):
    out = tmp_path / "run"
    done = command("train", "digits", "--out", out, *TINY)
    assert done.exit_code == 0, done.output
    assert "bits/dim on 360 test images" in done.output
    result = json.loads((out / "result.json").read_text())
    assert result["steps"] == 20
    assert result["stopped"] == "max_steps"
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train_bpd" in line] == [10, 20]
    best = max(line["validation_bpd"] for line in lines if "validation_bpd" in line)
    assert best >= result["validation_bpd"]
    validated = [line["step"] for line in lines if "validation_bpd" in line]
    assert (validated[0], validated[-1]) == (0, 20)
    assert (out / "samples.png").read_bytes().startswith(b"\x89PNG")
    flow, images = qf.load(out / "model.qf"), load_images("digits")
    assert qf.bits_per_dim(flow, images.test, draws=3).bpd == pytest.approx(result["test_bpd"], rel=1e-6)

    evaluated = command("evaluate", out / "model.qf", "digits", "--draws", 3, "--json")
    assert evaluated.exit_code == 0, evaluated.output
    numbers = json.loads(evaluated.output)
    assert numbers["bpd"] == pytest.approx(result["test_bpd"], rel=1e-6)
    assert numbers["reconstruction_error"] < 1e-4
    assert "bits/dim (360 images, 3 draws of noise: ±" in command("evaluate", out / "model.qf", "digits").output

    sampled = command("sample", out / "model.qf", "-o", tmp_path / "grid.png", "-n", 4)
    assert sampled.exit_code == 0, sampled.output
    assert (tmp_path / "grid.png").exists()

    # The file that it wrote gives the same run.
    again = command("train", "digits", "--out", tmp_path / "again", "--config", out / "config.toml")
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "again" / "result.json").read_text())["test_bpd"] == result["test_bpd"]
    assert (tmp_path / "again" / "config.toml").read_text() == (out / "config.toml").read_text()


def test_a_run_is_not_written_over(tmp_path):
    assert command("train", "digits", "--out", tmp_path, *TINY).exit_code == 0
    done = command("train", "digits", "--out", tmp_path, *TINY)
    assert done.exit_code == 2
    assert "--resume" in done.output
    config = (tmp_path / "config.toml").read_text()
    for change, message in (("model.hidden=12", "another run: its flow"), ("training.seed=1", "its seed is 0, now 1")):
        done = command("train", "digits", "--out", tmp_path, "--resume", "--set", change)
        assert done.exit_code == 2
        assert message.replace(" ", "") in "".join(c for c in done.output if c not in "│\n ")
    assert (tmp_path / "config.toml").read_text() == config
    assert command("train", "digits", "--out", tmp_path, "--resume").exit_code == 0


@pytest.mark.parametrize(("how", "more"), [(signal.SIGTERM, []), (signal.SIGKILL, ["--shard-size", "16KiB"])])
def test_a_run_that_was_killed_comes_to_the_same_end(tmp_path, how, more):
    settings = [*TINY[:4], "--set", "training.max_steps=150", "--set", "run.checkpoint_minutes=0.005", *more]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = [sys.executable, "-m", "quarflow.cli", "train", "digits", *settings, "--out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(out, *more):
        # As a script starts jobs: Ctrl-C is ignored, SIGTERM is not.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return subprocess.Popen(
                [*words, str(out), *more], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        finally:
            signal.signal(signal.SIGINT, before)

    process = start(cut)
    deadline = time.monotonic() + 100
    while not (cut / "state").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGTERM else -how), said
    at = json.loads(read_tensors(cut / "state", "training")[1]["state"])["step"]
    logged = max(step for step, _ in curve(cut))
    assert how == signal.SIGKILL or logged <= at < logged + 10
    assert not (cut / "result.json").exists()
    for out, more in ((cut, ["--resume"]), (whole, [])):
        process = start(out, *more)
        _, said = process.communicate(timeout=100)
        assert process.returncode == 0, said
    results = [json.loads((out / "result.json").read_text()) for out in (cut, whole)]
    for each in results:
        each.pop("minutes")
        each.pop("test_seconds")
    assert results[0] == results[1]
    assert curve(cut) == curve(whole)


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
def test_two_processes_are_one_with_the_joined_batch_and_one_goes_on_from_their_pieces(tmp_path):
    settings = [*TINY[:4], "--set", "training.max_steps=100", "--shard-size", "16KiB"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert command("train", "digits", "--out", one, *settings).exit_code == 0
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "quarflow.cli"]
    with (tmp_path / "said").open("w+") as said:
        both = subprocess.Popen(
            [sys.executable, *words, "train", "digits", "--out", str(two), *settings],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=said,
        )
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and both.poll() is None:
            if (two / "log.jsonl").exists() and '"step": 20, ' in (two / "log.jsonl").read_text():
                both.send_signal(signal.SIGTERM)
                break
            time.sleep(0.01)
        both.wait(timeout=100)
        said.seek(0)
        assert "Interrupted. The state is in" in said.read()
    assert not (two / "result.json").exists()
    assert len(list(two.glob("state-*-of-*.safetensors"))) > 1
    shared = curve(two)
    assert 100 > max(step for step, _ in shared) >= 20
    assert curve(one) | shared == pytest.approx(curve(one), abs=1e-6)
    done = command("train", "digits", "--out", two, "--resume")
    assert done.exit_code == 0, done.output
    # After that many steps differences of rounding have grown.
    assert curve(two) == pytest.approx(curve(one), abs=1e-4)


def test_batches_that_processes_cannot_share(monkeypatch):
    from quarflow import training

    monkeypatch.setattr(training, "_place_in", lambda distributed: (3, 0) if distributed else (1, 0))
    flow, x = qf.models.quar(2, blocks=1, hidden=(4,)), training.Rows(torch.randn(40, 2))
    for options, message in (
        ({"batch_size": 10}, "batch_size: expected a multiple of the 3 processes; got 10. Take 9"),
        ({"max_seconds": 3.0, "batch_size": 9}, "max_seconds: expected None with several processes"),
    ):
        with pytest.raises(ValueError, match=message):
            training.Trainer(flow, x, None, training.Options(**options), distributed=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_log_for_tensorboard(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    done = command("train", "digits", "--out", tmp_path, "--tensorboard", *TINY)
    assert done.exit_code == 0, done.output
    found = events.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    for name in ("train_bpd", "validation_bpd"):
        shown = {(e.step, name): e.value for e in found.Scalars(name)}
        assert shown == pytest.approx({k: v for k, v in curve(tmp_path).items() if k[1] == name}, rel=1e-6)


def test_options_come_from_preset_file_and_command_line_in_this_order(tmp_path):
    file = {"model": {"hidden": 32, "order": "channel"}, "training": {"max_steps": 5}, "run": {"draws": 7}}
    run = Run.of("digits", file, ["training.max_steps=6", "model.activation=sine", "training.patience=none"])
    assert dict(run.model) == {"blocks": (4, 4), "hidden": 32, "order": "channel", "activation": "sine"}
    assert (run.training.max_steps, run.training.patience, run.draws) == (6, None, 7)
    (tmp_path / "config.toml").write_text(run.to_toml())
    assert Run.of("digits", runs.read_config(tmp_path / "config.toml")) == dataclasses.replace(
        run, model={**run.model, "blocks": [4, 4]}
    )
    flow = run.build((1, 8, 8))
    assert flow.config.order == "channel"
    other = Run.of("digits", {}, ["model.name=residual_image", "model.hidden=8"]).build((1, 8, 8))
    assert not other.exact


@pytest.mark.parametrize("name", ["glow", "flowpp"])
def test_another_model_by_its_name(tmp_path, name):
    done = command("train", "digits", "--model", name, "--out", tmp_path, *TINY[:4], "--set", "training.max_steps=10")
    assert done.exit_code == 0, done.output
    flow, images = qf.load(tmp_path / "model.qf"), load_images("digits")
    assert flow.config.name == name
    found = json.loads((tmp_path / "result.json").read_text())["test_bpd"]
    assert qf.bits_per_dim(flow, images.test, draws=3).bpd == pytest.approx(found, rel=1e-6)
    assert reconstruction_error(flow, images.test[:20]) < 1e-4
    sampled = command("sample", tmp_path / "model.qf", "-o", tmp_path / "grid.png", "-n", 4)
    assert sampled.exit_code == 0, sampled.output


def tiles(path):
    """The pictures of a grid of 8x8 pixels: (lines, columns, 8, 8)."""
    from PIL import Image

    with Image.open(path) as image:
        grid = torch.tensor(list(image.tobytes()), dtype=torch.uint8).view(image.size[::-1])
    return grid[1:, 1:].unfold(0, 8, 9).unfold(1, 8, 9)


def test_classes_are_the_context_and_images_are_completed(tmp_path):
    settings = [*TINY, "--set", "model.context=10", "--set", "model.mixing=none"]
    done = command("train", "digits", "--out", tmp_path, *settings)
    assert done.exit_code == 0, done.output
    flow, images = qf.load(tmp_path / "model.qf"), load_images("digits")
    labels = torch.nn.functional.one_hot(images.test_labels, 10).float()
    found = json.loads((tmp_path / "result.json").read_text())["test_bpd"]
    assert qf.bits_per_dim(flow, images.test, labels, draws=3).bpd == pytest.approx(found, rel=1e-6)
    assert qf.bits_per_dim(flow, images.test, labels.flip(1), draws=3).bpd != pytest.approx(found, rel=1e-4)
    evaluated = json.loads(command("evaluate", tmp_path / "model.qf", "digits", "--json").output)
    assert evaluated["bpd"] == pytest.approx(found, rel=1e-6)
    assert evaluated["noise_error"] > 0

    grid, threes = tmp_path / "grid.png", tmp_path / "threes.png"
    assert command("sample", tmp_path / "model.qf", "-o", grid, "-n", 20).exit_code == 0
    assert command("sample", tmp_path / "model.qf", "-o", threes, "-n", 20, "--given", "class=3").exit_code == 0
    drawn = [flow.sample(20, torch.eye(10)[c], torch.Generator().manual_seed(0)) for c in (torch.arange(20) % 10, 3)]
    for path, draws, columns in zip((grid, threes), drawn, (10, 5), strict=True):
        pictures = tiles(path)
        assert pictures.shape[1] == columns
        assert torch.equal(pictures.reshape(-1, 8, 8), pixels.quantise(draws)[:, 0])

    words = ["sample", tmp_path / "model.qf", "-o", grid, "--complete", "digits", "--rows", 4, "-n", 24]
    done = command(*words)
    assert done.exit_code == 0, done.output
    pictures = tiles(grid)
    assert pictures.shape == (3, 8, 8, 8)
    assert torch.equal(pictures[:, 0], images.test[:3, 0])
    assert torch.equal(pictures[:, :, :4], images.test[:3, :, :4].expand(3, 8, 4, 8))
    assert pictures[:, 1:, 4:].float().std(1).amax((1, 2)).min() > 0  # each draw is another

    for more, message in (
        (["--given", "class=10"], "class: expected a class from 0 to 9; got 10"),
        (["--given", "pixel=1"], "given: expected class=NUMBER"),
        (["--complete", "digits", "--given", "class=1"], "given: expected none with --complete"),
        (["--complete", "digits", "--rows", 3], "rows: expected a multiple of 2 from 2 to 6; got 3"),
        (["--rows", 4], "rows: expected --complete SOURCE"),
        (["-o", tmp_path / "grid.jpg"], "out: expected a name that ends in .png"),
    ):
        done = command("sample", tmp_path / "model.qf", "-o", grid, *more)
        assert done.exit_code == 2
        assert message.replace(" ", "") in "".join(c for c in done.output if c not in "│\n ")


def test_pictures_without_labels_have_no_classes():
    images = load_images("digits")
    flow = qf.models.quar_image((1, 8, 8), context=10, blocks=(1,), hidden=4)
    with pytest.raises(ValueError, match=r"context: expected 0, as the pictures of digits have no labels"):
        runs.contexts(flow, dataclasses.replace(images, train_labels=None, test_labels=None))
    flow = qf.models.quar_image((1, 8, 8), context=7, blocks=(1,), hidden=4)
    with pytest.raises(ValueError, match=r"context: expected 10, one for each class of digits; got 7"):
        runs.contexts(flow, images)


def test_sizes_are_those_of_the_model():
    assert dict(Run.of("mnist", {}, ["model.name=glow"]).model) == {"name": "glow", "blocks": (32, 32)}
    assert dict(Run.of("cifar10", {"model": {"name": "flowpp"}}).model) == {"name": "flowpp"}
    assert Run.of("mnist", {}, ["model.name=residual_image"]).model["hidden"] == 512


def test_a_folder_of_pictures(tmp_path):
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for i in range(30):
        pixels = torch.randint(0, 256, (4, 4, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(pixels.numpy()).save(tmp_path / f"{i:02d}.png")
    settings = [*TINY, "--set", "model.hidden=12"]
    done = command("train", tmp_path, "--out", tmp_path / "run", *settings)
    assert done.exit_code == 0, done.output
    assert "on 3 test images" in done.output


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["train", "letters"], 2, "source: expected one of"),
        (["train", "digits", "--model", "glowing"], 2, "model: expected one of"),
        (["train", "digits", "--set", "hidden=3"], 2, "SECTION.KEY=VALUE"),
        (["train", "digits", "--set", "training.epochs=3"], 2, "[training] has no 'epochs'"),
        (["train", "digits", "--set", "model.width=3"], 2, "has no option 'width'"),
        (["train", "digits", "--set", "run.draws=0"], 2, "draws: expected an integer >= 1"),
        (["train", "digits", "--set", "run.recompute=3"], 2, "recompute: expected one of True, False; got 3"),
        (["train", "digits", "--shard-size", "big"], 2, "shard_size: expected a size of 1KiB or more"),
        (["train", "digits", "--device", "cuda"], 2, "torch sees none"),
        (["train", "mnist", "--folder", "FOLDER"], 2, "the files of mnist must be together"),
        (["train", "digits", "--config", "CONFIG"], 2, "expected a TOML file"),
        (["evaluate", "FOLDER/none.qf", "digits"], 2, "none.qf"),
        (["sample", "VECTORS"], 2, "expected a model of images"),
        (["sample", "WIDE", "--given", "class=3"], 2, "class: expected none, as the model has no classes; got 3"),
        (["sample", "WIDE", "--complete", "digits"], 2, "x: expected uint8 images (n, 1, 4, 4)"),
        (["sample", "WIDE", "-o", "none/grid.png"], 2, "out: expected a file in a folder that exists; got none"),
        (["evaluate", "VECTORS", "digits"], 2, "flow: expected one of images; this one is of vectors of 2 features"),
        (["evaluate", "WIDE", "digits"], 2, "x: expected uint8 images (n, 1, 4, 4)"),
    ],
)
def test_errors(words, code, message, tmp_path, monkeypatch):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").write_text("not = [toml")
    qf.save(qf.models.quar(2, blocks=1, hidden=(4,)), tmp_path / "vectors.qf")
    qf.save(qf.models.quar_image((1, 4, 4), blocks=(1,), hidden=4), tmp_path / "wide.qf")
    places = {"FOLDER": tmp_path, "CONFIG": "config", "VECTORS": "vectors.qf", "WIDE": "wide.qf"}
    for name, place in places.items():
        words = [word.replace(name, str(place)) for word in words]
    done = command(*words)
    assert done.exit_code == code, done.output
    assert message.replace(" ", "") in "".join(c for c in done.output if c not in "│\n ")


def test_a_run_does_not_end_for_want_of_a_picture_or_a_line(tmp_path, monkeypatch):
    """The disk is full for a while: pictures are left out, and lines of the log, one of them cut, are made up for."""
    append, save_grid, failed = runs._append, runs.save_grid, []

    def full(path, text):
        if len(failed) < 3:
            failed.append(path)
            append(path, text[:5])
            raise OSError(28, "No space left on device")
        append(path, text)

    def grid(*arguments):
        if len(failed) < 3:
            raise qf.NotConverged("no way back")
        save_grid(*arguments)

    monkeypatch.setattr(runs, "_append", full)
    monkeypatch.setattr(runs, "save_grid", grid)
    settings = ["run.sample_minutes=1e-6", "training.max_steps=20"]
    run = Run.of("digits", {"model": {"blocks": [1], "hidden": 4}}, settings)
    with pytest.warns(UserWarning, match="Training goes on") as said:
        runs.train(run, tmp_path)
    texts = [str(w.message) for w in said]
    assert any(text.startswith("the log: [Errno 28] No space left") for text in texts)
    assert any(text.startswith("samples: no way back") for text in texts)
    assert len(failed) == 3
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert len(lines) > len(runs.read_log(tmp_path / "log.jsonl")) > 0  # the cut ones
    assert [e["step"] for e in runs.read_log(tmp_path / "log.jsonl") if "train_bpd" in e] == [10, 20]
    assert (tmp_path / "samples.png").exists()


def test_samples_leave_no_half_written_file(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs, "save_grid", full)
    with pytest.raises(OSError, match="No space"):
        runs.save_samples(qf.models.quar_image((1, 4, 4), blocks=(1,), hidden=4), tmp_path / "s.png")
    assert list(tmp_path.iterdir()) == []
