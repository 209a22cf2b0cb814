"""The consuming side of the mesh, one duty per file.

`peer` is the object that applications hold, `engine` builds and runs the duties, and `session` keeps the worker registered.
`consumer` takes tasks of a queue for handlers, `manual_consumer` for claims by hand; `scheduler` shares the units out among
them. A claim is a `run`: `slots` runs its handler, `executors` those that do not run on the Trio loop, and `settler` ends it.
`control_channel` and `reconciler` receive cancellations. `leader` does the leader's chores.
"""
