"""Checks of flags against each other, one module for each family of flags."""
