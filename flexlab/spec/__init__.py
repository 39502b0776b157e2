"""Data only: the frozen types that packages hand to each other and put on the wire.

Every type is a `msgspec.Struct` (cheap to import, to build and to encode). Units are in the names:
`_bytes`, `_s` (seconds, float), `_ms`; times of day are Unix seconds (`_at`). Unknown is None,
never 0.
"""
