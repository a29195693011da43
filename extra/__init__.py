"""Tools that stand on the core; nothing in the core imports them."""
