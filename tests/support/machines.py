"""How the state machines of Hypothesis run: the same each time, unless the environment says more.

``WORQR_MACHINE_RANDOM=1`` makes each run another one. ``WORQR_MACHINE_EXAMPLES=2000`` and ``WORQR_MACHINE_STEPS=200`` make it a
long one. With ``WORQR_MACHINE_NO_SHRINK=1``, a failure is shown as it was found.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

STEPS = 60


def run_machine(machine: type[RuleBasedStateMachine], *, examples: int) -> None:
    """Run `examples` sequences of steps, and show the smallest one that fails."""
    phases = [Phase.generate] if "WORQR_MACHINE_NO_SHRINK" in os.environ else [Phase.generate, Phase.shrink]
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=int(os.environ.get("WORQR_MACHINE_EXAMPLES", examples)),
            stateful_step_count=int(os.environ.get("WORQR_MACHINE_STEPS", STEPS)),
            deadline=None,
            derandomize="WORQR_MACHINE_RANDOM" not in os.environ,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )
