"""Consumes tasks: a worker, with one duty per file.

`peer` is the object that applications hold, `engine` makes and runs the duties, and `session` keeps the worker registered.
`consumer` claims tasks of a queue for handlers, `manual_consumer` for applications that claim tasks themselves. `scheduler`
shares the units among them. Its slots run
handlers, `executors` those that do not run on the Trio loop, and its reconciler sees cancellations. A claim is a `run`; `settler`
ends it. `leader` has the chores of the leader.
"""
