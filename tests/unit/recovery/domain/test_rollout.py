from __future__ import annotations

from dataclasses import replace

from domain_scenes import plan, prepared, share

from recovery.domain.rollout import endpoint_port, fingerprint_difference


def test_agreeing_nodes_show_no_difference() -> None:
    assert fingerprint_difference(prepared(plan(2)).shares) == ""


def test_names_the_part_and_both_nodes_that_differ() -> None:
    here = share("gpu-01", fingerprint="x", fingerprint_parts={"script": "s1", "torch": "2.9"})
    there = share("gpu-02", fingerprint="y", fingerprint_parts={"script": "s1", "torch": "2.8"})
    assert fingerprint_difference([here, there]) == "torch is 2.9 on gpu-01 and 2.8 on gpu-02"


def test_a_part_that_one_node_lacks_is_a_difference() -> None:
    here = share("gpu-01", fingerprint="x", fingerprint_parts={"nccl": "2.21"})
    there = share("gpu-02", fingerprint="y", fingerprint_parts={})
    assert fingerprint_difference([here, there]) == "nccl is 2.21 on gpu-01 and None on gpu-02"


def test_different_fingerprints_without_parts_are_a_difference_still() -> None:
    assert fingerprint_difference([share("gpu-01", fingerprint="x"), share("gpu-02", fingerprint="y")])


def test_the_port_is_that_of_node_rank_0_wherever_its_share_stands() -> None:
    view = prepared(plan(2, nodes=("gpu-02", "gpu-01")))
    turned = (share("gpu-01", master_port=1), share("gpu-02", master_port=2))
    assert endpoint_port(replace(view, shares=turned)) == 2
    assert endpoint_port(replace(view, shares=(share("gpu-01", master_port=1), share("gpu-02")))) is None
