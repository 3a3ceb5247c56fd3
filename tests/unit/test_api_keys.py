"""API keys: shown once, kept as a hash, void when revoked."""

from __future__ import annotations

import fakeredis
import pytest

from orchestration.core.errors import Invalid
from orchestration.state.api_keys import STORED_AT, create_key, find_key, list_keys, revoke_key


@pytest.fixture(params=[True, False], ids=["text", "bytes"])
def redis(request: pytest.FixtureRequest) -> fakeredis.FakeRedis:
    return fakeredis.FakeRedis(decode_responses=request.param)


def test_a_key_stands_for_its_principal(redis: fakeredis.FakeRedis) -> None:
    key, made = create_key(redis, "alice", "acme", ["turns:write", "turns:read"], ["support"])
    found = find_key(redis, key)
    assert found == made.principal
    assert (found.sub, found.tenant, found.scopes, found.roles) == ("alice", "acme", ("turns:write", "turns:read"), ("support",))


def test_the_key_itself_is_not_kept(redis: fakeredis.FakeRedis) -> None:
    key, _ = create_key(redis, "alice", "acme", ["turns:read"])
    assert key not in str(redis.hgetall(STORED_AT))
    assert key.removeprefix("tmk_") not in str(redis.hgetall(STORED_AT))


def test_a_revoked_key_is_void_and_the_others_hold(redis: fakeredis.FakeRedis) -> None:
    first, made = create_key(redis, "alice", "acme", ["turns:read"])
    second, _ = create_key(redis, "bob", "acme", ["turns:read"])
    assert revoke_key(redis, made.key_id)
    assert find_key(redis, first) is None
    assert find_key(redis, second) is not None
    assert not revoke_key(redis, made.key_id)
    assert [known.principal.sub for known in list_keys(redis)] == ["bob"]


@pytest.mark.parametrize("text", ["", "tmk_", "tmk_wrong", "x" * 10_000_000, "tmk_\ud800", "Bearer tmk_x"])
def test_what_is_no_key_finds_nobody(redis: fakeredis.FakeRedis, text: str) -> None:
    create_key(redis, "alice", "acme", ["turns:read"])
    assert find_key(redis, text) is None


@pytest.mark.parametrize(
    ("sub", "tenant", "scopes", "where"),
    [
        ("", "acme", ["turns:read"], "sub"),
        ("alice", "no tenant", ["turns:read"], "tenant"),
        ("alice", "acme", [], "scope"),
        ("alice", "acme", ["turns:everything"], "scope"),
    ],
)
def test_a_key_that_cannot_work_is_not_made(redis: fakeredis.FakeRedis, sub: str, tenant: str, scopes: list[str], where: str) -> None:
    with pytest.raises(Invalid) as refused:
        create_key(redis, sub, tenant, scopes)
    assert [error["loc"] for error in refused.value.errors] == [[where]]
    assert list_keys(redis) == []
