"""Input from shards that cannot be read by offset: over http, out of object stores, from commands."""
