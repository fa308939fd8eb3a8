"""What Ray Serve is told of a deployment."""

import asyncio

import pytest

from quire.interfaces.deploy.application import CopyDeployment, FrontDeployment, Scale, application_of
from quire.interfaces.deploy.roster import Roster


class FakeDeployment:
    def __init__(self, kind):
        self.kind = kind

    def options(self, **options):
        self.told = options
        return self

    def bind(self, *arguments):
        self.arguments = arguments
        return self


class FakeServe:
    deployment = FakeDeployment


def application(scale, **server_options):
    return application_of(FakeServe, {"model": "m"}, server_options, scale, 2, "least_time")


def test_a_fixed_number_of_copies():
    front = application(Scale(3))
    assert front.kind is FrontDeployment
    assert "num_replicas" not in front.told
    policy, _, copies = front.arguments
    assert policy == "least_time"
    assert copies.kind is CopyDeployment
    assert copies.arguments == ({"model": "m"}, {})
    assert copies.told["num_replicas"] == 3
    assert "autoscaling_config" not in copies.told
    assert copies.told["ray_actor_options"] == {"num_cpus": 2}


def test_as_many_copies_as_requests_want():
    *_, copies = application(Scale(2, 8, 4.0, 5.0, 60.0), shutdown_timeout=120.0).arguments
    assert "num_replicas" not in copies.told
    assert copies.told["autoscaling_config"] == {
        "min_replicas": 2,
        "max_replicas": 8,
        "target_ongoing_requests": 4.0,
        "upscale_delay_s": 5.0,
        "downscale_delay_s": 60.0,
    }
    # a copy that is no longer needed may end what it has begun
    assert copies.told["graceful_shutdown_timeout_s"] == 120.0


def test_ray_takes_it():
    serve = pytest.importorskip("ray.serve")
    for scale in (Scale(2), Scale(1, 4)):
        assert application_of(serve, {"model": "m"}, {}, scale, 1, "least_time") is not None


def test_who_follows_the_roster_hears_of_what_was_before():
    roster = Roster()
    roster.change(frozenset("a"))
    heard = []
    roster.follow(heard.append)
    roster.change(frozenset("bc"))
    assert heard == [frozenset("a"), frozenset("bc")]


def test_the_front_knows_its_copies_once_it_is_healthy():
    from quire.interfaces.deploy.roster import ROSTER

    class Handle:
        """Serve tells of copies while the first call is made."""

        def options(self, **options):
            return self

        @property
        def is_ready(self):
            return self

        @property
        def answer(self):
            return self

        async def remote(self, *arguments):
            ROSTER.change(frozenset("ab"))
            return True

    async def test():
        front = FrontDeployment("least_time", 100, Handle())
        await front.check_health()
        await asyncio.sleep(0)
        assert front._front.num_serving == 2
        await front.check_health()

    asyncio.run(test())
