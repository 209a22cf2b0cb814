"""Jobs that are enqueued in a transaction of your database: `Outbox`, a transactional outbox, and effects that happen once.

The drivers and SQLAlchemy are not imported here. What an application passes is recognised by the module of its class.
"""

from worqr.sql.outbox import Outbox as Outbox
from worqr.sql.outbox import Promise as Promise
from worqr.sql.outbox import TooOld as TooOld

__all__ = ["Outbox", "Promise", "TooOld"]
