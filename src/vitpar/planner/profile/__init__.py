"""Profiles of machines and models: measured, estimated from data sheets, or imported; stored as JSON."""
