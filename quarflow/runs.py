"""A training run on images, from a configuration to a folder of results: what ``quarflow train`` does.

================  ================================================================================================
in the folder     what it is
================  ================================================================================================
``config.toml``   every option of the run, those left out too
``log.jsonl``     a line for each entry of the history: step, loss, learning rate, seconds; bits/dim on validation
``state``         to go on from, written every so often, at Ctrl-C and at SIGTERM; with ``shard_size`` an index of
                  the files ``state-*.safetensors``
``model.qf``      the best weights on validation, for `quarflow.load`
``samples.png``   draws, now and then and at the end
``result.json``   bits/dim on the test set, parameters, time
``tensorboard/``  what is in the log, if asked for
================  ================================================================================================
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import one_hot

from quarflow import models
from quarflow.checkpoint import save, size_in_bytes
from quarflow.checks import check_choice, check_count, check_positive
from quarflow.data.images import SOURCES, Images, load_images, save_grid
from quarflow.flow import Flow
from quarflow.pixels import bits_per_dim, check_images, complete, dequantise, quantise
from quarflow.training import History, Options, Trainer, bar, fit

SECTIONS = ("data", "model", "training", "run")
GRID, COLUMNS = 64, 8  # pictures of a grid of samples; and in a row of one of completions

TRAINING = {"max_steps": 10_000, "batch_size": 64, "learning_rate": 1e-3, "clip": 1.0, "ema": 0.999}
# What differs from the defaults, by source; the sizes are those of flows of residual blocks.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "digits": {
        "model": {"blocks": (4, 4), "hidden": 64},
        "training": {"max_steps": 800, "batch_size": 128, "learning_rate": 4e-3},
    },
    "mnist": {"model": {"blocks": (16, 16, 16), "hidden": 512}},
    "fashion-mnist": {"model": {"blocks": (16, 16, 16), "hidden": 512}},
    "cifar10": {"model": {"blocks": (16, 16, 16), "hidden": 576}},
}
# Sizes of other models, by source; their own defaults where nothing is said.
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "glow": {
        "digits": {"blocks": (4, 4), "hidden": 64},
        "mnist": {"blocks": (32, 32)},  # 28 pixels can be halved twice
        "fashion-mnist": {"blocks": (32, 32)},
    },
    "flowpp": {"digits": {"blocks": (2, 3), "hidden": 32, "depth": 2, "components": 8}},
}

@dataclass(frozen=True)
class Run:
    """Every option of a run, in the sections of its file.

    >>> run = Run.of("digits", {"model": {"hidden": 32}}, ["training.max_steps=10"])
    >>> run.model["hidden"], run.model["blocks"], run.training.max_steps
    (32, (4, 4), 10)
    """

    source: str
    data: Mapping[str, Any] = field(default_factory=dict)  # folder, download
    model: Mapping[str, Any] = field(default_factory=dict)  # name, and the options of `quarflow.models`
    training: Options = field(default_factory=Options)
    validation: float = 0.1  # the part of the training images that chooses the weights
    draws: int = 3  # of noise, for bits/dim on the test set
    checkpoint_minutes: float = 3.0
    sample_minutes: float = 10.0
    recompute: bool = False  # hidden values again in the backward pass: little memory, a third more time
    graph: bool = True  # on a GPU: a step is one CUDA graph
    shard_size: str | None = None  # of the files of the state and the model, such as "16MiB"; None: one file
    compact: bool = False  # averages and moments in the state in bfloat16
    tensorboard: bool = False

    def __post_init__(self) -> None:
        check_count("draws", self.draws)
        for name in ("recompute", "graph", "compact", "tensorboard"):
            check_choice(name, getattr(self, name), (True, False))
        if self.shard_size is not None:
            size_in_bytes(self.shard_size)
        for name in ("checkpoint_minutes", "sample_minutes"):
            check_positive(name, getattr(self, name))

    @classmethod
    def of(cls, source: str, file: Mapping[str, Any] | None = None, settings: list[str] | None = None) -> Run:
        """The options for ``source``: those of a file over the preset, and ``SECTION.KEY=VALUE`` over these."""
        preset = PRESETS.get(source, {"model": {"blocks": (8, 8), "hidden": 192}})
        merged: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        merged["training"] = TRAINING | preset.get("training", {})
        for section, options in (file or {}).items():
            if section not in SECTIONS or not isinstance(options, Mapping):
                raise ValueError(f"configuration: expected sections {', '.join(SECTIONS)}; got {section!r}.")
            merged[section] |= {key: None if value == "none" else value for key, value in options.items()}
        for text in settings or []:
            name, equals, given = text.partition("=")
            section, dot, key = name.strip().partition(".")
            if not (equals and dot and key) or section not in SECTIONS:
                raise ValueError(
                    f"setting: expected SECTION.KEY=VALUE with a section of {', '.join(SECTIONS)}; got {text!r}."
                )
            merged[section][key] = value(given.strip())
        sizes = SIZES.get(str(merged["model"].get("name")))
        merged["model"] = (preset["model"] if sizes is None else sizes.get(source, {})) | merged["model"]
        allowed = {
            "data": {"folder", "download"},
            "training": {f.name for f in dataclasses.fields(Options)},
            "run": {f.name for f in dataclasses.fields(cls)} - {"source", "data", "model", "training"},
        }
        for section, known in allowed.items():
            if unknown := set(merged[section]) - known:
                raise ValueError(
                    f"configuration: [{section}] has no {', '.join(map(repr, sorted(unknown)))}; it has "
                    f"{', '.join(sorted(known))}."
                )
        return cls(source, merged["data"], merged["model"], Options(**merged["training"]), **merged["run"])

    def build(self, shape: tuple[int, int, int]) -> Flow:
        """The flow for images of ``shape``, with fresh weights from the seed."""
        options = {"model": "quar_image", **self.model, "shape": shape}
        if "name" in self.model:
            options["model"] = options.pop("name")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.training.seed)
            return models.from_dict(options).build()

    def to_toml(self) -> str:
        """The file that gives this run."""
        run = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        sections = {
            "data": run.pop("data"),
            "model": run.pop("model"),
            "training": dataclasses.asdict(run.pop("training")),
        }
        source, sections["run"] = run.pop("source"), run
        lines = [f"# quarflow train {source} --config THIS_FILE"]
        for section, options in sections.items():
            lines += ["", f"[{section}]"]
            lines += [f"{key} = {_toml(value)}" for key, value in options.items()]
        return "\n".join(lines) + "\n"


def value(text: str) -> Any:
    """A value as TOML reads it; ``none``; anything else is text."""
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'  # TOML has no null
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The sections of a configuration file."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a TOML file; {error}.") from error


def images_of(source: str, data: Mapping[str, Any]) -> Images:
    """What a run trains on."""
    return load_images(source if source in SOURCES else Path(source), data.get("folder"), data.get("download", False))


@contextmanager
def processes(device: str) -> Iterator[tuple[bool, torch.device]]:
    """Within it, `torch.distributed` joins the processes that ``torchrun`` started, if it did; this one's device.

    >>> with processes("cpu") as (distributed, where):
    ...     print(distributed, where)
    False cpu
    """
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        yield False, torch.device(device)
        return
    where = torch.device(device, int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield True, where
    finally:
        dist.destroy_process_group()


def train(
    run: Run,
    out: Path,
    device: str = "cpu",
    resume: bool = False,
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Trains, evaluates and writes ``out``; returns what is in ``result.json``.

    A model with a ``context`` is trained given the classes of the images, see `contexts`.
    With ``resume`` a run goes on from its ``state``, to the same end as without the break. Under ``torchrun`` the
    processes share every batch; the first of them writes, and what the others return is empty.
    """
    with processes(device) as (distributed, where):
        first = not distributed or dist.get_rank() == 0
        images = images_of(run.source, run.data)
        flow = run.build(images.shape).to(where)
        context, _ = contexts(flow, images)
        state = out / "state"
        if not resume and state.exists():
            raise ValueError(f"{state}: a run is there already. Go on with it (--resume), or give another folder.")
        out.mkdir(parents=True, exist_ok=True)
        if distributed:
            dist.barrier()  # before the first writes what the others look for
        going_on = resume and state.exists()
        if first and not going_on:
            _replace(out / "config.toml", run.to_toml())
        parameters = sum(p.numel() for p in flow.parameters())
        if first:
            say(f"{run.source}: {len(images.train)} images of {images.shape} to train on, {parameters:,} parameters")
        with _observed(run, out, going_on) if first else nullcontext(False) as show:
            history = fit(
                flow,
                images.train,
                context,
                validation=run.validation,
                progress=show,
                checkpoint=state,
                checkpoint_seconds=60 * run.checkpoint_minutes,
                shard_size=run.shard_size,
                compact=run.compact,
                resume=going_on,
                recompute=run.recompute,
                graph=run.graph and where.type == "cuda",
                distributed=distributed,
                **dataclasses.asdict(run.training),
            )
    if first:
        _replace(out / "config.toml", run.to_toml())  # only now is it known to be that of the state
        save(flow, out / "model.qf", run.shard_size)
    if history.stopped == "interrupted":
        raise KeyboardInterrupt
    if not first:
        return {}
    result = evaluated(run, flow, images, history) | {"parameters": parameters}
    _replace(out / "result.json", json.dumps(result, indent=1) + "\n")
    save_samples(flow, out / "samples.png")
    return result


def evaluated(run: Run, flow: Flow, images: Images, history: History) -> dict[str, Any]:
    """Bits/dim on the test set, and on validation, where the weights were chosen."""
    begun = time.monotonic()
    found = bits_per_dim(flow, images.test, contexts(flow, images)[1], draws=run.draws)
    best = history.best_validation
    return {
        "source": run.source,
        "test_bpd": found.bpd,
        "test_bpd_se": found.standard_error,
        "test_bpd_noise_se": found.noise_error,
        "test_images": found.n,
        "draws": found.draws,
        "validation_bpd": None if best is None else bits(flow, best),
        "best_step": history.best_step,
        "steps": history.steps[-1] if history.steps else 0,
        "stopped": history.stopped,
        "minutes": history.seconds / 60,
        "test_seconds": time.monotonic() - begun,
    }


def bits(flow: Flow, nats: float) -> float:
    """Bits/dim of a mean log-density of dequantised images, in nats."""
    return 8 - nats / (flow.event_shape.numel() * math.log(2))


def contexts(flow: Flow, images: Images) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Of the training and of the test images, for a flow that has a context: the unit vectors of their classes.

    >>> images = load_images("digits")
    >>> [c.shape for c in contexts(models.quar_image((1, 8, 8), context=10, blocks=(1,), hidden=4), images)]
    [torch.Size([1437, 10]), torch.Size([360, 10])]
    """
    features = flow.context_features
    if not features:
        return None, None
    if images.train_labels is None or images.test_labels is None:
        raise ValueError(f"model.context: expected 0, as the pictures of {images.name} have no labels; got {features}.")
    classes = 1 + int(max(images.train_labels.max(), images.test_labels.max()))
    if classes != features:
        raise ValueError(f"model.context: expected {classes}, one for each class of {images.name}; got {features}.")
    return unit_vectors(flow, images.train_labels), unit_vectors(flow, images.test_labels)


def unit_vectors(flow: Flow, labels: Tensor) -> Tensor:
    """The context of each of ``labels``: (n,) -> (n, context features)."""
    return one_hot(labels, flow.context_features).to(flow.base.anchor)


def save_samples(flow: Flow, path: Path, n: int = GRID, seed: int = 0, label: int | None = None) -> None:
    """A grid of ``n`` draws as a PNG file; of a flow with classes as its context a column for each, or all of one."""
    classes = flow.context_features
    if label is not None and not 0 <= label < classes:
        there = f"a class from 0 to {classes - 1}" if classes else "none, as the model has no classes"
        raise ValueError(f"class: expected {there}; got {label}.")
    context, columns = None, None
    if classes:
        labels = torch.arange(n) % classes if label is None else torch.full((n,), label)
        context, columns = unit_vectors(flow, labels), classes if label is None else None
    generator = torch.Generator(flow.base.anchor.device).manual_seed(seed)
    _write_grid(lambda: quantise(flow.sample(n, context, generator)), path, columns)


def save_completions(
    flow: Flow, images: Images, path: Path, n: int = GRID, rows: int | None = None, seed: int = 0
) -> None:
    """A grid of ``n`` pictures: in each line a test image, and draws of the rest of it given its first ``rows``."""
    check_images(flow, images.test)
    lines = math.ceil(n / COLUMNS)
    some, c = images.test[:lines], contexts(flow, images)[1]
    generator = torch.Generator(flow.base.anchor.device).manual_seed(seed)

    def pictures() -> Tensor:
        x = dequantise(some, flow.base.anchor, generator).repeat_interleave(COLUMNS - 1, 0)
        each = None if c is None else c[: len(some)].repeat_interleave(COLUMNS - 1, 0)
        drawn = quantise(complete(flow, x, rows, each, generator)).cpu().unflatten(0, (-1, COLUMNS - 1))
        return torch.cat([some[:, None], drawn], 1).flatten(0, 1)[:n]

    _write_grid(pictures, path, COLUMNS)


def _write_grid(pictures: Callable[[], Tensor], path: Path, columns: int | None) -> None:
    if path.suffix.lower() != ".png":
        raise ValueError(f"out: expected a name that ends in .png; got {path}. Give it that ending.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"out: expected a file in a folder that exists; got {path}. Create the folder.")
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.png")
    try:
        save_grid(pictures().cpu(), temporary, columns)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _observed(run: Run, out: Path, resume: bool) -> Iterator[Callable[[Trainer], None]]:
    """To be called after each step: a bar, a line in the log for what is new, a grid of samples now and then."""
    log, seen = out / "log.jsonl", {"loss": 0, "validation": 0}
    sampled = time.monotonic()

    def entries(trainer: Trainer) -> list[dict[str, Any]]:
        h, flow = trainer.history, trainer.flow
        new: list[dict[str, Any]] = [
            {"step": h.steps[i], "train_bpd": bits(flow, -h.loss[i]), "learning_rate": h.learning_rate[i]}
            for i in range(seen["loss"], len(h.loss))
        ]
        new += [
            {"step": h.validation_steps[i], "validation_bpd": bits(flow, h.validation[i])}
            for i in range(seen["validation"], len(h.validation))
        ]
        seen["loss"], seen["validation"] = len(h.loss), len(h.validation)
        return [{**each, "seconds": round(trainer.seconds, 1)} for each in new]

    with ExitStack() as stack:
        drawn = stack.enter_context(bar(None))
        if not resume:
            _replace(log, "")
        board = _board(out / "tensorboard") if run.tensorboard else None
        if board is not None:
            stack.callback(board.close)
        last: Trainer | None = None
        waiting: list[str] = []  # lines for the log

        def write(trainer: Trainer) -> None:
            for each in entries(trainer):
                waiting.append(json.dumps(each) + "\n")
                if board is not None:
                    for name in each.keys() - {"step"}:
                        board.add_scalar(name, each[name], each["step"])
            if not waiting:
                return
            if _went_well("the log", lambda: _append(log, "".join(waiting))):
                waiting.clear()
            else:
                waiting.insert(0, "\n")  # behind what a full disk has taken of a line

        def show(trainer: Trainer) -> None:
            nonlocal sampled, last
            if last is None and resume:
                # A run that was killed may have logged more than its state holds, one that was asked to end less.
                kept = [entry for entry in read_log(log) if entry["step"] < trainer.step]
                _replace(log, "".join(json.dumps(entry) + "\n" for entry in kept))
                seen["loss"] = sum("train_bpd" in entry for entry in kept)
                seen["validation"] = len(kept) - seen["loss"]
            last = trainer
            write(trainer)
            drawn(trainer)
            if time.monotonic() - sampled > 60 * run.sample_minutes:
                with trainer.averaged():
                    _went_well("samples", lambda: save_samples(trainer.flow, out / "samples.png"))
                sampled = time.monotonic()

        yield show
        # The entries of the end; a run that was cut will come to them.
        if last is not None and last.history.stopped != "interrupted":
            write(last)


def _went_well(what: str, action: Callable[[], object]) -> bool:
    """Does it; if that fails, a warning, as a run does not end for want of a picture or a line."""
    try:
        action()
    except (OSError, ArithmeticError) as error:
        warnings.warn(f"{what}: {error}. Training goes on.", stacklevel=3)
        return False
    return True


def read_log(path: Path) -> list[dict[str, Any]]:
    """The entries of a log, if there is one; a line that was cut is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("run.tensorboard needs TensorBoard: pip install 'quarflow[tensorboard]'") from error
    return SummaryWriter(str(folder))


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
