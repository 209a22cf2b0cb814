"""`MeshClient`: the client of a mesh, and the producer that sends the calls of its functions.

A `Mesh` has one, and its functions share it. A test replaces the producer and the connections here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from worqr.batches import BatchRef
from worqr.client.batch import Batch
from worqr.client.batch_block import OpenBatch, Plan
from worqr.client.batch_handles import BatchMaker
from worqr.client.client import Client, SlotWatch
from worqr.client.connections import ConnectionRegistry
from worqr.client.mesh_info import MeshInfoReader
from worqr.client.producer import Producer
from worqr.client.settings import ClientSettings
from worqr.client.traced import producer_of
from worqr.relocation import Relocation


class MeshClient(Client):
    """A `Client` that also sends the calls of functions.

    Attributes:
        producer: sends the calls.
        observer: a test's callback for each run that did not return normally, with its context and error; else None.
        relocation: where a test has moved the mesh to; else None.
        mesh_info: reads the whole mesh.
        batch_maker: makes the batches.
    """

    def __init__(self, settings: ClientSettings, slot_watch: Callable[[str], SlotWatch]) -> None:
        super().__init__(settings, slot_watch)
        self.producer: Producer = producer_of(self)
        self.observer: Callable[[Any, BaseException], None] | None = None
        self.relocation: Relocation | None = None
        self.mesh_info: MeshInfoReader = MeshInfoReader(self)
        self.batch_maker: BatchMaker = BatchMaker()

    def new_batch(self, plan: Plan, parent: Batch | None) -> OpenBatch:
        """Return a new batch, which is stored nowhere yet."""
        return self.batch_maker.open(self, self.producer, plan, parent)

    def batch_of(self, ref: BatchRef) -> Batch:
        """Return a handle of the batch that the record of a job names."""
        return self.batch_maker.of_ref(self, self.producer, ref)

    @contextmanager
    def replaced(
        self,
        *,
        producer: Producer,
        connections: ConnectionRegistry,
        observer: Callable[[Any, BaseException], None] | None = None,
        relocation: Relocation | None = None,
        batch_maker: BatchMaker | None = None,
    ) -> Generator[None]:
        """Use another producer and other connections in the block. For tests, while the mesh is not connected."""
        own = self.producer, self.connections, self.observer, self.relocation, self.mesh_info, self.batch_maker
        self._use(producer, connections, observer, relocation, MeshInfoReader(self), batch_maker or self.batch_maker)
        try:
            yield
        finally:
            self._use(*own)

    def _use(
        self,
        producer: Producer,
        connections: ConnectionRegistry,
        observer: Callable[[Any, BaseException], None] | None,
        relocation: Relocation | None,
        mesh_info: MeshInfoReader,
        batch_maker: BatchMaker,
    ) -> None:
        self.use_connections(connections)
        self.producer = producer
        self.observer = observer
        self.relocation = relocation
        self.mesh_info = mesh_info
        self.batch_maker = batch_maker
