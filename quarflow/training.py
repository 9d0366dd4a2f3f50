"""Learning a flow from data: `fit`, and the `Trainer` that it drives.

The loop: ``flow.initialise`` from data; then minibatches without replacement, Adam on the mean of ``-log p``,
gradients clipped by their global norm, a learning rate that warms up linearly and decays to zero as a cosine,
and a moving average of the weights. Every so often the averaged weights are scored on validation rows; the
best ones are kept, and are what the flow has in the end.

A step does not wait for the device. A loss or gradient that is not finite raises a flag there, under which
the optimiser leaves every weight as it is; the host looks at the flag every few steps.

Several processes can share the steps of one run. Each has the whole data and takes its share of the rows of every
batch; gradients and losses are averaged over all, so that every process makes the same updates, those of one process
with the whole batch. (Estimated log-determinants draw the same signs in each process: unbiased, but other draws.)
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from quarflow.checkpoint import CheckpointError, read_tensors, size_in_bytes, to_json, write_tensors
from quarflow.checks import check_choice, check_count, check_positive, is_out_of_memory
from quarflow.evaluation import as_data, as_rows, as_tensor, rows_at_once
from quarflow.pixels import dequantise
from quarflow.precision import PRECISIONS, products
from quarflow.transforms.residual import recomputing

if TYPE_CHECKING:
    from quarflow.flow import Flow

OPTIMIZERS = ("adam", "adamax")
LOG_EVERY = 10  # steps between two looks at the loss and at the flag of the guard


@dataclass(frozen=True)
class Options:
    """How to train. Everything here decides the result: a run can be resumed only with the same options."""

    max_steps: int | None = None  # optimiser steps; 4000 if there is no limit on time either
    max_seconds: float | None = None  # the decay then follows the clock, and a run is no longer repeatable
    batch_size: int = 512  # or all rows, if there are fewer
    learning_rate: float = 1e-2  # at its peak
    warmup: float = 0.05  # part of the run with a rising learning rate
    clip: float | None = 5.0  # global norm of the gradient; None for no limit
    ema: float = 0.998  # decay of the averaged weights, once the run is long; 0 for no average
    patience: int | None = 20  # evaluations without a new best before the run stops; None for never
    evaluate_every: int | None = None  # steps; None: often, but at most a tenth of the time
    seed: int = 0
    optimizer: str = "adam"  # or "adamax"
    precision: str = "full"  # of matrix products, see `quarflow.precision`; parameters and optimiser keep their dtype
    weight_decay: float = 0.0  # times the learning rate, the part by which a step of Adam draws all weights to zero

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "patience", "evaluate_every"):
            if getattr(self, name) is not None or name == "batch_size":
                check_count(name, getattr(self, name))
        for name in ("max_seconds", "learning_rate", "clip"):
            if getattr(self, name) is not None or name == "learning_rate":
                check_positive(name, getattr(self, name))
        for name in ("warmup", "ema"):
            _check_fraction(name, getattr(self, name))
        check_count("seed", self.seed, 0)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("precision", self.precision, PRECISIONS)
        if self.weight_decay != 0:
            check_positive("weight_decay", self.weight_decay)
            if self.optimizer != "adam":
                raise ValueError(f"weight_decay: expected optimizer='adam' with it; got {self.optimizer!r}.")
        if self.max_steps is None and self.max_seconds is None:
            object.__setattr__(self, "max_steps", 4000)


@dataclass(repr=False)
class History:
    """What happened in a run, in nats: ``loss`` is ``-log p`` averaged over the steps since the entry before,
    ``validation`` is the mean of ``log p`` over the validation rows, with the averaged weights."""

    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    validation_steps: list[int] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    best_step: int | None = None
    best_validation: float | None = None
    stopped: str | None = None  # "max_steps", "max_seconds", "early stopping", "interrupted" or "diverged"
    seconds: float = field(default=0.0, compare=False)  # of a run and those that it resumed

    def __repr__(self) -> str:
        """
        >>> History([10], [2.5], [1e-3], [0, 10], [-3.0, -2.4], 10, -2.4, "max_steps", 0.52)
        History(10 steps in 0.5 s, stopped: max_steps, loss 2.500, best validation -2.400 nats at step 10)
        """
        parts = [
            f"{self.steps[-1] if self.steps else 0} steps in {self.seconds:.1f} s",
            f"stopped: {self.stopped}",
        ]
        if self.loss:
            parts.append(f"loss {self.loss[-1]:.3f}")
        if self.best_validation is not None:
            parts.append(f"best validation {self.best_validation:.3f} nats at step {self.best_step}")
        return f"History({', '.join(parts)})"

    def to_dict(self) -> dict[str, Any]:
        """Lists, numbers and strings only.

        >>> History(stopped="max_steps").to_dict()["stopped"]
        'max_steps'
        """
        return dataclasses.asdict(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the learning curves and the learning rate; the suffix of ``path`` is the kind of picture."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.5), layout="constrained", dpi=150)
        FigureCanvasAgg(figure)  # no window, and no change to the caller's backend
        curves, rate = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        nats = [-loss for loss in self.loss]
        curves.plot(self.steps, nats, color="#9db7d5", lw=1, label="training")
        curves.plot(
            self.validation_steps,
            self.validation,
            color="#1f4e8c",
            lw=1.8,
            label="validation, averaged weights",
        )
        if self.best_step is not None:
            best = f"best: {self.best_validation:.3f} at step {self.best_step}"
            curves.plot(
                self.best_step, self.best_validation, "o", color="#c8452c", ms=6, zorder=3, label=best
            )
        # The first steps may be worse by orders of magnitude; the picture is about the rest.
        seen = sorted(value for value in nats + self.validation if math.isfinite(value))
        if seen and seen[-1] > seen[0]:
            low = seen[len(seen) // 20]
            margin = 0.08 * (seen[-1] - low) or 1.0
            curves.set_ylim(low - margin, seen[-1] + margin)
        curves.set_ylabel("mean log-likelihood (nats)")
        curves.legend(loc="lower right", frameon=False)
        rate.plot(self.steps, self.learning_rate, color="#6b6b6b", lw=1.2)
        rate.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
        for axes in (curves, rate):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25, lw=0.5)
        figure.align_ylabels()
        figure.savefig(path)


class TrainingDiverged(ArithmeticError):
    """A loss or gradient was not finite. The flow has its last good weights; ``history`` is the run's."""

    def __init__(self, message: str, history: History) -> None:
        super().__init__(message)
        self.history = history


@dataclass(frozen=True)
class Rows:
    """Data side by side: ``x`` (n, *event), ``context`` (n, features), ``weights`` (n,) of mean one."""

    x: Tensor
    context: Tensor | None = None
    weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: Tensor | slice) -> Rows:
        context = None if self.context is None else self.context[rows]
        return Rows(self.x[rows], context, None if self.weights is None else self.weights[rows])

    def values(self, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """``x`` as a flow takes it: images of whole numbers with uniform noise, drawn anew at each call."""
        return dequantise(self.x, like, generator) if self.x.dtype == torch.uint8 else self.x


def schedule(progress: float, warmup: float) -> float:
    """The learning rate over its peak: a line up during ``warmup``, then half a cosine down to zero.

    >>> [round(schedule(p, warmup=0.1), 3) for p in (0.05, 0.1, 0.55, 1.0)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if progress < warmup:
        return progress / warmup
    return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup)))


class Trainer:
    """A flow in training: its optimiser, averaged and best weights, place in the data, and history.

    ``model`` is what a step calls: the flow, unless a wrapper takes its place. The rows of a step follow from
    the seed and the number of the step alone, so that a run can be resumed, and a step repeated. If ``distributed``,
    the processes of `torch.distributed` share the rows of every step.
    """

    def __init__(
        self,
        flow: Flow,
        train: Rows,
        validation: Rows | None,
        options: Options,
        distributed: bool = False,
    ) -> None:
        self.flow, self.train, self.validation, self.options = flow, train, validation, options
        self.model: Callable[..., Tensor] = flow
        self.batch_size = min(options.batch_size, len(train))
        self.processes, self.rank = _place_in(distributed)
        if self.processes > 1 and options.max_seconds is not None:
            raise ValueError("max_seconds: expected None with several processes, whose clocks differ. Give max_steps.")
        if self.batch_size % self.processes:
            raise ValueError(
                f"batch_size: expected a multiple of the {self.processes} processes; got {self.batch_size}. Take "
                f"{max(1, self.batch_size // self.processes) * self.processes}."
            )
        self.named = {name: p for name, p in flow.named_parameters() if p.requires_grad}
        if not self.named:
            raise ValueError("flow: expected parameters to train; every one has requires_grad=False.")
        self.parameters = list(self.named.values())
        device = self.parameters[0].device
        self.learning_rate = torch.zeros((), device=device)
        self.fused = options.optimizer == "adam"  # Adamax has no fused form
        self.optimizer: Any = (
            torch.optim.AdamW(self.parameters, self.learning_rate, weight_decay=options.weight_decay, fused=True)
            if self.fused
            else torch.optim.Adamax(self.parameters, lr=self.learning_rate)
        )
        # Everything that a checkpoint of the flow would hold; buffers have to be updated in place.
        state = {name: t for name, t in flow.state_dict().items() if t.is_floating_point()}
        self.names, self.live = list(state), list(state.values())
        self.average = [t.clone() for t in self.live]
        self.best: list[Tensor] | None = None
        self.step = 0
        self.misses = 0
        self.history = History()
        self.started = time.monotonic()
        self._epoch = -1
        self._order = torch.empty(0)
        # On the device: what changes from step to step (the rows, the part of a new average that is new), then the sum
        # of losses since the last entry, finite steps since the last look, the flag.
        self._place = torch.zeros(self.batch_size, dtype=torch.long, device=train.x.device)
        self._keep = torch.zeros((), device=device)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._finite = torch.zeros((), device=device)
        self._failed = torch.zeros((), device=device)
        self._looked, self._logged = 0, 0

    # One step.

    def rows(self, step: int) -> Tensor:
        """Indices of the rows of a step: slices of a permutation of the data, a new one each epoch."""
        epoch, place = divmod(step, len(self.train) // self.batch_size)
        if epoch != self._epoch:
            order = permutation(len(self.train), self.options.seed, epoch)
            self._epoch, self._order = epoch, order.to(self.train.x.device)
        return self._order[place * self.batch_size : (place + 1) * self.batch_size]

    def loss(self, batch: Rows) -> Tensor:
        """``-mean(w log p(x | context))`` of this process's share of the rows."""
        # Noise for all rows, the same in every process: a row gets the one that it gets in a run of one process.
        share = Rows(batch.values(self.flow.base.anchor), batch.context, batch.weights)[self.share]
        with products(self.options.precision, share.x.device):
            log_prob = self.model(share.x, share.context)
        return -(log_prob if share.weights is None else share.weights * log_prob).mean()

    def _backward(self, batch: Rows) -> Tensor:
        """The loss, and its gradients."""
        loss, precision = self.loss(batch), self.options.precision
        with products("full" if precision == "bf16" else precision, loss.device):
            loss.backward()
        return loss.detach()

    @property
    def share(self) -> slice:
        """Which rows of a batch are this process's."""
        return slice(self.rank, None, self.processes)

    def update(self, batch: Rows) -> None:
        """A step of the weights, without a look at any value where the optimiser is fused."""
        self.optimizer.zero_grad()
        loss = self._backward(batch)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if self.processes > 1:
            _average([*grads, loss])
        # In float64, where no sum of squares overflows: a gradient that is huge but finite can be clipped.
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, torch.float64))).float()
        torch.maximum(self._failed, (~torch.isfinite(norm + loss)).float(), out=self._failed)
        self._finite += 1 - self._failed
        self._loss += loss
        self._apply(grads, (norm / (self.options.clip or math.inf)).clamp_min(1))

    def _apply(self, grads: list[Tensor], scale: Tensor) -> None:
        """The optimiser's step with gradients over ``scale``; nothing, once a step has failed."""
        if self.fused:
            # As torch.amp does: the kernel divides gradients by the one, and is idle if the other is set.
            self.optimizer.grad_scale, self.optimizer.found_inf = scale, self._failed
            self.optimizer.step()
        elif not bool(self._failed):
            torch._foreach_div_(grads, scale)
            self.optimizer.step()

    def queued(self) -> AbstractContextManager[object]:
        """Within it, work goes to where this trainer's does."""
        return nullcontext()

    def advance(self) -> None:
        """The next step of the run."""
        with self.queued():
            self.learning_rate.fill_(self._rate(self.step))
            self._place.copy_(self.rows(self.step))
            # The average is over about a tenth of the steps at first: a short run must not remember its start.
            self._keep.fill_(1 - min(self.options.ema, (1 + self.step) / (10 + self.step)))
            self._body()
            self.step += 1
            if self.step % LOG_EVERY == 0:
                self.log()

    def _body(self) -> None:
        """A step on the device: the same work each time, at what `advance` has put there."""
        self.update(self.train[self._place])
        difference = torch._foreach_sub(self.live, self.average)
        torch._foreach_mul_(difference, self._keep)
        torch._foreach_add_(self.average, difference)

    def asked(self, interrupted: bool) -> bool:
        """Whether this process was ``interrupted``, or any that shares the steps: they look at the same ones."""
        if self.processes == 1 or self.step % LOG_EVERY:
            return interrupted and self.processes == 1
        flag = self.learning_rate.new_tensor(float(interrupted))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def what_fits(self, why: str) -> str:
        """After a step that memory was too small for: what else would fit, found by trying."""
        image = "image" if len(self.flow.event_shape) == 3 else "row"
        found = []
        if (rows := self._largest(self.batch_size // 2)) > 0:
            found.append(f"{rows} do (batch_size={rows})")
        if not any(getattr(m, "recompute", False) for m in self.flow.modules()):
            with suppress(ValueError), recomputing(self.flow):  # an error if there is nothing to recompute
                if (rows := self._largest(self.batch_size)) > 0:
                    found.append(f"{rows} do with recompute=True")
        if self.options.precision == "full":
            found.append("precision='bf16' halves what is kept of each")
        return (
            f"batch_size: {self.batch_size} {image}s do not fit in the memory of {self.learning_rate.device} ({why}). "
            f"{'; '.join(found) or f'Not even one {image} does: take a smaller model'}."
        )

    def _largest(self, rows: int) -> int:
        """``rows``, halved until a step's forward and backward pass fit."""
        while (rows := rows // self.processes * self.processes) > 0:
            self.optimizer.zero_grad()
            try:
                self._backward(self.train[self._place[:rows]])
                break
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            rows //= 2
        return rows

    def progress(self, step: float | None = None) -> float:
        """The part of the run that is over, by steps or by the clock, whichever is further."""
        steps, seconds = self.options.max_steps, self.options.max_seconds
        done = (self.step if step is None else step) / steps if steps else 0.0
        return min(1.0, max(done, self.seconds / seconds if seconds else 0.0))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def _rate(self, step: int) -> float:
        return self.options.learning_rate * schedule(self.progress(step + 0.5), self.options.warmup)

    # Looks at values.

    def look(self) -> None:
        """Raises `TrainingDiverged` if a step since the last look was not finite."""
        steps, finite = self.step - self._looked, int(self._finite)
        if finite < steps:
            raise self._diverged(self._looked + finite)
        self._looked = self.step
        self._finite.zero_()

    def log(self) -> None:
        """Into the history: the mean loss since the last entry."""
        self.look()
        if self.step > self._logged:
            self.history.steps.append(self.step)
            self.history.loss.append(self._loss.item() / (self.step - self._logged))
            self.history.learning_rate.append(self.learning_rate.item())
            self._logged = self.step
            self._loss.zero_()

    def evaluate(self) -> None:
        """Scores the averaged weights on the validation rows, and keeps them if they are the best."""
        if self.validation is None or self.step in self.history.validation_steps[-1:]:
            return
        self.look()
        with self.averaged():
            nats = mean_log_prob(self.flow, self.validation, self.options.precision, self.processes > 1)
        history = self.history
        history.validation_steps.append(self.step)
        history.validation.append(nats)
        if (
            history.best_validation is None
            or nats > history.best_validation
            or math.isnan(history.best_validation)
        ):
            history.best_step, history.best_validation = self.step, nats
            self.best = [t.clone() for t in self.average]
            self.misses = 0
        else:
            self.misses += 1

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The flow with its averaged weights, in ``eval()`` mode."""
        kept = [t.clone() for t in self.live]
        torch._foreach_copy_(self.live, self.average)
        self.flow.eval()
        try:
            yield
        finally:
            torch._foreach_copy_(self.live, kept)
            self.flow.train()

    def finish(self) -> None:
        """Leaves the flow with the weights to keep: the best on validation, or else the averaged ones."""
        torch._foreach_copy_(self.live, self.average if self.best is None else self.best)
        self.optimizer.zero_grad()
        self.flow.eval()
        self.history.seconds = self.seconds

    def _diverged(self, step: int) -> TrainingDiverged:
        # The guard left the weights as they were when it struck: the step can be repeated.
        batch = self.train[self.rows(step)]
        self.optimizer.zero_grad()
        loss = self._backward(batch)
        grads = {name: p.grad for name, p in self.named.items() if p.grad is not None}
        bad = [name for name, grad in grads.items() if not bool(torch.isfinite(grad).all())]
        if not bool(torch.isfinite(loss)):
            x = batch.values(self.flow.base.anchor)[self.share]
            batch = batch[self.share]
            cause = f"the loss is {loss.item()}: {self.flow.diagnose(x, batch.context)}"
        elif bad:
            cause = f"the loss is {loss.item():.4g}, but the gradient is not finite in {', '.join(bad[:3])}"
            cause += f" and {len(bad) - 3} more" * (len(bad) > 3)
        else:
            cause = "the loss or the gradient's norm was not finite, but is in a repeat of the step"
        best = "average" if self.best is None else f"best on validation, of step {self.history.best_step}"
        self.history.stopped = "diverged"
        return TrainingDiverged(
            f"training diverged at step {step + 1} with learning rate {self._rate(step):.3g}: "
            f"{cause.rstrip('.')}. The flow has its last good weights (the {best}). Try learning_rate="
            f"{self.options.learning_rate / 4:.2g}, a longer warmup or a smaller clip; look for outliers.",
            self.history,
        )

    # The state in a file.

    def write(
        self, path: str | os.PathLike[str], shard_size: int | str | None = None, compact: bool = False
    ) -> None:
        """The whole state, for `read`; in files of at most ``shard_size``, see `quarflow.checkpoint.write_tensors`.

        ``compact`` rounds what is not the weights themselves to bfloat16: the moments of the optimiser, and by how much
        the averages differ from the weights. That is 12 bytes for each parameter instead of 20, and no longer to the
        last bit the run without a break.
        """
        self.look()
        averages = {"average": self.average} | ({} if self.best is None else {"best": self.best})
        tensors = {f"weights/{name}": t for name, t in self.flow.state_dict().items()}
        for part, each in averages.items():
            each = [d.bfloat16() for d in torch._foreach_sub(each, self.live)] if compact else each
            tensors |= {f"{part}/{name}": t for name, t in zip(self.names, each, strict=True)}
        for name, p in self.named.items():
            for key, t in self.optimizer.state.get(p, {}).items():
                tensors[f"adam/{name}/{key}"] = t.bfloat16() if compact and key != "step" else t
        tensors |= {f"random/{name}": t for name, t in _random_state(self._loss.device).items()}
        tensors["loss"] = self._loss
        self.history.seconds = self.seconds
        state = {"step": self.step, "misses": self.misses, "logged": self._logged, "compact": compact}
        metadata = {
            "kind": "training",
            "state": json.dumps(state | {"history": self.history.to_dict()}),
            "run": to_json(self._fingerprint),
        }
        write_tensors(path, tensors, metadata, shard_size)

    def read(self, path: str | os.PathLike[str]) -> None:
        """Goes on from a file of `write`; `CheckpointError` if it is of another run."""
        tensors, metadata = read_tensors(path, kind="training")
        try:
            # An option that the file does not know had what is now its default.
            theirs = dataclasses.asdict(Options()) | json.loads(metadata["run"])
            state = json.loads(metadata["state"])
            for name, ours in self._fingerprint.items():
                if theirs[name] != ours:
                    raise CheckpointError(
                        f"{path}: the state of another run: its {name} is "
                        f"{theirs[name]!r:.200}, now {ours!r:.200}. "
                        "Give the same flow, data and options, or start anew with resume=False."
                    )
            parts: dict[str, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                part, _, rest = name.partition("/")
                parts.setdefault(part, {})[rest] = tensor
            self.flow.load_state_dict(parts["weights"])
            if "best" in parts:
                self.best = [t.clone() for t in self.average]
            for part, each in {"average": self.average, "best": self.best}.items():
                if each is not None:
                    torch._foreach_copy_(each, [parts[part][name] for name in self.names])
                    if state.get("compact"):
                        torch._foreach_add_(each, self.live)
            for name, tensor in parts.get("adam", {}).items():
                name, _, key = name.rpartition("/")
                parameter = self.named[name]
                dtype = tensor.dtype if key == "step" else parameter.dtype
                self.optimizer.state[parameter][key] = tensor.to(parameter.device, dtype, copy=True)
            self._loss.copy_(tensors["loss"])
            self.step = self._looked = state["step"]
            self.misses, self._logged = state["misses"], state["logged"]
            self.history = History(**state["history"])
            self.history.stopped = None
            self.started = time.monotonic() - self.history.seconds
            _set_random_state(self._loss.device, parts["random"])
        except CheckpointError:
            raise
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{path}: its contents are damaged ({error!r}). Start anew with resume=False."
            ) from error

    @cached_property
    def _fingerprint(self) -> dict[str, object]:
        """What has to be the same in a run that goes on."""
        config, held_out = self.flow.config, self.validation
        run = {
            "flow": None if config is None else config.to_dict(),
            "list of tensors": [[name, str(t.dtype), *t.shape] for name, t in self.flow.state_dict().items()],
            **dataclasses.asdict(self.options),
            "x": _digest(self.train.x),
            "context": _digest(self.train.context),
            "weights": _digest(self.train.weights),
            "validation": held_out and [_digest(t) for t in (held_out.x, held_out.context, held_out.weights)],
        }
        return dict(json.loads(to_json(run)))  # as it comes back from a file


def fit(
    flow: Flow,
    x: object,
    context: object = None,
    *,
    weights: object = None,
    validation: object = 0.1,
    max_steps: int | None = Options.max_steps,
    max_seconds: float | None = Options.max_seconds,
    batch_size: int = Options.batch_size,
    learning_rate: float = Options.learning_rate,
    warmup: float = Options.warmup,
    clip: float | None = Options.clip,
    ema: float = Options.ema,
    patience: int | None = Options.patience,
    evaluate_every: int | None = Options.evaluate_every,
    seed: int = Options.seed,
    optimizer: str = Options.optimizer,
    precision: str = Options.precision,
    weight_decay: float = Options.weight_decay,
    recompute: bool = False,
    graph: bool = False,
    distributed: bool = False,
    progress: bool | Callable[[Trainer], None] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_seconds: float = 60.0,
    shard_size: int | str | None = None,
    compact: bool = False,
    resume: bool = False,
) -> History:
    """Maximum likelihood: leaves ``flow`` with the best weights for the rows of ``x``, in ``eval()`` mode.

    Args:
        x: (n, *event), a tensor or an array; brought to the flow's dtype and device. Images may be uint8: they get
            uniform noise at each step (`quarflow.pixels.dequantise`).
        context: (n, context features) if the flow is conditional.
        weights: (n,), not negative; rows count in proportion, in training and in validation.
        validation: the part of the rows that is held out, in [0, 1); or the rows themselves, ``x`` or
            ``(x, context)``. With 0 there is no early stopping, and the averaged weights of the end are kept.
        max_steps, max_seconds: the learning rate has decayed to zero at whichever comes first.
        recompute: residual blocks keep their inputs alone for the backward pass, and make the rest again: a third
            more time, the same result, and memory for one block's hidden values instead of all.
        graph: captures a step as a CUDA graph, on a GPU: one launch for thousands of kernels. Steps must not depend
            on values, as those of the models here do not.
        distributed: the processes of `torch.distributed`, which all call this with the same arguments, share every
            batch. The first writes the checkpoint.
        progress: a bar on stderr; ``None`` for only if that is a terminal; or what is called with the
            `Trainer` after each step.
        checkpoint: a file for the state of the run, written every ``checkpoint_seconds`` and at the end.
        shard_size: writes the checkpoint in files of at most this size, bytes or such as "16MiB", and an index.
        compact: rounds what is in the checkpoint beside the weights to bfloat16, see `Trainer.write`.
        resume: goes on from ``checkpoint`` if that file is there, to the same result as without the break.

    The other options are explained in `Options`. The same seed gives the same weights, bit for bit, on one
    machine, unless ``max_seconds`` is set; torch's global random state is left as it was. Ctrl-C ends the run
    after the step in hand, with the best weights so far; a second one at once. Raises `TrainingDiverged` if a
    loss or a gradient is not finite, and ``MemoryError``, with what would fit, if a batch does not.

    >>> import quarflow as qf
    >>> flow = qf.models.quar(features=2, blocks=2, hidden=(4,))
    >>> history = qf.fit(flow, torch.randn(200, 2), max_steps=20)
    >>> history.stopped, history.steps, len(history.validation) > 1
    ('max_steps', [10, 20], True)
    """
    started = time.monotonic()
    options = Options(
        max_steps,
        max_seconds,
        batch_size,
        learning_rate,
        warmup,
        clip,
        ema,
        patience,
        evaluate_every,
        seed,
        optimizer,
        precision,
        weight_decay,
    )
    check_positive("checkpoint_seconds", checkpoint_seconds)
    shown = progress is None or callable(progress) or progress
    switches = {"resume": resume, "progress": shown, "recompute": recompute, "graph": graph, "compact": compact}
    switches["distributed"] = distributed
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}: expected True or False; got {value!r}.")
    if resume and checkpoint is None:
        raise ValueError("resume: expected the file to go on from in checkpoint=; got none.")
    if checkpoint is not None and not Path(checkpoint).absolute().parent.is_dir():
        raise ValueError(
            f"checkpoint: expected a file in a folder that exists; got {checkpoint}. Create the folder."
        )
    if shard_size is not None:
        size_in_bytes(shard_size)
    train, held_out = _split(flow, x, context, weights, validation, options.seed)
    flow.notes = {}  # of what it was before
    with ExitStack() as stack:
        stack.enter_context(_seeded(train.x.device, options.seed))
        interrupted, show = stack.enter_context(interruptible()), stack.enter_context(bar(progress))
        if recompute:
            stack.enter_context(recomputing(flow))
        going_on = resume and checkpoint is not None and os.path.exists(checkpoint)
        if distributed:
            _check_alike(going_on, train.x.device)
        if resume and not going_on:
            warnings.warn(f"{checkpoint}: nothing to resume from; starting from the beginning.", stacklevel=2)
        if not going_on:
            # Actnorm needs good means and variances, not every row.
            count = min(len(train), max(256, 8 * rows_at_once(train.x)))
            order = permutation(len(train), options.seed, 0)[:count].to(train.x.device)
            if train.weights is not None:
                # As often as they count; and a few as they are, so that no column becomes constant.
                often = order[torch.multinomial(train.weights[order], count, replacement=True)]
                order = torch.cat([often, order[: max(2, count // 100)]])
            some = train[order]
            flow.initialise(some.values(flow.base.anchor), some.context)
        flow.train()
        kind = Trainer
        if graph:
            from quarflow.graph_training import GraphTrainer as kind
        trainer = kind(flow, train, held_out, options, distributed)
        trainer.started = started
        with trainer.queued():
            if going_on and checkpoint is not None:
                trainer.read(checkpoint)
            if trainer.processes > 1:
                for t in (*trainer.live, *trainer.average):
                    dist.broadcast(t, 0)
            run(trainer, interrupted, show, checkpoint, checkpoint_seconds, shard_size, compact)
    return trainer.history


def run(
    trainer: Trainer,
    interrupted: Callable[[], bool] = lambda: False,
    show: Callable[[Trainer], None] = lambda trainer: None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_seconds: float = 60.0,
    shard_size: int | str | None = None,
    compact: bool = False,
) -> None:
    """Drives ``trainer`` until it is done; of several processes the first writes the checkpoint."""
    options, history = trainer.options, trainer.history
    every = options.evaluate_every or _evaluate_every(trainer)
    checkpoint = None if trainer.rank else checkpoint
    written, writable = time.monotonic(), checkpoint is not None

    def write() -> None:
        nonlocal written, writable
        try:
            trainer.write(checkpoint, shard_size, compact)  # type: ignore[arg-type]
        except OSError as error:
            if writable:
                warnings.warn(f"checkpoint: {error}. Training goes on, and will try again.", stacklevel=3)
            writable = False
        written = time.monotonic()

    try:
        while history.stopped is None:
            if trainer.step % every == 0:
                trainer.evaluate()
            if options.max_steps is not None and trainer.step >= options.max_steps:
                history.stopped = "max_steps"
            elif options.max_seconds is not None and trainer.seconds >= options.max_seconds:
                history.stopped = "max_seconds"
            elif options.patience is not None and trainer.misses >= options.patience:
                history.stopped = "early stopping"
            elif trainer.asked(interrupted()):
                history.stopped = "interrupted"
            else:
                _advance(trainer)
                show(trainer)
                if checkpoint is not None and time.monotonic() - written >= checkpoint_seconds:
                    write()
        # The last entries are not those of a run that goes on: after an interrupt the file goes without them.
        if history.stopped != "interrupted":
            trainer.log()
            trainer.evaluate()
        if checkpoint is not None:
            write()
        trainer.log()
    except KeyboardInterrupt:
        # Perhaps in the middle of a step, as our handler did not raise it: no state to resume from.
        history.stopped = "interrupted"
        if interrupted():
            raise
    finally:
        trainer.finish()


def _advance(trainer: Trainer) -> None:
    """`Trainer.advance`; ``MemoryError`` with what would fit, if a step does not."""
    try:
        return trainer.advance()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        why = str(error).partition("\n")[0]
    # Only here is the error gone, and with it what its frames held.
    with trainer.queued():
        raise MemoryError(trainer.what_fits(why))


def _place_in(distributed: bool) -> tuple[int, int]:
    """How many processes share the steps, and which of them this is."""
    return (dist.get_world_size(), dist.get_rank()) if distributed else (1, 0)


def _check_alike(going_on: bool, device: torch.device) -> None:
    """The checkpoint must be there for all processes, or for none."""
    count = torch.tensor(int(going_on), device=device)
    dist.all_reduce(count)
    if int(count) not in (0, dist.get_world_size()):
        raise ValueError(
            f"checkpoint: expected a file that all processes see; it is there for {int(count)} of "
            f"{dist.get_world_size()}. Put it into a folder that their machines share."
        )


def _average(tensors: list[Tensor]) -> None:
    """Each tensor becomes its mean over all processes."""
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([t.numel() for t in tensors])
    torch._foreach_copy_(tensors, [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])


def permutation(n: int, seed: int, epoch: int) -> Tensor:
    """The order of ``n`` rows in an epoch.

    >>> torch.equal(permutation(5, seed=1, epoch=0).sort().values, torch.arange(5))
    True
    """
    return torch.randperm(n, generator=torch.Generator().manual_seed((1_000_003 * seed + epoch) % 2**32))


def mean_log_prob(flow: Flow, rows: Rows, precision: str = "full", distributed: bool = False) -> float:
    """The weighted mean of ``log p`` over ``rows``, without gradients."""
    size = rows_at_once(rows.x)
    processes, rank = _place_in(distributed)
    total = torch.zeros((), dtype=torch.float64, device=rows.x.device)
    noise = torch.Generator(rows.x.device).manual_seed(0)  # the same each time: what changes are the weights
    with torch.no_grad(), products(precision, rows.x.device):
        for i in range(0, len(rows), size):
            part = rows[i : i + size]
            part = Rows(part.values(flow.base.anchor, noise), part.context, part.weights)[rank::processes]
            if len(part):
                log_prob = flow(part.x, part.context).double()
                total += (log_prob if part.weights is None else part.weights * log_prob).sum()
    if processes > 1:
        dist.all_reduce(total)
    return total.item() / len(rows)


def _evaluate_every(trainer: Trainer) -> int:
    if trainer.validation is None:
        return sys.maxsize
    # A row costs about a third in evaluation of what it costs in training: a tenth of the time.
    fair = math.ceil(10 / 3 * len(trainer.validation) / trainer.batch_size)
    return max(fair, min(50, (trainer.options.max_steps or 1000) // 20), 1)


def split_rows(n: int, part: float, seed: int) -> tuple[Tensor, Tensor]:
    """The places of the rows to train on, and of the ``part`` of them to validate on.

    >>> [sorted(places.tolist()) for places in split_rows(5, 0.4, seed=0)]
    [[0, 2, 4], [1, 3]]
    """
    order = permutation(n, seed, -1)
    count = round(n * part)
    return order[count:], order[:count]


def _split(
    flow: Flow, x: object, context: object, weights: object, validation: object, seed: int
) -> tuple[Rows, Rows | None]:
    """Rows to train on and rows to validate on."""
    rows = Rows(*as_data(flow, x, context))
    n = len(rows)
    if weights is not None:
        w = _weights(weights, n, rows.x)
        rows = Rows(rows.x, rows.context, w)[w > 0]
        n = len(rows)
    held_out = None
    if isinstance(validation, numbers.Real):
        _check_fraction("validation", validation)
        train, validate = split_rows(n, float(validation), seed)
        count = len(validate)
        if validation and not 1 <= count <= n - 2:
            raise ValueError(
                f"validation: expected 1 row or more to validate and 2 to train on; {validation} of {n} "
                f"leaves {count} and {n - count}. Give more rows, another fraction, or validation=0."
            )
        if count:
            held_out, rows = rows[validate.to(rows.x.device)], rows[train.to(rows.x.device)]
    else:
        try:
            held_out = Rows(*as_data(flow, *(validation if isinstance(validation, tuple) else (validation,))))
        except (ValueError, TypeError) as error:
            raise ValueError(f"validation: expected a part in [0, 1), x or (x, context); {error}") from error
    if len(rows) < 2:
        raise ValueError(f"x: expected at least 2 rows to train on; got {len(rows)}. Give more rows.")
    if len(flow.event_shape) == 1:
        varying = flow.varying(rows.x)
        constant = (varying.amin(0) == varying.amax(0)).nonzero().flatten().tolist()
        if constant:
            raise ValueError(
                f"x: expected columns that vary; got constant columns {constant[:10]} in the {len(rows)} "
                "rows to train on. Drop them: they have no density."
            )
    return _normalised(rows), held_out and _normalised(held_out)


def _weights(weights: object, n: int, like: Tensor) -> Tensor:
    w = as_tensor("weights", weights)
    if tuple(w.shape) != (n,):
        raise ValueError(f"weights: expected shape ({n},), one for each row of x; got {tuple(w.shape)}.")
    if not w.is_complex():
        w = w.to(like.dtype)  # counts are fine
    w = as_rows("weights", w[:, None], (1,), like)[:, 0]
    if bool((w < 0).any()) or not bool(w.sum() > 0):
        raise ValueError(
            f"weights: expected numbers >= 0 with a sum > 0; got a minimum of {w.min().item():g} and a sum "
            f"of {w.sum().item():g}. Leave out rows that should not count."
        )
    return w


def _normalised(rows: Rows) -> Rows:
    """Weights of mean one, so that a loss is a mean over rows whatever the batch."""
    return rows if rows.weights is None else Rows(rows.x, rows.context, rows.weights / rows.weights.mean())


def _check_fraction(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) < 1:
        raise ValueError(f"{name}: expected a number in [0, 1); got {value!r}.")


def _digest(data: Tensor | None) -> object:
    """Shape and a checksum; integer sums wrap around and are the same in any order of summation."""
    if data is None:
        return None
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()]
    total, start = 0, 0
    for bits in data.contiguous().flatten().view(kind).split(2**22):  # as integers of 64 bits they need much memory
        places = torch.arange(2 * start + 1, 2 * (start + len(bits)) + 1, 2, device=data.device)
        total += int((bits.long() * places).sum())
        start += len(bits)
    return [list(data.shape), f"{total % 2**64:016x}"]


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(device: torch.device, state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers from ``seed``; the caller's are as before in the end."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed % 2**63)
        if devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed % 2**63)
        yield


_running: list[threading.Event] = []  # of the runs in hand


def ask_to_stop() -> bool:
    """Asks the runs in hand to end after their step; False if there is none that has not been asked."""
    waiting = [asked for asked in _running if not asked.is_set()]
    for asked in waiting:
        asked.set()
    return bool(waiting)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C, or `ask_to_stop`, sets the flag that is yielded; a second Ctrl-C does what it did before."""
    asked = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread() and callable(before)

    def ask(signum: int, frame: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    _running.append(asked)
    if ours:
        signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        _running.remove(asked)
        if ours:
            signal.signal(signal.SIGINT, before)


@contextmanager
def bar(progress: bool | Callable[[Trainer], None] | None) -> Iterator[Callable[[Trainer], None]]:
    """Something to call after each step, which shows how far the run is."""
    if callable(progress):
        yield progress
        return
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda trainer: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    started, first, shown = 0.0, -1, 0.0
    columns = (TextColumn("[bold]fit"), BarColumn(bar_width=24), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("", total=1.0)

        def show(trainer: Trainer) -> None:
            nonlocal started, first, shown
            now, done, history = time.monotonic(), trainer.progress(), trainer.history
            if first < 0:
                started, first = now, trainer.step
            if now - shown < 0.2 and done < 1:
                return
            shown = now
            limit = trainer.options.max_steps
            text = f"step {trainer.step}" + f"/{limit}" * (limit is not None)
            if history.loss:
                text += f"  loss {history.loss[-1]:.3f}"
            if history.validation:
                text += f"  validation {history.validation[-1]:.3f} nats"
            if now > started:
                text += f"  {(trainer.step - first) / (now - started):.0f} steps/s"
            if done:
                text += f"  {_clock(trainer.seconds * (1 - done) / done)} left"
            bar.update(task, completed=done, description=text, refresh=True)

        yield show


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
