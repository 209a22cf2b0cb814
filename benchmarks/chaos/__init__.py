"""Random faults on real processes and servers, checked against an independent ledger: ``python -m benchmarks chaos``.

How a run works:

* `world` starts a server (`servers`, `clock`), peers and producers (`children`, `peer`, `producer`), and injects random
  faults (`faults`, `cluster_faults`). Then a calm phase begins: everything is repaired and all queues must become empty.
* Every process writes what it did to its own file of the `ledger`. worqr writes nothing there and reads nothing from it.
* `history` reads the ledger, `rules` check it, `excuses` decides whether a fault explains that a claim was lost, and
  `report` prints the tables and the violations.
* `judge` is a second judge, which shares no code with these, and judges each run too. By itself, it reads a kept ledger:
  ``python -m benchmarks.chaos.judge FOLDER``.

`workload` holds what the processes, the checker and the tests must agree on. The checker imports nothing of worqr.
"""
