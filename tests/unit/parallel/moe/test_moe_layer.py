"""The layer on one process against dense masks; expert forms; initial values; odd inputs."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from trilithon.errors import ConfigError, ProtocolError
from trilithon.parallel.moe import MoE
from trilithon.parallel.moe.experts import Experts
from trilithon.parallel.moe.forms import ACTIVATIONS, recognise
from trilithon.testing.moe_reference import PlainMoE

M, E = 6, 4


class Swiglu(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(M, 10, bias), nn.Linear(M, 10, bias), nn.Linear(10, M, bias)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Odd(nn.Module):
    """No form of ours: a norm, a parameter of its own, and a bias that is returned beside the output."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.scale = nn.LayerNorm(M), nn.Linear(M, M), nn.Parameter(torch.ones(M))

    def forward(self, x):
        return self.inner(self.norm(x)) * self.scale, self.scale


class OddPlain(Odd):
    def forward(self, x):
        out, bias = super().forward(x)
        return out + bias


EXPERTS = {
    "gelu": lambda: nn.Sequential(nn.Linear(M, 10), nn.GELU(), nn.Linear(10, M)),
    "relu": lambda: nn.Sequential(nn.Linear(M, 10, bias=False), nn.ReLU(), nn.Linear(10, M, bias=False)),
    "swiglu": Swiglu,
    "odd": Odd,
}


def plain(layer, expert, **options):
    """The same weights in the plain layer."""
    experts = []
    stacked = dict(layer.experts.named_parameters())
    for g in range(layer.num_experts):
        one = OddPlain() if isinstance(expert, Odd) else copy.deepcopy(expert)
        one.double().load_state_dict({name: value[g] for name, value in stacked.items()})
        experts.append(one)
    return PlainMoE(layer.gate.weight, experts, layer.k, **options)


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("policy", ["position", "probs", "dropless"])
def test_layer_equals_dense_masks(kind, k, policy):
    torch.manual_seed(k)
    expert = EXPERTS[kind]()
    drop = policy != "dropless"
    layer = MoE(
        M, expert, E, k=k, capacity_factor=0.75, min_capacity=1, drop_tokens=drop,
        drop_policy=policy if drop else None, top2_2nd_expert_sampling=False,
    ).double()  # fmt: skip
    assert (layer.experts.form is None) == (kind == "odd")
    reference = plain(
        layer, expert, capacity_factor=0.75 if drop else None, min_capacity=1, policy=policy if drop else "position"
    )
    x = torch.randn(3, 7, M, dtype=torch.float64)
    x1, x2 = x.clone().requires_grad_(True), x.clone().requires_grad_(True)
    y1, balance1, counts = layer(x1)
    y2, balance2, routed, kept = reference(x2)
    assert torch.allclose(y1, y2, rtol=0, atol=1e-12)
    assert balance1.item() == pytest.approx(balance2.item(), abs=1e-12)
    assert counts.tolist() == routed
    assert layer.last.kept.tolist() == kept
    weight = torch.randn_like(x)
    (y1 * weight).sum().add(balance1).backward()
    (y2 * weight).sum().add(balance2).backward()
    assert torch.allclose(x1.grad, x2.grad, rtol=0, atol=1e-12)
    assert torch.allclose(layer.gate.weight.grad, reference.gate.grad, rtol=0, atol=1e-12)
    for name, param in layer.experts.named_parameters():
        theirs = torch.stack([dict(one.named_parameters())[name].grad for one in reference.experts])
        assert torch.allclose(param.grad, theirs, rtol=0, atol=1e-12), name


def test_capacity_for_everything_equals_dropless():
    torch.manual_seed(0)
    layer = MoE(M, EXPERTS["gelu"](), E, k=2, capacity_factor=float(E), top2_2nd_expert_sampling=False).double()
    free = MoE(M, EXPERTS["gelu"](), E, k=2, drop_tokens=False, top2_2nd_expert_sampling=False).double()
    free.load_state_dict(layer.state_dict())
    x = torch.randn(11, M, dtype=torch.float64)
    assert torch.allclose(layer(x)[0], free(x)[0], rtol=0, atol=1e-14)
    assert layer.last.drop_rate == free.last.drop_rate == 0


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_forms_are_recognised_by_what_they_compute(name):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.second, self.first = nn.Linear(8, M), nn.Linear(M, 8)

        def forward(self, x):
            return self.second(ACTIVATIONS[name](self.first(x)))

    form = recognise(Block())
    assert (form.activation, form.up, form.down, form.gate) == (name, "first", "second", None)


def test_what_is_no_plain_block_is_not_taken_for_one():
    assert recognise(nn.Sequential(nn.Linear(M, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, M))) is None
    assert recognise(nn.Sequential(nn.Linear(M, 8), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, M))).activation == "gelu"
    assert recognise(nn.Sequential(nn.Linear(M, 8), nn.ELU(), nn.Linear(8, M))) is None
    assert recognise(nn.Linear(M, M)) is None
    assert recognise(Odd()) is None
    block, before = Swiglu(), torch.get_rng_state()
    recognise(block)
    assert torch.equal(before, torch.get_rng_state())


def test_experts_start_differently_and_alike_from_the_same_seed():
    def build(init, expert):
        torch.manual_seed(5)
        return Experts(expert(), E, init)

    first, again = build("independent", EXPERTS["gelu"]), build("independent", EXPERTS["gelu"])
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
        assert all(not torch.equal(a[0], a[g]) for g in range(1, E))
    bound = 1 / M**0.5
    assert first.get_parameter("0.weight").abs().max() <= bound
    assert first.get_parameter("0.weight").std().item() == pytest.approx(bound / 3**0.5, rel=0.15)
    same = build("copy", EXPERTS["gelu"])
    assert all(torch.equal(p[0], p[g]) for p in same.parameters() for g in range(E))
    made = Experts(EXPERTS["gelu"], E)
    assert not torch.equal(made.get_parameter("0.weight")[0], made.get_parameter("0.weight")[1])


def test_built_on_the_meta_device_and_filled_by_reset_parameters():
    torch.manual_seed(9)
    real = Experts(EXPERTS["gelu"](), E)
    torch.manual_seed(9)
    EXPERTS["gelu"]()  # draws what building the sample above drew
    with torch.device("meta"):
        late = Experts(EXPERTS["gelu"](), E)
    late.to_empty(device="cpu")
    for part in late.modules():
        if list(part.parameters(recurse=False)):
            part.reset_parameters()
    for a, b in zip(real.parameters(), late.parameters(), strict=True):
        assert torch.equal(a, b)


def test_no_tokens_one_expert_and_tokens_that_all_go_to_one():
    for drop in (True, False):
        layer = MoE(M, EXPERTS["gelu"](), E, k=2, drop_tokens=drop)
        y, balance, counts = layer(torch.zeros(0, M, requires_grad=True))
        (y.sum() + balance).backward()
        assert y.shape == (0, M)
        assert counts.tolist() == [0] * E
        assert all(p.grad is not None and not p.grad.any() for p in layer.experts.parameters())
    single = MoE(M, EXPERTS["gelu"](), 1)
    x = torch.randn(5, M)
    assert torch.allclose(single(x)[0], single.experts(x.unsqueeze(0))[0])
    layer = MoE(M, EXPERTS["gelu"](), E, drop_tokens=False)
    with torch.no_grad():
        layer.gate.weight.zero_()
    assert layer(x)[2].tolist() == [5, 0, 0, 0]


def test_dropless_outputs_do_not_depend_on_the_rest_of_the_batch():
    torch.manual_seed(2)
    layer = MoE(M, EXPERTS["swiglu"](), E, k=2).double().eval()
    x = torch.randn(9, M, dtype=torch.float64)
    together = layer(x)[0]
    alone = torch.cat([layer(row.unsqueeze(0))[0] for row in x])
    assert torch.allclose(together, alone, rtol=0, atol=1e-12)
    assert torch.equal(layer(x.flip(0))[0].flip(0), together) or torch.allclose(
        layer(x.flip(0))[0].flip(0), together, rtol=0, atol=1e-12
    )


def test_evaluation_is_dropless_unless_asked_and_never_random():
    torch.manual_seed(2)
    layer = MoE(M, EXPERTS["gelu"](), E, noisy_gate_policy="RSample", capacity_factor=0.5, min_capacity=1).eval()
    x = torch.randn(16, M)
    state = torch.get_rng_state()
    assert torch.equal(layer(x)[0], layer(x)[0])
    assert torch.equal(state, torch.get_rng_state())
    assert layer.last.drop_rate == 0
    asked = MoE(M, EXPERTS["gelu"](), E, capacity_factor=0.5, eval_capacity_factor=0.5, min_capacity=1).eval()
    asked(x)
    assert asked.last.drop_rate > 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_routes_as_the_forward_did(reentrant):
    torch.manual_seed(4)
    layer = MoE(M, EXPERTS["gelu"](), E, capacity_factor=0.5, min_capacity=1, noisy_gate_policy="RSample").double()
    x = torch.randn(16, M, dtype=torch.float64, requires_grad=True)
    grads = []
    for recompute in (False, True):
        torch.manual_seed(11)
        layer.zero_grad()
        y, balance, _ = checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
        last = layer.last
        (y.square().sum() + balance).backward()
        assert layer.last is last or recompute
        grads.append([p.grad.clone() for p in layer.parameters()])
    for plain_grad, again in zip(*grads, strict=True):
        assert torch.equal(plain_grad, again)


def test_recomputation_from_another_random_state_is_refused_by_name():
    layer = MoE(M, EXPERTS["gelu"](), E, noisy_gate_policy="RSample")
    layer.name = "blocks.3.moe"
    y, _, _ = checkpoint(layer, torch.randn(8, M, requires_grad=True), use_reentrant=True, preserve_rng_state=False)
    with pytest.raises(ProtocolError, match=r"blocks\.3\.moe.*preserve_rng_state=True"):
        y.sum().backward()


def test_residual_branch():
    """Coefficients of equal size halve both; one that drowns the other leaves the experts only."""
    torch.manual_seed(1)
    layer = MoE(M, EXPERTS["gelu"](), E, use_residual=True, drop_tokens=False).double()
    x = torch.randn(7, M, dtype=torch.float64)
    bare = copy.deepcopy(layer)
    bare.mlp = None
    moe, dense = bare(x)[0], layer.mlp(x)
    with torch.no_grad():
        layer.coefficient.weight.zero_()
        layer.coefficient.bias.zero_()
    assert torch.allclose(layer(x)[0], (moe + dense) / 2, rtol=0, atol=1e-15)
    with torch.no_grad():
        layer.coefficient.bias.copy_(torch.tensor([40.0, -40.0]))
    assert torch.allclose(layer(x)[0], moe, rtol=0, atol=1e-15)
    assert not torch.equal(layer.mlp[0].weight, layer.experts.get_parameter("0.weight")[0])
    summed = MoE(M, EXPERTS["gelu"](), E, use_residual=True, residual_combine="sum", drop_tokens=False).double()
    bare = copy.deepcopy(summed)
    bare.mlp = None
    assert torch.allclose(summed(x)[0], bare(x)[0] + summed.mlp(x), rtol=0, atol=1e-15)


def test_scores_that_are_not_a_number_reach_the_output():
    """The engine sees the loss and skips the step on all ranks alike; nothing crashes on one of them."""
    layer = MoE(M, EXPERTS["gelu"](), E)
    x = torch.randn(4, M)
    x[2, 0] = float("nan")
    assert bool(layer(x)[0].isnan().any())


def test_settings_that_do_not_fit_are_refused_together():
    with pytest.raises(ConfigError, match=r"k=5 experts.*ep_size=3.*capacity_factor=0.*'Loud'"):
        MoE(M, EXPERTS["gelu"](), E, ep_size=3, k=5, capacity_factor=0, noisy_gate_policy="Loud")
    with pytest.raises(ConfigError, match="buffers"):
        MoE(M, nn.BatchNorm1d(M), E)
    with pytest.raises(ConfigError, match="no parameters"):
        MoE(M, nn.GELU(), E)
    with pytest.raises(ConfigError, match="keep their shape"):
        MoE(M, nn.Linear(M, M + 1), E, k=1)(torch.randn(3, M))


def test_a_copied_or_saved_layer_is_a_layer(tmp_path):
    layer = MoE(M, EXPERTS["gelu"](), E, k=2)
    layer(torch.randn(3, M))
    twin = copy.deepcopy(layer)
    torch.save(twin, tmp_path / "layer.pt")
    back = torch.load(tmp_path / "layer.pt", weights_only=False).eval()
    x = torch.randn(3, M)
    assert torch.equal(back(x)[0], layer.eval()(x)[0])


def test_every_argument_of_deepspeeds_layer_is_taken_in_its_place_or_refused():
    """Names, order and defaults; evaluation drops nothing unless asked, where DeepSpeed's default factor is 1."""
    theirs = {
        "hidden_size": inspect.Parameter.empty, "expert": inspect.Parameter.empty, "num_experts": 1, "ep_size": 1,
        "k": 1, "capacity_factor": 1.0, "eval_capacity_factor": None, "min_capacity": 4, "use_residual": False,
        "noisy_gate_policy": None, "drop_tokens": True, "use_rts": True, "use_tutel": False,
        "enable_expert_tensor_parallelism": False, "top2_2nd_expert_sampling": True,
    }  # fmt: skip
    positional = [p for p in inspect.signature(MoE).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert {p.name: p.default for p in positional} == theirs and [p.name for p in positional] == list(theirs)
    with pytest.warns(UserWarning, match="use_tutel has no effect"):
        layer = MoE(M, EXPERTS["gelu"](), E, 1, 2, 1.25, 2.0, 0, True, "None", False, False, True, True, False)
    y, balance, counts = layer(torch.randn(3, 5, M), torch.ones(3, 5))
    assert y.shape == (3, 5, M) and balance.dim() == 0 and int(counts.sum()) == 30
    for policy in ("Jitter", "RSample"):
        MoE(M, EXPERTS["gelu"](), E, noisy_gate_policy=policy)(torch.randn(2, M))
    with pytest.raises(ConfigError, match="noisy_gate_policy='Loud'"):
        MoE(M, EXPERTS["gelu"](), E, noisy_gate_policy="Loud")
    with pytest.raises(ConfigError, match=r"num_experts=4 does not split over ep_size=3"):
        MoE(M, EXPERTS["gelu"](), E, ep_size=3)
