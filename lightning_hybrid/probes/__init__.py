"""Reads the machine."""
