"""Places in which handlers run, except slots on the Trio loop: threads, asyncio loops, and worker processes.

`executors` chooses for each handler, and holds the limits. `offloaded` is the part of such a run that its slot uses.
`asyncio_loop` is the asyncio loop of a peer, `host_loop` that of an application. Not here: slots (`worqr.peer.consumer`).
"""
