"""The consuming side of the mesh, one duty per file.

`peer` is the object that applications hold, `membership` its registration, `capacity` its free slots. `claiming` takes tasks for
handlers, `claims` by hand; `running` runs handlers, `settling` ends claims, `cancelling` receives cancellations, `leading` does
the leader's chores.
"""
