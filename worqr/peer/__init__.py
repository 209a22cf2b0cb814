"""Consumes tasks: a worker, with one duty per file.

`peer` is the object that applications hold, `engine` makes and runs the duties, and `session` keeps the worker registered.
`consumer` claims tasks of a queue for handlers, `manual_consumer` for applications that claim tasks themselves. `scheduler`
shares the units among them. A claim is a `run`: `slots` runs its handler, `executors` those that do not run on the Trio loop, and
`settler` ends it. `reconciler` handles cancellations. `leader` has the chores of the leader.
"""
