"""Input from shards that can only be read sequentially: over http, from object stores or from commands."""
