"""Runs on disk: trained, recorded, interrupted and gone on with."""
