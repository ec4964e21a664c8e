"""Schedules, checked by a simulator that knows only what depends on what."""

from __future__ import annotations

import pytest

from trilithon.errors import ConfigError, ProtocolError
from trilithon.parallel.pipeline.schedule import Action, Kind, channel_order, make_orders
from trilithon.parallel.pipeline.simulate import simulate

SIZES = [(stages, micros) for stages in range(1, 9) for micros in range(1, 17)]


def as_text(order):
    return " ".join(map(str, order))


def test_the_orders_of_two_and_four_stages():
    two = make_orders("1f1b", 2, 4)
    assert [as_text(order) for order in two] == ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    four = make_orders("1f1b", 4, 4)
    assert as_text(four[0]) == "F0 F1 F2 F3 B0 B1 B2 B3"
    assert as_text(four[1]) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert as_text(four[2]) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert as_text(make_orders("gpipe", 2, 2)[1]) == "F0 F1 B0 B1"
    assert as_text(make_orders("interleaved", 2, 2, 2)[0]) == "F0 F1 F0/1 F1/1 B0/1 B1/1 B0 B1"


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_bubble_is_that_of_the_formula(schedule):
    for stages, micros in SIZES:
        timeline = simulate(make_orders(schedule, stages, micros))
        assert timeline.bubble == pytest.approx((stages - 1) / (micros + stages - 1))
        assert timeline.duration == pytest.approx(3 * (micros + stages - 1))
        bound = [min(stages - stage, micros) if schedule == "1f1b" else micros for stage in range(stages)]
        assert list(timeline.live) == bound


def test_chunks_divide_the_wait():
    for stages, micros in SIZES:
        for chunks in (1, 2, 3):
            if micros % stages == 0:
                timeline = simulate(make_orders("interleaved", stages, micros, chunks), chunks)
                wait = (stages - 1) / chunks
                assert timeline.bubble == pytest.approx(wait / (micros + wait))


def test_weight_gradients_fill_the_wait_in_the_memory_of_the_first_stage():
    for stages, micros in SIZES:
        timeline = simulate(make_orders("zero-bubble", stages, micros))
        plain = (stages - 1) / (micros + stages - 1)
        assert timeline.bubble <= plain + 1e-9
        assert max(timeline.live) <= stages
        if stages > 1 and micros >= 2 * stages:
            assert timeline.bubble < 0.8 * plain


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble", "interleaved", "forward"])
def test_each_action_is_there_once_and_messages_keep_their_order(schedule):
    for stages, micros in SIZES:
        if schedule == "interleaved" and micros % stages:
            continue
        for chunks in (1, 3) if schedule in ("interleaved", "forward") else (1,):
            orders = make_orders(schedule, stages, micros, chunks)
            kinds = {"zero-bubble": "FIW", "forward": "F"}.get(schedule, "FB")
            wanted = {Action(Kind(k), m, c) for k in kinds for m in range(micros) for c in range(chunks)}
            assert all(len(order) == len(wanted) and set(order) == wanted for order in orders)
            assert channel_order(orders, chunks) == []
            simulate(orders, chunks)


def test_backwards_come_in_the_order_of_micro_batches_as_on_one_process():
    for schedule in ("1f1b", "gpipe", "zero-bubble"):
        for order in make_orders(schedule, 4, 7):
            micros = [action.micro for action in order if action.kind in (Kind.BACKWARD, Kind.WEIGHT)]
            assert micros == sorted(micros)


def test_what_waits_for_ever_or_arrives_in_another_order_is_told():
    orders = make_orders("1f1b", 2, 2)
    orders[0] = [Action(Kind.BACKWARD, 0), *(action for action in orders[0] if action != Action(Kind.BACKWARD, 0))]
    with pytest.raises(ProtocolError, match=r"stages wait before {0: 'B0', 1: 'F0'}"):
        simulate(orders)
    swapped = make_orders("gpipe", 2, 2)
    swapped[1][:2] = swapped[1][1::-1]
    assert "F from stage 0 to 1" in channel_order(swapped)[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("interleaved", 3, 4, 2), "Use 3 or 6"),
        (("interleaved", 3, 2, 2), "Use 3,"),
        (("1f1b", 2, 4, 2), 'Use pipeline.schedule="interleaved"'),
        (("fancy", 2, 4), "there are gpipe, 1f1b, interleaved and zero-bubble"),
        (("1f1b", 2, 0), "got 2, 0, 1"),
    ],
)
def test_numbers_that_a_schedule_cannot_do_are_refused(arguments, text):
    with pytest.raises(ConfigError, match=text):
        make_orders(*arguments)


def test_the_drawing_shows_who_waits():
    assert simulate(make_orders("1f1b", 2, 2)).draw().splitlines() == [
        "stage 0  F0 F1 .  .  B0 B0 .  B1 B1",
        "stage 1  .  F0 B0 B0 F1 B1 B1 .  .",
    ]
