"""The node's own policy: it refuses with a sentence that says what to set."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest

from agents.errors import PolicyRefused, PolicyUnreadable
from agents.policy import Policy, load_policy
from agents.protocol.messages import LaunchSpec

LAUNCH = LaunchSpec(
    argv=[sys.executable, "train.py"],
    working_directory="/tmp",
    environment={},
    run_id="r",
    node_rank=0,
    node_count=1,
    ranks_per_node=1,
    first_rank=0,
    world_size=1,
    master_address="127.0.0.1",
    checkpoint_directory="/c",
)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="what root may do differs from what others may do")


def launch(**changes: object) -> LaunchSpec:
    return msgspec.structs.replace(LAUNCH, **changes)


@as_root
def test_no_rank_runs_as_root_unless_the_policy_says_so() -> None:
    with pytest.raises(PolicyRefused, match="allow_root = true"):
        Policy().account_for(LAUNCH)
    with pytest.raises(PolicyRefused, match="allow_root = true"):
        Policy(allowed_users=("root",)).account_for(launch(user="root"))
    assert Policy(allow_root=True).account_for(LAUNCH).uid == 0


def test_only_listed_users_may_run_ranks() -> None:
    with pytest.raises(PolicyRefused, match="allowed_users"):
        Policy().account_for(launch(user="nobody"))
    with pytest.raises(PolicyRefused, match="does not exist"):
        Policy().account_for(launch(user="no-such-user-here"))


@as_root
def test_a_listed_user_may() -> None:
    account = Policy(allowed_users=("nobody",)).account_for(launch(user="nobody"))
    assert account.name == "nobody"
    assert account.uid != 0


def test_working_directories_are_judged_with_their_links_followed(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    (allowed / "job").mkdir(parents=True)
    outside.mkdir()
    (allowed / "link").symlink_to(outside)
    policy = Policy(allowed_directories=(allowed.resolve(),))
    policy.check_directory(launch(working_directory=str(allowed / "job")))
    for wrong in (outside, allowed / "link", allowed / "job/../../outside", tmp_path / "allowed-not"):
        with pytest.raises(PolicyRefused, match="allowed_directories"):
            policy.check_directory(launch(working_directory=str(wrong)))
    with pytest.raises(PolicyRefused, match="absolute"):
        policy.check_directory(launch(working_directory="job"))


def test_any_directory_is_allowed_by_default(tmp_path: Path) -> None:
    Policy().check_directory(launch(working_directory=str(tmp_path)))


def test_interpreters_are_looked_up_and_matched_by_pattern(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("")
    python.chmod(0o755)
    assert Policy().interpreter_for(launch(argv=["python3", "x"]), search_path=str(tmp_path)) == str(python)
    assert Policy(allowed_interpreters=(f"{tmp_path}/python*",)).interpreter_for(
        launch(argv=[str(python)]), search_path=""
    ) == str(python)
    with pytest.raises(PolicyRefused, match="allowed_interpreters"):
        Policy(allowed_interpreters=("/opt/*",)).interpreter_for(launch(argv=[str(python)]), search_path="")
    with pytest.raises(PolicyRefused, match="allowed_interpreters"):
        Policy(allowed_interpreters=("/opt/*",)).interpreter_for(
            launch(argv=[f"/opt/../{python}", "x"]), search_path=""
        )
    for wrong in ([], ["no-such-program"], ["./python3"], ["/bin/\0sh"]):
        with pytest.raises(PolicyRefused):
            Policy().interpreter_for(launch(argv=wrong), search_path=str(tmp_path))


def test_refuses_variables_that_cannot_exist() -> None:
    for environment in ({"": "x"}, {"A=B": "x"}, {"A": "x\0y"}):
        with pytest.raises(PolicyRefused):
            Policy().check_environment(launch(environment=environment))


def test_reads_a_policy_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('allowed_users = ["alice"]\nallowed_directories = ["/data"]\nallow_root = true\n')
    policy = load_policy(path)
    assert policy.allowed_users == ("alice",)
    assert policy.allowed_directories == (Path("/data"),)
    assert policy.allow_root
    assert load_policy(None) == Policy()


@pytest.mark.parametrize(
    "text", ["allow_rot = true", 'allow_root = "yes"', "allowed_users = [1]", "allowed_users = 'alice'", "[", "\0"]
)
def test_an_agent_does_not_start_with_a_policy_that_it_does_not_understand(tmp_path: Path, text: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(PolicyUnreadable, match=r"policy\.toml"):
        load_policy(path)


def test_a_missing_policy_file_is_no_permission(tmp_path: Path) -> None:
    with pytest.raises(PolicyUnreadable):
        load_policy(tmp_path / "none.toml")
