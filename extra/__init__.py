"""Tools that are built on the core. Nothing in the core imports them."""
