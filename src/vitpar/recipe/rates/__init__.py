"""Schedules over a run: learning rate, weight decay, averages, drop-path and image size."""
