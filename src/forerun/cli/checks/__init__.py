"""The checks of `forerun doctor`, by what they look at."""
