"""What every other package may use: errors, settings, paths, units, strict YAML, logging."""
