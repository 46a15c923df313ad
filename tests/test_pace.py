"""Who follows commits is at hand for a single one, and spares the machine where there are many."""

from outbox.pace import Pace


def pauses(pace: Pace, *commits: int) -> list[float]:
    return [pace.after(each) for each in commits]


def test_a_commit_now_and_then_is_not_waited_for():
    short = Pace().after(1)

    assert pauses(Pace(), 1, 1, 2, 1) == [short] * 4


def test_many_commits_make_the_pauses_longer_until_there_are_few_again():
    pace = Pace()
    short, long = pauses(pace, 1, 100)

    assert long > short
    # As many in a longer pause are fewer a second.
    assert pauses(pace, 100, 3, 3) == [long, short, long]
    assert pauses(pace, 1, 1) == [short, short]


def test_a_steady_stream_keeps_its_pace():
    """Otherwise the length of the pauses would decide whether they are long."""
    for per_second in (50, 100, 200, 300, 1_000):
        pace = Pace()
        pause, found = pace.after(1), []
        for _ in range(20):
            pause = pace.after(round(per_second * pause))
            found.append(pause)
        assert len(set(found)) == 1, f"{per_second} commits a second: {found}"
