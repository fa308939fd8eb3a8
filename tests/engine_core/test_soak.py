"""The program that runs random workloads: it goes on where it was, sums up, and says how to repeat a failure."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.testing import soak


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_SEEDS_OF_A_BATCH", 2)
    monkeypatch.setattr(soak, "result_of", partial(soak.result_of, num_steps=30))


def run(*arguments: str) -> int:
    return soak.main([*arguments, "--processes", "1"])


@pytest.mark.usefixtures("short")
def test_pieces_add_up(tmp_path: Path) -> None:
    path = tmp_path / "build" / "soak.json"
    assert run("--steps", "10", "--state", str(path)) == 0
    first = json.loads(path.read_text())
    assert first["num_steps"] >= 10
    assert run("--steps", str(first["num_steps"] + 10), "--state", str(path)) == 0
    second = json.loads(path.read_text())
    assert second["num_seeds"] > first["num_seeds"]
    assert second["next_seed"] == soak.FIRST_SEED + second["num_seeds"]
    assert second["counts"]["requests"] > first["counts"]["requests"]
    assert run("--steps", "10", "--state", str(path)) == 0
    assert json.loads(path.read_text()) == second, "there is nothing left to do"


@pytest.mark.usefixtures("short")
def test_pieces_may_begin_at_seeds_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    assert run("--steps", "1", "--state", str(path), "--first-seed", "7000000") == 0
    state = json.loads(path.read_text())
    assert state["next_seed"] == 7_000_000 + state["num_seeds"]


@pytest.mark.parametrize("wrong", [("--steps", "-5"), ("--first-seed", "-1"), ("--processes", "0")])
def test_numbers_that_mean_nothing_are_refused(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        soak.main(wrong)
    assert "1 or more" in capsys.readouterr().err


@pytest.mark.usefixtures("short")
def test_one_that_is_interrupted_keeps_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "soak.json"
    whole = soak.result_of

    def interrupted(seed: int) -> soak.SeedResult:
        if seed == soak.FIRST_SEED + 3:
            raise KeyboardInterrupt
        return whole(seed)

    monkeypatch.setattr(soak, "result_of", interrupted)
    assert run("--steps", "100000", "--state", str(path)) == 130
    assert json.loads(path.read_text())["num_seeds"] == 2
    assert "workloads in" in capsys.readouterr().out


@pytest.mark.usefixtures("short")
def test_the_time_of_a_piece_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    assert run("--steps", "1000000", "--seconds", "0.01", "--state", str(path)) == 0
    assert json.loads(path.read_text())["num_seeds"] == 2


@pytest.mark.usefixtures("short")
def test_a_failure_is_kept_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "soak.json"
    with monkeypatch.context() as broken:
        broken.setattr(KVCacheManager, "fork", lambda *_: None)
        broken.setattr(KVCacheManager, "free", lambda *_: None)
        assert run("--steps", "1", "--state", str(path)) == 1
    failures = json.loads(path.read_text())["failures"]
    assert [failure["seed"] for failure in failures] == [soak.FIRST_SEED, soak.FIRST_SEED + 1]
    assert f"python -m quire.testing.soak --seed {soak.FIRST_SEED}" in capsys.readouterr().out
    assert run("--steps", "1", "--state", str(path)) == 0, "mended"
    assert json.loads(path.read_text())["failures"] == []


@pytest.mark.usefixtures("short")
def test_one_seed_says_what_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--seed", "5") == 0
    assert "every rule kept" in capsys.readouterr().out
    monkeypatch.setattr(KVCacheManager, "free", lambda *_: None)
    with pytest.raises(AssertionError) as caught:
        run("--seed", "5")
    assert "python -m quire.testing.soak --seed 5" in "".join(caught.value.__notes__)
