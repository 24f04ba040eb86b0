"""Import and export of Galvatron's strategy files (``vitpar.strategy.galvatron.reading`` has the table of keys)."""

from vitpar.strategy.galvatron.reading import (
    ImportedPlan,
    from_galvatron,
    read_galvatron,
    unlisted_blocks,
)
from vitpar.strategy.galvatron.writing import to_galvatron, write_galvatron

__all__ = [
    "ImportedPlan",
    "from_galvatron",
    "read_galvatron",
    "to_galvatron",
    "unlisted_blocks",
    "write_galvatron",
]
