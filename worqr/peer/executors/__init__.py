"""Where handlers run, if that is not a slot on the Trio loop: in threads, on an asyncio loop, in worker processes.

`executors` chooses for each handler, and holds the limits. `offloaded` is one such run, as the slot that waits for it sees it.
`asyncio_loop` is the asyncio loop of a peer, `host_loop` that of an application. Slots themselves are in `peer.slots`.
"""
