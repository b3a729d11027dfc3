"""The gate that holds sampling back in several processes."""

import pytest

from lightning_core.backends.gate import Gate, GateState
from lightning_core.errors import InfrastructureError


def test_a_hold_counts_only_the_answers_to_itself() -> None:
    gate, states, late = Gate(version=3), list[GateState](), False

    def follower(state: GateState) -> None:
        states.append(state)
        if state.held:
            gate.answered(follower, state.holds - late, 2, 1)

    gate.attach(follower)
    gate.hold(0)
    assert (gate.sampling, gate.whole, gate.is_empty(0)) == (2, 1, False)
    gate.answered(follower, 1, 0, 0)
    gate.wait_for_whole(0)
    assert gate.is_empty(0)
    gate.release(4)
    late = True
    with pytest.raises(InfrastructureError, match="a worker of the policy endpoint did not answer within 0 s"):
        gate.hold(0)
    gate.detach(follower)
    assert gate.is_empty(0)
    assert [(s.version, s.held, s.holds) for s in states] == [(3, False, 0), (3, True, 1), (4, False, 1), (4, True, 2)]
