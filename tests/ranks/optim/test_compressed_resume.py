"""Compressed runs that stop and go on: bit for bit on as many ranks, with everything unsent on another number."""

import shutil
import tempfile

import pytest
import torch
from compressed_runs import BATCHES, engine_of, everyones, restore, snapshot, train, weights

from trilithon.comm.compressed import conserved
from trilithon.errors import CheckpointError, ProtocolError
from trilithon.testing import ranks
from trilithon.testing.ranks import run_ranks

RULES = {
    "onebit_adam": {"kind": "onebit_adam", "lr": 3e-3, "freeze_step": 4, "per_tensor_scaling": True},
    "gradient target": {"kind": "apmsqueeze", "lr": 3e-3, "freeze_step": 4, "compress_target": "gradient",
                        "compressor": {"kind": "topk", "ratio": 0.1}},
    "onebit_lamb": {"kind": "onebit_lamb", "lr": 0.01, "freeze_step": 4, "weight_decay": 0.1},
    "zero_one_adam": {"kind": "zero_one_adam", "lr": 3e-3, "var_freeze_step": 6, "var_update_scaler": 2,
                      "local_step_scaler": 2},
}  # fmt: skip


@ranks(2, 3)
@pytest.mark.parametrize("name", RULES)
def test_a_resumed_run_goes_on_bit_for_bit_from_every_phase(world_size, name):
    rule = RULES[name]
    # at the last step of the warm-up and well inside the compressed phase; in the warm-up and at the first after it
    for stop in (4, 9) if world_size == 2 else (2, 5):
        with engine_of(rule) as engine:
            train(engine, BATCHES[:stop])
            saved = snapshot(engine)  # makes the ranks one, which is part of the run that is compared
            losses, expected = train(engine, BATCHES[stop:]), weights(engine)
            end = engine._update.state_dict()
        for stage in (0,) if name == "zero_one_adam" else (0, 1):
            if name == "onebit_lamb" and stage == 1:
                continue  # norms are added in another order there
            with engine_of(rule, stage=stage) as engine:
                restore(engine, saved)
                again = snapshot(engine)  # saved again at once, nothing is lost
                restore(engine, again)
                assert train(engine, BATCHES[stop:]) == losses
                assert all(torch.equal(value, expected[key]) for key, value in weights(engine).items())
                assert engine._update.state_dict() == end


def first_part(rule, stop):
    with engine_of(rule) as engine:
        train(engine, BATCHES[:stop])
        saved = snapshot(engine)
        return saved if engine.rank == 0 else None


def second_part(rule, saved, stop):
    """(losses, what was unsent right after loading, what one step had still to send)."""
    with engine_of(rule) as engine:
        restore(engine, saved)
        states = everyones({key: value.clone() for key, value in engine._update.rank_state().items()})
        losses = train(engine, BATCHES[stop:])
        return losses, states, weights(engine)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("sizes", [(4, 2), (2, 3), (2, 1)])
def test_other_numbers_of_ranks_take_over_all_that_was_unsent(name, sizes):
    rule, stop = RULES[name], 9
    saved = run_ranks(first_part, sizes[0], rule, stop)[0]
    numel = sum(value.numel() for key, value in saved["fields"].items() if key.startswith("master/"))
    before = conserved([r["residual"] for r in saved["ranks"]], [r["server_residual"] for r in saved["ranks"]], numel)
    assert before.any()
    straight = run_ranks(second_part, sizes[0], rule, saved, stop)[0]
    losses, states, _ = run_ranks(second_part, sizes[1], rule, saved, stop)[0]
    if sizes[1] == 1:
        after = states[0]["residual"]
    else:
        after = conserved([r["residual"] for r in states], [r["server_residual"] for r in states], numel)
        assert not any(r["residual"].any() for r in states)
    assert torch.allclose(after, before, rtol=1e-6, atol=1e-6 * float(before.abs().max()))
    # the same samples, another split of them: no jump
    assert losses == pytest.approx(straight[0], abs=0.05)


@ranks(2)
def test_a_longer_warm_up_goes_back_to_averages_and_a_shorter_one_freezes_now(world_size):
    rule = RULES["onebit_adam"]
    with engine_of(rule) as engine:
        train(engine, BATCHES[:6])
        saved = snapshot(engine)
    with engine_of({**rule, "freeze_step": 8}) as engine:
        restore(engine, saved)
        with engine.ledger.measure() as sent:
            train(engine, BATCHES[6:7])
        assert sent.all_to_all_bytes == 0 and sent.reduce_scatter_bytes > 0
        train(engine, BATCHES[7:9])
        assert engine._update.state_dict()["frozen"]["updates"] == 8
    with engine_of({"kind": "adamw", "lr": 3e-3, "weight_decay": 0.0}) as engine:
        train(engine, BATCHES[:6])
        plain = snapshot(engine)
    with engine_of(rule) as engine:  # a run of plain Adam goes on compressed
        restore(engine, plain)
        train(engine, BATCHES[6:7])
        assert engine._update.state_dict()["frozen"]["updates"] == 6


@ranks(2)
def test_the_compressor_may_change_and_other_rules_are_refused(world_size):
    with engine_of(RULES["gradient target"] | {"compress_target": "momentum"}) as engine:
        train(engine, BATCHES[:6])
        saved = snapshot(engine)
    with engine_of(RULES["onebit_adam"] | {"per_tensor_scaling": False}) as engine:
        restore(engine, saved)
        assert torch.equal(engine._update.rank_state()["residual"], saved["ranks"][engine.rank]["residual"])
        train(engine, BATCHES[6:8])
        with pytest.raises(CheckpointError, match="written by rule 'sgd', and onebit_adam continues from adamw"):
            engine._update.load_state_dict({"rule": "sgd", "updates": 1})
    for kind, other in (("onebit_lamb", "lamb"), ("zero_one_adam", "adamw")):
        with engine_of(RULES[kind]) as engine:
            engine._update.load_state_dict({"rule": other, "updates": 1, "missed": {}})
            with pytest.raises(CheckpointError, match=f"and {kind} continues from {other}"):
                engine._update.load_state_dict({"rule": "sgd", "updates": 1})


@ranks(2)
def test_drifted_ranks_are_not_saved(world_size):
    with engine_of(RULES["zero_one_adam"] | {"var_freeze_step": 2}) as engine:
        train(engine, BATCHES[:5])
        with pytest.raises(ProtocolError, match=r"call engine\.drain"):
            engine._update.state_dict()
        engine.drain()
        engine._update.state_dict()


@ranks(2)
def test_residuals_of_another_model_are_refused(world_size):
    with engine_of(RULES["onebit_adam"]) as engine:
        train(engine, BATCHES[:6])
        saved = snapshot(engine)
    short = [{name: value[:80] for name, value in rank.items()} for rank in saved["ranks"]]
    for saved_ranks in (None, short):
        with engine_of(RULES["onebit_adam"]) as engine:
            restore(engine, saved)
            with pytest.raises(CheckpointError, match="as they were when it was saved"):
                engine._update.load_rank_state(short[engine.rank], saved_ranks)
                train(engine, BATCHES[6:7])


def save_and_finish(rule, folder, stop):
    """Train, save, train on: what a resumed run has to equal."""
    with engine_of(rule) as engine:
        train(engine, BATCHES[:stop])
        engine.save(folder)
        return train(engine, BATCHES[stop:]), weights(engine)


def load_and_finish(rule, folder, stop):
    """Load and train on, with what was unsent right after loading."""
    with engine_of(rule) as engine:
        engine.load(folder)
        states = everyones({key: value.clone() for key, value in engine._update.rank_state().items()})
        return train(engine, BATCHES[stop:]), weights(engine), states


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("stop", [3, 9])
def test_a_checkpoint_of_the_engine_continues_bit_for_bit(name, stop, tmp_path):
    losses, expected = run_ranks(save_and_finish, 2, RULES[name], tmp_path, stop)[0]
    again, found, _ = run_ranks(load_and_finish, 2, RULES[name], tmp_path, stop)[0]
    assert again == losses
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb"])
def test_a_checkpoint_of_four_ranks_continues_on_two(name, tmp_path):
    losses, _ = run_ranks(save_and_finish, 4, RULES[name], tmp_path, 9)[0]
    again, _, states = run_ranks(load_and_finish, 2, RULES[name], tmp_path, 9)[0]
    assert again == pytest.approx(losses, abs=0.05)
    assert any(state["server_residual"].any() for state in states)
    assert not any(state["residual"].any() for state in states)


@ranks(2)
def test_a_checkpoint_of_plain_adam_goes_on_compressed_with_the_masks_of_this_run(world_size):
    folder = everyones(tempfile.mkdtemp())[0]

    def masked(rows):
        def groups(module):
            mask = torch.ones(module.positions.weight.shape)
            mask[:rows] = 0
            rest = [p for p in module.parameters() if p is not module.positions.weight]
            return [{"params": [module.positions.weight], "exp_avg_mask": mask}, {"params": rest}]

        return groups

    with engine_of({"kind": "adamw", "lr": 3e-3, "weight_decay": 0.0}) as engine:
        train(engine, BATCHES[:6])
        engine.save(folder, "plain")
    with engine_of(RULES["onebit_adam"]) as engine:
        engine.load(folder, "plain")
        train(engine, BATCHES[6:8])
        assert engine._update.state_dict()["frozen"]["updates"] == 6
    with engine_of(RULES["onebit_adam"], parameters=masked(2)) as engine:
        train(engine, BATCHES[:6])
        engine.save(folder, "masked")
    with engine_of(RULES["onebit_adam"], parameters=masked(5)) as engine:
        engine.load(folder, "masked")
        train(engine, BATCHES[6:7])
        momentum = dict(engine.view("exp_avg"))["positions.weight"]
        assert not momentum[:5].any() and momentum[5:].any()
    everyones(0)
    shutil.rmtree(folder, ignore_errors=True)
