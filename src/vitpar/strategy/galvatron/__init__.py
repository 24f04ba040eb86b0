"""Galvatron's strategy files, read and written (``vitpar.strategy.galvatron.keys`` has the table)."""

from vitpar.strategy.galvatron.keys import is_galvatron
from vitpar.strategy.galvatron.reading import Imported, from_galvatron, read_galvatron
from vitpar.strategy.galvatron.writing import to_galvatron, write_galvatron

__all__ = ["Imported", "from_galvatron", "is_galvatron", "read_galvatron", "to_galvatron", "write_galvatron"]
