"""The distillation term and its end."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trilithon
from trilithon.compress import StagedDistillation, distillation_loss, stop_after
from trilithon.errors import ConfigError, NonFiniteError, ProtocolError

V = 7


def logits(seed, *shape):
    return torch.randn(*shape, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_same_logits_cost_nothing_and_pull_nowhere():
    student = logits(0, 3, 4).requires_grad_(True)
    loss = distillation_loss(student, student.detach().clone(), temperature=2.0)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-15)
    assert student.grad.abs().max() < 1e-16


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_gradient_is_the_difference_of_probabilities(temperature):
    """temperature (softmax(s / t) - softmax(teacher / t)) / tokens."""
    student, teacher = logits(0, 3, 4).requires_grad_(True), logits(1, 3, 4)
    distillation_loss(student, teacher, temperature=temperature).backward()
    by_hand = temperature * ((student / temperature).softmax(-1) - (teacher / temperature).softmax(-1)) / 12
    assert torch.allclose(student.grad, by_hand, rtol=0, atol=1e-15)


def test_masked_tokens_do_not_count():
    student, teacher = logits(0, 5), logits(1, 5)
    mask = torch.tensor([True, False, True, True, False])
    masked = distillation_loss(student, teacher, mask=mask)
    assert masked.item() == pytest.approx(distillation_loss(student[mask], teacher[mask]).item(), abs=1e-15)
    assert distillation_loss(student, teacher, mask=mask & False).item() == 0


def test_a_padded_vocabulary_and_one_that_does_not_fit():
    student, teacher = logits(0, 5), logits(1, 5)
    padded = F.pad(teacher, (0, 3), value=9.0)
    assert torch.equal(distillation_loss(student, padded, vocab_size=V), distillation_loss(student, teacher))
    with pytest.raises(ConfigError, match="one vocabulary of 7 tokens"):
        distillation_loss(student, teacher[..., :5])
    with pytest.raises(NonFiniteError, match="teacher"):
        distillation_loss(student, teacher.index_fill(0, torch.tensor([1]), float("nan")))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head, self.calls = nn.Linear(4, V), 0

    def forward(self, x):
        self.calls += 1
        return self.head(x)


def train(distill, model, steps):
    engine = trilithon.initialize(model, {"optimizer": {"kind": "sgd", "lr": 0.1}})
    if distill is not None:
        engine.hooks.append(distill)
    losses, generator = [], torch.Generator().manual_seed(3)
    for _ in range(steps):
        x = torch.randn(6, 4, generator=generator)
        out = engine(x)
        loss = F.cross_entropy(out, torch.arange(6))
        engine.backward(loss if distill is None else loss + distill.loss(out, x))
        engine.step()
        losses.append(engine.loss)
    engine.close()
    return losses


def student():
    torch.manual_seed(0)
    return nn.Linear(4, V)


def test_the_teacher_runs_until_its_step_and_is_let_go():
    teacher = Counting()
    distill = StagedDistillation(teacher, stop_step=3)
    losses, plain = train(distill, student(), 5), train(None, student(), 5)
    assert teacher.calls == 3
    assert not any(param.requires_grad for param in teacher.parameters())
    assert distill._teacher is None and not distill.active
    assert losses[0] > plain[0]
    assert train(StagedDistillation(None, stop_step=0), student(), 5) == plain


def test_the_phase_follows_from_the_step_that_is_restored():
    over, during = StagedDistillation(None, stop_step=3), StagedDistillation(None, stop_step=3)
    over.load_state_dict({"step": 4})
    assert over.loss(logits(0, 2), None).item() == 0
    during.load_state_dict({"step": 3})
    with pytest.raises(ProtocolError, match="step 3 is one with a teacher"):
        during.loss(logits(0, 2), None)
    assert during.state_dict() == {"step": 3}


def test_where_it_stops_and_what_is_refused():
    assert stop_after(572_000) == 400_400
    with pytest.raises(ConfigError, match=r"fraction=1\.5"):
        stop_after(10, 1.5)
    with pytest.raises(ConfigError, match="temperature=0"):
        StagedDistillation(None, stop_step=1, temperature=0)
