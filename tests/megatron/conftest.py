"""Hypothesis without a deadline: the machines that run these tests are shared and uneven."""

from hypothesis import settings

settings.register_profile("project", deadline=None, max_examples=50)
settings.load_profile("project")
