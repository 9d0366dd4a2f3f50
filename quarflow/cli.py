"""The command line: ``quarflow COMMAND``, or ``python -m quarflow.cli COMMAND``.

Exit codes: 0 done; 1 something failed while it ran; 2 the command is not right; 130 interrupted.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from quarflow.table_flow import TableFlow

INTERRUPTED = 130
WARNINGS = 5  # that are shown in full

app = typer.Typer(
    name="quarflow",
    help="Exact-likelihood residual flows for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """What the command ``quarflow`` runs."""
    app()


def _version(asked: bool) -> None:
    if asked:
        from quarflow import __version__

        typer.echo(f"quarflow {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


class Figure(StrEnum):
    """What `reproduce` reproduces."""

    figure2 = "figure2"
    figure3 = "figure3"
    figures4_6 = "figures4-6"
    table1 = "table1"
    stability = "stability"
    all = "all"


class Device(StrEnum):
    """Where to train."""

    cpu = "cpu"
    cuda = "cuda"


Folder = Annotated[
    Path | None,
    typer.Option(help="Where the original files are.", show_default="$QUARFLOW_DATA, or ~/.cache/quarflow"),
]
Download = Annotated[bool, typer.Option("--download", help="Fetch missing files from their public homes.")]


@app.command()
def reproduce(
    figure: Annotated[
        Figure,
        typer.Argument(
            help="figure2: the Lipschitz Trick. figure3: log-density contours under three kinds of flow. "
            "figures4-6: where the modes are after each transform. all: these figures. "
            "table1: bits/dim of four flows of images. stability: the rates and batch sizes at which these train.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder of the results; the runs are kept in OUT/runs.")
    ] = Path("reproduced"),
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Updates of each model; a few hundred for a quick look.",
            show_default="20000; table1: as many as --minutes allow; stability: 200",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each model, with seeds 0, 1, ...")] = 5,
    models: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Only these of figure 3: maf, residual, quar, quar-coordinate; "
            "of table1 and stability: quar, residual, glow, flowpp.",
            show_default="all of them; stability: without residual",
        ),
    ] = "",
    also: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="More models for figure 3, such as nice, realnvp, planar, sylvester, bnaf; zuko:NSF for zuko's.",
            show_default="none",
        ),
    ] = "",
    batch_size: Annotated[int, typer.Option(min=1, help="Points of each update; no point is seen twice.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="At its peak: it warms up, then decays to zero.")] = 1e-3,
    device: Annotated[Device, typer.Option(help="Where to train.")] = Device.cpu,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, each a process with one thread.")] = 1,
    fresh: Annotated[bool, typer.Option("--fresh", help="Train anew what is finished or was cut.")] = False,
    minutes: Annotated[
        float | None, typer.Option(help="Of table1: of training of each run.", show_default="5, without --steps")
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Of table1: data sets; digits for a quick look. Of stability: one of them.",
            show_default="mnist,cifar10; stability: digits",
        ),
    ] = "",
    settings: Annotated[
        str, typer.Option(metavar="NAME,...", help="Of table1: each system's published optimiser, the engine's own.")
    ] = "published,engine",
    precision: Annotated[
        str, typer.Option(help="Of table1 and stability: of the products of all runs: full, tf32 or bf16.")
    ] = "full",
    graph: Annotated[
        bool, typer.Option("--graph/--no-graph", help="Of table1 and stability, on a GPU: steps as CUDA graphs.")
    ] = True,
    rates: Annotated[
        str, typer.Option(metavar="RATE,...", help="Of stability: learning rates.", show_default="2e-5 to 0.1")
    ] = "",
    folder: Folder = None,
    download: Download = False,
) -> None:
    """Reproduce the figures and a table of the paper: pictures and their numbers.

    Each writes FIGURE.json and PNG. A run that is finished is kept, and one that was cut goes on: Ctrl-C, and the
    same command later, loses nothing.
    """
    experiments = _experiments()
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("reproduce draws with matplotlib: pip install 'quarflow[plots]'.")
    if figure in (Figure.table1, Figure.stability):
        options: dict[str, Any] = {
            "models": _names(models),
            "steps": steps,
            "precision": precision,
            "graph": graph,
            "device": device.value,
            "folder": None if folder is None else str(folder),
            "download": download,
        }
        if figure is Figure.stability:
            given = {name: value for name, value in {**options, "data": data}.items() if value}
            given |= {"graph": graph} | ({"rates": _numbers("rates", rates)} if rates else {})
            return _stability(given, out, fresh)
        options |= {"data": _names(data or "mnist,cifar10"), "settings": _names(settings), "minutes": minutes}
        return _table1(options, out, fresh)
    every = tuple(f.value for f in Figure if f not in (Figure.all, Figure.table1, Figure.stability))
    try:
        chosen = experiments.Settings(
            figures=every if figure is Figure.all else (figure.value,),
            steps=20_000 if steps is None else steps,
            seeds=seeds,
            batch_size=batch_size,
            learning_rate=learning_rate,
            device=device.value,
            models=_names(models),
            also=_names(also),
        )
        out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    console = Console(stderr=True)
    board = _Board(console, [job for name in chosen.figures for job in chosen.jobs(name)])
    try:
        with terminable(), board.shown():
            failed, written = experiments.reproduce(chosen, out, jobs, fresh, board.tell, console.print)
    except experiments.Mismatch as error:
        raise typer.BadParameter(str(error)) from error
    except KeyboardInterrupt:
        console.print("Interrupted. What is finished is kept; the same command goes on from here.")
        raise typer.Exit(INTERRUPTED) from None
    for path in written:
        typer.echo(path)
    if failed:
        console.print(f"{len(failed)} of the runs failed: {'; '.join(map(str, failed))}.")
        raise typer.Exit(1)


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in _names(text))
    except ValueError as error:
        raise typer.BadParameter(f"{name}: expected numbers, with commas between them; got {text!r}.") from error


def _table1(options: dict[str, Any], out: Path, fresh: bool) -> None:
    """`reproduce` of table 1."""
    from experiments import table1

    written = _of_images(options["device"], lambda say: table1.reproduce(table1.Table(**options), out, fresh, say))
    typer.echo((out / "table1.md").read_text())
    for path in written:
        typer.echo(path)


def _stability(options: dict[str, Any], out: Path, fresh: bool) -> None:
    """`reproduce` of stability."""
    from experiments import stability

    def make(say: Callable[[str], object]) -> list[Path]:
        return stability.reproduce(stability.Stability(**options), out, fresh, say)

    written = _of_images(options["device"], make)
    for line in (*stability.verdicts(json.loads(written[0].read_text())), *written):
        typer.echo(line)


def _of_images(device: str, make: Callable[[Callable[[str], object]], list[Path]]) -> list[Path]:
    """What ``make`` writes, with errors as the command line has them; what it says goes to stderr."""
    console = Console(stderr=True)
    try:
        with terminable(), _errors():
            _check_device(Device(device))
            return make(lambda text: console.print(text, highlight=False))
    except KeyboardInterrupt:
        console.print("Interrupted. What is finished is kept; the same command goes on from here.")
        raise typer.Exit(INTERRUPTED) from None


class Missing(StrEnum):
    """See `quarflow.tables.MISSING`."""

    error = "error"
    marginal = "marginal"


class Precision(StrEnum):
    """See `quarflow.precision`."""

    full = "full"
    tf32 = "tf32"
    bf16 = "bf16"


Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="mnist, fashion-mnist, cifar10, digits (small, comes with scikit-learn), or a folder of PNG files.",
        show_default=False,
    ),
]
Model = Annotated[Path, typer.Argument(help="A file that `train` or `quarflow.save` wrote.", show_default=False)]


@app.command()
def train(
    source: Source,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder of the results.", show_default="runs/SOURCE")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="A model of images.", show_default="quar_image")
    ] = None,
    config: Annotated[Path | None, typer.Option(dir_okay=False, help="A TOML file with what differs.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            help="An option of the file, such as model.hidden=192 or training.max_steps=1000; may be repeated.",
        ),
    ] = None,
    folder: Folder = None,
    download: Download = False,
    device: Annotated[Device, typer.Option(help="Where to train.")] = Device.cpu,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in OUT.")] = False,
    shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Files of at most this size, such as 16MiB, for the state and the model."),
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="The log in OUT/tensorboard, too.")] = False,
) -> None:
    """Train a flow on images: bits/dim on the test set, a model, a log and samples.

    Ctrl-C writes the state, and `--resume` goes on from there. Every option that a run had is in OUT/config.toml. On
    several GPUs or machines: torchrun --nproc-per-node 8 -m quarflow.cli train cifar10 --device cuda.
    """
    from quarflow import runs

    console = Console(stderr=True)
    out = out or Path("runs") / Path(source).name
    with _errors():
        file = {} if config is None else runs.read_config(config)
        if resume and config is None and (out / "config.toml").exists():
            file = runs.read_config(out / "config.toml")
        more = [] if model is None else [f"model.name={model}"]
        more += [*(set_ or []), *([] if shard_size is None else [f"run.shard_size={shard_size}"])]
        more += ["run.tensorboard=true"] if tensorboard else []
        run = runs.Run.of(source, _with_data(file, folder, download), more)
        _check_device(device)
    try:
        with terminable(), _errors():
            result = runs.train(run, out, device.value, resume, lambda text: console.print(text, highlight=False))
    except KeyboardInterrupt:
        console.print(f"Interrupted. The state is in {out}; the same command with --resume goes on from there.")
        raise typer.Exit(INTERRUPTED) from None
    if not result:  # another process of this run tells it
        return
    noise = "" if result["test_bpd_noise_se"] is None else f", noise ± {result['test_bpd_noise_se']:.4f}"
    typer.echo(
        f"{result['test_bpd']:.4f} ± {result['test_bpd_se']:.4f} bits/dim on {result['test_images']} test images"
        f"{noise}; {result['steps']} steps in {result['minutes']:.1f} minutes"
    )
    typer.echo(f"{out / 'model.qf'}\n{out / 'samples.png'}\n{out / 'result.json'}")


@app.command()
def evaluate(
    model: Model,
    source: Source,
    folder: Folder = None,
    download: Download = False,
    draws: Annotated[int, typer.Option(min=1, help="Draws of the noise that makes whole numbers continuous.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 256,
    precision: Annotated[
        Precision, typer.Option(help="Of matrix products: tf32 and bf16 are fast on a GPU, bf16 is the least exact.")
    ] = Precision.full,
    device: Annotated[Device, typer.Option(help="Where to evaluate.")] = Device.cpu,
    json_: Annotated[bool, typer.Option("--json", help="Numbers as JSON.")] = False,
) -> None:
    """Bits per dimension of a model on the whole test set, and how well it reconstructs images."""
    import json

    from quarflow import runs
    from quarflow.checkpoint import load
    from quarflow.pixels import bits_per_dim, check_images, reconstruction_error

    with _errors():
        _check_device(device)
        flow = load(model).to(device.value)
        images = runs.images_of(source, {"folder": folder, "download": download})
        check_images(flow, images.test)
        c = runs.contexts(flow, images)[1]
        found = bits_per_dim(flow, images.test, c, draws, batch_size, precision=precision.value)
        error = reconstruction_error(flow, images.test[:batch_size], None if c is None else c[:batch_size])
    if json_:
        typer.echo(json.dumps({**vars(found), "reconstruction_error": error}))
    else:
        typer.echo(f"{found}\nlargest error of a reconstruction: {error:.1e} (of {min(batch_size, found.n)} images)")


@app.command()
def sample(
    model: Model,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            dir_okay=False,
            help="The file to write: PNG; of a table, CSV (also .csv.gz) or Parquet.",
            show_default="samples.png, or standard output for a table",
        ),
    ] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="How many images or rows.")] = 64,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--given",
            metavar="COLUMN=VALUE",
            help="What is given, of a table: columns of the context, and of a model in one order any first ones; once "
            "for each column. Of images with classes: class=3.",
        ),
    ] = None,
    complete: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Instead: test images of a SOURCE, as of `train`, each followed by draws of the rest of it given its "
            "first rows. Of a model whose blocks share one order (model.mixing=none).",
        ),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Of an image, that --complete is given.", show_default="half")
    ] = None,
    folder: Folder = None,
    download: Download = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    device: Annotated[Device, typer.Option(help="Where to sample.")] = Device.cpu,
) -> None:
    """Draw images from a model, as one grid, or rows from a model of a table."""
    from quarflow import runs, table_runs
    from quarflow.checkpoint import load
    from quarflow.table_flow import TableFlow

    with _errors():
        _check_device(device)
        flow = load(model).to(device.value)
        if rows is not None and complete is None:
            raise ValueError("rows: expected --complete SOURCE with it, whose images have these rows; got none.")
        if isinstance(flow, TableFlow):
            if complete is not None:
                raise ValueError(f"complete: expected a model of images; {model} is of a table. Use --given.")
            table_runs.sample(flow, "-" if out is None else str(out), n, _pairs("given", given), seed)
            return
        if len(flow.event_shape) != 3:
            raise ValueError(
                f"model: expected a model of images or of a table; {model} is of vectors of {flow.event_shape.numel()}."
            )
        out = out or Path("samples.png")
        if complete is None:
            runs.save_samples(flow, out, n, seed, _class(given))
        elif given:
            raise ValueError("given: expected none with --complete, where images have their own classes.")
        else:
            images = runs.images_of(complete, {"folder": folder, "download": download})
            runs.save_completions(flow, images, out, n, rows, seed)
    typer.echo(out)


Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="A CSV file (also .csv.gz), a Parquet file, or - for CSV from standard input.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Numbers as JSON.")]


@app.command("fit")
def fit_command(
    data: Data,
    out: Annotated[Path, typer.Option("--out", "-o", dir_okay=False, help="The model to write.")],
    context: Annotated[str, typer.Option(metavar="COLUMN,...", help="Columns that are given, not modelled.")] = "",
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=KIND",
            help="What a column is: number, integer, category, drop, or the step of its values; may be repeated.",
        ),
    ] = None,
    bounds: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN=LOW:HIGH", help="Of a column; either side may be left out; may be repeated."),
    ] = None,
    first: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN,...",
            help="One order of all columns, these first: for densities of the first ones, and of others given them.",
            show_default="no one order",
        ),
    ] = None,
    missing: Annotated[
        Missing,
        typer.Option(help="marginal: rows may lack values, of the columns that come last in the order of the model."),
    ] = Missing.error,
    model: Annotated[str, typer.Option(help="The flow of the numbers, by its name in quarflow.models.")] = "quar",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the model, such as blocks=4; may be repeated."),
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Of the training.", show_default="by the rows")
    ] = None,
    max_seconds: Annotated[float | None, typer.Option(help="Of the training.", show_default="no limit")] = None,
    rows: Annotated[int, typer.Option(min=2, help="Rows to learn from: drawn at random if there are more.")] = 10**6,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws, the weights and the training.")] = 0,
    json_: Json = False,
) -> None:
    """Learn the density of a table: a model for `score` and `sample`.

    What each column was found to be is printed, and stored with the model.
    """
    import json

    from quarflow import table_runs

    with _errors(), _plain_warnings(), terminable():
        try:
            found = table_runs.fit(
                data,
                out,
                rows=rows,
                context=_names(context),
                columns=_pairs("column", column),
                bounds=_pairs("bounds", bounds),
                first=None if first is None else _names(first),
                missing=missing.value,
                model=model,
                model_options=_pairs("set", set_),
                max_steps=max_steps,
                max_seconds=max_seconds,
                seed=seed,
            )
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
    if json_:
        typer.echo(json.dumps(found))
        raise typer.Exit(INTERRUPTED if found["stopped"] == "interrupted" else 0)
    for name, words in found["columns"].items():
        typer.echo(f"{name}: {words}")
    if found["order"]:
        typer.echo(f"in this order: {', '.join(found['order'])}")
    nats = "" if found["validation_nats"] is None else f", {found['validation_nats']:.3f} nats on rows held out"
    typer.echo(f"{found['rows']} of {found['rows_in_file']} rows, {found['steps']} steps{nats}\n{out}")
    if found["stopped"] == "interrupted":
        typer.echo("Interrupted: the model has the best weights so far.", err=True)
        raise typer.Exit(INTERRUPTED)


@app.command()
def score(
    model: Model,
    data: Data,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", dir_okay=False, help="CSV (also .csv.gz) or Parquet.", show_default="standard output"
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN,...",
            help="The density of these alone, the first ones of the model's order.",
            show_default="all",
        ),
    ] = None,
    given: Annotated[
        str, typer.Option(metavar="COLUMN,...", help="The density given these, which come before them in the order.")
    ] = "",
    json_: Annotated[
        bool, typer.Option("--json", help="The summary as JSON; without OUT nothing but the summary.")
    ] = False,
) -> None:
    """The log-density of each row of a table in nats, one line for each, and a summary.

    The file is read in parts, which are scored on all cores: memory does not grow with it.
    """
    import json

    from quarflow import table_runs

    with _errors(), _plain_warnings(), terminable():
        try:
            found = table_runs.score(
                _table_model(model),
                data,
                None if json_ and out is None else str(out or "-"),
                columns=None if columns is None else _names(columns),
                given=_names(given),
            )
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
    if json_:
        typer.echo(json.dumps(found))
        return
    said = f"{found['rows']} rows: "
    if found["impossible"]:
        said += f"{found['impossible']} of them impossible, so their mean is -inf"
    else:
        said += f"{found['nats']:.4f} ± {found['standard_error']:.4f} nats"
    typer.echo(said, err=out is None)


@app.command()
def report(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option("--out", "-o", dir_okay=False, help="The page to write.")] = Path("report.html"),
    train: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Rows that other densities learn from, if DATA is not the table of the fit.",
            show_default="a half of DATA",
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=2, help="Rows of each kind to look at, held out and learnt from: drawn at random.")
    ] = 5000,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    json_: Json = False,
) -> None:
    """A page about a model of a table and the rows of a file: is the density right, and what surprises it?

    One HTML file that needs nothing else: likelihood beside other densities, calibration, pictures, outliers, warnings.
    """
    import json

    from quarflow import table_runs

    with _errors(), terminable():
        try:
            flow = _table_model(model)
            found = table_runs.report(flow, data, out, model=model.name, train=train, rows=rows, seed=seed)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
    if json_:
        typer.echo(json.dumps(found))
        return
    for text in found["warnings"]:
        typer.echo(f"warning: {text}", err=True)
    nats = "impossible rows" if found["nats"] is None else f"{found['nats']:.4f} nats"
    typer.echo(f"{found['judged']} rows, {found['kind']}: {nats}\n{out}")


@app.command()
def bench(
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A model.", show_default="quar; quar_image with --shape"),
    ] = None,
    features: Annotated[
        int | None, typer.Option(min=1, help="Of a model of vectors.", show_default="6")
    ] = None,
    shape: Annotated[str | None, typer.Option(metavar="C,H,W", help="Of a model of images, such as 3,32,32.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="An option of the model, such as blocks=[16,16,16]; may be repeated."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows of a step.", show_default="512 vectors or 64 images")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Draws at a time.", show_default="as many")] = None,
    precision: Annotated[
        Precision, typer.Option(help="Of matrix products in training and log_prob; sampling is in full precision.")
    ] = Precision.full,
    rounds: Annotated[int, typer.Option(min=1, help="Calls to take the median of, after a warm-up.")] = 10,
    device: Annotated[
        Device | None, typer.Option(help="Where to measure.", show_default="cuda if torch sees one")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few rows and rounds: does it run at all?")] = False,
    json_: Json = False,
) -> None:
    """What a model costs on this machine: time and memory of training steps, of log_prob and of sampling.

    Beside each time: the part of it that its matrix products and memory traffic would take at the rates measured here,
    and which form of the networks ran, and why.
    """
    import json

    import torch

    from quarflow import bench as bench_
    from quarflow.runs import value

    console = Console(stderr=True)
    with _errors(), terminable(), console.status("rates of this machine") as status:
        try:
            device = device or (Device.cuda if torch.cuda.is_available() else Device.cpu)
            _check_device(device)
            asked = bench_.Bench(
                model or ("quar" if shape is None else "quar_image"),
                features,
                None if shape is None else _shape(shape),
                {key: value(text) for key, text in _pairs("set", set_).items()},
                batch_size,
                samples,
                precision.value,
                rounds,
                quick,
            )
            found = bench_.measure(asked, torch.device(device.value))
            head, rows = next(found), []
            if not json_:
                typer.echo(
                    f"{asked.model}, {head['parameters']} parameters, {precision.value} precision, on "
                    f"{head['gpu'] or head['cpu']} ({head['threads']} threads), torch {head['torch']}\n"
                    f"measured here: products {head['operations_per_second'] / 1e12:.3g} TFLOP/s, "
                    f"copies {head['bytes_per_second'] / 1e9:.3g} GB/s"
                )
            for row in found:
                rows.append(row)
                status.update(f"{row['what']} done")
                if not json_:
                    typer.echo("\n".join(bench_.lines(row)))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
    if json_:
        typer.echo(json.dumps({**head, "rows": rows}, default=vars))
    if any("failed" in row and not row["impossible"] for row in rows):
        raise typer.Exit(1)


def _shape(text: str) -> tuple[int, ...]:
    """What ``3,32,32`` says."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"shape: expected channels, height and width, such as 3,32,32; got {text!r}.")
    return tuple(map(int, parts))


def _with_data(file: dict[str, Any], folder: Path | None, download: bool) -> dict[str, Any]:
    """The sections of a file, with the data options of the command line over its own."""
    given = {"folder": None if folder is None else str(folder), "download": download or None}
    return file | {"data": file.get("data", {}) | {k: v for k, v in given.items() if v is not None}}


def _table_model(path: Path) -> TableFlow:
    from quarflow.checkpoint import load
    from quarflow.table_flow import TableFlow

    flow = load(path)
    if not isinstance(flow, TableFlow):
        raise ValueError(f"model: expected a model of a table; {path} is another. Make one with quarflow fit.")
    return flow


def _check_device(device: Device) -> None:
    import torch

    if device is Device.cuda and not torch.cuda.is_available():
        raise ValueError("device: expected a device of this machine; got 'cuda', and torch sees none. Use cpu.")


def _pairs(name: str, texts: list[str] | None) -> dict[str, str]:
    """``KEY=VALUE`` texts; the key may hold an equals sign of its own."""
    found = {}
    for text in texts or []:
        key, equals, value = text.rpartition("=")
        if not (key and equals and value):
            raise ValueError(f"{name}: expected NAME=VALUE; got {text!r}.")
        found[key] = value
    return found


def _class(given: list[str] | None) -> int | None:
    """What ``class=3`` says, which is all that can be given of images."""
    texts = _pairs("given", given)
    if not texts:
        return None
    if set(texts) != {"class"} or not texts["class"].isdecimal():
        raise ValueError(f"given: expected class=NUMBER, as the model is of images; got {' '.join(given or [])}.")
    return int(texts["class"])


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as lines of text, the first few of them."""
    import warnings

    shown = 0

    def show(message: Warning | str, *rest: Any, **more: Any) -> None:
        nonlocal shown
        shown += 1
        if shown <= WARNINGS:
            typer.echo(f"warning: {message}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield
    if shown > WARNINGS:
        typer.echo(f"warning: and {shown - WARNINGS} more", err=True)


@contextmanager
def _errors() -> Iterator[None]:
    """What a user can mend is a message and exit code 2, what failed while it ran is one with exit code 1."""
    from quarflow.checks import is_out_of_memory
    from quarflow.training import TrainingDiverged

    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error
    except (TrainingDiverged, ArithmeticError, OSError, MemoryError, ImportError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, RuntimeError):
            if not is_out_of_memory(error):
                raise
            why = str(error).partition("\n")[0]
            text = f"MemoryError: {why} Give fewer images at a time (evaluate --batch-size, sample -n)."
        Console(stderr=True).print(text, highlight=False, markup=False)
        raise typer.Exit(1) from error


def _experiments() -> ModuleType:
    """The module that reproduces: it comes with quarflow, but quarflow does not depend on it."""
    try:
        return importlib.import_module("experiments.reproduce")
    except ModuleNotFoundError as error:
        if error.name not in ("experiments", "experiments.reproduce"):
            raise
        found = sys.modules.get("experiments")
        other = f"the package 'experiments' in {list(found.__path__)} is another" if found else "it is not here"
        raise typer.BadParameter(
            f"reproduce needs the package 'experiments' that comes with quarflow: {other}. Run the command in the "
            "repository, or install quarflow from it, and away from folders of that name."
        ) from error


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


@contextmanager
def terminable() -> Iterator[None]:
    """To be told to end, as by ``timeout``, is Ctrl-C; also where that is ignored, as in jobs that a script started."""
    from quarflow.training import ask_to_stop

    def stop(number: int, frame: object) -> None:
        if ask_to_stop():
            return
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Board:
    """Progress: a bar for all updates and one for each run in hand; off a terminal, a line for each run that ends."""

    def __init__(self, console: Console, jobs: list[Any]) -> None:
        self.console = console
        self.jobs = {job.stem: job for job in jobs}
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self.tasks: dict[str, Any] = {}
        self.ended = 0

    def shown(self) -> Any:
        return self.bars if self.console.is_terminal else nullcontext()

    def tell(self, job: Any, state: str, value: Any) -> None:
        """See `experiments.jobs`."""
        if state == "started":
            self.tasks[job.stem] = self.bars.add_task(str(job), total=job.steps)
        elif state == "step":
            self.bars.update(self.tasks[job.stem], completed=value)
        else:
            self.bars.remove_task(self.tasks.pop(job.stem))
            self.ended += 1
            text = f"{state}: {value}" if state == "failed" else state
            if state == "finished":
                text = f"{value['test_nats']:.4f} nats (true {value['true_nats']:.4f}), {value['seconds']:.0f} s"
            self.console.print(f"{job}: {text}", highlight=False)


if __name__ == "__main__":
    main()
