"""What a run will need, from its sizes alone."""
