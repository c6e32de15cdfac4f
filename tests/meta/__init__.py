"""Tests of the suite itself: each shows that a check is able to fail."""
