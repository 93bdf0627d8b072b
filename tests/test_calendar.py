"""A peer's time: bookings never over-book it, keep their windows, and make best use of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.mutants import applied
from valence.protocols.capacity.admission import Admission
from valence.protocols.capacity.bookings import Bookings, Commitment, length_here
from valence.protocols.capacity.calendar import Booking, BookingAsk, Calendar, Profile, exceeds
from valence.protocols.capacity.matching import plus
from valence.protocols.config import LAN
from valence.protocols.wire.messages import Capacity, Needs, Room, Traits

CORE = Capacity(1000)


def ask(length: float, start: float = 0.0, due: float = math.inf, cores: int = 1) -> BookingAsk:
    return BookingAsk(Capacity(1000 * cores), length, start, due, length)


def bookings(cores: int, share: float = 1.0) -> Bookings:
    return Bookings(Capacity(1000 * cores, 2**30), share, 15.0, 120.0, 1000)


def held(peer: Bookings, *asks: BookingAsk, owner: str = "o", now: float = 0.0) -> Any:
    made = confirmed(peer, *asks, owner=owner, now=now)
    return None if made is None else [(p.booking.start_at, p.booking.end_at) for p in made]


def confirmed(
    peer: Bookings, *asks: BookingAsk, owner: str = "o", now: float = 0.0
) -> list[Commitment] | None:
    """Bookings that may be moved in their windows. (A hold stays where its home was told it is.)"""
    peer.refresh(now)
    made = peer.hold(b"h", "w", owner, list(asks), now)
    for promise, asked in zip(made or [], asks, strict=False):
        assert peer.confirm(promise.id, "w", b"h", 1, asked.due_at, now)
    return made


# --------------------------------------------------------------------------- one calendar


@st.composite
def rectangles(draw: st.DrawFn) -> list[tuple[float, float, Capacity]]:
    rows = []
    for _ in range(draw(st.integers(0, 12))):
        start, length = draw(st.integers(0, 30)), draw(st.integers(1, 10))
        needs = Capacity(1000 * draw(st.integers(1, 3)), draw(st.integers(0, 2)))
        rows.append((float(start), float(start + length), needs))
    return rows


@given(rectangles(), st.integers(1, 8), st.integers(1, 4), st.integers(1, 8), st.integers(0, 30))
@settings(max_examples=500, deadline=None)
def test_the_earliest_time_is_that_of_brute_force(
    rows: list[tuple[float, float, Capacity]], cores: int, need: int, length: int, start: int
) -> None:
    profile, needs, limit = Profile(), Capacity(1000 * need, 1), Capacity(1000 * cores, 4)
    for row in rows:
        profile.add(*row)

    def used(at: float) -> Capacity:
        total = Capacity()
        for begin, end, its in rows:
            total = plus(total, its) if begin <= at < end else total
        return total

    def fits(at: int) -> bool:
        return not any(exceeds(used(at + i), needs, limit) for i in range(length))

    expected = next((at for at in range(start, 200) if fits(at)), math.inf)
    assert profile.earliest(needs, length, start, limit) == expected
    for row in rows:
        profile.add(*row, times=-1)
    assert profile.earliest(needs, length, start, Capacity(8000, 9)) == start


def test_two_tasks_of_a_sequence_may_have_a_gap_between_them() -> None:
    peer = bookings(1)
    assert held(peer, ask(2, 2, 4)) == [(2, 4)]
    assert held(peer, ask(2), ask(2)) == [(0, 2), (4, 6)]


def test_a_booking_makes_room_in_its_window_and_never_leaves_it() -> None:
    peer = bookings(1)
    assert held(peer, ask(3, 1, 10)) == [(1, 4)]
    assert held(peer, ask(3, 1, 4)) == [(1, 4)]
    (first,) = [p for p in peer.promises.values() if p.booking.due_at == 10]
    assert first.booking.start_at == 4
    assert held(peer, ask(3, 2, 6)) is None


@pytest.mark.parametrize("mutant", ["", "memory-is-not-booked"])
def test_memory_is_booked_too(mutant: str) -> None:
    peer = bookings(8)
    need = Capacity(1000, 2**29)
    with applied(mutant):
        assert held(peer, BookingAsk(need, 2, 0, 2, 2))
        assert held(peer, BookingAsk(need, 2, 0, 2, 2))
        assert (held(peer, BookingAsk(need, 2, 0, 2, 2)) is None) is not bool(mutant)


# --------------------------------------------------------------------------- shares


def test_a_quarter_is_promised_to_nobody() -> None:
    peer = bookings(4, share=0.75)
    assert [held(peer, ask(2, 0, 2)) is not None for _ in range(4)] == [True, True, True, False]


def test_after_a_promise_of_all_of_a_peer_there_is_a_pause() -> None:
    peer = bookings(1, share=0.75)
    assert held(peer, ask(3)) == [(0, 3)]
    assert held(peer, ask(3)) == [(4, 7)]


def test_of_two_owners_none_has_more_than_half() -> None:
    peer = bookings(8, share=0.75)
    for _ in range(3):
        assert held(peer, ask(2, 0, 2), owner="first")
    assert held(peer, ask(2, 0, 2), owner="second")
    assert held(peer, ask(2, 0, 2), owner="first") is None
    assert held(peer, ask(2, 0, 2), owner="second")


# --------------------------------------------------------------------------- as time passes


@st.composite
def lives(draw: st.DrawFn) -> tuple[int, list[Any]]:
    """A peer's size, and what happens there."""
    steps = []
    for _ in range(draw(st.integers(1, 40))):
        rows = [
            (draw(st.floats(0.1, 5)), draw(st.floats(0, 8)), draw(st.floats(1, 5)))
            for _ in range(draw(st.integers(0, 2)))
        ]
        steps.append((draw(st.floats(0, 2)), rows, draw(st.integers(0, 3)), draw(st.booleans())))
    return draw(st.sampled_from((1, 2, 4, 8))), steps


@given(lives())
@settings(max_examples=250, deadline=None)
def test_whatever_happens_nothing_is_over_booked(life: tuple[int, list[Any]]) -> None:
    cores, steps = life
    peer, now, count = bookings(cores, 0.75), 0.0, 0
    for passed, rows, ended, is_late in steps:
        now += passed
        asks, line = [], now
        for length, wait, slack in rows:
            length = length_here(length, 1.0)
            line += wait
            asks.append(BookingAsk(CORE, length, line, line + slack * length, length / 1.2))
            line += length
        made = confirmed(peer, *asks, owner=f"o{count % 2}", now=now) if asks else None
        for promise in made or []:
            count += 1
            if not is_late:
                peer.commit(promise.id, "w", b"h", promise.id)
        peer.tick(now)
        free = peer.calendar.capacity
        for promise in peer.running():
            free = plus(free, promise.needs, -1)
        for promise in peer.waiting():
            if free.millicores >= 1000 and peer.may_begin(promise, now):
                peer.begin(promise, now)
                free = plus(free, promise.needs, -1)
        for promise in list(peer.running())[:ended]:
            peer.ended(promise.unit)
        peer.expire(now)
        peer.calendar.forget(now)
        peer.sanity_check(now)


def test_a_late_unit_uses_its_margin_before_it_moves_others() -> None:
    peer = bookings(1)
    asked = BookingAsk(CORE, 2.4, 0.0, 10.0, 2.0)
    (first,) = confirmed(peer, asked) or []
    (second,) = confirmed(peer, ask(2, 2.4, 4.4)) or []
    peer.tick(0.3)
    assert (first.booking.start_at, first.booking.end_at) == (0.3, 2.4)
    peer.tick(1.0)  # now there is no room for it before the other one, which is due
    assert second.booking.start_at == 2.4
    assert first.booking.start_at == 4.4


def test_a_unit_begins_early_if_that_breaks_no_other_promise() -> None:
    peer = bookings(1)
    (first,) = confirmed(peer, ask(2, 0, 8)) or []
    (second,) = confirmed(peer, ask(2, 2, 8)) or []
    assert peer.commit(second.id, "w", b"h", "second") == "wait"
    assert peer.may_begin(second, 0.5)  # the first is not here yet, and can wait
    assert first.booking.start_at >= 2.5


def test_what_is_loaded_keeps_to_its_windows() -> None:
    before = bookings(1)
    (one,) = confirmed(before, ask(2, 0, 8)) or []
    row = before.row(one, wall_s=1000.0)
    (two,) = confirmed(before, ask(2, 0, 2)) or []
    assert one.booking.start_at == 2  # it was moved after it was written
    after = bookings(1)
    after.load([row, before.row(two, 1000.0)], 2, 1000.0, 0.0)
    assert sorted(p.booking.start_at for p in after.promises.values()) == [0, 2]
    assert after.new_id() not in before.promises


@pytest.mark.parametrize("mutant", ["", "bookings-fall-with-their-home"])
def test_a_hold_that_nobody_confirms_expires_and_a_booking_does_not(mutant: str) -> None:
    peer = bookings(1)
    (hold,) = peer.hold(b"h", "w", "o", [ask(2, 50, 60)], 0.0) or []
    (booked,) = peer.hold(b"h", "w", "o", [ask(2, 70, 80)], 0.0) or []
    assert peer.confirm(booked.id, "w", b"h", 1, 80.0, 0.0)
    assert peer.expire(16.0) == [hold.id]
    with applied(mutant):
        assert peer.forsake(b"h") is bool(mutant)
    if not mutant:
        assert peer.expire(121.0) == [booked.id]


def test_a_home_of_an_older_epoch_does_not_speak_for_a_booking() -> None:
    peer = bookings(1)
    (booked,) = peer.hold(b"h", "w", "o", [ask(2, 70, 80)], 0.0) or []
    assert peer.confirm(booked.id, "w", b"new", 5, 80.0, 0.0)
    assert peer.confirm(booked.id, "w", b"h", 4, 80.0, 0.0) is None
    assert not peer.let_go(booked.id, b"h")
    assert peer.let_go(booked.id, b"new")


# --------------------------------------------------------------------------- beside other work


def admission(cores: int) -> Admission:
    return Admission(Capacity(1000 * cores, 2**30), Traits(), LAN)


def room(count: int = 1, runtime_s: float | None = None) -> Room:
    return Room(Needs(CORE), count, runtime_s)


def booked(peer: Admission, length: float, start: float, due: float, cores: int = 1) -> Commitment:
    made = confirmed(peer.bookings, ask(length, start, due, cores))
    assert made is not None
    return made[0]


def test_work_without_a_promise_runs_in_between_and_makes_way() -> None:
    peer = admission(4)
    promise = booked(peer, 5, 10, 20, cores=3)
    leases = peer.reserve(b"x", room(4), 0.0).leases
    for n, lease in enumerate(leases):
        assert peer.commit(b"x", lease, f"u{n}", float(n)) == "run"
    assert peer.commit(b"h", promise.id, "promised", 9.0, None, "w") == "wait"
    assert peer.starts(10.0) == []
    assert peer.told_to_go() == ["u3", "u2", "u1"]  # the youngest first, and no more than needed
    assert peer.told_to_go() == []
    for unit in ("u1", "u2", "u3"):
        peer.release(unit)
    assert peer.starts(10.1) == ["promised"]
    peer.sanity_check()


def test_nothing_new_begins_while_a_promised_unit_waits_for_room() -> None:
    peer = admission(2)
    promise = booked(peer, 5, 0, 20, cores=2)
    for n, lease in enumerate(peer.reserve(b"x", room(2), 0.0).leases):
        peer.commit(b"x", lease, f"u{n}", 0.0)
    peer.commit(b"h", promise.id, "promised", 0.0, None, "w")
    peer.starts(0.1)
    peer.release("u0")
    grant = peer.reserve(b"x", room(1), 0.2)
    assert not grant.leases
    assert "promised" in grant.refusal


def test_what_would_have_to_make_way_for_certain_begins_elsewhere() -> None:
    peer = admission(1)
    booked(peer, 5, 10, 20)
    assert not peer.reserve(b"x", room(1, runtime_s=15.0), 0.0).leases
    assert peer.reserve(b"x", room(1, runtime_s=2.0), 0.0).leases
    peer = admission(1)
    booked(peer, 5, 10, 20)
    assert peer.reserve(b"x", room(1), 0.0).leases  # nobody knows how long it takes


def test_a_unit_that_made_way_three_times_keeps_its_place() -> None:
    peer = admission(1)
    promise = booked(peer, 5, 10, 30)
    (lease,) = peer.reserve(b"x", room(1), 0.0).leases
    refused = peer.commit(b"x", lease, "u", 0.0, None, "", LAN.ways_max)
    assert refused == "its place is promised to other work"
    peer.give_back(b"x", (lease,))
    peer.bookings.let_go(promise.id, b"h")
    other = booked(peer, 1, 5000, 6000)
    (lease,) = peer.reserve(b"x", room(1), 0.0).leases
    assert peer.commit(b"x", lease, "u", 0.0, None, "", LAN.ways_max) == "run"
    assert held(peer.bookings, ask(5, 10, 30)) is None  # nothing is promised in its place
    assert peer.release("u")
    assert held(peer.bookings, ask(5, 10, 30)) == [(10, 15)]
    assert other.booking.start_at == 5000
    peer.sanity_check()


@pytest.mark.parametrize("mutant", ["", "booked-units-begin-in-order-of-arrival"])
def test_units_begin_in_the_order_of_their_deadlines(mutant: str) -> None:
    peer = admission(1)
    late, soon = booked(peer, 1, 0, 50), booked(peer, 1, 0, 20)
    for name, promise in (("late", late), ("soon", soon)):
        peer.commit(b"h", promise.id, name, 0.0, None, "w")
    with applied(mutant):
        assert peer.starts(2.0) == (["late"] if mutant else ["soon"])


@pytest.mark.parametrize("mutant", ["", "overruns-are-ignored"])
def test_only_a_unit_that_takes_too_long_makes_way_for_another_promise(mutant: str) -> None:
    peer = admission(1)
    first, second = booked(peer, 5, 0, 5), booked(peer, 5, 10, 15)
    peer.bookings.promises[second.id].workflow = "other"
    peer.commit(b"h", first.id, "first", 0.0, None, "w")
    assert peer.starts(0.0) == ["first"]
    peer.commit(b"h", second.id, "second", 1.0, None, "other")
    assert peer.starts(4.0) == []
    with applied(mutant):
        assert peer.starts(10.0) == []
    assert peer.told_to_go() == ([] if mutant else ["first"])
    peer.release("first")
    assert peer.starts(10.1) == ["second"]


def test_leases_that_nobody_has_taken_up_go_first() -> None:
    peer = admission(1)
    promise = booked(peer, 5, 1, 9)
    (lease,) = peer.reserve(b"x", room(1), 0.0).leases
    peer.commit(b"h", promise.id, "promised", 0.5, None, "w")
    assert peer.starts(1.0) == ["promised"]
    assert peer.commit(b"x", lease, "u", 1.1) == "the lease has expired"
    peer.sanity_check()


@given(rectangles(), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_a_calendar_forgets_only_what_has_passed(
    rows: list[tuple[float, float, Capacity]], cores: int
) -> None:
    kept, forgot = (
        Calendar(Capacity(1000 * cores, 9), 1.0),
        Calendar(Capacity(1000 * cores, 9), 1.0),
    )
    for n, (start, end, needs) in enumerate(rows):
        for calendar in (kept, forgot):
            calendar.add(Booking(n + 1, needs, end - start, start, end, 0.0, start, "o"))
    for n, (_, end, _) in enumerate(rows):
        if end <= 15:
            kept.drop(n + 1)
            forgot.drop(n + 1)
    forgot.forget(15.0)
    for length in (1, 3, 7):
        wanted = ask(length, 15.0)
        assert kept.earliest(wanted) == forgot.earliest(wanted)


# --------------------------------------------------------------------------- what a review found


def test_a_hold_stays_where_its_home_was_told_it_is() -> None:
    peer = bookings(1)
    (hold,) = peer.hold(b"h", "w", "o", [ask(3, 1, 10)], 0.0) or []
    assert held(peer, ask(3, 1, 4)) is None
    assert hold.booking.start_at == 1


def test_a_booking_that_will_end_too_late_is_not_confirmed() -> None:
    peer = bookings(1)
    (hold,) = peer.hold(b"h", "w", "o", [ask(3, 1, 10)], 0.0) or []
    assert peer.confirm(hold.id, "w", b"h", 1, 3.0, 0.0) is None
    assert peer.confirm(hold.id, "w", b"h", 1, 4.0, 0.0) is hold


def test_one_owner_has_at_most_half_of_the_places() -> None:
    peer = Bookings(Capacity(8000), 1.0, 15.0, 120.0, 10)
    for n in range(6):
        assert (held(peer, ask(1, 100.0 * n), owner="eve") is not None) is (n < 5)
    assert held(peer, ask(1, 5000.0), owner="bob") is not None


def test_what_nobody_could_serve_makes_no_contest() -> None:
    peer = bookings(4, share=0.75)
    assert held(peer, ask(10, 0, 1), owner="eve") is None
    for _ in range(3):
        assert held(peer, ask(2, 0, 2), owner="bob") is not None


def test_with_many_bookings_none_is_moved_and_nothing_takes_long() -> None:
    peer = bookings(1)
    for n in range(300):
        assert held(peer, ask(1, 2.0 * n, 2.0 * n + 900))
    before = {n: p.booking.start_at for n, p in peer.promises.items()}
    assert held(peer, ask(1.5, 0, 20)) is None
    assert before == {n: p.booking.start_at for n, p in peer.promises.items()}


def test_a_committed_unit_needs_no_row_on_the_disk() -> None:
    peer = bookings(1)
    (one,) = confirmed(peer, ask(2, 0, 10)) or []
    assert peer.take_gone(0.0) == []
    peer.commit(one.id, "w", b"h", "unit")
    assert peer.take_gone(0.0) == [one.id]
    peer.ended("unit")
    assert peer.take_gone(0.0) == []


def test_a_unit_that_takes_longer_than_it_said_has_no_place_of_its_own() -> None:
    peer = admission(1)
    (lease,) = peer.reserve(b"x", room(1, runtime_s=1.0), 0.0).leases
    booked(peer, 1, 5000, 6000)
    assert peer.commit(b"x", lease, "liar", 0.0, None, "", LAN.ways_max) == "run"
    promise = booked(peer, 5, 10, 30)
    peer.commit(b"h", promise.id, "promised", 9.0, None, "w")
    assert peer.starts(10.0) == []
    assert peer.told_to_go() == ["liar"]
    peer.release("liar")
    assert peer.starts(10.1) == ["promised"]
    peer.sanity_check()


def test_promised_work_is_early_only_as_far_as_others_have_the_rest() -> None:
    peer = admission(4)
    for n in range(4):
        promise = booked(peer, 5, 100.0 * n + 50, 4000)
        peer.commit(b"h", promise.id, f"p{n}", 0.0, None, "w")
    (lease,) = peer.reserve(b"x", room(1), 0.0).leases  # somebody else wants to begin
    assert len(peer.starts(0.0)) == 3
    assert peer.commit(b"x", lease, "other", 0.1) == "run"
    peer.sanity_check()
