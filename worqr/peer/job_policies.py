"""`policies_over`: the policies of jobs that have policy fields of their own, each made once."""

from __future__ import annotations

from collections.abc import Callable

from worqr.peer.run import PolicyFields
from worqr.policy import Policy

MANY_POLICIES = 100
"""Limit of cached policies of jobs. If all jobs of a queue have different fields, no cached policy is used twice."""


def policies_over(policy: Policy) -> Callable[[PolicyFields], Policy]:
    """Return a factory of policies for jobs with policy fields of their own.

    Most jobs of a queue have the same fields, so each policy is made once.
    """
    made: dict[PolicyFields, Policy] = {}

    def with_own(own: PolicyFields) -> Policy:
        if (known := made.get(own)) is None:
            if len(made) >= MANY_POLICIES:
                made.clear()
            known = made[own] = policy.with_overrides({name.decode(): value.decode() for name, value in own})
        return known

    return with_own
