"""Fair shares: every partition has one live worker, shares are even, and few partitions move."""

from collections import Counter
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.model.shares import fair_shares

NAMES = ["ann", "bob", "cid", "dan", "eve"]
owners = st.lists(st.one_of(st.none(), st.sampled_from([*NAMES, "killed"])), max_size=40)
workers = st.sets(st.sampled_from(NAMES), min_size=1)


@pytest.mark.parametrize(
    ("owned", "live", "dealt"),
    [
        ([None] * 4, ["bob", "ann"], ["ann", "ann", "bob", "bob"]),
        (["ann"] * 4, ["ann", "bob"], ["ann", "ann", "bob", "bob"]),
        (["ann", "bob", "ann", "bob"], ["ann", "bob", "cid"], ["ann", "bob", "ann", "cid"]),
        (["bob", "killed", "ann", "killed"], ["ann", "bob"], ["bob", "ann", "ann", "bob"]),
        (["bob"], ["ann", "bob"], ["bob"]),
        (["ann", "bob", "cid"], [], [None, None, None]),
        ([], ["ann"], []),
    ],
)
def test_partitions_are_dealt_out(owned, live, dealt):
    assert list(fair_shares(owned, live)) == dealt


@given(owners, workers)
def test_shares_are_even_and_complete(owned, live):
    shares = Counter(fair_shares(owned, live))

    sizes = [shares[worker] for worker in live]
    assert sum(sizes) == len(owned)
    assert max(sizes) - min(sizes) <= 1


@given(owners, workers)
def test_the_order_of_the_workers_is_of_no_account(owned, live):
    assert fair_shares(owned, sorted(live)) == fair_shares(owned, sorted(live, reverse=True))


@given(owners, workers)
def test_a_deal_that_was_carried_out_stays(owned, live):
    dealt = fair_shares(owned, live)

    assert fair_shares(dealt, live) == dealt


@pytest.mark.parametrize("live", [["ann"], ["ann", "bob"], ["ann", "bob", "cid"]])
@pytest.mark.parametrize("partitions", range(5))
def test_no_even_deal_moves_fewer_partitions(partitions, live):
    """Compared with all other deals."""
    for owned in product([None, "killed", *live], repeat=partitions):
        even = (
            deal
            for deal in product(live, repeat=partitions)
            if max(map(deal.count, live)) - min(map(deal.count, live)) <= 1
        )
        fewest = min(moves(owned, deal) for deal in even)

        assert moves(owned, fair_shares(owned, live)) == fewest


def test_names_decide_only_among_equals():
    """Whoever has more keeps more, whatever the names are."""
    for first, second in permutations(["ann", "bob"]):
        assert Counter(fair_shares([first, second, first], [first, second])) == {first: 2, second: 1}


def moves(owned, dealt):
    """How many partitions change their owner."""
    return sum(before != after for before, after in zip(owned, dealt, strict=True))
