"""How long tests wait for an event. It does not depend on the machine's speed: a test that waits in vain fails in any case."""

PATIENCE = 60.0
"""Seconds. CI machines are slow, shared, and stand still for a second now and then."""
