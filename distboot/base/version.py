"""The version of this package, which all ranks compare."""

__version__ = "0.2.0"
