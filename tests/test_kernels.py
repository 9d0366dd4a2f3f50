"""The fast path against its readable reference."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from registry import data
from torch import Tensor

from quarflow.kernels import forms, triangular, usable
from quarflow.nn import convolution, masks
from quarflow.nn.activations import ACTIVATIONS
from quarflow.nn.conditioned import ConditionedNet
from quarflow.nn.convolution import TriangularConvNet
from quarflow.nn.triangular import TriangularNet

FAST = [name for name, kind in ACTIVATIONS.items() if kind.curves is not None]


def outputs_and_gradients(net: TriangularNet | ConditionedNet, x: Tensor, c: Tensor | None) -> list[Tensor]:
    x = x.clone().requires_grad_()
    value, diagonal, *others = net(x, c)
    for other in others:
        value = value + other
    weight = torch.linspace(0.5, 1.5, x.shape[0], dtype=x.dtype).view(-1, *[1] * (x.ndim - 1))
    loss = (value.sin() * weight).sum() - (torch.log1p(diagonal) * weight).sum()
    return [value, diagonal, *torch.autograd.grad(loss, [x, *net.parameters()])]


def relative_error(got: list[Tensor], truth: list[Tensor]) -> float:
    return max(((g.double() - t).norm() / t.norm().clamp_min(1e-300)).item() for g, t in zip(got, truth, strict=True))


@pytest.mark.parametrize("name", FAST)
def test_error_is_at_most_twice_that_of_plain_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, (features, context, trick, lipschitz) in enumerate(
        itertools.product((1, 2, 7), (0, 3), (True, False), ("coordinate", "diagonal", "network", "conditioned"))
    ):
        torch.manual_seed(seed)
        hidden = (9, 4, 6) if trick else (16,)
        options = {"context": context, "activation": name, "trick": trick}
        if lipschitz == "conditioned":
            net = ConditionedNet(features, hidden, conditioner=(8,), **options)
        else:
            net = TriangularNet(features, hidden, lipschitz=lipschitz, **options)
        x, c = data(300, features, context)
        monkeypatch.setenv("QUARFLOW_KERNELS", "0")
        truth = outputs_and_gradients(net.double(), x, c)
        single = [x.float(), None if c is None else c.float()]
        plain = relative_error(outputs_and_gradients(net.float(), *single), truth)
        monkeypatch.delenv("QUARFLOW_KERNELS")
        fast = relative_error(outputs_and_gradients(net, *single), truth)
        assert fast <= 2 * plain, (features, context, fast, plain)
        assert relative_error(outputs_and_gradients(net.double(), x, c), truth) < 1e-12
        net.float()


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("lipschitz", ["coordinate", "network"])
def test_autocast_costs_what_it_costs_plain_torch(name: str, lipschitz: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = TriangularNet(5, (16, 16), 3, activation=name, lipschitz=lipschitz)
    x, c = (t.float() for t in data(300, 5, 3))
    monkeypatch.setenv("QUARFLOW_KERNELS", "0")
    truth = outputs_and_gradients(net.double(), x.double(), c.double())
    net.float()
    with torch.autocast("cpu", torch.bfloat16):
        plain = relative_error(outputs_and_gradients(net, x, c), truth)
        monkeypatch.delenv("QUARFLOW_KERNELS")
        found = outputs_and_gradients(net, x, c)
    assert all(t.dtype == torch.float32 for t in found)
    assert 1e-4 < relative_error(found, truth) <= 2 * plain


@pytest.mark.parametrize("lipschitz", ["coordinate", "network"])
def test_products_leave_out_what_masks_hold_at_zero(lipschitz: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = TriangularNet(7, (30, 41), lipschitz=lipschitz)
    stairs = [layer.panels for layer in net.layers]
    assert [len(panels) for panels in stairs] == [1, 3, 1]
    x, _ = data(200, 7, 0)
    truth = outputs_and_gradients(net.double(), x, None)
    for layer, panels in zip(net.layers, stairs, strict=True):
        layer.panels = panels[-1:]  # one: the whole product
    whole = relative_error(outputs_and_gradients(net.float(), x.float(), None), truth)
    for layer, panels in zip(net.layers, stairs, strict=True):
        layer.panels = panels
    assert relative_error(outputs_and_gradients(net, x.float(), None), truth) <= 2 * whole
    monkeypatch.setenv("QUARFLOW_KERNELS", "0")
    plain = outputs_and_gradients(net.double(), x, None)
    assert relative_error(truth, plain) < 1e-12


def test_panels_cover_the_mask() -> None:
    torch.manual_seed(0)
    for rows, columns, least in itertools.product((1, 5, 12), (1, 4, 9), (1, 2, 4)):
        mask = masks.triangular_mask(torch.randint(5, (columns,)).sort()[0], torch.randint(5, (rows,)).sort()[0])
        seen = torch.zeros(rows, columns, dtype=torch.int)
        by_column = seen.clone()
        for r0, r1, c0, c1 in masks.panels(mask, least):
            seen[r0:r1, :c1] += 1
            by_column[r0:, c0:c1] += 1
        assert torch.equal(seen, by_column)
        assert seen.max() <= 1
        assert bool((seen[mask] == 1).all())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which the compiler looks at
@pytest.mark.parametrize("name", ["elu", "wave"])
def test_the_form_for_gpus_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here without the code that a GPU would run, but with the graph that it would be made of."""
    torch.manual_seed(0)
    nets = [
        (TriangularNet(3, (5, 4), 2, activation=name).double(), *data(20, 3, 2)),
        (TriangularConvNet(2, hidden=8, activation=name).double(), torch.randn(3, 2, 4, 4).double(), None),
    ]
    for net, x, c in nets:
        plain = outputs_and_gradients(net, x, c)
        with monkeypatch.context() as patched, torch.no_grad():
            forget_compiled()
            patched.setattr(triangular, "fuses", lambda x, numel: True)
            patched.setattr(convolution, "fuses", lambda x, numel: True)
            patched.setattr(triangular, "_without_three", lambda *form: "left out here")
            patched.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
            with torch.enable_grad():
                fused = outputs_and_gradients(net, x, c)
            alone = net(x, c)
        forget_compiled()
        assert relative_error(fused, plain) < 1e-13
        assert relative_error(alone, plain[:2]) < 1e-13


def forget_compiled() -> None:
    for made in (triangular._fused, triangular._scaled):
        made.cache_clear()
    torch._dynamo.reset()


def image_net(name: str, **options: Any) -> tuple[Any, Tensor]:
    return TriangularConvNet(2, hidden=12, activation=name, **options), torch.randn(5, 2, 4, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("name", ["elu", "tanh", "sine", "wave"])
def test_the_kernels_for_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of three layers, interpreted: in float32, as the interpreter knows no bfloat16."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    nets = [
        image_net(name),
        image_net(name, order="channel", lipschitz="diagonal"),
        image_net(name, opening=False, bound="gram"),
        (TriangularNet(3, (5, 4), activation=name), torch.randn(20, 3)),
    ]
    for net, x in nets:
        for p in net.parameters():
            p.data += 0.3 * torch.randn_like(p)
        exact = outputs_and_gradients(copy.deepcopy(net).double(), x.double(), None)
        with monkeypatch.context() as patched:
            forget_compiled()
            patched.setattr(triangular, "fuses", lambda x, numel: True)
            patched.setattr(convolution, "fuses", lambda x, numel: True)
            patched.setattr(torch, "compile", lambda made, dynamic: made)
            with forms() as seen:
                found = outputs_and_gradients(net, x, None)
                with torch.no_grad():
                    alone = net(x)
            parts = ("layers", "columns") if isinstance(net, TriangularConvNet) else ("layers",)
            assert seen == {f"{part}: Triton": 2 for part in parts}
        forget_compiled()
        plain = outputs_and_gradients(net, x, None)
        assert relative_error(found, exact) < 2 * relative_error(plain, exact) + 1e-6
        assert relative_error(alone, exact[:2]) < 2 * relative_error(plain[:2], exact[:2]) + 1e-6


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize("opening", [True, False])
def test_second_derivatives_of_the_kernels_for_gpus(opening: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")

    def second(net: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        value, diagonal = net(x)
        (g,) = torch.autograd.grad(value.sin().sum() + torch.log1p(diagonal).sum(), x, create_graph=True)
        return torch.autograd.grad(g.cos().sum(), x)[0]

    net, x = image_net("tanh", opening=opening)
    exact = second(copy.deepcopy(net).double(), x.double())
    forget_compiled()
    with monkeypatch.context() as patched:
        patched.setattr(triangular, "fuses", lambda x, numel: True)
        patched.setattr(convolution, "fuses", lambda x, numel: True)
        patched.setattr(torch, "compile", lambda made, dynamic: made)
        with forms() as seen:
            found = second(net, x)
    forget_compiled()
    assert seen["columns: Triton"] == seen["layers: Triton"] == 1
    assert relative_error([found], [exact]) < 1e-4


@pytest.mark.parametrize("kind", [TriangularNet, ConditionedNet])
def test_second_derivatives(kind: type[TriangularNet | ConditionedNet]) -> None:
    torch.manual_seed(0)
    net = kind(2, (3, 2), activation="sine").double()
    x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(net, (x,))


def test_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 1)
    assert usable(x)
    seen: list[bool] = []
    torch.func.vmap(lambda x: (seen.append(usable(x)), x)[1])(x)
    assert seen == [False]
    with torch.autograd.forward_ad.dual_level():
        assert not usable(x)
    monkeypatch.setenv("QUARFLOW_KERNELS", "0")
    assert not usable(x)


def test_forms_say_what_ran_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(net: Any, x: Tensor) -> dict[str, int]:
        with forms() as found:
            net(x)
        return dict(found)

    net, x = image_net("wave")
    general = {"layers: general (not on a GPU)": 1, "columns: general (not on a GPU)": 1}
    assert seen(net, x) == general
    assert seen(TriangularNet(3, (4,), lipschitz="network"), torch.zeros(1, 3)) == {"layers: general (not on a GPU)": 1}
    with monkeypatch.context() as patched:
        forget_compiled()
        patched.setattr(torch, "compile", lambda made, dynamic: made)
        patched.setattr(triangular, "fuses", lambda x, numel: True)
        (line,) = seen(TriangularNet(3, (5, 4)).double(), torch.zeros(1, 3).double())
        assert line == "layers: general (no kernel for 3 layers of 3 features, Wave, torch.float64, or for context)"
        (line,) = seen(TriangularNet(3, (5,)), torch.zeros(1, 3))
        assert "no kernel for 2 layers" in line
    forget_compiled()
    line = "layers: reference (an activation without written out derivatives)"
    assert seen(TriangularNet(3, (4,), activation="lipswish"), torch.zeros(1, 3)) == {line: 1}
    monkeypatch.setenv("QUARFLOW_KERNELS", "0")
    assert seen(net, x) == {"layers: reference (QUARFLOW_KERNELS=0)": 1}
    assert seen(TriangularNet(3, (4,)), torch.zeros(1, 3)) == {"layers: reference (QUARFLOW_KERNELS=0)": 1}


def test_nothing_is_kept_without_gradients() -> None:
    net = TriangularNet(2, (3,))
    with torch.no_grad():
        value, diagonal = net(torch.zeros(1, 2))
    assert value.grad_fn is None
    assert diagonal.grad_fn is None
