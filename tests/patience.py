"""How long tests wait for what must happen: never a matter of the machine's speed, for whoever waits in vain fails anyway."""

PATIENCE = 60.0
"""Seconds. CI machines are slow, shared, and stand still for a second now and then."""
