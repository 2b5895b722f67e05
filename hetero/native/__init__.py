"""The links' data path in C, built by every install."""
