"""Measurement of profiles and plans. The only part of the planner that needs devices."""
