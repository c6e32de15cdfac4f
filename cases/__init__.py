"""Case files: one situation each, as data, with the digests of the bits that contract 1 expects."""

from __future__ import annotations
