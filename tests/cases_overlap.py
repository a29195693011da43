"""The slow network of harness/properties/overlap.py, for cases that are not properties yet."""

from harness.properties.overlap import late_collectives  # noqa: F401
