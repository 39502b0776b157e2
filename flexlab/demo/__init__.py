"""Fakes on real TCP: for tests, and for `flexlab top --demo`."""
