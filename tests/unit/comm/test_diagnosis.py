import pytest
import torch

from trilithon.comm.diagnosis import diagnose, first_mismatch, table
from trilithon.comm.journal import KEPT, Journal
from trilithon.comm.rank_state import GroupState, RankState, Status, group_state
from trilithon.contracts import Tag


def calls(*modules, group="gather", world_size=3, numel=4):
    """The journal of a rank that called all_gather for these modules."""
    journal = Journal(group, tuple(range(world_size)))
    for module in modules:
        journal.issue("all_gather", torch.float32, numel, Tag(module, (f"{module}.weight",), 7, 1))
    return {group: group_state(journal)}


def waiting(rank, *modules, waited_s=3.0, **options):
    groups = calls(*modules, **options)
    group = next(iter(groups))
    return RankState(rank, Status.WAITING, group, len(modules) - 1, waited_s, "train.py:9 in main", groups=groups)


def outside(rank, *modules, where="load.py:3 in read", status=Status.OUTSIDE, world_size=3, **kwargs):
    return RankState(rank, status, where=where, groups=calls(*modules, world_size=world_size), **kwargs)


def test_a_rank_that_never_arrived_is_named_with_its_line():
    found = diagnose([waiting(0, "a", "b"), outside(1, "a"), waiting(2, "a", "b")])
    assert found.culprits == (1,)
    assert found.awaited.parameters == ["b.weight"]
    assert "rank 1 never arrived" in found.cause
    assert "load.py:3 in read" in found.cause


def test_a_skipped_module_is_told_from_earlier_steps():
    usual = ("a", "b", "c", "a", "b")
    found = diagnose([waiting(0, *usual), waiting(1, "a", "b", "c", "a", "c"), waiting(2, *usual)])
    assert (found.culprits, found.awaited.module) == ((1,), "b")
    assert "rank 1 skipped b" in found.cause


def test_between_two_ranks_history_decides_who_left_the_order():
    skipped = diagnose(
        [waiting(0, "a", "b", "c", "a", "c", world_size=2), waiting(1, "a", "b", "c", "a", "b", world_size=2)]
    )
    assert (skipped.culprits, skipped.awaited.module) == ((0,), "b")
    extra = diagnose([waiting(0, "a", "save", world_size=2), waiting(1, "a", "a", world_size=2)])
    assert extra.culprits == (0,)
    assert "rank 0 made a call that no other rank made" in extra.cause


def test_between_two_ranks_without_history_both_sides_are_named():
    found = diagnose([waiting(0, "a", world_size=2), waiting(1, "b", world_size=2)])
    assert found.culprits == (0, 1)
    assert "rank 0 calls all_gather of 4 float32 for a; rank 1 calls all_gather of 4 float32 for b" in found.cause


def test_another_size_is_a_mismatch():
    found = diagnose([waiting(0, "a"), waiting(1, "a", numel=5), waiting(2, "a")])
    assert found.culprits == (1,)
    assert "rank 1 has another size or dtype: it is in all_gather of 5 float32" in found.cause


def test_an_exception_outranks_everything_else():
    raised = outside(1, "b", status=Status.RAISED, error="ValueError: no", where="train.py:4 in f")
    found = diagnose([waiting(0, "a"), raised, waiting(2, "a")])
    assert (found.culprits, found.cause) == ((1,), "rank 1 raised ValueError: no at train.py:4 in f.")


@pytest.mark.parametrize(
    ("status", "words"), [(Status.LEFT, "rank 1 left early"), (Status.GONE, "rank 1 ended without a word")]
)
def test_a_rank_that_is_no_longer_there(status, words):
    found = diagnose([waiting(0, "a", "b"), outside(1, "a", status=status), waiting(2, "a", "b")])
    assert found.culprits == (1,)
    assert words in found.cause


def test_the_way_out_when_a_program_ended_depends_on_the_call():
    for call in ("engine.save", "engine.load"):
        tag = f"{call}, which every rank has to call"
        found = diagnose([waiting(0, "a", tag, world_size=2), outside(1, "a", status=Status.LEFT, world_size=2)])
        assert found.way_out.startswith(f"Call {call} on every rank")
    found = diagnose([waiting(0, "a", "b", world_size=2), outside(1, "a", status=Status.LEFT, world_size=2)])
    assert "same number of batches" in found.way_out


def test_a_call_made_by_one_rank_only():
    found = diagnose([waiting(0, "a", "save"), outside(1, "a"), outside(2, "a")])
    assert found.culprits == (1, 2)
    assert "only rank 0 made this call" in found.cause


def test_ranks_that_wait_in_different_groups():
    one, other = waiting(0, "a", world_size=2), waiting(1, "x", group="reduce", world_size=2, waited_s=2.0)
    found = diagnose([one, other])
    assert found.culprits == (1,)
    assert (
        "the order between groups differs: rank 1 waits in group reduce for all_gather of 4 float32 for x"
        in found.cause
    )


def test_everybody_in_the_same_call_is_a_matter_of_the_transport():
    found = diagnose([waiting(rank, "a") for rank in range(3)])
    assert found.culprits == ()
    assert "every rank is inside the same collective" in found.cause


def test_groups_of_the_same_name_over_other_ranks_are_not_compared():
    left = RankState(0, Status.OUTSIDE, groups={"t": GroupState([0, 1], calls("a")["gather"].calls)})
    right = RankState(2, Status.OUTSIDE, groups={"t": GroupState([2, 3], calls("b")["gather"].calls)})
    assert first_mismatch([left, right]) is None


def test_the_table_has_a_row_per_rank_and_names_module_and_parameter():
    raised = outside(1, "a", status=Status.RAISED, error="ValueError: no", where="train.py:4 in f")
    text = table([waiting(0, "a", "b"), raised, RankState(2, Status.GONE)], "rank 0 waited 3.0 s")
    rows = {line.split()[0]: line for line in text.splitlines() if line[:1].isdigit()}
    assert text.startswith("trilithon: rank 0 waited 3.0 s\n")
    assert "waiting 3.0 s" in rows["0"]
    assert "b.weight" in rows["0"]
    assert "7.1" in rows["0"]
    assert "raised" in rows["1"]
    assert "after all_gather" in rows["1"]
    assert "gone" in rows["2"]
    assert "missing: rank 1, in all_gather for module b (b.weight)\n" in text


def test_states_survive_the_trip_through_the_store():
    state = waiting(1, "a", "b")
    assert RankState.from_json(state.to_json()) == state


def test_a_journal_forgets_old_calls_but_keeps_counting():
    journal = Journal("g", (0, 1))
    made = [journal.issue("barrier", torch.uint8, 0, Tag("x")) for _ in range(KEPT + 5)]
    assert [call.sequence for call in journal.calls] == list(range(5, KEPT + 5))
    assert len({call.code for call in made}) == len(made)


def test_a_code_depends_on_exactly_what_must_agree():
    def code(kind="k", dtype=torch.float32, numel=4, tag=Tag("m", ("p",), 1, 2), before=0):
        journal = Journal("g", (0, 1))
        for _ in range(before):
            journal.issue("other", torch.uint8, 0, tag)
        return journal.issue(kind, dtype, numel, tag).code

    changed = [code("j"), code(dtype=torch.float64), code(numel=5), code(tag=Tag("n")), code(before=1)]
    assert len({code(), *changed}) == 6
    assert code(tag=Tag("m", ("other",), 9, 9)) == code()
    assert 0 <= code() < 2**31
