"""Which rule runs for which optimizer, and what the probe lets through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trilithon.config.optimizer import Adagrad, Adam, AdamW, Lamb, Lion, Sgd
from trilithon.errors import ConfigError, ProtocolError
from trilithon.optim.build import describe, make_update
from trilithon.optim.elementwise import Elementwise
from trilithon.optim.foreign import Foreign
from trilithon.optim.groups import groups_of
from trilithon.optim.lamb import Lamb as LambUpdate
from trilithon.optim.probe import why_not_elementwise


def built(optimizer: Any, **options: Any) -> Any:
    model = nn.Linear(4, 3)
    made = optimizer(model.parameters()) if isinstance(optimizer, Factory) else optimizer
    names = [name for name, _ in model.named_parameters()]
    return make_update(made, groups_of(model, made), names, **options)


class Factory:
    """Makes a torch optimizer over the test's model; a class of its own so that `built` can tell it from a class."""

    def __init__(self, cls: Callable[..., torch.optim.Optimizer], **settings: Any) -> None:
        self.cls, self.settings = cls, settings

    def __call__(self, params: Any) -> torch.optim.Optimizer:
        return self.cls(params, **self.settings)


@pytest.mark.parametrize(
    "config,rule",
    [(Adam(), "adam"), (AdamW(), "adamw"), (Sgd(), "sgd"), (Lion(), "lion"), (Adagrad(), "adagrad"), (Lamb(), "lamb")],
)
def test_every_configured_kind_has_its_rule(config: Any, rule: str) -> None:
    update = built(config)
    assert isinstance(update, LambUpdate if rule == "lamb" else Elementwise)
    assert describe(update) == rule


@pytest.mark.parametrize(
    "optimizer",
    [
        Factory(torch.optim.Adam),
        Factory(torch.optim.AdamW, fused=True),
        Factory(torch.optim.AdamW, foreach=True, maximize=True),
        Factory(torch.optim.SGD, lr=0.1, momentum=0.9),
        Factory(torch.optim.Adagrad, initial_accumulator_value=0.1),
    ],
)
def test_torch_optimizers_whose_formula_we_have_are_only_read(optimizer: Factory) -> None:
    assert isinstance(built(optimizer), Elementwise)


@pytest.mark.parametrize(
    "optimizer",
    [
        Factory(torch.optim.Adam, amsgrad=True),
        Factory(torch.optim.RAdam),
        Factory(torch.optim.NAdam),
        Factory(torch.optim.Adamax),
        Factory(torch.optim.RMSprop, momentum=0.9, centered=True),
        Factory(torch.optim.Adadelta),
        Factory(torch.optim.Rprop),
        Factory(torch.optim.ASGD),
    ],
)
def test_other_elementwise_torch_optimizers_run_themselves(optimizer: Factory) -> None:
    update = built(optimizer)
    assert isinstance(update, Foreign)
    assert describe(update) == optimizer.cls.__name__  # type: ignore[attr-defined]


class Own(torch.optim.Optimizer):
    """A user's optimizer: `rule` says what a step subtracts from a parameter."""

    def __init__(self, params: Any, rule: Callable[[Tensor, Tensor], Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.rule(p, p.grad))


def lamb_like(p: Tensor, g: Tensor) -> Tensor:
    return g * p.norm() / g.norm()


def shampoo_like(p: Tensor, g: Tensor) -> Tensor:
    return torch.linalg.inv(g @ g.mT + torch.eye(g.shape[0])) @ g


def flattening_shampoo(p: Tensor, g: Tensor) -> Tensor:
    rows = g.reshape(g.shape[0], -1)
    return (torch.linalg.inv(rows @ rows.mT + torch.eye(rows.shape[0])) @ rows).view_as(g)


def clipping(p: Tensor, g: Tensor) -> Tensor:
    return g / max(1.0, float(g.norm()) / 50.0)  # only looks across elements when a gradient is large


def noisy(p: Tensor, g: Tensor) -> Tensor:
    return g + 0.1 * torch.randn_like(g)


def centred(p: Tensor, g: Tensor) -> Tensor:
    return g - g.mean()


@pytest.mark.parametrize(
    "optimizer,reason",
    [
        (Factory(Own, rule=lamb_like), "depends on other elements"),
        (Factory(Own, rule=shampoo_like), "raised"),
        (Factory(Own, rule=flattening_shampoo), "shape of a parameter"),
        (Factory(Own, rule=clipping), "depends on other elements"),
        (Factory(Own, rule=noisy), "depends on"),
        (Factory(Own, rule=centred), "depends on other elements"),
        (Factory(Own, rule=lambda p, g: torch.zeros_like(g)), "did not move"),
        (Factory(torch.optim.LBFGS), "closure"),
        (Factory(torch.optim.Adafactor), "shape of a parameter"),
        (Factory(torch.optim.SparseAdam), "dense gradients"),
    ],
)
def test_rules_that_look_across_elements_are_refused_by_name(optimizer: Factory, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        built(optimizer)
    assert optimizer.cls.__name__ in str(caught.value) and "zero.stage=0" in str(caught.value)  # type: ignore[attr-defined]


def test_where_parameters_are_whole_such_rules_run() -> None:
    assert isinstance(built(Factory(Own, rule=lamb_like), whole=True), Foreign)


def test_users_own_elementwise_rule_passes_even_at_rate_zero_and_under_a_scheduler() -> None:
    optimizer = Own([nn.Parameter(torch.ones(3))], rule=lambda p, g: g.sign() + 0.1 * p, lr=0.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # wraps `step` on the instance
    assert why_not_elementwise(optimizer) is None


def test_the_probe_leaves_optimizer_parameters_and_random_numbers_alone() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = Own([p], rule=noisy)
    before = torch.random.get_rng_state()
    assert why_not_elementwise(optimizer) is not None
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(p, torch.ones(3)) and p.grad is None
    assert len(optimizer.state) == 0 and optimizer.param_groups[0]["params"] == [p]


def test_an_optimizer_that_has_made_steps_is_refused() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="AdamW passed to initialize has already made 1 steps"):
        make_update(optimizer, groups_of(model, optimizer), ["weight", "bias"])


def test_the_state_that_adagrad_makes_in_advance_is_dropped() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adagrad(model.parameters())
    assert optimizer.state
    make_update(optimizer, groups_of(model, optimizer), ["weight", "bias"])
    assert not optimizer.state


def test_a_class_needs_the_groups_that_were_made_from_it() -> None:
    with pytest.raises(ConfigError, match="groups_of"):
        make_update(torch.optim.Adam, [{"lr": 0.1}], ["weight"])
    model = nn.Linear(4, 3)
    update = make_update(torch.optim.Adam, groups_of(model, torch.optim.Adam), ["weight", "bias"])
    assert isinstance(update, Elementwise)


def test_the_users_optimizer_refuses_a_step_that_would_change_nothing():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    update = make_update(optimizer, groups_of(model, optimizer), ["weight", "bias"])
    with pytest.raises(ProtocolError, match=r"AdamW\.step\(\) would change nothing.*Call engine\.step\(\) instead"):
        optimizer.step()
    update.close()
    optimizer.step()
