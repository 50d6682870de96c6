"""Which rank keeps a copy of which."""

from __future__ import annotations

from everstep.checkpoint.memory_partner import Partners, choose_partners


def test_each_rank_sends_to_its_like_on_the_next_node_and_the_last_to_the_first() -> None:
    places = ["a", "a", "b", "b", "c", "c"]
    found = [choose_partners(places, rank) for rank in range(6)]
    assert found[0] == Partners(to_rank=2, from_rank=4)
    assert found[3] == Partners(to_rank=5, from_rank=1)
    assert found[5] == Partners(to_rank=1, from_rank=3)


def test_ranks_that_lie_across_nodes_still_match_in_pairs() -> None:
    places = ["a", "b", "a", "b"]
    found = [choose_partners(places, rank) for rank in range(4)]
    for rank, partners in enumerate(found):
        assert isinstance(partners, Partners)
        other = found[partners.to_rank]
        assert isinstance(other, Partners) and other.from_rank == rank
        assert places[partners.to_rank] != places[rank]


def test_one_node_alone_is_told_why() -> None:
    assert "would be lost with it" in str(choose_partners(["a", "a"], 0))


def test_nodes_of_different_sizes_are_told_why() -> None:
    assert "nodes have 1 to 2 ranks each" in str(choose_partners(["a", "a", "b"], 2))
