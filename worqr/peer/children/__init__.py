"""Warm worker processes for handlers with ``runs_in="process"``: one run each at a time, really killed, with all they started.

`Children` (pool) is the side of the peer: it starts processes on demand, keeps them warm, and gives each run one of its own.
`process` is one of them as seen from here, `output` what it writes to its standard error, `frames` the wire between the two
sides, `naming` how a function is found over there. `child` is the program that runs there, and `lifeline` its end with us.

Nothing but bytes crosses: payloads, records and results as they are, functions and exceptions by their names.
"""
