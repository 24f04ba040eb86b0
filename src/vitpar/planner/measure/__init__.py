"""Fills the records of ``vitpar.planner.profile`` by running and timing. The only part of the planner that needs
devices."""
