"""verify_resume finds nothing in a run that continues exactly, and names what was not restored in one that does not."""

import pytest
import torch

from trilithon.data import Loader
from trilithon.engine.restore import Restore
from trilithon.errors import ConfigError
from trilithon.pretrain import load_pretrain, run
from trilithon.pretrain.verify_resume import verify_resume


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(str(number**2) for number in range(500)))
    settings = {
        "data.paths": [str(tmp_path / "text.txt")], "data.cache": str(tmp_path / "cache"), "model.preset": "nano",
        "model.context": 32, "batch.micro_size": 2, "optimizer.lr": 0.01, "zero.stage": 2, "precision": "bf16",
    }  # fmt: skip
    return load_pretrain(overrides=settings)


def here(config, nproc: int) -> int:
    """The runs in this process: what is tested is the comparison."""
    assert nproc == 1
    return run(config).exit_status


def test_a_run_that_continues_exactly_has_no_difference(config):
    verdict = verify_resume(config, steps=4, start=here)
    assert verdict.difference is None and verdict.saved_at == 2
    assert verdict.values == 4 * 5 and verdict.tensors >= 3 * 14
    assert "4 steps on 1 rank, straight and with a save and a load after step 2: 20 recorded values" in str(verdict)


def test_a_position_that_is_not_restored_shows_in_the_first_loss_after_the_load(config, monkeypatch):
    monkeypatch.setattr(Loader, "load_state_dict", lambda self, state: None)
    verdict = verify_resume(config, steps=4, save_at=1, start=here)
    assert verdict.difference is not None and "the first difference is loss of step 2: " in verdict.difference


def test_moments_that_are_not_restored_are_named_with_the_element(config, monkeypatch):
    plain = Restore.tensors

    def tensors(self) -> None:
        plain(self)
        for part in self._engine._sharding.slices():
            with self._engine._update.state(part, write=True) as state:
                state["exp_avg_sq"][0] += 1e-12  # too little to show in a loss

    monkeypatch.setattr(Restore, "tensors", tensors)
    verdict = verify_resume(config, steps=2, save_at=1, start=here)
    assert verdict.difference is not None
    assert "differs: " in verdict.difference and "elements, by at most" in verdict.difference


def test_what_is_no_tensor_is_compared_too(config, monkeypatch):
    monkeypatch.setattr(Restore, "finish", _and_draw(Restore.finish))
    verdict = verify_resume(config, steps=2, save_at=1, start=here)
    assert verdict.difference is not None
    assert "random.torch is one tensor straight, another resumed" in verdict.difference


def _and_draw(plain):
    def finish(self) -> None:
        plain(self)
        torch.rand(1)

    return finish


@pytest.mark.parametrize("at", [0, 4])
def test_steps_that_leave_nothing_to_compare_are_refused(config, at):
    with pytest.raises(ConfigError, match=f"saving after step {at} of 4 leaves nothing to compare"):
        verify_resume(config, steps=4, save_at=at, start=here)
