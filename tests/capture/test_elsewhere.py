"""How requests that do not go through the endpoint are written to the trace."""

from __future__ import annotations

from lightning_core.capture import note_elsewhere, rollout, scope
from tests.propagation.requests_elsewhere import elsewhere


def test_the_most_frequent_hosts_are_written_and_the_others_summed_up() -> None:
    with rollout() as run:
        for number in range(5000):
            with scope("crawler" if number % 2 else "reader"):
                note_elsewhere(f"{number}.example", "not a model call")
        for agent in ("crawler", "reader"):
            with scope(agent):
                for _ in range(3):
                    note_elsewhere("frequent.example", "not a model call")
    found = elsewhere(run)
    assert len(found) == 99 + 2 + 2
    assert sum(found.values()) == 5006
    for agent in ("crawler", "reader"):
        assert found[agent, "frequent.example", "not a model call"] == 3
        assert found[agent, "others", "not a model call"] > 2400


def test_a_hundred_hosts_are_all_written() -> None:
    with rollout() as run:
        for number in range(100):
            note_elsewhere(f"{number}.example", "ignored")
    assert len(elsewhere(run)) == 100
    assert "others" not in {host for _, host, _ in elsewhere(run)}
