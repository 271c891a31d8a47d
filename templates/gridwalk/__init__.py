"""A walk over a grid with holes."""
