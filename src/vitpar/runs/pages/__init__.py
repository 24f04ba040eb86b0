"""Parts of self-contained HTML reports: the document, tables, colours, charts, and maps of a plan's ranks."""
