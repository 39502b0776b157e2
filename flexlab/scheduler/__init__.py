"""Who runs, who waits, who yields, and why: decisions only, from spec types alone."""
