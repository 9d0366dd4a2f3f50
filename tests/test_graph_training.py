"""Steps as CUDA graphs against plain ones. Without a GPU the same steps run without a graph: CI has that twin."""

import copy
import math

import pytest
import torch

from quarflow.flow import Flow
from quarflow.graph_training import SIZES, GraphTrainer, run_together
from quarflow.logdet import RouletteLogDet
from quarflow.models import quar, residual
from quarflow.training import Options, Rows, Trainer

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
STEPS = 30


def rows(device: str) -> Rows:
    x = torch.randn(400, 2, generator=torch.Generator().manual_seed(1))
    return Rows((x @ torch.tensor([[2.0, 1.0], [0.0, 0.3]]) + 1).to(device))


def options(**more) -> Options:
    return Options(max_steps=STEPS, batch_size=64, learning_rate=1e-2, patience=None, **more)


def start(flow: Flow, data: Rows) -> Flow:
    return flow.to(data.x.device).initialise(data.x).train()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", ["adam", "adamax"])
@pytest.mark.parametrize("lipschitz", ["network", "coordinate"])
def test_the_same_weights_as_plain_steps(device, optimizer, lipschitz):
    data = rows(device)
    plain = start(quar(2, blocks=2, hidden=(8,), lipschitz=lipschitz), data)
    flows = [copy.deepcopy(plain) for _ in range(2)]
    trainer = Trainer(plain, data, None, options(optimizer=optimizer))
    for _ in range(STEPS):
        trainer.advance()
    trainer.finish()
    together = [GraphTrainer(flow, data, None, options(optimizer=optimizer)) for flow in flows]
    run_together(together)
    for each in together:
        assert each.history.stopped == "max_steps"
        assert each.history.loss == pytest.approx(trainer.history.loss, rel=1e-4)
        for name, t in plain.state_dict().items():
            torch.testing.assert_close(each.flow.state_dict()[name], t, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_random_log_determinants_are_drawn_anew_at_every_step(device):
    data = rows(device)
    flow = start(residual(2, blocks=2, hidden=(8,)), data)
    trainer = GraphTrainer(flow, data, None, options())
    draws = [m for m in flow.modules() if isinstance(m, RouletteLogDet)]
    seen = set()
    for _ in range(STEPS):
        trainer.advance()
        held = [tuple(m.held.flatten().tolist()) for m in draws]
        assert (len({len(w) for w in held}) == 1 and len(held[0]) in SIZES) or max(map(len, held)) > max(SIZES)
        seen.add(tuple(held))
    assert len(seen) > STEPS // 2
    assert any(a != b for a, b in seen)  # each block draws for itself
    trainer.finish()
    assert all(m.held is None for m in draws)
    assert bool(flow.log_prob(data.x).isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_that_was_cut_goes_on(device, tmp_path):
    data, ends = rows(device), []
    for cut in (STEPS, 13):
        torch.manual_seed(0)
        trainer = GraphTrainer(start(quar(2, blocks=2, hidden=(8,)), data), data, None, options())
        for _ in range(cut):
            trainer.advance()
        with trainer.queued():
            trainer.write(tmp_path / "state")
        torch.manual_seed(0)
        other = GraphTrainer(start(quar(2, blocks=2, hidden=(8,)), data), data, None, options())
        other.read(tmp_path / "state")
        run_together([other])
        assert other.step == STEPS
        ends.append(other.flow.state_dict())
    for name, t in ends[0].items():
        torch.testing.assert_close(ends[1][name], t, rtol=1e-4, atol=1e-6)


def test_terms_beyond_a_draw_weigh_nothing():
    logdet = RouletteLogDet().train()
    drawn = logdet.draw(5).float()
    x = torch.randn(5, 2)

    def value(weights):
        logdet.held = weights
        torch.manual_seed(3)
        return logdet(lambda x, context: (x.flip(1) / 2, None), x)[1]

    padded = torch.nn.functional.pad(drawn, (0, 0, 0, max(SIZES) - len(drawn)))
    torch.testing.assert_close(value(padded), value(drawn), rtol=0, atol=0)


def test_each_runs_to_its_own_end_and_one_that_diverges_is_alone():
    data = rows("cpu")
    flows = [start(quar(2, blocks=1, hidden=(4,)), data) for _ in range(3)]
    flows[1].register_forward_hook(lambda module, args, out: out * math.nan)
    lengths = [Options(max_steps=n, batch_size=64) for n in (11, 30, 20)]
    trainers = [GraphTrainer(f, data, None, o) for f, o in zip(flows, lengths, strict=True)]
    rounds = []
    diverged = run_together(trainers, lambda: rounds.append(trainers[2].step))
    assert list(diverged) == [trainers[1]]
    assert "the loss is nan" in str(diverged[trainers[1]])
    assert [t.step for t in trainers] == [11, 10, 20]
    assert [t.history.stopped for t in trainers] == ["max_steps", "diverged", "max_steps"]
    assert rounds == [*range(1, 21), 20]
    assert not any(flow.training for flow in flows)


def test_a_limit_on_time_ends_all_at_once():
    data, trainers = rows("cpu"), []
    for seconds in (0.8, 1.6):
        settings = Options(max_seconds=seconds, batch_size=64)
        trainers.append(GraphTrainer(start(quar(2, blocks=1, hidden=(4,)), data), data, data[:50], settings))
    run_together(trainers)
    assert [t.history.stopped for t in trainers] == ["max_seconds"] * 2
    for trainer, seconds in zip(trainers, (0.8, 1.6), strict=True):
        assert seconds <= trainer.history.seconds < seconds + 5
        assert trainer.history.learning_rate[-1] < 2e-3  # of 1e-2 at its peak: the decay follows the clock
        assert trainer.history.validation_steps == [trainer.step]
    assert 0 < trainers[0].step < trainers[1].step
