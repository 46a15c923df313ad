"""Each message belongs to the batch whose settle was the first to pass it, whatever was open, however it was paged."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from outbox.model.position import EARLIEST, Position, Progress, Window
from outbox.spark.reports.batches import Batch, Batches

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def settled(*progress: Progress) -> list[Batch]:
    """A settle a second."""
    return [
        Batch(epoch=1, n=n, progress=each, settled_at=NOON + timedelta(seconds=n)) for n, each in enumerate(progress, 1)
    ]


def found(batches: Batches, *rows: tuple[int, int]) -> list[int | None]:
    """The `n` of the settles of these (number, id)."""
    return [None if (batch := batches.find(*row)) is None else batch.n for row in rows]


def test_whole_windows():
    batches = Batches(settled(Progress(Position(10)), Progress(Position(20)), Progress(Position(30))))

    assert found(batches, (9, 9), (10, 10), (19, 19), (20, 20), (29, 29), (30, 30)) == [None, 2, 2, 3, 3, None]


def test_the_first_batch_that_is_kept_counts_only_if_it_was_the_first_ever():
    steps = settled(Progress(Position(10)), Progress(Position(20)))

    assert found(Batches(steps), (9, 9), (10, 10)) == [None, 2]
    assert found(Batches(steps, complete=True), (9, 9), (10, 10)) == [1, 2]


def test_what_was_open_belongs_to_the_batch_after_its_commit():
    batches = Batches(settled(Progress(Position(10)), Progress(Position(20, (12, 15))), Progress(Position(21, (15,)))))

    assert found(batches, (11, 11), (12, 12), (15, 15), (20, 20)) == [2, 3, None, 3]


def test_pages_of_a_window():
    target = Position(20)
    pages = [Progress(Position(10), target, 100), Progress(Position(10), target, 105), Progress(target)]

    batches = Batches(settled(Progress(Position(10)), *pages))

    assert found(batches, (11, 100), (11, 101), (11, 105), (11, 106), (20, 99)) == [2, 3, 3, 4, None]


def test_pages_of_a_window_that_is_not_over():
    pages = [Progress(Position(10), Position(20, (13,)), 100)]

    batches = Batches(settled(Progress(Position(10)), *pages))

    assert found(batches, (11, 100), (11, 101), (13, 99)) == [2, None, None]


def test_after_a_restore_positions_begin_anew():
    before = settled(Progress(Position(90)), Progress(Position(95)), Progress(Position(5)))
    after = settled(Progress(Position(90)), Progress(Position(95)), Progress(Position(5)), Progress(Position(9)))

    assert found(Batches(before), (92, 92), (4, 4)) == [None, None]
    assert found(Batches(after), (92, 92), (4, 4), (5, 5)) == [None, None, 4]


def test_without_any_batch_nothing_is_known():
    assert found(Batches([]), (1, 1)) == [None]


NUMBERS = 12


@st.composite
def runs(draw: st.DrawFn) -> list[Progress]:
    """Progress as a worker stores it: of rising positions, whole windows or pages of them."""
    steps, base = [Progress(EARLIEST)], EARLIEST
    for _ in range(draw(st.integers(0, 5))):
        head = draw(st.integers(base.head, NUMBERS))
        may_be_open = [n for n in range(head) if not base.sees(n)]
        target = Position.of(head, draw(st.sets(st.sampled_from(may_be_open))) if may_be_open else ())
        pages = sorted(draw(st.sets(st.integers(0, NUMBERS), max_size=3)))
        steps += [Progress(base, target, after) for after in pages]
        if draw(st.booleans()):
            steps.append(Progress(target))
            base = target
        else:
            break
    return steps[draw(st.integers(0, len(steps) - 1)) :]


def passes(progress: Progress, number: int, id: int) -> bool:
    """Whether a message is settled at this progress."""
    if progress.base.sees(number):
        return True
    if progress.target is None or progress.after is None:
        return False
    return Window(progress.base, progress.target).holds(number) and id <= progress.after


@given(runs(), st.permutations(range(NUMBERS + 1)))
def test_as_the_definition_says(steps: list[Progress], ids: list[int]) -> None:
    """The first settle that passes the message, unless that is the oldest which is known."""
    batches = Batches(settled(*steps))

    for number in range(NUMBERS + 1):
        first = next((at for at, each in enumerate(steps, 1) if passes(each, number, ids[number])), None)
        assert found(batches, (number, ids[number])) == [None if first == 1 else first]
