"""`fit`: the loop against a naive one, repeatability, guards, interrupts, and runs that go on after a cut."""

import copy
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from quarflow import training
from quarflow.checkpoint import CheckpointError, read_tensors, save
from quarflow.evaluation import evaluate
from quarflow.flow import Flow
from quarflow.models import quar, quar_image, residual_image
from quarflow.pixels import dequantise
from quarflow.training import History, Options, Rows, Trainer, TrainingDiverged, fit, permutation, schedule
from quarflow.transforms.residual import recomputing


def data(n: int = 300, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (x @ torch.tensor([[2.0, 1.0], [0.0, 0.3]], dtype=torch.float64) + 1).to(dtype)


def small(seed: int = 0, context: int = 0) -> Flow:
    torch.manual_seed(seed)
    return quar(features=2, context=context, blocks=2, hidden=(8,))


def weights_of(flow: Flow) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in flow.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


def at_step(flow: Flow, step: int, act) -> None:
    """Calls ``act`` in the forward pass of the ``step``-th training step (counted from 1)."""
    calls = 0

    def count(module, args):
        nonlocal calls
        calls += module.training and torch.is_grad_enabled()
        if calls == step and module.training:
            act()

    flow.register_forward_pre_hook(count)


def noisy(flow: Flow) -> Flow:
    """The flow with random numbers in its training steps, which a repeated run has to draw again."""
    flow.register_forward_hook(lambda m, args, out: out + 0.01 * torch.randn_like(out) if m.training else out)
    return flow


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


# What is learned.


def test_fit_reaches_the_entropy_of_a_gaussian_and_keeps_the_best_weights():
    x = data(2000)
    flow = small()
    history = fit(flow, x[:1500], validation=x[1500:], max_steps=400, batch_size=256)
    truth = torch.distributions.MultivariateNormal(
        torch.ones(2), torch.tensor([[4.0, 2.0], [2.0, 1.09]]), validate_args=False
    )
    found = evaluate(flow, x[1500:])
    gap = (truth.log_prob(x[1500:]) - flow.log_prob(x[1500:])).mean().item()
    assert abs(gap) < 0.05
    assert found.nats == pytest.approx(history.best_validation, abs=1e-5)
    assert history.best_validation == max(history.validation) > history.validation[0]
    assert not flow.training
    assert all(p.grad is None for p in flow.parameters())


def test_the_loop_is_the_naive_loop():
    """Against torch's plain Adam, clipping and averages written out, in float64."""
    x = data(64, torch.float64)
    flow, twin = small().double(), small().double()
    steps, clip, rate, ema = 30, 0.5, 1e-2, 0.7
    fit(
        flow,
        x,
        validation=0,
        max_steps=steps,
        batch_size=16,
        clip=clip,
        learning_rate=rate,
        ema=ema,
        warmup=0.2,
    )

    twin.initialise(x[permutation(64, 0, 0)])
    twin.train()
    optimizer = torch.optim.Adam(twin.parameters(), foreach=False)
    average = {name: t.clone() for name, t in twin.state_dict().items()}
    clipped = 0
    for step in range(steps):
        epoch, place = divmod(step, 4)
        rows = permutation(64, 0, epoch)[16 * place : 16 * (place + 1)]
        optimizer.zero_grad()
        (-twin(x[rows]).mean()).backward()
        clipped += torch.nn.utils.clip_grad_norm_(twin.parameters(), clip).item() > clip
        part = (step + 0.5) / steps
        warm, decayed = part / 0.2, 0.5 * (1 + math.cos(math.pi * (part - 0.2) / 0.8))
        optimizer.param_groups[0]["lr"] = rate * (warm if part < 0.2 else decayed)
        optimizer.step()
        decay = min(ema, (1 + step) / (10 + step))
        for name, t in twin.state_dict().items():
            average[name] = decay * average[name] + (1 - decay) * t if t.is_floating_point() else t
    assert clipped > 0
    for name, t in flow.state_dict().items():
        # The rate is a float32 on the device.
        torch.testing.assert_close(t, average[name], rtol=1e-5, atol=1e-7)


def test_the_rows_of_an_epoch_are_all_rows_once():
    trainer = Trainer(small(), Rows(data(23)), None, Options(batch_size=5))
    assert trainer.batch_size == 5
    epochs = [torch.cat([trainer.rows(4 * epoch + i) for i in range(4)]) for epoch in range(3)]
    for rows in epochs:
        assert len(rows.unique()) == 20
    assert not torch.equal(epochs[0], epochs[1])


def test_weights_count_rows():
    x, w = data(6), torch.tensor([3.0, 0.0, 1.0, 2.0, 2.0, 1.0])
    flow = small()
    flow.initialise(x)
    trainer = Trainer(flow, Rows(x, None, w / w.mean()), None, Options())
    repeated = flow(x.repeat_interleave(w.long(), 0))
    torch.testing.assert_close(trainer.loss(trainer.train), -repeated.mean())


def test_rows_of_weight_zero_are_not_there():
    x = data(100)
    one, other = small(), small()
    poisoned = torch.cat([x, 1e4 * torch.ones(7, 2)])
    first = fit(one, poisoned, weights=torch.cat([torch.full((100,), 3.0), torch.zeros(7)]), max_steps=20)
    assert first == fit(other, x, weights=[1] * 100, max_steps=20)
    assert same(weights_of(one), weights_of(other))


def test_context_is_learned():
    generator = torch.Generator().manual_seed(0)
    c = torch.randn(600, 1, generator=generator)
    x = torch.cat([2 * c, -c], 1) + 0.3 * torch.randn(600, 2, generator=generator)
    flow = small(context=1)
    fit(flow, x.numpy(), c.numpy(), max_steps=150, validation=(x[:50], c[:50]))
    assert evaluate(flow, x, c).nats > evaluate(flow, x, c.flip(0)).nats + 1


@pytest.mark.parametrize("progress", [0.0, 0.1, 0.3, 1.0])
def test_schedule(progress):
    expected = {0.0: 0.0, 0.1: 0.5, 0.3: 0.5 + 0.5 * math.cos(math.pi / 8), 1.0: 0.0}[progress]
    assert schedule(progress, 0.2) == pytest.approx(expected, abs=1e-12)


# How a run ends.


def test_early_stopping_keeps_the_best_weights():
    x = data(40)
    flow = small()
    history = fit(flow, x, max_steps=3000, evaluate_every=5, patience=3, validation=0.5, learning_rate=0.03)
    assert history.stopped == "early stopping"
    assert history.validation_steps[-1] < 3000
    assert history.best_step == history.validation_steps[-4]
    assert max(history.validation[-3:]) <= history.best_validation
    held_out = x[permutation(40, 0, -1)[:20]]
    assert evaluate(flow, held_out).nats == pytest.approx(history.best_validation, abs=1e-5)


def test_a_limit_on_time():
    start = time.monotonic()
    history = fit(small(), data(), max_seconds=0.6)
    assert history.stopped == "max_seconds"
    assert 0.6 <= history.seconds < time.monotonic() - start + 0.01 < 3
    assert history.learning_rate[-1] < 0.1 * max(history.learning_rate)


def test_without_validation_there_is_none():
    history = fit(small(), data(), validation=0, max_steps=25)
    assert (history.stopped, history.validation, history.best_step) == ("max_steps", [], None)
    assert history.steps == [10, 20, 25]


def test_one_seed_one_result_and_no_trace_in_the_global_generator():
    one, other, third = noisy(small()), noisy(small()), noisy(small())
    state = torch.get_rng_state()
    first = fit(one, data(), max_steps=30)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert first == fit(other, data(), max_steps=30)
    assert same(weights_of(one), weights_of(other))
    assert first != fit(third, data(), max_steps=30, seed=1)


def test_evaluation_does_not_touch_the_training():
    often = fit(small(), data(), max_steps=30, evaluate_every=1)
    seldom = fit(small(), data(), max_steps=30, evaluate_every=30)
    assert len(often.validation) > len(seldom.validation)
    assert often.loss == seldom.loss


# Divergence.


def test_a_gradient_that_is_not_finite_is_named():
    flow = small()
    name, parameter = list(flow.named_parameters())[-1]
    calls = 0

    def poison(grad):
        nonlocal calls
        calls += 1
        return grad * (float("nan") if calls >= 14 else 1.0)

    parameter.register_hook(poison)
    with pytest.raises(
        TrainingDiverged, match=rf"at step 14 with learning rate 0.00.*gradient.*{name}"
    ) as caught:
        fit(flow, data(), max_steps=100, evaluate_every=4, warmup=0.0)
    history = caught.value.history
    assert history.stopped == "diverged"
    assert history.validation_steps == [0, 4, 8, 12]
    expected = small()
    at_step(expected, 13, ctrl_c)
    fit(expected, data(), max_steps=100, evaluate_every=4, warmup=0.0)
    assert same(weights_of(flow), weights_of(expected))


def test_a_gradient_whose_squares_overflow_is_clipped():
    flow, twin = small(), small()
    flow.register_forward_hook(lambda m, args, out: 1e25 * out if m.training else out)
    for each in (flow, twin):
        each.initialise(data())
        trainer = Trainer(each.train(), Rows(data()), None, Options(max_steps=1, clip=1e-3))
        trainer.advance()
        trainer.look()
        trainer.finish()
    for name, t in twin.state_dict().items():
        torch.testing.assert_close(flow.state_dict()[name], t, rtol=1e-4, atol=1e-6)


def test_a_real_divergence_leaves_good_weights():
    flow = small()
    with pytest.raises(
        ArithmeticError, match=r"diverged at step [2-9] .* loss is (nan|inf).*best on"
    ) as caught:
        fit(flow, data(), max_steps=300, learning_rate=1e30, clip=None, warmup=0.0)
    assert caught.value.history.best_step == 0
    assert bool(torch.isfinite(flow.log_prob(data())).all())
    assert all(bool(torch.isfinite(p).all()) for p in flow.parameters())


def test_weight_decay_is_apart_from_the_gradient():
    """A step with decay is one without, from weights drawn to zero by the rate times the decay."""
    start, plain, decayed = small(), small(), small()
    for flow, decay in ((plain, 0.0), (decayed, 0.5)):
        Trainer(flow, Rows(data(64)), None, Options(max_steps=1, warmup=0.0, weight_decay=decay)).advance()
    rate = 1e-2 * schedule(0.5, 0.0)
    before = dict(start.named_parameters())
    for (name, a), b in zip(plain.named_parameters(), decayed.parameters(), strict=True):
        torch.testing.assert_close(b, a - rate * 0.5 * before[name])


def test_the_guard_leaves_weights_alone_until_the_host_looks():
    flow = small()
    flow.initialise(data())
    trainer = Trainer(flow, Rows(data(64)), None, Options(max_steps=50, batch_size=16))
    trainer.advance()
    before = weights_of(flow)
    trainer.model = lambda x, context: flow(x, context) * float("nan")
    trainer.advance()
    trainer.model = flow
    trainer.advance()
    assert same(weights_of(flow), before)
    with pytest.raises(TrainingDiverged, match=r"at step 2 .*a repeat of the step"):
        trainer.look()


# Interrupts.


def test_ctrl_c_ends_the_run_with_the_best_weights():
    flow, before = small(), signal.getsignal(signal.SIGINT)
    at_step(flow, 7, ctrl_c)
    history = fit(flow, data(), max_steps=100, evaluate_every=3)
    assert history.stopped == "interrupted"
    assert (history.steps, history.validation_steps) == ([7], [0, 3, 6])
    assert not flow.training
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_goes_through():
    flow, before = small(), signal.getsignal(signal.SIGINT)
    at_step(flow, 7, lambda: (ctrl_c(), ctrl_c()))
    with pytest.raises(KeyboardInterrupt):
        fit(flow, data(), max_steps=100)
    assert not flow.training
    assert signal.getsignal(signal.SIGINT) is before


# Runs that go on.


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_a_run_that_was_cut_is_the_run_without_a_cut(tmp_path, cut):
    options = {
        "max_steps": np.int64(40),
        "evaluate_every": 4,
        "patience": 8,
        "batch_size": 64,
        "learning_rate": 0.01,
    }
    whole = noisy(small())
    expected = fit(whole, data(), **options)

    path = tmp_path / "run.state"
    first = small()
    at_step(first, cut, ctrl_c)
    assert fit(noisy(first), data(), checkpoint=path, **options).stopped == "interrupted"
    second = noisy(small(seed=5))
    history = fit(second, data(), checkpoint=path, resume=True, **options)
    assert history == expected
    assert same(weights_of(second), weights_of(whole))

    # The state is now that of a run that is over.
    third = small(seed=6)
    assert fit(third, data(), checkpoint=path, resume=True, **options) == expected
    assert same(weights_of(third), weights_of(whole))


def test_a_cut_does_not_renew_patience(tmp_path):
    options = {
        "evaluate_every": 5,
        "patience": 3,
        "validation": 0.5,
        "learning_rate": 0.03,
        "max_steps": 3000,
    }
    expected = fit(small(), data(40), **options)
    assert expected.stopped == "early stopping"
    path, flow = tmp_path / "run.state", small()
    at_step(flow, expected.best_step + 7, ctrl_c)
    assert fit(flow, data(40), checkpoint=path, **options).best_step == expected.best_step
    assert fit(small(), data(40), checkpoint=path, resume=True, **options) == expected


CHILD = """
import sys, time, torch
sys.path.insert(0, sys.argv[2])
from test_training import data, noisy, small
from quarflow.training import fit
torch.set_num_threads(1)
flow = small()
flow.register_forward_pre_hook(lambda *_: time.sleep(0.02))
fit(noisy(flow), data(), max_steps=150, evaluate_every=9, checkpoint=sys.argv[1], checkpoint_seconds=0.1)
"""


def test_a_killed_process_goes_on(tmp_path):
    path = tmp_path / "run.state"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path), str(Path(__file__).parent)])
    try:
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline and child.poll() is None:
            time.sleep(0.02)
        time.sleep(0.25)
    finally:
        child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    step = json.loads(read_tensors(path, "training")[1]["state"])["step"]
    assert 0 < step < 150

    resumed, whole = noisy(small(seed=3)), noisy(small())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        history = fit(resumed, data(), max_steps=150, evaluate_every=9, checkpoint=path, resume=True)
        assert history == fit(whole, data(), max_steps=150, evaluate_every=9)
    finally:
        torch.set_num_threads(threads)
    assert same(weights_of(resumed), weights_of(whole))


def test_a_state_is_of_one_run(tmp_path):
    path = tmp_path / "run.state"
    base = {"max_steps": 12, "checkpoint": path}
    fit(small(), data(), **base)
    base["resume"] = True
    for change, name in [
        ({"seed": 1}, "seed is 0, now 1"),
        ({"max_steps": 13}, "max_steps is 12, now 13"),
        ({"learning_rate": 0.1}, "learning_rate"),
        ({"validation": 0.2}, "x is .*270, 2.* now .*240, 2"),
        ({"weights": torch.arange(1.0, 301)}, "weights"),
    ]:
        with pytest.raises(CheckpointError, match=f"another run: its {name}"):
            fit(small(), data(), **{**base, **change})
    changed = data()
    changed[permutation(300, 0, -1)[-1], 0] += 1e-3
    with pytest.raises(CheckpointError, match="its x is"):
        fit(small(), changed, **base)
    with pytest.raises(CheckpointError, match="its flow is"):
        fit(quar(features=2, blocks=3, hidden=(8,)), data(), **base)
    with pytest.raises(CheckpointError, match=r"is .*float32.* now .*float64"):
        fit(small().double(), data(), **base)
    save(small(), path)
    with pytest.raises(CheckpointError, match="expected the kind 'training'; got 'flow'"):
        fit(small(), data(), **base)
    with pytest.warns(UserWarning, match="nothing to resume from"):
        fit(small(), data(), max_steps=2, checkpoint=tmp_path / "new.state", resume=True)


def test_a_full_disk_is_a_warning(tmp_path, monkeypatch):
    path = tmp_path / "run.state"
    fit(small(), data(), max_steps=5, checkpoint=path)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match=r"No space left.*intact.*Training goes on") as caught:
        history = fit(small(), data(), max_steps=15, checkpoint=path, checkpoint_seconds=1e-9)
    assert len(caught) == 1
    assert history.stopped == "max_steps"
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["run.state"]


@pytest.mark.parametrize("compact", [False, True])
def test_a_run_goes_on_from_pieces(tmp_path, compact):
    options = {"max_steps": 40, "evaluate_every": 4, "batch_size": 64, "learning_rate": 0.01}
    whole, path = small(), tmp_path / "state"
    expected = fit(whole, data(), **options)
    first = small()
    at_step(first, 20, ctrl_c)
    fit(first, data(), checkpoint=path, shard_size="2KiB", compact=compact, **options)
    assert len(list(tmp_path.glob("state-*-of-*.safetensors"))) > 2
    second = small(seed=5)
    history = fit(second, data(), checkpoint=path, shard_size="2KiB", compact=compact, resume=True, **options)
    if not compact:
        assert history == expected
        assert same(weights_of(second), weights_of(whole))
    else:
        assert history != expected
        # What is rounded are differences and moments: the run ends where it would have.
        assert history.validation == pytest.approx(expected.validation, abs=2e-3)


def test_a_compact_state_is_small(tmp_path):
    flow = quar(features=2, blocks=2, hidden=(128, 128)).initialise(data())
    trainer = Trainer(flow.train(), Rows(data(64)), Rows(data(64)), Options(max_steps=9, batch_size=16))
    trainer.advance()
    trainer.evaluate()
    trainer.write(tmp_path / "full")
    trainer.write(tmp_path / "compact", compact=True)
    ratio = os.path.getsize(tmp_path / "compact") / os.path.getsize(tmp_path / "full")
    assert 0.58 < ratio < 0.68
    other = Trainer(copy.deepcopy(flow), Rows(data(64)), Rows(data(64)), trainer.options)
    other.read(tmp_path / "compact")
    for name, t in trainer.flow.state_dict().items():
        assert torch.equal(other.flow.state_dict()[name], t)
    for a, b, live in zip(other.average, trainer.average, trainer.live, strict=True):
        assert ((a - b).abs() <= (b - live).abs() / 200 + 1e-7 * live.abs()).all()


# Precision, recomputation, memory.


def image_flow(seed: int = 0, **options: object) -> Flow:
    torch.manual_seed(seed)
    return quar_image((1, 8, 8), **{"blocks": (2, 1), "hidden": 16, **options})


def images(n: int = 96) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(0, 200, (n, 1, 8, 1), generator=generator)
    return (rows + torch.randint(0, 56, (n, 1, 8, 8), generator=generator)).to(torch.uint8)


def test_bf16_learns_what_float32_does():
    curves = {}
    for precision in ("full", "bf16", "tf32"):
        flow = image_flow()
        history = fit(flow, images(), max_steps=30, batch_size=48, precision=precision, learning_rate=3e-3)
        curves[precision] = torch.tensor(history.loss) / (64 * math.log(2))
        assert all(t.dtype == torch.float32 for t in flow.state_dict().values() if t.is_floating_point())
    assert curves["full"][0] - curves["full"][-1] > 0.3
    assert 0 < (curves["bf16"] - curves["full"]).abs().max() < 0.01  # bits/dim
    assert torch.equal(curves["tf32"], curves["full"])  # on a CPU
    assert torch.get_float32_matmul_precision() == "highest"


def test_bf16_of_a_residual_flow():
    flow = residual_image((1, 8, 8), blocks=(1,), hidden=16).initialise(dequantise(images(), torch.zeros(())))
    losses = []
    for precision in ("full", "bf16"):
        trainer = Trainer(flow.train(), Rows(images()), None, Options(precision=precision, max_steps=9))
        torch.manual_seed(0)
        losses.append(trainer._backward(trainer.train) / (64 * math.log(2)))
    assert 0 < abs(losses[0] - losses[1]) < 0.01


def gradients(flow: Flow, precision: str) -> tuple[dict[str, Tensor], int]:
    """Of a step, and the bytes that it kept for its backward pass."""
    trainer, kept = Trainer(flow, Rows(images()), None, Options(precision=precision, max_steps=1)), {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = trainer.loss(trainer.train)
    loss.backward()
    return {name: p.grad.clone() for name, p in flow.named_parameters()}, sum(kept.values())


@pytest.mark.parametrize("precision", ["full", "bf16"])
@pytest.mark.parametrize("options", [{}, {"activation": "lipswish"}, {"lipschitz": "diagonal", "activation": "wave"}])
def test_recomputation_changes_memory_alone(options, precision):
    flow = image_flow(hidden=64, **options).initialise(dequantise(images(), torch.zeros(())))
    plain, much = gradients(flow, precision)
    flow.zero_grad()
    with recomputing(flow):
        again, little = gradients(flow, precision)
    assert same(plain, again)
    assert little < much / 4
    assert not any(getattr(m, "recompute", False) for m in flow.modules())


def test_recomputation_of_what_is_random_is_refused():
    for flow in (small(), quar(2, blocks=2, hidden=(8,), bound="gram", lipschitz="network")):
        with recomputing(flow):
            pass
    for flow in (
        residual_image((1, 8, 8), blocks=(1,), hidden=8),
        quar(2, blocks=2, hidden=(8,), bound="power"),
    ):
        with pytest.raises(ValueError, match=r"recompute: expected a flow with residual blocks that draw no random"):
            fit(flow, data() if len(flow.event_shape) == 1 else images(), max_steps=1, recompute=True)


def test_a_batch_that_does_not_fit_says_what_would(monkeypatch):
    plain = Trainer.loss

    def limited(trainer, batch):
        recompute = any(getattr(m, "recompute", False) for m in trainer.flow.modules())
        if len(batch) > (50 if recompute else 20):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return plain(trainer, batch)

    monkeypatch.setattr(Trainer, "loss", limited)
    with pytest.raises(
        MemoryError,
        match=r"batch_size: 80 images do not fit in the memory of cpu \(CUDA out .*\). 20 do \(batch_size=20\); "
        r"40 do with recompute=True; precision='bf16' halves",
    ):
        fit(image_flow(), images(), batch_size=80, max_steps=2)
    with pytest.raises(MemoryError, match=r"80 images do not fit .*20 do \(batch_size=20\)\.$"):
        fit(residual_image((1, 8, 8), blocks=(1,), hidden=8), images(), batch_size=80, max_steps=2, precision="bf16")
    monkeypatch.setattr(Trainer, "loss", lambda trainer, batch: plain(trainer, batch) + torch.empty(2**50))
    with pytest.raises(MemoryError, match="Not even one row does: take a smaller model"):
        fit(small(), data(), max_steps=2, precision="bf16")


def test_graphs_take_the_same_steps():
    """Without a GPU: the trainer that would capture them, in `fit`."""
    flow, twin = image_flow(), image_flow()
    expected = fit(twin, images(), max_steps=20, batch_size=48)
    assert fit(flow, images(), max_steps=20, batch_size=48, graph=True) == expected
    assert same(weights_of(flow), weights_of(twin))


# What is shown.


def test_progress(capfd):
    fit(small(), data(), max_steps=30, progress=True)
    shown = capfd.readouterr().err
    for word in ("step 30/30", "loss", "validation", "nats", "steps/s", "left"):
        assert word in shown
    fit(small(), data(), max_steps=30)
    fit(small(), data(), max_steps=30, progress=False)
    assert capfd.readouterr() == ("", "")


def test_history(tmp_path):
    pytest.importorskip("matplotlib")
    history = fit(small(), data(), max_steps=60)
    assert history.steps == [10, 20, 30, 40, 50, 60]
    assert len(history.loss) == len(history.learning_rate) == 6
    assert len(history.validation_steps) == len(history.validation)
    assert History(**json.loads(json.dumps(history.to_dict()))) == history
    assert repr(history).startswith("History(60 steps in ")
    assert f"best validation {history.best_validation:.3f} nats at step {history.best_step}" in repr(history)
    for curves in (history, History(), fit(small(), data(), max_steps=3, validation=0)):
        curves.plot(tmp_path / "history.png")
        assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")


# Bad input.


def with_value(value: float) -> Tensor:
    x = data(50)
    x[3, 1] = value
    return x


X = data(50)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": data(50)[:, :1]}, r"x: expected shape \(..., 2\); got \(50, 1\)"),
        ({"x": torch.zeros(5, 5, 2)}, r"x: expected shape \(n, 2\); got \(5, 5, 2\)"),
        ({"x": X[0]}, r"x: expected shape"),
        ({"x": torch.ones(50, 2, dtype=torch.int64)}, "x: expected a floating dtype; got torch.int64"),
        ({"x": X.to(torch.complex64)}, "x: expected a floating dtype; got torch.complex64"),
        ({"x": np.array([["a", "b"]])}, "x: expected a tensor or an array of numbers"),
        ({"x": with_value(float("nan"))}, r"x: .*NaN or inf in 1 of 50 rows, columns \[1\]"),
        ({"x": with_value(float("inf"))}, r"x: .*NaN or inf in 1 of 50 rows, columns \[1\]"),
        ({"x": X.double() * 1e300}, "x: expected finite values"),
        ({"x": X[:0]}, "x: expected at least one row"),
        ({"x": X[:1]}, "validation: expected 1 row or more"),
        ({"x": X[:1], "validation": 0}, "x: expected at least 2 rows"),
        ({"x": X[:4]}, "validation: expected 1 row or more .*0.1 of 4 leaves 0 and 4"),
        ({"x": torch.cat([X[:, :1], torch.ones(50, 1)], 1)}, r"x: .*constant columns \[1\]"),
        ({"context": torch.zeros(50, 1)}, "context: this flow has no context"),
        ({"weights": torch.ones(49)}, r"weights: expected shape \(50,\).*got \(49,\)"),
        ({"weights": -torch.ones(50)}, "weights: expected numbers >= 0"),
        ({"weights": torch.zeros(50)}, "weights: expected numbers >= 0 with a sum > 0"),
        ({"weights": torch.full((50,), float("nan"))}, "weights: expected finite"),
        ({"validation": 1.0}, r"validation: expected a number in \[0, 1\); got 1.0"),
        ({"validation": "some"}, "validation: expected"),
        ({"validation": X[:, :1]}, r"validation: .*x: expected shape"),
        ({"validation": (X, X, X)}, "validation: expected"),
        ({"max_steps": 0}, "max_steps: expected an integer >= 1; got 0"),
        ({"max_seconds": -1.0}, "max_seconds: expected a finite number > 0"),
        ({"batch_size": 2.5}, "batch_size: expected an integer"),
        ({"learning_rate": float("nan")}, "learning_rate: expected a finite number > 0"),
        ({"warmup": 1.0}, r"warmup: expected a number in \[0, 1\)"),
        ({"clip": 0}, "clip: expected a finite number > 0"),
        ({"ema": -0.1}, "ema: expected"),
        ({"patience": 0}, "patience: expected"),
        ({"evaluate_every": 0}, "evaluate_every: expected"),
        ({"weight_decay": -1.0}, "weight_decay: expected a finite number > 0; got -1.0"),
        ({"weight_decay": 0.1, "optimizer": "adamax"}, "weight_decay: expected optimizer='adam' with it"),
        ({"precision": "half"}, "precision: expected one of 'full', 'tf32', 'bf16'; got 'half'"),
        ({"recompute": 1}, "recompute: expected True or False"),
        ({"shard_size": "big"}, "shard_size: expected a size of 1KiB"),
        ({"seed": -1}, "seed: expected an integer >= 0"),
        ({"progress": "yes"}, "progress: expected True or False"),
        ({"resume": True}, "resume: expected the file"),
        ({"checkpoint_seconds": 0}, "checkpoint_seconds: expected"),
        ({"checkpoint": "no/such/folder/run.state"}, "checkpoint: expected a file in a folder that exists"),
        ({"batch_size": None}, "batch_size: expected an integer >= 1; got None"),
        ({"learning_rate": None}, "learning_rate: expected a finite number > 0; got None"),
    ],
)
def test_bad_input(arguments, message):
    flow = small()
    before = weights_of(flow)
    with pytest.raises(ValueError, match=message):
        fit(flow, **{"x": X, "max_steps": 1, **arguments})
    assert same(weights_of(flow), before)


def test_bad_context():
    flow = small(context=1)
    for context, message in [
        (None, "context: this flow is conditional on 1 features; got none"),
        (torch.zeros(49, 1), "context: expected 50 rows, one for each row of x; got 49"),
        (torch.full((50, 1), float("nan")), "context: expected finite"),
        (torch.zeros(50, 2), "context: expected shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            fit(flow, X, context, max_steps=1)
    with pytest.raises(ValueError, match=r"validation: .*context: this flow is conditional"):
        fit(flow, X, torch.randn(50, 1), validation=X, max_steps=1)


def test_nothing_to_train():
    with pytest.raises(ValueError, match="every one has requires_grad=False"):
        fit(small().requires_grad_(False), X, max_steps=1)


def test_arrays_of_any_layout():
    expected = fit(small(), X, max_steps=3)
    for array in (
        X.double().numpy(),
        X.numpy()[::-1][::-1],
        X.numpy().astype(">f8"),
        np.asfortranarray(X.numpy()),
    ):
        assert fit(small(), array, max_steps=3) == expected


# Evaluation.


def test_evaluate():
    flow = small()
    fit(flow, data(), max_steps=20)
    flow.train()
    log_prob = copy.deepcopy(flow).eval().log_prob(data()).double()
    found = evaluate(flow, data().double().numpy(), batch_size=7)
    assert flow.training
    assert found.n == 300
    assert found.nats == pytest.approx(log_prob.mean().item(), abs=1e-5)
    assert found.standard_error == pytest.approx(log_prob.std().item() / 300**0.5, rel=1e-4)
    assert math.isnan(evaluate(flow, data(1)).standard_error)
    assert f"{found.nats:.3f} ± {found.standard_error:.3f} nats (300 rows)" == str(found)
    with pytest.raises(ValueError, match="batch_size: expected"):
        evaluate(flow, data(), batch_size=0)


def test_options_have_their_defaults_in_one_place():
    import inspect

    parameters = inspect.signature(training.fit).parameters
    for field in Options.__dataclass_fields__.values():
        assert parameters[field.name].default == field.default
