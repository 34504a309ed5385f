"""Writes what was measured to loggers and to the console."""
