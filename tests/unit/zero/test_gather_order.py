"""The recorded order of gathers: it predicts what repeats, and says nothing where the model changed."""

from __future__ import annotations

from itertools import islice

from trilithon.zero.prefetch import Trace


def play(trace: Trace, order: list[int], ahead: int = 2) -> list[list[int]]:
    predicted = [list(islice(trace.follow(index), ahead)) for index in order]
    trace.restart()
    return predicted


def test_a_repeated_pass_is_predicted_and_the_first_is_not():
    trace = Trace()
    assert play(trace, [0, 1, 2]) == [[], [], []]
    assert play(trace, [0, 1, 2]) == [[1, 2], [2], []]


def test_a_unit_used_twice_is_predicted_at_both_places():
    trace = Trace()
    play(trace, [0, 1, 0, 2])
    assert play(trace, [0, 1, 0, 2], ahead=1) == [[1], [0], [2], []]


def test_at_the_first_difference_prediction_stops_and_the_new_order_is_learned():
    trace = Trace()
    play(trace, [0, 1, 2, 3])
    assert play(trace, [0, 2, 1, 3], ahead=1) == [[1], [], [], []]
    assert play(trace, [0, 2, 1, 3], ahead=1) == [[2], [1], [3], []]


def test_a_pass_without_gathers_keeps_the_record():
    trace = Trace()
    play(trace, [0, 1])
    trace.restart()
    assert play(trace, [0, 1], ahead=1) == [[1], []]


def test_a_longer_and_a_shorter_pass_are_no_error():
    trace = Trace()
    play(trace, [0, 1])
    assert play(trace, [0, 1, 2, 3], ahead=1) == [[1], [], [], []]
    assert play(trace, [0], ahead=3) == [[1, 2, 3]]
