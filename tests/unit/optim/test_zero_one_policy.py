"""The policy of 0/1 Adam against the plainest simulation, and the volume it leads to."""

import pytest

from trilithon.optim.zero_one_policy import Policy, PolicySettings


def kinds(settings, steps, stop=None):
    """What each step did: F full, 1 one bit, L silent, S one bit in phase B. With `stop`, saved and loaded there."""
    policy, found = Policy(settings), []
    for step in range(1, steps + 1):
        if policy.full(step):
            policy.did_full()
            found.append("F")
        elif not policy.frozen(step):
            policy.did_onebit()
            found.append("1")
        elif policy.did_local():
            policy.did_sync()
            found.append("S")
        else:
            found.append("L")
        if step == stop:
            saved, policy = policy.state_dict(), Policy(settings)
            policy.load_state_dict(saved)
    return policy, "".join(found)


def simulated(settings, steps):
    """Lists of gaps: kappa full steps at each gap 1, 2, 4, ...; in phase B the gap follows the number of steps."""
    found, gap, left, since = [], 1, settings.var_update_scaler, 0
    for _ in range(min(steps, settings.var_freeze_step)):
        since += 1
        if since == gap:
            since, left = 0, left - 1
            if left == 0:
                gap, left = 2 * gap, settings.var_update_scaler
            found.append("F")
        else:
            found.append("1")
    since = 0
    for step in range(max(steps - settings.var_freeze_step, 0)):
        gap = min(2 ** (step // settings.local_step_scaler), settings.local_step_clipper)
        since += 1
        found.append("S" if since >= gap else "L")
        since = 0 if found[-1] == "S" else since
    return "".join(found)


@pytest.mark.parametrize("kappa", [1, 2, 16])
@pytest.mark.parametrize("clip", [1, 4, 16])
def test_steps_are_those_of_the_simulation(kappa, clip):
    settings = PolicySettings(200, kappa, 30, clip)
    assert kinds(settings, 500)[1] == simulated(settings, 500)
    assert kinds(settings, 500, stop=137) == kinds(settings, 500, stop=333) == kinds(settings, 500)


def test_a_full_precision_warm_up_is_full():
    assert kinds(PolicySettings(20, 1, full_precision_warmup=10), 20)[1][:10] == "F" * 10


def test_the_volume_of_the_published_schedule():
    """152 000 steps, var_freeze_step 12 500: about 153 full rounds, half of all rounds, half a bit per element and step
    (Lu et al. 2023, arXiv:2202.06009, section 7)."""
    policy, found = kinds(PolicySettings(12_500, 16, 32_678, 16), 152_000)
    assert policy.full_rounds == found.count("F") == 152
    rounds = policy.full_rounds + policy.onebit_rounds
    assert 0.48 < rounds / 152_000 < 0.50
    assert policy.skipped_rounds == 152_000 - rounds
    bits = (16 * policy.full_rounds + policy.onebit_rounds) / 152_000
    assert 0.49 < bits < 0.52 and 31 < 16 / bits < 33
