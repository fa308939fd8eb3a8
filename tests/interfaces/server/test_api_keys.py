"""Keys: how they are read, that all are compared, and what a file of them may say."""

import hashlib
import hmac

import pytest

from quire.errors import OptionError
from quire.interfaces.cli import main
from quire.interfaces.gateway.access.access import Callers
from quire.interfaces.gateway.access.api_keys import key_ring
from quire.interfaces.gateway.access.doors import doors_of, is_loopback
from quire.interfaces.gateway.access.tenants import NOBODY, Quota, Tenant, Tenants
from quire.interfaces.gateway.access.waiting_room import WaitingRoom
from quire.interfaces.server.options import ServerOptions

HASH = hashlib.sha256(b"secret").hexdigest()


@pytest.fixture
def keys(tmp_path):
    def write(text, mode=0o600, **others):
        path = tmp_path / "keys.txt"
        path.write_text(text)
        path.chmod(mode)
        return key_ring(file=str(path), **others)

    return write


def test_all_forms_of_a_line(keys):
    ring = keys(
        f"# ours\n\nhashed: {HASH} weight=2.5 max_requests=4\nprefixed: sha256:{HASH[::-1]}\n"
        "plain: sk-plain tokens_per_minute=1000 priority=-1\nsk-alone\nplain: sk-second\n"
    )
    assert len(ring.keys) == 5
    hashed = ring.tenant_of(b"secret")
    assert hashed == Tenant("hashed", Quota(weight=2.5, max_requests=4))
    plain = Tenant("plain", Quota(tokens_per_minute=1000, priority=-1))
    assert ring.tenant_of(b"sk-plain") == ring.tenant_of(b"sk-second") == plain
    alone = ring.tenant_of(b"sk-alone")
    assert alone.name == "key-" + hashlib.sha256(b"sk-alone").hexdigest()[:12]
    for wrong in (b"", b"secre", b"secret ", HASH.encode(), b"plain"):
        assert ring.tenant_of(wrong) is None
    assert [tenant.name for tenant in ring.tenants] == ["hashed", "prefixed", "plain", alone.name]


def test_the_name_of_a_key_does_not_depend_on_its_place():
    one, other = key_ring(["a", "b"]), key_ring(["b", "a"])
    assert one.tenant_of(b"a") == other.tenant_of(b"a") != one.tenant_of(b"b")


def test_defaults_are_for_what_a_line_does_not_say(keys):
    ring = keys("a: sk-a max_queued=3\nb: sk-b\n", defaults=Quota(max_requests=9, max_queued=9))
    assert ring.tenant_of(b"sk-a").quota == Quota(max_requests=9, max_queued=3)
    assert ring.tenant_of(b"sk-b").quota == Quota(max_requests=9, max_queued=9)


def test_every_key_is_compared(monkeypatch):
    ring = key_ring([f"key-{number}" for number in range(20)])
    seen = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda one, other: seen.append(other) or compare(one, other))
    for key in (b"key-0", b"key-19", b"none"):
        seen.clear()
        ring.tenant_of(key)
        assert len(set(seen)) == 20, key


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no key"),
        ("# only a comment\n", "holds no key"),
        ("a b: sk-x", "'b:' is not one of"),
        ("bad/name: sk-x", "letters, digits"),
        ("empty:", "has no key"),
        ("a: sk-x wieght=2", 'Did you mean "weight"'),
        ("a: sk-x weight=0", "at least"),
        ("a: sk-x weight=nan", "at least"),
        ("a: sk-x max_requests=1.5", "whole number"),
        ("a: sk-x tokens_per_minute=0", "at least 1"),
        ("a: sk-x weight=2\na: sk-y weight=3", "weight=2"),
        ("a: sk-x\nb: sk-x", "occurs twice"),
        (f"a: {HASH}\nsecret", "occurs twice"),
    ],
)
def test_a_wrong_file_is_said_with_its_line(keys, text, why):
    with pytest.raises(OptionError, match=why):
        keys(text)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604])
def test_a_file_that_others_may_read_is_refused(keys, mode):
    with pytest.raises(OptionError, match="chmod 600"):
        keys("sk-x", mode=mode)


def test_a_file_that_is_not_there(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(OptionError, match="api_key_file"):
            key_ring(file=str(path))


def test_the_command_makes_a_line_for_the_file(keys, capsys):
    assert main(["api-key", "team-a"]) == 0
    said = capsys.readouterr()
    key = next(word for word in said.err.split() if word.startswith("qk-"))
    assert key not in said.out
    assert keys(said.out).tenant_of(key.encode()).name == "team-a"
    assert main(["api-key", "team a"]) != 0


# ---------------------------------------------------------------------------------------------- doors


def test_what_would_be_open_to_anybody_is_refused():
    with pytest.raises(OptionError, match="admin port needs a key"):
        doors_of(ServerOptions(admin_port=0, admin_host="0.0.0.0"))
    with pytest.raises(OptionError, match="ordinary key as well"):
        doors_of(ServerOptions(api_keys=("same",), admin_api_key="same"))
    with pytest.raises(OptionError, match="Give admin_port"):
        doors_of(ServerOptions(admin_host="0.0.0.0", admin_api_key="root"))
    assert doors_of(ServerOptions(admin_port=0, admin_host="0.0.0.0", admin_api_key="root")).admin is not None


@pytest.mark.parametrize(
    ("options", "is_local", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"api_keys": ("a",)}, True, False),
        ({"admin_api_key": "root"}, False, True),
        ({"admin_api_key": "root", "admin_port": 0}, False, False),
        ({"admin_port": 0}, True, False),
    ],
)
def test_where_the_endpoints_of_the_administrator_are(options, is_local, expected):
    assert doors_of(ServerOptions(**options), is_local=is_local).is_administrated_here is expected


def test_addresses_of_this_machine():
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "example.org", ""]))


# ---------------------------------------------------------------------------------------------- tenants


def test_parts_of_the_cache_follow_from_the_secret():
    one, two = Tenant("one"), Tenant("two", Quota(weight=2))
    here, there = (Tenants([one, two], secret="s") for _ in range(2))
    assert here.tenancy(one) == there.tenancy(one)
    assert here.tenancy(one).cache_scope != here.tenancy(two).cache_scope
    assert here.tenancy(two).weight == 2
    assert len(here.tenancy(one).cache_scope) == 32
    others = Tenants([one, two])
    assert others.tenancy(one).cache_scope != here.tenancy(one).cache_scope
    assert Tenants([one, two], share_prefix_cache=True).tenancy(one).cache_scope == ""


def test_nobody_is_told_apart_from_nobody():
    def tenancy_among(tenants, tenant):
        return Callers(Tenants(tenants), WaitingRoom(tenants)).of(tenant, "").tenancy

    one, two = Tenant("one"), Tenant("two")
    assert tenancy_among([], NOBODY) is None
    assert tenancy_among([one], one) is None
    assert tenancy_among([one, two], NOBODY) is None
    assert tenancy_among([one, two], one) is not None
