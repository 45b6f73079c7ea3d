"""Features of a reducer, beside the way of a gradient: each installed only where it is used."""
